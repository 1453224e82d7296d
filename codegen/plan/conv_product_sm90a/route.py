"""The convolution as a product on Hopper: which convolutions and transposed convolutions without a norm it serves, and its plan.

x is first split into halves, the channels of a pixel side by side, and W with it; the copy engine then gathers the pixels of a tap (im2col), or copies runs of
positions as they lie, so that the multiplication is that of a GEMM. Sums are finished by the element-wise operators behind the convolution and stored where torch has them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from codegen.ir.fused_form import FusedSpec
from codegen.plan.conv_product_sm90a.constants import conv_constants
from codegen.plan.conv_product_sm90a.cost import estimated_ms
from codegen.plan.conv_product_sm90a.forms import MATHS, form_of
from codegen.plan.conv_product_sm90a.geometry import Geometry, geometry_of, rows_of
from codegen.plan.conv_product_sm90a.kernel import conv_kernel, ordered_taps, units_of
from codegen.plan.conv_product_sm90a.layout import CONSUMERS, GROUP_K, Layout, layout_of
from codegen.plan.conv_product_sm90a.operands import SPLIT_PIXELS, operand_steps
from codegen.plan.floor import floor
from codegen.plan.model import Launch, Plan, Refusal
from codegen.plan.route import Choice, Offer, Request, Route
from codegen.plan.shared.axes import CONVOLUTIONS
from codegen.plan.shared.product import INDICES, refuse_convolution

TRUNCATED_K = 4096  # see _check
ACROSS = 0.95  # by which the estimate is multiplied to be compared with other targets'
MOST_TAPS = 16000  # whose offsets constant memory holds
FILTER_VALUES = 1 << 16  # fewer values of a filter than its count of near ones holds


@dataclass(frozen=True)
class Detail:
    """Where the pixels lie, and how they meet the multiplier."""

    geometry: Geometry
    layout: Layout


def offers(request: Request) -> tuple[Offer, ...]:
    """The taps along the width each by itself, as channels, or as a row that shares its pixels, or as runs, the fastest first. Raises Refusal where the convolution is not served."""
    spec = request.form
    _check(spec)
    in_turn = form_of(spec.precision).in_turn
    found, reason = [], None
    for row in rows_of(spec, in_turn):
        try:
            found.append(_offer(request, geometry_of(spec, row, in_turn)))
        except Refusal as far:
            reason = far
    if not found:
        raise reason
    return tuple(sorted(found, key=lambda offer: offer.ms))


def _offer(request: Request, geometry: Geometry) -> Offer:
    spec = request.form
    layout = layout_of(form_of(spec.precision), spec.input_shape[1] * geometry.folded_taps, spec.channels, geometry, request.target.smem_bytes)
    if (taps := len(ordered_taps(geometry, layout))) > MOST_TAPS:
        raise Refusal(f"a filter of {taps} taps has more of them than constant memory holds")
    pixels = units_of(spec, geometry, layout) * layout.tile_pixels
    if max(pixels, spec.batch * geometry.gathered * layout.blocks // SPLIT_PIXELS, geometry.gathered * layout.padded_channels) >= INDICES:
        raise Refusal("the convolution has more tiles, or a sample of x more values, than kernels count")
    knobs = (("tile", f"{layout.tile_channels}x{layout.tile_pixels}"), ("block", layout.block), ("row", geometry.row or "apart"))
    return Offer(Choice("conv_product_sm90a", knobs), estimated_ms(spec, request.device, geometry, layout), across=ACROSS, detail=Detail(geometry, layout))


def _check(spec: FusedSpec) -> None:
    weight = spec.producer.parameters[0].shape
    refuse_convolution(spec, "the convolution as a product")
    if spec.math not in (None, spec.precision.name, MATHS.get(spec.precision.name)):
        raise Refusal(f"math: {spec.math} asked for, which the convolution as a product does not have")
    if spec.precision.name == "tf32" and not spec.has_norm and (k := _longest_sum(spec)) > TRUNCATED_K:
        # The rounding of operands errs by 2e-4 / sqrt(k) of a sum of one sign. What the tensor core cuts off is given back on average, 1.9e-9 of it for each k,
        # and a fifth of that is still less up to here.
        raise Refusal(f"at tf32 a sum of {k} products, more than {TRUNCATED_K}, which no norm scales, loses more to truncation than tf32 allows")
    if spec.input_shape[1] * math.prod(weight[2:]) >= FILTER_VALUES:
        raise Refusal(f"a filter of {spec.input_shape[1] * math.prod(weight[2:])} values is longer than the kernel that splits it counts")


def _longest_sum(spec: FusedSpec) -> int:
    """Products of a result, zeros of the padding counted."""
    values = spec.producer.values
    steps = values["stride"] if spec.producer.operator.transposed else (1,) * len(values["stride"])
    return spec.input_shape[1] * math.prod(math.ceil(kernel / step) for kernel, step in zip(values["kernel_size"], steps, strict=True))


def plan(request: Request, offer: Offer) -> Plan:
    """The plan of an offer: kernels that split or arrange W and x, then the convolution."""
    spec, target, device = request.form, request.target, request.device
    geometry, layout = offer.detail.geometry, offer.detail.layout
    kernel = conv_kernel(spec, target, geometry, layout, device.sms, request.debug, _notes(geometry, layout))
    kernel = replace(kernel, constants=conv_constants(spec, kernel))
    steps, buffers = operand_steps(spec, geometry, layout, ordered_taps(geometry, layout), device.sms)
    return Plan(spec, target, device, (*steps, Launch(kernel)), tuple(buffers), floor(spec, device, layout.form.products, device.fp16), _why(spec, geometry, layout))


def _notes(geometry: Geometry, layout: Layout) -> tuple[str, ...]:
    apart = "tiles in turn" if layout.form.in_turn else f"with {'channels' if layout.tile_channels == 64 * CONSUMERS else 'pixels'} of their own"
    notes = [
        f"tiles of {layout.tile_channels} channels x {layout.tile_pixels} pixels of a sample; one warpgroup fetches, {CONSUMERS} multiply, {apart}",
        _stage_note(geometry, layout),
    ]
    if layout.paired:
        notes.append("two taps of eight channels are one multiplication; the partner that a tap lacks is zeros")
    if layout.spread:
        notes.append(f"the channels of y are spread over all warps, {layout.warp_channels} each")
    if layout.form.parts == 2:
        notes.append(f"the tensor core's sums are added to fp32 registers every {layout.group_steps * GROUP_K} of K, while the next ones are multiplied")
    if layout.form.in_turn:
        notes.append("a warpgroup finishes and stores a tile while the other multiplies")
    if geometry.wide_phases > 1:
        notes.append("a thread has the sums of both columns that a pixel gives, and stores them side by side")
    return tuple(notes)


def _stage_note(geometry: Geometry, layout: Layout) -> str:
    if not layout.runs:
        return f"a stage has {'one tap' if layout.taps == 1 else f'{layout.taps} taps'} of {layout.block} channels, gathered by the copy engine (im2col)"
    taps = len(geometry.row_taps)
    return f"a stage has {'one tap' if taps == 1 else f'a row of {taps} taps'} of {layout.block} channels: W as it lies, and a run of positions for each eight channels"


def _arithmetic(spec: FusedSpec) -> str:
    name = spec.precision.name
    return {
        "fp32": "three fp16 products of scaled operands split in two, promoted: fp32's error at the tensor cores' speed",
        "tf32": "one fp16 product of scaled operands rounded to nearest: TF32's error at twice its rate",
    }.get(name, f"one {name} product")


def _while(spec: FusedSpec) -> str:
    return "while x is split" if form_of(spec.precision).scaled else "while x is turned around"


def _why(spec: FusedSpec, geometry: Geometry, layout: Layout) -> tuple[str, ...]:
    reasons = [_arithmetic(spec)]
    channels, taps = spec.input_shape[1], geometry.folded_taps
    if geometry.folded:
        reasons.append(f"the {taps} taps along the width become channels {_while(spec)}: {taps * channels} beside each other, and as many fewer taps")
    if geometry.shared and len(geometry.row_taps) > 1:
        reasons.append(f"the {len(geometry.row_taps)} taps along the width read the same pixels in shared memory, fetched once")
    if layout.padded_channels != channels * taps:
        reasons.append(f"{channels * taps} channels of x are filled up to {layout.padded_channels}")
    phases = len(geometry.phases) * geometry.wide_phases
    if phases > 1:
        reasons.append(f"{phases} phases of results, each with its own taps: no product with a zero in between")
    reasons.append("the operators behind the product are in its epilogue" if len(spec.chain) > 1 else "the product alone")
    return tuple(reasons)


CONV_PRODUCT_SM90A = Route("conv_product_sm90a", "Hopper's tiles of pixels", frozenset({"sm_90a"}), frozenset(), offers, plan, products=CONVOLUTIONS)
