"""Tiles, clusters and shared memory of the Hopper GEMM."""

from __future__ import annotations

import math
from dataclasses import dataclass

TILE_K = 64  # halves in a row of 128 bytes, which the swizzle covers
CONSUMERS = 2  # warpgroups that multiply
ROW_PART = 32  # channels of a sample that a thread holds in registers at a time
STATISTICS_BYTES = 12  # of a strip or a group of one sample: three floats


@dataclass(frozen=True)
class Form:
    """How an arithmetic lies on the multiplier: `registers`: W stays fp32 in memory and is converted on its way into operand registers;
    `parts`: halves that each value is split into; `promote`: k-steps between additions of the tensor core's sums to fp32 registers."""

    registers: bool
    parts: int
    tile_channels: int
    tile_samples: int
    stages: int
    promote: int

    def __post_init__(self) -> None:
        if self.registers and self.blocks != 1:
            raise ValueError("W from registers takes one accumulator block a warpgroup")

    @property
    def blocks(self) -> int:
        """64-row accumulators a warpgroup."""
        return self.tile_channels // (64 * CONSUMERS)


@dataclass(frozen=True)
class Layout:
    """How tiles make up the result: `share` names the operand that the CTAs of a cluster fetch for each other, `unit_tiles` the tiles that a
    CTA computes before their groups are complete, `statistics` who merges a group: "lanes" of a warp, "strips" of 16 channels through shared
    memory, or "none" (the norm kernel). `exchange`: the cluster's CTAs hold parts of one group. `slices` CTAs share a tile, each with its own part of K."""

    cluster: int
    share: str
    unit_tiles: int
    statistics: str
    exchange: bool = False
    slices: int = 1

    def slice_steps(self, k: int) -> int:
        """Stages of the ring in a slice; those behind the last value of K multiply zeros."""
        return math.ceil(math.ceil(k / TILE_K) / self.slices)


def strip_blocks(form: Form, group_width: int) -> int:
    """Accumulator blocks of a warp that lie in one group."""
    return form.blocks if group_width >= 64 * form.blocks else 1


def in_warpgroup(form: Form, group_width: int) -> bool:
    """Whether each group of a tile lies within one warpgroup's channels."""
    return group_width <= form.tile_channels // CONSUMERS


def by_rows(form: Form, layout: Layout, itemsize: int) -> bool:
    """Whether threads finish whole rows of a tile, one sample each: results of 16 bits, whose tile fits into shared memory beside the ring,
    and at most one other waits in registers."""
    return layout.statistics == "strips" and itemsize == 2 and not layout.exchange and layout.unit_tiles <= 2 and form.tile_samples == 128 and form.blocks <= 2


def row_parts(form: Form, layout: Layout, group_width: int, costly: bool) -> tuple[int, int]:
    """How many channels of a row a thread holds in registers at a time, and how often to meet all of a group's in the row. Beside a tile that
    waits there are registers for half as many, and for half of those where operators are `costly`."""
    part = min(group_width, ROW_PART // (layout.unit_tiles * (2 if costly and layout.unit_tiles > 1 else 1)))
    return part, min(group_width, 64 * form.blocks) // part


@dataclass(frozen=True)
class Memory:
    """The dynamic shared memory of a CTA, in bytes."""

    weight_part: int
    input_part: int
    stage: int
    scratch_at: int
    scratch: int  # of one warpgroup: its strips' statistics, then a piece of y on its way out
    store_samples: int
    groups_at: int
    parameters_at: int
    exchange_at: int
    barriers_at: int
    total: int


def memory(form: Form, layout: Layout, group_width: int, itemsize: int, limit: int, vectors: int = 0) -> Memory | None:
    """Where everything lies; None when it does not fit into `limit` bytes. `vectors`: parameters of the epilogue."""
    weight_part = form.tile_channels * TILE_K * (4 if form.registers else 2)
    input_part = form.tile_samples * TILE_K * 2
    stage = weight_part * (1 if form.registers else form.parts) + input_part * form.parts
    strips = groups = 0
    planes = form.tile_samples * STATISTICS_BYTES
    rows = by_rows(form, layout, itemsize)
    if rows:
        groups = 0 if in_warpgroup(form, group_width) else CONSUMERS * form.tile_samples * 8  # mean and M2
    elif layout.statistics == "strips":
        strips = 4 * form.blocks // strip_blocks(form, group_width) * planes
        groups = 0 if in_warpgroup(form, group_width) else planes  # otherwise in the place of its first strip
    exchange = 2 * planes if layout.exchange else 0
    # A warpgroup's part of y leaves in pieces of 64 samples: one through the scratch memory, the others through half of a stage.
    store_samples = 64 if itemsize == 2 else 0
    pieces = form.blocks * form.tile_samples // 64
    scratch = -(-max(strips, store_samples * 128) // 1024) * 1024  # the swizzle counts from multiples of 1024
    scratch_at = form.stages * stage
    groups_at = scratch_at + CONSUMERS * scratch
    parameters_at = groups_at + groups
    exchange_at = parameters_at + (4 * vectors * form.tile_channels * layout.unit_tiles if rows else 0)
    barriers_at = exchange_at + exchange
    rings = 2 if form.registers else 1
    total = barriers_at + 8 * (2 * rings * form.stages + (2 if layout.exchange else 0))
    if total > limit or (store_samples and stage // CONSUMERS < (pieces - 1) * store_samples * 128):
        return None
    return Memory(weight_part, input_part, stage, scratch_at, scratch, store_samples, groups_at, parameters_at, exchange_at, barriers_at, total)


@dataclass(frozen=True)
class Bands:
    """How the clusters of one wave lie over the result: in bands of `width` of them along the batch, each of which goes over all channels before the next.

    `last` is the width of the last one. A single band reads all of x for every row of tiles.
    """

    width: int
    last: int
    count: int

    @property
    def uneven(self) -> bool:
        return self.last != self.width


def bands_of(blocks: int, clusters: int, rows: int, channels: int, x_bytes: int, l2_bytes: float) -> Bands:
    """Bands for `blocks` clusters along the batch, `clusters` at once, each of `rows` samples and `channels`.

    A wave reads least where its clusters cover as many rows of W as of x. One band does where x stays in the L2 cache beside W's rows, or a wave is no wider.
    """
    wanted = max(1, round(math.sqrt(clusters * channels / rows)))
    count = 1 if x_bytes <= l2_bytes / 2 else max(1, round(blocks / wanted))
    width = math.ceil(blocks / count)
    count = math.ceil(blocks / width)
    return Bands(width, blocks - (count - 1) * width, count)


def balanced(units: int, places: int) -> int:
    """Clusters to launch: as few as finish `units` in as many rounds as `places` clusters at once would need."""
    return math.ceil(units / math.ceil(units / places))
