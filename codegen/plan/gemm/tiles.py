"""Tiles of the sm_80 GEMM as data, and how a tile's pipeline goes through K."""

from __future__ import annotations

import math
from dataclasses import dataclass

from codegen.numerics import Arithmetic

WARP = 32
PROMOTE_STEPS = 4  # multiplies in a chain before a rounded addition: every one of them cuts off, TF32's after 8 of K, the others' after 16
SLICES = (2, 4, 8, 16, 32)  # parts of K that blocks of one tile share
SLICE_STAGES = 4  # of the pipeline, at least, in a slice


@dataclass(frozen=True)
class Tile:
    """One block's share of the product: m rows of x times n rows of W.

    The block's warps form a grid of `warps_m` x `warps_n`, `warps_k` deep: each layer takes its own part of every stage's K, and the
    layers' sums are added in the epilogue. A stage holds `warps_k` panels of `row_bytes` of K per row. `share` is the part of the
    multiplier's rate that the main loop reaches when the device is full of such blocks. `presplit`: fp32 operands are split into
    16-bit parts once a block, on their way into shared memory, instead of once a warp on their way out.
    """

    m: int
    n: int
    warps_m: int
    warps_n: int
    warps_k: int
    row_bytes: int
    stages: int
    blocks_per_sm: int
    share: float
    presplit: bool = False

    @property
    def threads(self) -> int:
        return WARP * self.warps_m * self.warps_n * self.warps_k

    @property
    def warp_m(self) -> int:
        return self.m // self.warps_m

    @property
    def warp_n(self) -> int:
        return self.n // self.warps_n

    @property
    def stage_bytes(self) -> int:
        return (self.m + self.n) * self.row_bytes * self.warps_k * (2 if self.presplit else 1)

    @property
    def smem_bytes(self) -> int:
        return self.stage_bytes * self.stages

    @property
    def max_registers(self) -> int:
        return min(255, 65536 // (self.threads * self.blocks_per_sm) // 8 * 8)

    def panel_k(self, itemsize: int) -> int:
        """Values of K in one row of a panel."""
        return self.row_bytes // (2 if self.presplit else itemsize)

    def stage_k(self, itemsize: int) -> int:
        return self.panel_k(itemsize) * self.warps_k


# The shares were measured on an H200 with 1024 x 8192 x 8192, where the smallest tiles meet L2's limit first: theirs are estimates.
# One product: sums live in the accumulators alone, so a warp can own 64x64.
SINGLE = (
    Tile(128, 256, 2, 4, 1, 64, 4, 1, 0.78),
    Tile(256, 128, 4, 2, 1, 64, 4, 1, 0.78),
    Tile(128, 128, 2, 2, 1, 64, 3, 2, 0.71),
    Tile(128, 64, 2, 2, 1, 64, 4, 2, 0.52),
    Tile(64, 128, 2, 2, 1, 64, 4, 2, 0.50),
    Tile(64, 64, 2, 2, 1, 128, 3, 2, 0.46),
    Tile(32, 128, 1, 4, 1, 128, 4, 1, 0.43),
    Tile(32, 64, 1, 2, 2, 128, 4, 1, 0.37),
    Tile(32, 32, 1, 1, 4, 128, 3, 1, 0.28),
    Tile(16, 256, 1, 4, 1, 64, 4, 1, 0.22),
    Tile(16, 128, 1, 2, 2, 128, 2, 1, 0.28),
    Tile(16, 64, 1, 2, 4, 128, 2, 1, 0.23),
    Tile(16, 32, 1, 1, 4, 128, 4, 1, 0.20),
)

# Three products: a second set of sums for the promotion leaves a warp 64x32. Operands are split by every warp that multiplies them.
SPLIT = (
    Tile(128, 128, 2, 4, 1, 128, 3, 1, 0.47),
    Tile(256, 64, 4, 2, 1, 64, 4, 1, 0.57),
    Tile(64, 256, 1, 8, 1, 64, 4, 1, 0.57),
    Tile(128, 64, 2, 2, 1, 64, 4, 2, 0.55),
    Tile(64, 128, 1, 4, 1, 64, 4, 2, 0.55),
    Tile(64, 64, 2, 2, 1, 128, 3, 2, 0.51),
    Tile(32, 128, 1, 4, 1, 128, 4, 1, 0.49),
    Tile(32, 64, 1, 2, 2, 128, 4, 1, 0.46),
    Tile(32, 32, 1, 1, 4, 128, 3, 1, 0.46),
    Tile(16, 256, 1, 8, 1, 64, 4, 1, 0.45),
    Tile(16, 128, 1, 4, 2, 128, 2, 1, 0.45),
    Tile(16, 64, 1, 2, 4, 128, 2, 1, 0.45),
    Tile(16, 32, 1, 1, 4, 128, 4, 1, 0.40),
)

# Three products of 16-bit parts: the multiplies are short enough for the splitting to count, so large tiles split once a block.
SPLIT_16_BIT = (
    Tile(128, 128, 2, 4, 1, 64, 2, 1, 0.53, presplit=True),
    Tile(256, 64, 4, 2, 1, 64, 2, 1, 0.47, presplit=True),
    Tile(64, 256, 1, 8, 1, 64, 2, 1, 0.47, presplit=True),
    Tile(64, 64, 2, 2, 1, 64, 2, 2, 0.37, presplit=True),
    Tile(32, 128, 1, 4, 1, 128, 4, 1, 0.37),
    Tile(32, 64, 1, 2, 2, 128, 4, 1, 0.31),
    Tile(32, 32, 1, 1, 4, 128, 3, 1, 0.29),
    Tile(16, 256, 1, 8, 1, 64, 4, 1, 0.20),
    Tile(16, 128, 1, 4, 2, 128, 2, 1, 0.20),
    Tile(16, 64, 1, 2, 4, 128, 2, 1, 0.20),
    Tile(16, 32, 1, 1, 4, 128, 4, 1, 0.24),
)

# Fused multiply-adds: 8x8 sums a thread, and as many again for the partial sums.
FFMA = (
    Tile(128, 128, 2, 4, 1, 64, 4, 1, 0.61),
    Tile(64, 256, 1, 8, 1, 64, 4, 1, 0.58),
    Tile(128, 64, 2, 2, 1, 64, 4, 2, 0.58),
    Tile(64, 64, 1, 2, 1, 64, 4, 4, 0.62),
    Tile(32, 128, 1, 4, 1, 128, 4, 1, 0.56),
    Tile(32, 64, 1, 2, 2, 128, 4, 1, 0.55),
    Tile(32, 32, 1, 1, 4, 128, 3, 1, 0.53),
    Tile(16, 256, 1, 8, 1, 64, 4, 1, 0.35),
    Tile(16, 128, 1, 4, 2, 128, 2, 1, 0.35),
    Tile(16, 64, 1, 2, 4, 128, 2, 1, 0.35),
    Tile(16, 32, 1, 1, 4, 128, 4, 1, 0.36),
)


def tiles_for(arithmetic: Arithmetic) -> tuple[Tile, ...]:
    if arithmetic.name == "ffma":
        return FFMA
    if arithmetic.parts == 1:
        return SINGLE
    return SPLIT if arithmetic.operand == "tf32" else SPLIT_16_BIT


def partial_sum_stages(arithmetic: Arithmetic, tile: Tile, itemsize: int) -> int:
    """Stages of the pipeline after which the tensor cores' sum is added to the others, rounded; 1 where they keep it."""
    if not arithmetic.promote:
        return 1
    promote = min(arithmetic.promote, PROMOTE_STEPS * (8 if arithmetic.operand == "tf32" else 16))
    return max(1, promote // tile.panel_k(itemsize))


def slice_stages(arithmetic: Arithmetic, tile: Tile, k: int, itemsize: int, slices: int) -> int:
    """Stages of the pipeline in a slice: whole partial sums."""
    stages = math.ceil(math.ceil(k / tile.stage_k(itemsize)) / slices)
    partial = min(stages, partial_sum_stages(arithmetic, tile, itemsize))
    return math.ceil(stages / partial) * partial if slices > 1 else stages


def slice_counts(arithmetic: Arithmetic, tile: Tile, k: int, itemsize: int) -> list[int]:
    """Into how many slices K may be cut, more than one: none is empty, and each has enough stages."""
    found = []
    for slices in SLICES:
        stages = slice_stages(arithmetic, tile, k, itemsize, slices)
        if stages < SLICE_STAGES:
            break
        found.append(math.ceil(math.ceil(k / tile.stage_k(itemsize)) / stages))
    return [count for count in found if count > 1]


def aligned_k(k: int) -> int:
    """K with the zeros behind it that bring every row of 16-bit values to a multiple of 16 bytes."""
    return math.ceil(k / 8) * 8
