"""The route of the GEMM for mma.sync: its arithmetic, its tile, and whether the chain finishes in its epilogue or the norm's kernel follows."""

from __future__ import annotations

import math
from dataclasses import dataclass

from codegen.ir.fused_form import FusedSpec
from codegen.numerics import ARITHMETICS, Arithmetic
from codegen.plan.floor import floor
from codegen.plan.gemm.choice import Tiling, scale_ms, tile_choices
from codegen.plan.gemm.companions import SCALES, WEIGHT_ROWS, X_ROWS, align_rows_kernel, row_scale_kernel
from codegen.plan.gemm.kernel import STATISTICS, gemm_kernel, rounds_early
from codegen.plan.gemm.tiles import aligned_k
from codegen.plan.model import Buffer, Launch, Plan
from codegen.plan.norm.route import plan_norm, plan_norm_of_product
from codegen.plan.route import Choice, Offer, Request, Route
from codegen.plan.shared.moments import TileStatistics
from codegen.plan.shared.product import refuse_truncated
from codegen.plan.shared.slices import sliced_product
from codegen.targets import DeviceClass, Target

HELD_BY_NORM = 8192  # values of a group that the norm kernel keeps in registers; wider groups get statistics from here

# What the planner weighs against each other where the spec forces nothing. A split of bf16 parts is not fp32-grade, so it has to be asked for.
# The product of the lower parts is left out of a split: up to 2^-22 of each product, which only long sums average below fp32's own error.
CANDIDATES = {"fp32": ("fp16x3", "tf32x3", "ffma"), "tf32": ("tf32",), "fp16": ("fp16",), "bf16": ("bf16",)}
SPLIT_MIN_K = {"fp16x3": 1024, "tf32x3": 1024}


def arithmetics(spec: FusedSpec) -> list[str]:
    """The arithmetics that keep the promise of the spec's precision."""
    return [name for name in CANDIDATES[spec.precision.name] if spec.input_shape[1] >= SPLIT_MIN_K.get(name, 0)]


def offers(request: Request) -> tuple[Offer, ...]:
    """Every tile of every arithmetic that keeps the promise: those of the fastest arithmetic first, and of one arithmetic the fastest tile first."""
    spec, device = request.form, request.device
    refuse_truncated(spec)
    names = [spec.math] if spec.math else arithmetics(spec)
    found = [[offer_of(request, ARITHMETICS[name], tiling) for tiling in tile_choices(spec, device, ARITHMETICS[name])] for name in names]
    return tuple(offer for listed in sorted(found, key=lambda listed: listed[0].ms) for offer in listed)


def offer_of(request: Request, arithmetic: Arithmetic, tiling: Tiling) -> Offer:
    """The offer of a tiling: its launches, the search for scales, and the norm's kernel where one follows."""
    tile, device = tiling.tile, request.device
    end = "one_kernel" if tiling.finished or not request.form.has_norm else "norm_kernel"
    knobs = (("math", arithmetic.name), ("tile", f"{tile.m}x{tile.n}"), ("slices", tiling.slices), ("aligned", tiling.aligned), ("end", end))
    return Offer(Choice("gemm", knobs), tiling.ms + scale_ms(request.form, device, arithmetic) + device.launch_us / 1e3, detail=(arithmetic, tiling))


def plan(request: Request, offer: Offer) -> Plan:
    """The plan of an offer: the GEMM, and the norm's kernel behind it unless the chain ends in the GEMM."""
    spec, target, device = request.form, request.target, request.device
    arithmetic, tiling = offer.detail
    gemm = plan_gemm(spec, target, device, arithmetic, tiling, request.forced is not None)
    steps, buffers, why = gemm.steps, gemm.buffers, gemm.why
    if spec.has_norm and not gemm.finished:
        if gemm.sliced:
            tail = plan_norm_of_product(spec, target, device)
        else:
            tail = plan_norm(spec, target, device, source="y", apply_before=gemm.bare, producer_bias=None, statistics=gemm.statistics)
        steps, buffers, why = steps + tail.steps, buffers + tail.buffers, why + tail.why
    rate = {"fp32": device.fp32, "tf32": device.tf32, "fp16": device.fp16, "bf16": device.fp16}[arithmetic.operand]
    bound = floor(spec, device, len(arithmetic.products), rate)
    return Plan(spec, target, device, steps, buffers, bound, why)


