"""Shapes of the convolution as a product: windows times filters, and the tiles' ends."""

from __future__ import annotations

import math
from dataclasses import dataclass

from codegen.ir.fused_form import FusedSpec
from codegen.plan.gemm.tiles import Tile

PIECE_BYTES = 16  # of one copy: neighbouring channels of a pixel
PLANE_PAD = 4  # floats behind a staged channel: a warp's stores meet no bank twice


@dataclass(frozen=True)
class Shape:
    """The product of one convolution group: `m` results of a channel, `n` channels, `k` values of a window, `pieces` of 16 bytes a tap; `groups` of them."""

    m: int
    n: int
    k: int
    groups: int
    pieces: int


@dataclass(frozen=True)
class Planes:
    """The end of a tile: `round_rows` results of each channel are staged at once, at a pitch of `pitch` floats, and leave `vector` at a time."""

    vector: int
    round_rows: int
    pitch: int


@dataclass(frozen=True)
class Tiling:
    """A tile, the blocks that share it, each with its own part of K, and the estimate of product, copies and sums of slices in front of the norm."""

    tile: Tile
    slices: int
    ms: float


def shape_of(spec: FusedSpec) -> Shape:
    groups, weight = spec.producer.values["groups"], spec.producer.parameters[0].shape
    values = PIECE_BYTES // spec.precision.itemsize
    pieces = math.ceil(weight[1] / values)
    results = spec.batch * math.prod(spec.producer.output_shape[2:])
    return Shape(results, spec.channels // groups, math.prod(weight[2:]) * pieces * values, groups, pieces)


def planes_of(spec: FusedSpec, tile: Tile, slices: int) -> Planes:
    vector = math.gcd(math.prod(spec.producer.output_shape[2:]), PIECE_BYTES // (4 if slices > 1 else spec.precision.itemsize))
    rows = tile.warp_m
    while rows < tile.m and tile.n * (2 * rows + PLANE_PAD) * 4 * tile.warps_k <= tile.smem_bytes:
        rows *= 2
    return Planes(vector, rows, rows + PLANE_PAD)
