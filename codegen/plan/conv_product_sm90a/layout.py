"""Tiles, steps and shared memory of the convolution as a product on Hopper.

Rows of the accumulators are channels of y (W is operand A), columns are pixels (x is operand B). A step of K is a block of channels of one tap. The halves
of a value lie side by side in a row of 128 bytes, or in planes of their own where a block of 64 channels fills such a row.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from codegen.plan.conv_product_sm90a.geometry import Geometry

CONSUMERS = 2  # warpgroups that multiply
THREADS = 128 * (1 + CONSUMERS)
ROW_HALVES = 64  # of a row of 128 bytes, which the swizzle covers
GROUP_K = 16  # of one multiplication
BARRIER_BYTES = 8
WARPGROUP_PIXELS = 128  # 64 sums of a thread, and as many of two groups in flight: 192 registers
LEAST_STAGES = 3
MOST_UNROLLED = 9  # stages of 64 channels
SHARED_PIXELS = 96  # the same where a thread has the sums of two phases


@dataclass(frozen=True)
class Layout:
    """How channels and pixels lie on the multiplier.

    `block` channels make a step, `blocks` of them a tap; `taps` of a stage, of which each has a step. `parts`: halves of a value. `pixels` of a warpgroup:
    the two have 64 channels each of the same pixels, or the same 64 channels and pixels of their own. `unrolled` stages are multiplied without a pause.
    """

    parts: int
    block: int
    blocks: int
    taps: int
    tile_channels: int
    pixels: int
    unrolled: int = 1

    @property
    def tile_pixels(self) -> int:
        return self.pixels * (1 if self.tile_channels == 64 * CONSUMERS else CONSUMERS)

    @property
    def padded_channels(self) -> int:
        """Channels of x, zeros behind the last included."""
        return self.block * self.blocks

    @property
    def planes(self) -> int:
        """Rows that the halves of a step's value are spread over."""
        return max(1, self.block * self.parts // ROW_HALVES)

    @property
    def row_bytes(self) -> int:
        return 2 * self.block * self.parts // self.planes

    @property
    def weight_part(self) -> int:
        """Bytes of one plane of W in a stage."""
        return self.tile_channels * self.row_bytes * self.taps

    @property
    def input_tap(self) -> int:
        """Bytes of the pixels of one tap."""
        return self.tile_pixels * self.row_bytes

    @property
    def input_part(self) -> int:
        return self.input_tap * self.taps

    @property
    def stage_bytes(self) -> int:
        return self.planes * (self.weight_part + self.input_part)

    @property
    def staged_pitch(self) -> int:
        """Floats from one channel to the next of the results on their way out: 32, and what keeps the pairs of four rows, or the fours of two, in banks of their own."""
        return 32 + (8 if self.pixels == WARPGROUP_PIXELS else 16)

    @property
    def staged_bytes(self) -> int:
        """Of the 16 channels of every multiplying warp."""
        return 4 * CONSUMERS * 16 * self.staged_pitch * 4

    def stages(self, limit: int) -> int:
        """As many as fit, with two barriers each."""
        return (limit - self.staged_bytes) // (self.stage_bytes + 2 * BARRIER_BYTES)

    def shared_bytes(self, stages: int) -> int:
        return self.staged_bytes + stages * (self.stage_bytes + 2 * BARRIER_BYTES)

    @property
    def half_steps(self) -> int:
        """Multiplications along K of each of a stage's two groups."""
        return self.block * self.taps // (2 * GROUP_K)

    def low(self, part_bytes: int) -> int:
        """Bytes from the high halves to the low ones."""
        return part_bytes if self.planes == 2 else 2 * self.block

    def half(self, tap_bytes: int) -> int:
        """Bytes from a stage's first group to its second."""
        return tap_bytes if self.taps == 2 else self.block

    def stages_of(self, taps: int) -> int:
        """Stages that the taps of a phase take."""
        return math.ceil(taps / self.taps) * self.blocks


def layout_of(channels: int, results: int, geometry: Geometry, limit: int) -> Layout:
    """The layout for so many channels of x and of y, as halves in two parts: the longest steps that leave room for a ring in `limit` bytes."""
    pixels = WARPGROUP_PIXELS if geometry.wide_phases == 1 else SHARED_PIXELS
    tile_channels = 64 if results <= 64 else 128
    found = (Layout(2, block, blocks, 2 if block == GROUP_K else 1, tile_channels, pixels) for block, blocks in _blocks_of(channels))
    layout = next(layout for layout in found if layout.stages(limit) >= LEAST_STAGES)
    counts = [layout.stages_of(len(taps)) for phase in geometry.phases for taps in phase.taps]
    return replace(layout, unrolled=_unrolled(math.gcd(*counts), MOST_UNROLLED * ROW_HALVES // (layout.block * layout.taps)))


def _unrolled(stages: int, most: int) -> int:
    """The largest divisor of a tile's stages that is not too long."""
    return max(divisor for divisor in range(1, most + 1) if stages % divisor == 0)


def _blocks_of(channels: int) -> Iterator[tuple[int, int]]:
    """(channels of a step, steps of a tap), the longest steps first that add no more zeros than shorter ones."""
    padded = math.ceil(channels / 32)
    if channels > GROUP_K and padded % 2 == 0:
        yield 64, padded // 2
    yield (32, padded) if channels > GROUP_K else (GROUP_K, 1)


__all__ = ["BARRIER_BYTES", "CONSUMERS", "GROUP_K", "THREADS", "Layout", "layout_of"]