@dataclass(frozen=True)
class GemmPlan:
    """The launches up to the norm and what they leave behind.

    `finished`: "y" holds the chain's result, as it does without a norm; otherwise it holds the values before the norm, in the spec's storage type, and where
    `statistics` is set each row's and tile's moments lie in its buffer. `bare`: "y" holds the linear's result, for the norm kernel to apply the operators in
    between. `sliced`: "t0" holds the product instead, without bias. `why` holds the reasons, one sentence each.
    """

    steps: tuple[Launch, ...]
    buffers: tuple[Buffer, ...]
    finished: bool
    statistics: TileStatistics | None
    why: tuple[str, ...]
    sliced: bool = False
    bare: bool = False


def plan_gemm(spec: FusedSpec, target: Target, device: DeviceClass, arithmetic: Arithmetic, choice: Tiling, recorded: bool = False) -> GemmPlan:
    """The GEMM of a chain that starts with a linear, with all that its epilogue can take of the chain; `recorded`: a record chose the tile."""
    tile = choice.tile
    statistics = None
    bare = rounds_early(spec, choice)
    if spec.has_norm and not choice.finished and not bare and choice.slices == 1 and spec.group_channels > HELD_BY_NORM and spec.group_channels % tile.n == 0:
        statistics = TileStatistics(tile.n, spec.channels // tile.n, STATISTICS)
    why = _why(spec, device, arithmetic, choice, recorded)
    front: tuple[Launch, ...] = ()
    copies: tuple[Buffer, ...] = ()
    if choice.aligned:
        pitch, dtype = aligned_k(spec.input_shape[1]), spec.precision.dtype
        front, copies = (Launch(align_rows_kernel(spec)),), (Buffer(X_ROWS, (spec.batch, pitch), dtype), Buffer(WEIGHT_ROWS, (spec.channels, pitch), dtype))
    if choice.slices > 1:
        kernel = gemm_kernel(spec, arithmetic, choice, False, notes=why)
        steps, buffers = sliced_product(spec, kernel, choice.slices)
        return GemmPlan((*front, *steps), (*copies, *buffers), False, None, why, sliced=True)
    kernel = gemm_kernel(spec, arithmetic, choice, statistics is not None, notes=why)
    steps, buffers = [*front, Launch(kernel)], [*copies]
    if kernel.scaled:
        steps.insert(0, Launch(row_scale_kernel(spec)))
        buffers.append(Buffer(SCALES, (spec.batch + spec.channels,), "float32"))
    if statistics is not None:
        buffers.append(Buffer(STATISTICS, (spec.batch, statistics.tiles, 4), "float32"))
    return GemmPlan(tuple(steps), tuple(buffers), choice.finished, statistics, why, bare=bare)


def _why(spec: FusedSpec, device: DeviceClass, arithmetic: Arithmetic, choice: Tiling, recorded: bool) -> tuple[str, ...]:
    tile = choice.tile
    forced = "asked for" if spec.math else "as measured" if recorded else f"the fastest here for {device.name} at {spec.precision.name}"
    blocks = math.ceil(spec.batch / tile.m) * math.ceil(spec.channels / choice.columns) * choice.slices
    reasons = [
        f"{arithmetic.name}, {arithmetic.summary}: {forced}",
        f"tiles of {tile.m}x{tile.n}: {blocks} blocks on {device.sms} SMs, {choice.ms:.3f} ms estimated",
    ]
    if choice.aligned:
        reasons.append("rows of an odd number of values are copied to where 16 bytes can be read at once")
    if choice.slices > 1:
        where = "in front of the norm kernel" if spec.has_norm else "by a kernel that ends the chain"
        reasons.append(f"a tile's K is cut into {choice.slices} parts, a block each, for SMs that whole tiles would leave idle; their sums are added {where}")
    elif not spec.has_norm:
        reasons.append("the operators behind the product are in its epilogue" if len(spec.chain) > 1 else "the product alone")
    elif choice.finished:
        kept = "all that there are" if choice.columns == spec.channels else "so that no group is cut"
        waste = "" if choice.columns == tile.n else f" ({choice.columns} of {tile.n} columns kept, {kept})"
        reasons.append(f"groups of {spec.group_channels} channels lie within a tile, so the whole chain ends in this kernel{waste}")
    else:
        reasons.append(f"groups of {spec.group_channels} channels span several tiles, so the norm kernel follows")
    return tuple(reasons)


GEMM = Route("gemm", "our GEMM", frozenset({"sm_80"}), frozenset({"linear"}), offers, plan, products=frozenset({"linear"}))
