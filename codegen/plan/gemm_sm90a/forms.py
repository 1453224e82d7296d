"""Forms of the Hopper GEMM: how each precision's arithmetic lies on the multiplier, and which of them serve a spec."""

from __future__ import annotations

from dataclasses import replace

from codegen.ir.fused_form import FusedSpec
from codegen.plan.gemm_sm90a.layout import TILE_K, Form
from codegen.plan.gemm_sm90a.split import padded_columns
from codegen.plan.model import Refusal
from codegen.plan.shared.halves import RESTORED

CONVERSION_BYTES = 1 << 30  # the most that a call may take for W's copy

# Measured on an H200 (K = 8192): what promotion every 256 costs is lost in the noise, 128 costs 2 %, 64 more. The error of PyTorch's fp32
# grows with K, that of a promoted sum hardly: shorter sums may be added up more often. (least K, k between promotions) So must those of results too few to
# keep the card busy, whose K the vendor cuts into parts, which are more accurate: 7e-7 at 384 x 17696 -> 7761 with 256, 1.3 times PyTorch's.
# For few rows the vendor's sums are about 16 chains each (1.6e-7 at K = 1021, one row). So exact are sums promoted every 64 (modelled: 1.5e-7, 3.7e-7
# with 128). As long as all rows are one tile's, W's way from memory takes longer than the multiplication.
PROMOTION = ((4096, 256), (512, 128), (0, 64))
# Truncation makes a sum smaller by a share that grows with the k between promotions (docs/kernels.md). A norm takes such a factor away, which scales its
# input. Without one it is an error of the result, and averages of results have it whole: sums are promoted more often, and each with RESTORED more.
PROMOTION_ALONE = ((2048, 128), (0, 64))
PARTS_RESULTS = 1 << 22  # fewer results are such

FORMS = {
    # registers, parts, channels, samples, stages, promote
    ("fp32", False): Form(True, 2, 128, 128, 3, 4),
    ("fp32", True): Form(False, 2, 128, 128, 3, 4),
    ("tf32", False): Form(True, 1, 128, 256, 3, 0),
    ("tf32", True): Form(False, 1, 256, 128, 4, 0),
    ("fp16", False): Form(False, 1, 256, 128, 4, 0),
    ("bf16", False): Form(False, 1, 256, 128, 4, 0),
}
NARROW = (128, 6)  # channels and stages of a second form for 16-bit operands, of which twice as many SMs find a tile


def forms_of(spec: FusedSpec) -> list[Form]:
    """The forms that serve the spec, the preferred first. Raises Refusal where none does."""
    if spec.precision.itemsize == 2 or spec.prepack:
        form = form_of(spec, spec.precision.itemsize == 4)
        return [form] if spec.precision.itemsize == 4 else [form, replace(form, tile_channels=NARROW[0], stages=NARROW[1])]
    k = spec.input_shape[1]
    found = [form_of(spec, False)] if k % 16 == 0 else []  # W is read as planes of 16 k
    converted = form_of(spec, True)
    scratch = converted.parts * spec.channels * padded_columns(k) * 2
    if scratch <= CONVERSION_BYTES:
        found.append(converted)
    if not found:
        raise Refusal(
            f"in_features: {k} is no multiple of 16, so W would have to be copied on every call, {scratch / 1e6:.0f} MB, more than {CONVERSION_BYTES / 1e6:.0f}; "
            "prepack: true keeps the copy"
        )
    return found


def form_of(spec: FusedSpec, converted: bool) -> Form:
    form = FORMS[spec.precision.name, converted]
    if not form.promote:
        return form
    k, promotion = spec.input_shape[1], PROMOTION if spec.has_norm else PROMOTION_ALONE
    if spec.batch <= form.tile_samples:
        k = 0
    elif spec.batch * spec.channels < PARTS_RESULTS:
        k = min(k, promotion[0][0] - 1)
    interval = next(interval for least, interval in promotion if k >= least)
    return replace(form, promote=interval // TILE_K)


def restoring_factor(spec: FusedSpec, form: Form) -> float | None:
    """By what a sum is multiplied when it is promoted, so that on average truncation costs nothing; None where it is added as it is."""
    return None if spec.has_norm or not form.promote else 1 + RESTORED.value * TILE_K * form.promote


def converts(spec: FusedSpec, form: Form) -> bool:
    """Does a kernel of its own turn W into halves?"""
    return spec.precision.itemsize == 4 and not form.registers
