"""The direct convolution: convolutions and transposed convolutions of few channels, without a norm, on the CUDA cores.

A tensor core's tile has 64 channels or more, and x must be brought into its form first; with three channels of x and sixteen of the result both cost more than
the products. Here a thread sums all channels of a few results, x and W come from shared memory, and nothing is written but y. One source serves every card.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from codegen.ir.fused_form import FusedSpec
from codegen.plan.conv_direct.cost import estimated_ms
from codegen.plan.conv_direct.kernel import SUM_PRODUCTS, direct_kernel
from codegen.plan.conv_direct.tile import Geometry, Tile, geometry_of, tile_of
from codegen.plan.floor import floor
from codegen.plan.model import Launch, Plan, Refusal
from codegen.plan.route import Choice, Offer, Request, Route
from codegen.plan.shared.axes import CONVOLUTIONS
from codegen.plan.shared.product import refuse_convolution

LONGEST_SUM = 4096  # products of a result
MOST_PHASES = 16  # along depth and height, each of which has code of its own
WIDEST = 4  # phases along the width


@dataclass(frozen=True)
class Detail:
    """The convolution's axes, and how results meet threads."""

    geometry: Geometry
    tile: Tile


def offers(request: Request) -> tuple[Offer, ...]:
    """The one way. Raises Refusal where the convolution is not served."""
    spec = request.form
    refuse_convolution(spec, "a direct convolution")
    geometry = geometry_of(spec)
    _check(spec, geometry)
    depth, height, width = geometry.axes
    if depth.step * height.step > MOST_PHASES or width.step > WIDEST:
        raise Refusal(f"stride: {depth.step * height.step * width.step} phases of results are more than a direct convolution has code for")
    tile = tile_of(spec, geometry)
    if tile.blocks >= 1 << 31:
        raise Refusal("a direct convolution has more blocks than a grid")
    knobs = (("tile", f"{tile.rows}x{tile.columns}"), ("channels", tile.channels))
    return (Offer(Choice("conv_direct", knobs), estimated_ms(spec, request.device, geometry, tile), detail=Detail(geometry, tile)),)


def _check(spec: FusedSpec, geometry: Geometry) -> None:
    if spec.math is not None:
        raise Refusal(f"math: {spec.math} asked for; a direct convolution multiplies in fp32 on the CUDA cores")
    if (longest := spec.input_shape[1] * geometry.products) > LONGEST_SUM:
        raise Refusal(f"sums of {longest} products are longer than fp32 adds up from partial sums")
    if geometry.products > SUM_PRODUCTS:
        raise Refusal(f"the {geometry.products} products of one channel are longer than fp32 adds one after the other")


def plan(request: Request, offer: Offer) -> Plan:
    """The plan of the offer: one kernel."""
    spec, geometry, tile = request.form, offer.detail.geometry, offer.detail.tile
    kernel = direct_kernel(spec, geometry, tile)
    bound = floor(spec, request.device, 1, request.device.fp32)
    return Plan(spec, request.target, request.device, (Launch(kernel),), (), bound, tuple(_why(spec, geometry)))


def _why(spec: FusedSpec, geometry: Geometry) -> list[str]:
    phases = math.prod(axis.step for axis in geometry.axes)
    reasons = ["fp32 products on the CUDA cores: with so few channels the tensor cores' tiles would be mostly empty"]
    if phases > 1:
        reasons.append(f"{phases} phases of results, each with its own taps: no product with a zero in between")
    reasons.append("the operators behind the product are applied to its sums" if len(spec.chain) > 1 else "the product alone")
    return reasons


CONV_DIRECT = Route("conv_direct", "a direct convolution", frozenset({"sm_80", "sm_90a"}), frozenset(), offers, plan, products=CONVOLUTIONS)
