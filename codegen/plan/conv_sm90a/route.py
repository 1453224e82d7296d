"""The route of the one-pass convolution for Hopper: a chain that starts with `conv2d`, in one kernel and one read of x.

    conv2d -> element-wise -> group_norm -> monotone or affine element-wise -> max_pool2d -> element-wise

The sign of what multiplies the normalised value decides, before the statistics are known, whether a pooling window's largest or smallest
value counts, so one value of a window waits in shared memory for its group's statistics.
"""

from __future__ import annotations

from dataclasses import dataclass

from codegen.ir.fused_form import FusedSpec
from codegen.numerics import Arithmetic
from codegen.plan.conv_sm90a.cost import one_kernel_ms
from codegen.plan.conv_sm90a.geometry import PREFERENCE, Geometry, candidates, channel_tile, fitting
from codegen.plan.conv_sm90a.kernel import conv_kernel, steps_of, two_walks_of
from codegen.plan.floor import floor
from codegen.plan.model import Launch, Plan, Refusal
from codegen.plan.route import Choice, Offer, Request, Route, refuse_kept
from codegen.plan.shared.windows import (
    ONE_READ, Direction, Windows, arithmetic_of, direction_of, reasons, split_at_pool, windows_of,
)  # fmt: skip

SHORT_ROWS = 64  # a narrower tile leaves the tensor cores half idle
ACROSS = 0.95  # by which the estimate is multiplied to be compared with other targets


@dataclass(frozen=True)
class Way:
    """A way to cut the chain: its windows, arithmetic and direction, and the geometry."""

    windows: Windows
    arithmetic: Arithmetic
    rising: Direction
    geometry: Geometry


def offers(request: Request) -> tuple[Offer, ...]:
    """The best geometry of every layout, the fastest first. Raises Refusal, with the reason, where this kernel cannot serve the chain."""
    spec, target, device = request.form, request.target, request.device
    refuse_kept(spec)
    windows, arithmetic = windows_of(spec), arithmetic_of(spec)
    rising = direction_of(spec)
    channels = channel_tile(spec)
    if channels is None:
        raise Refusal(f"a group of {spec.group_channels} channels is wider than the 64 that one CTA computes")
    channel_floats = 2 + (spec.bias is not None) + sum(len(step.parameters) for step in spec.before_norm)
    two_walks = two_walks_of(spec, arithmetic)
    listed = list(candidates(spec, device, windows, arithmetic.parts, two_walks, channels, channel_floats))
    if not listed:
        raise Refusal("the weights of this convolution, with a tile's accumulators, exceed the registers of a warpgroup")
    able = fitting(listed, target)
    if not able:
        least = min(g.smem_bytes for g in listed)
        raise Refusal(f"the pooled plane of a sample and the rows of x take {least} bytes of shared memory a CTA; there are {target.smem_bytes}")
    best = {g.layout: g for g in reversed(able)}  # of a layout the first in the list
    return tuple(_offer(request, Way(windows, arithmetic, rising, g), two_walks) for g in able if best[g.layout] is g)


def _offer(request: Request, way: Way, two_walks: bool) -> Offer:
    g, spec = way.geometry, request.form
    knobs = (("cluster", g.layout.cluster), ("warpgroups", g.layout.warpgroups), ("bulk", g.layout.bulk))
    ms = one_kernel_ms(spec, request.device, g, len(steps_of(spec, g, two_walks)))
    return Offer(Choice("conv_sm90a", knobs), ms, across=ACROSS, detail=way)


def plan(request: Request, offer: Offer) -> Plan:
    """The plan of an offer: one kernel."""
    spec, device, way = request.form, request.device, offer.detail
    before_pool, rest = split_at_pool(spec)
    kernel = conv_kernel(spec, way.geometry, way.windows, way.arithmetic, way.rising, (*before_pool, *rest), request.debug)
    bound = floor(spec, device, len(way.arithmetic.products), device.fp16)
    return Plan(spec, request.target, device, (Launch(kernel),), (), bound, _why(spec, way.geometry, way.arithmetic))


def _why(spec: FusedSpec, g: Geometry, arithmetic: Arithmetic) -> tuple[str, ...]:
    used = g.clusters * g.layout.cluster
    listed = [
        ONE_READ,
        f"{used} CTAs on {used} SMs, the busiest computes {g.strips_computed} strips of {g.strips * g.items} in {g.items} samples",
        f"{g.layout.warpgroups} warpgroups multiply, as many as the registers allow with {g.tile_values} accumulators and the weights of a thread"
        + ("; they take turns at the tensor cores" if g.turns else ""),
        f"x comes by the copy engine, {g.chunk} rows at a time, {g.raw_stages} times ahead" if g.layout.bulk else "x comes through registers",
        f"of the cuts that fit, in this order: {PREFERENCE}",
        *reasons(spec, arithmetic, "a sample out of fp16's range"),
    ]
    if g.tile < SHORT_ROWS:
        listed.append(f"tiles of {g.tile} pixels leave the tensor cores partly idle")
    return tuple(listed)


CONV_SM90A = Route("conv_sm90a", "one kernel for the whole chain", frozenset({"sm_90a"}), frozenset({"conv2d"}), offers, plan)
