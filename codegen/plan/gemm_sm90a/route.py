"""The route of the GEMM for Hopper: which tiles, clusters and arithmetic multiply a chain that starts with `linear`, and where its groups are complete.

W is operand A and x operand B: rows of the accumulators are channels. The operand with larger, one-signed values (x, usually) belongs in
slot B, which costs less power, and power is what limits these kernels. W may then also come from registers, converted on the way; or a kernel
of its own converts it first, once for given parameters (`prepack`) or on every call, where that is faster or the copy engine cannot read W as it is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from codegen.ir.fused_form import FusedSpec
from codegen.plan.floor import floor
from codegen.plan.gemm_sm90a.choice import LEAST_STEPS, Way, all_ways, choose_layout, faster, sliced
from codegen.plan.gemm_sm90a.cost import PRODUCTS, estimated_ms, rounds_of
from codegen.plan.gemm_sm90a.forms import PARTS_RESULTS, converts, forms_of
from codegen.plan.gemm_sm90a.kernel import gemm_kernel, ragged_result, result_pitch
from codegen.plan.gemm_sm90a.layout import CONSUMERS, TILE_K, Form, Layout, by_rows
from codegen.plan.gemm_sm90a.split import (
    WEIGHT_SPLIT, WEIGHT_UNSCALE, X_SPLIT, X_UNSCALE, fits_a_block, padded_columns, split_kernel,
)  # fmt: skip
from codegen.plan.gemm_sm90a.window import WEIGHT_SHIFT
from codegen.plan.model import Buffer, Launch, Plan, Refusal
from codegen.plan.norm.flat import access_width, residency
from codegen.plan.norm.route import plan_norm, plan_norm_of_product
from codegen.plan.route import Choice, Offer, Request, Route, refuse_kept
from codegen.plan.shared.product import refuse_truncated
from codegen.plan.shared.slices import sliced_product
from codegen.targets import DeviceClass

ACROSS = 0.95  # by which the estimate is multiplied to be compared with other targets'


@dataclass(frozen=True)
class Detail:
    """A form and a layout; `whole` are the best ways of every form without slices, which the reasons compare it with."""

    form: Form
    layout: Layout
    whole: tuple[Way, ...]


def offers(request: Request) -> tuple[Offer, ...]:
    """Every form and layout, and K in slices: the family's own choice first, then the least estimated time.

    Raises Refusal where this target cannot serve the chain; whether it serves it better than sm_80 is not asked here.
    """
    spec, target, device = request.form, request.target, request.device
    if spec.has_norm:
        refuse_kept(spec)
    if spec.batch * spec.channels < PARTS_RESULTS:  # else halves, 16 of which are added at a time, lose half of what the vendor's TF32 does
        refuse_truncated(spec)
    _check(spec)
    forms = forms_of(spec)
    whole = tuple((form, choose_layout(spec, target, device, form)) for form in forms)
    chosen = sliced(spec, device, forms, faster(spec, device, list(whole)))
    if spec.precision.itemsize == 4 and not fits_a_block(spec.input_shape[1]):
        raise Refusal(f"in_features: {spec.input_shape[1]} is more than a block of the splitting kernel holds")
    ways = sorted(all_ways(spec, target, forms), key=lambda way: estimated_ms(spec, device, *way))
    return tuple(offer_of(request, Detail(*way, whole)) for way in dict.fromkeys((chosen, *ways)))


def offer_of(request: Request, detail: Detail) -> Offer:
    """The offer of a form and a layout."""
    form, layout = detail.form, detail.layout
    weights = "registers" if form.registers else "converted" if converts(request.form, form) else "direct"
    knobs = (
        ("weights", weights), ("tile", f"{form.tile_channels}x{form.tile_samples}"), ("cluster", layout.cluster), ("share", layout.share),
        ("unit_tiles", layout.unit_tiles), ("statistics", layout.statistics), ("exchange", layout.exchange), ("slices", layout.slices),
    )  # fmt: skip
    return Offer(Choice("gemm_sm90a", knobs), estimated_ms(request.form, request.device, form, layout), across=ACROSS, detail=detail)


def plan(request: Request, offer: Offer) -> Plan:
    """The plan of an offer: kernels that split x and W where they are fp32, the GEMM, and the norm's kernels unless the chain ends in the GEMM."""
    spec, target, device = request.form, request.target, request.device
    form, chosen, ways = offer.detail.form, offer.detail.layout, offer.detail.whole
    rounds, busy = rounds_of(spec, form, chosen, device.sms)
    notes = _notes(spec, form, chosen, rounds)
    gemm = gemm_kernel(spec, target, form, chosen, device, request.debug, notes)
    steps, buffers = [], []
    if spec.precision.itemsize == 4:
        split, buffers = _splits(spec, form)
        steps += split
    steps.append(Launch(gemm))
    why = _why(spec, device, ways, form, chosen, busy)
    if chosen.slices > 1:
        steps[-1:], own = sliced_product(spec, gemm, chosen.slices)
        buffers = [*buffers, *own]
    if not spec.has_norm:
        pass  # the chain ends in the multiplication or where the slices are added
    elif chosen.slices > 1:
        tail = plan_norm_of_product(spec, target, device)
        steps, buffers, why = steps + list(tail.steps), buffers + list(tail.buffers), why + tail.why
    elif chosen.statistics == "none":
        pitch = result_pitch(spec, chosen)
        source = "t0" if pitch else "y"
        if pitch:
            steps[-1] = Launch(gemm, result=source)
            buffers = [*buffers, Buffer(source, (spec.batch, pitch), spec.precision.dtype)]
        tail = plan_norm(spec, target, device, source=source, apply_before=True, producer_bias=None, statistics=None, pitch=pitch)
        steps, buffers, why = steps + list(tail.steps), buffers + list(tail.buffers), why + tail.why
    return Plan(spec, target, device, tuple(steps), tuple(buffers), floor(spec, device, PRODUCTS[spec.precision.name], device.fp16), why)


