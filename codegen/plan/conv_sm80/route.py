"""The route of the one-pass convolution for mma.sync: a chain that starts with `conv2d`, in one read of x and two kernels.

    conv2d -> element-wise -> group_norm -> monotone or affine element-wise -> max_pool2d -> element-wise

The first kernel multiplies without im2col and keeps of each pooling window the one value before the norm that decides (the sign of what multiplies
the normalised value is known before the statistics are), and the statistics of every part of a sample. The second normalises what was kept.
"""

from __future__ import annotations

from dataclasses import dataclass

from codegen.numerics import Arithmetic
from codegen.plan.conv_sm80.cost import one_pass_ms
from codegen.plan.conv_sm80.finish import KEPT, STATISTICS, FinishLayout, finish_kernel, finish_layout
from codegen.plan.conv_sm80.geometry import Geometry, candidates, fitting
from codegen.plan.conv_sm80.kernel import conv_kernel
from codegen.plan.floor import floor
from codegen.plan.model import Buffer, Launch, Plan, Refusal
from codegen.plan.route import Choice, Offer, Request, Route
from codegen.plan.shared.windows import ONE_READ, Direction, Windows, arithmetic_of, direction_of, reasons, windows_of

CONV_SHARE = 0.9  # by which the estimate is multiplied to be compared: it was too high for the shipped chains


@dataclass(frozen=True)
class Way:
    """A way to cut the chain: its windows, arithmetic and direction, the convolution's geometry and the layout of the kernel behind it."""

    windows: Windows
    arithmetic: Arithmetic
    rising: Direction
    geometry: Geometry
    finish: FinishLayout


def offers(request: Request) -> tuple[Offer, ...]:
    """Every way to cut the chain for a block, the cheapest first. Raises Refusal, with the reason, where these kernels cannot serve it."""
    spec, target, device = request.form, request.target, request.device
    windows, arithmetic = windows_of(spec, strided=True), arithmetic_of(spec)
    rising = Direction((), False) if windows.size == (1, 1) else direction_of(spec)
    listed = list(candidates(spec, windows, arithmetic.parts, 3 + (spec.bias is not None) + sum(len(step.parameters) for step in spec.before_norm)))
    if not listed:
        raise Refusal(
            f"pooling windows of {windows.size[1]} columns are wider than a warp's tile of 32" if windows.size[1] > 32
            else "the weights of this convolution, with a tile's accumulators, exceed the registers of a warp"
        )  # fmt: skip
    able = fitting(listed, spec.batch, target, device)
    if not able:
        least = min(g.smem_bytes for g in listed)
        raise Refusal(f"the rows of x of one pooled row take {least} bytes of shared memory a block; there are {target.smem_bytes}")
    return tuple(_offer(request, Way(windows, arithmetic, rising, g, finish_layout(spec, device, g, windows))) for g in able)


def _offer(request: Request, way: Way) -> Offer:
    g = way.geometry
    knobs = (("tile", f"{g.tile_rows}x{g.tile_columns}"), ("row_tiles", g.row_tiles), ("part_strips", g.part_strips))
    ms = one_pass_ms(request.form, request.device, g, way.finish)
    return Offer(Choice("conv_sm80", knobs), ms, CONV_SHARE, CONV_SHARE, way)


def plan(request: Request, offer: Offer) -> Plan:
    """The plan of an offer: the convolution, and the kernel that normalises what it keeps."""
    spec, device, way = request.form, request.device, offer.detail
    g = way.geometry
    conv = conv_kernel(spec, device, g, way.windows, way.arithmetic, way.rising)
    finish = finish_kernel(spec, g, way.windows, way.finish)
    kept = Buffer(KEPT, (spec.batch, spec.channels, *way.windows.output), "float32")
    statistics = Buffer(STATISTICS, (spec.batch, spec.channels, g.sample_parts, 4), "float32")
    bound = floor(spec, device, len(way.arithmetic.products), device.fp16)
    why = (ONE_READ, *reasons(spec, way.arithmetic, "a part out of its scales' range"))
    return Plan(spec, request.target, device, (Launch(conv), Launch(finish)), (kept, statistics), bound, why)


CONV_SM80 = Route("conv_sm80", "the convolution in one pass", frozenset({"sm_80"}), frozenset({"conv2d"}), offers, plan)