def _check(spec: FusedSpec) -> None:
    k = spec.input_shape[1]
    if spec.producer.operator.name != "linear":
        raise Refusal("this target has no convolution kernel")
    if spec.gemm == "library":
        raise Refusal("gemm: library asked for, which this target does not call")
    wanted = {"fp32": "fp16x3", "tf32": "fp16"}.get(spec.precision.name)
    if spec.math is not None and spec.math not in (wanted, spec.precision.name):
        raise Refusal(f"math: {spec.math} asked for, which this target does not have")
    if spec.precision.itemsize == 2 and k % 8:
        raise Refusal(f"in_features: {k} is no multiple of 8, and rows of x and W that do not start at multiples of 16 bytes are out of the copy engine's reach")
    if ragged_result(spec) and (not spec.has_norm or spec.gives or residency(spec, access_width(spec)) is None):
        raise Refusal(f"out_features: {spec.channels} is no multiple of 8, and rows of y must start at multiples of 16 bytes for the copy engine")
    if k < LEAST_STEPS * TILE_K:
        raise Refusal(f"in_features: {k} gives fewer than {LEAST_STEPS} stages of {TILE_K}, too few to fill the ring; sm_80 serves it as well")


def _splits(spec: FusedSpec, form: Form) -> tuple[list[Launch], list[Buffer]]:
    batch, k = spec.input_shape
    pitch = padded_columns(k)
    padded = math.ceil(batch / (2 * form.tile_samples)) * 2 * form.tile_samples
    x = split_kernel(spec, "x", form, batch, padded, WEIGHT_SHIFT if form.registers and form.parts == 2 else 0)
    if x is None:
        raise Refusal(f"in_features: {k} is more than a block of the splitting kernel holds")
    steps, buffers = [Launch(x)], [Buffer(X_SPLIT, (form.parts * batch, pitch), "float16"), Buffer(X_UNSCALE, (padded,), "float32")]
    if converts(spec, form):
        weight = split_kernel(spec, "weight", form, spec.channels, spec.channels, 0)
        steps.insert(0, Launch(weight, prepares=(WEIGHT_SPLIT, WEIGHT_UNSCALE) if spec.prepack else ()))
        buffers += [Buffer(WEIGHT_SPLIT, (form.parts * spec.channels, pitch), "float16"), Buffer(WEIGHT_UNSCALE, (spec.channels,), "float32")]
    return steps, buffers


def _notes(spec: FusedSpec, form: Form, layout: Layout, rounds: float) -> tuple[str, ...]:
    notes = [
        f"tiles of {form.tile_channels} channels x {form.tile_samples} samples, {form.stages} stages of {TILE_K} k; one warpgroup fetches, {CONSUMERS} multiply",
    ]
    if layout.cluster > 1:
        notes.append(f"clusters of {layout.cluster} CTAs that share rows of {'W' if layout.share == 'weight' else 'x'}: fetched once, received by both")
    if layout.statistics == "lanes":
        notes.append(f"groups of {spec.group_channels} channels lie in the lanes of a warp")
    elif layout.statistics == "strips":
        wide = layout.unit_tiles > 1 or layout.exchange
        place = "registers" if by_rows(form, layout, spec.precision.itemsize) else "y"
        where = f"{layout.unit_tiles} tiles of a CTA" + (f", which wait in {place}" if layout.unit_tiles > 1 else "") if wide else "one tile"
        notes.append(f"groups of {spec.group_channels} channels lie in {where}" + (", and their other half in the cluster's other CTA" if layout.exchange else ""))
    if form.registers:
        notes.append("W stays fp32 in memory and is converted on its way into the multiplier's operand registers")
    if form.promote:
        notes.append(f"the tensor core's sums are added to fp32 registers every {form.promote * TILE_K} of K")
    return tuple(notes)


def _why(spec: FusedSpec, device: DeviceClass, ways: list[tuple[Form, Layout]], form: Form, layout: Layout, busy: float) -> tuple[str, ...]:
    arithmetic = {
        "fp32": "three fp16 products of scaled operands split in two, promoted: fp32's error at the tensor cores' speed",
        "tf32": "one fp16 product of scaled operands rounded to nearest: TF32's error at twice its rate",
    }.get(spec.precision.name, f"one {spec.precision.name} product")
    reasons = [arithmetic, f"tiles of {form.tile_channels} x {form.tile_samples} keep {busy:.0%} of the SMs busy"]
    if converts(spec, form) and not spec.prepack:
        if len(ways) > 1:
            direct, converted = (estimated_ms(spec, device, *way) for way in ways)
            reasons.append(f"W is converted by a kernel of its own on every call: {converted:.3f} ms estimated in all, against {direct:.3f} ms with W converted in the multiplication")
        else:
            reasons.append(f"W is converted by a kernel of its own on every call: of in_features {spec.input_shape[1]} the multiplication could not read it in planes of 16")
    if layout.exchange:
        reasons.append("the statistics of a group meet through distributed shared memory, so that the chain ends in this kernel")
    elif layout.slices > 1:
        parts, whole = estimated_ms(spec, device, form, layout), estimated_ms(spec, device, *faster(spec, device, ways))
        where = "in front of the norm kernel" if spec.has_norm else "by a kernel that ends the chain"
        reasons.append(f"K is cut into {layout.slices} parts, whose sums are added {where}: {parts:.3f} ms estimated, against {whole:.3f} ms with whole tiles")
    elif not spec.has_norm:
        reasons.append("the operators behind the product are in its epilogue" if len(spec.chain) > 1 else "the product alone")
    elif layout.statistics == "none":
        reasons.append(f"groups of {spec.group_channels} channels do not match the tiles, so the norm kernel follows")
    else:
        reasons.append(f"groups of {spec.group_channels} channels are complete within a CTA, so the chain ends in this kernel")
    return tuple(reasons)


GEMM_SM90A = Route("gemm_sm90a", "Hopper's tiles", frozenset({"sm_90a"}), frozenset({"linear"}), offers, plan, products=frozenset({"linear"}))
