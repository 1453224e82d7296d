"""Tiles, steps and shared memory of the convolution as a product on Hopper.

Rows of the accumulators are channels of y (W is operand A), columns are pixels (x is operand B). A step of K is a block of channels of one tap. The halves
of a value lie side by side in a row of 128 bytes, or in planes of their own where a block of 64 channels fills such a row.

Where x lies in runs, eight values of K of a row, 16 bytes, make a piece, and pieces of neighbouring rows follow each other: no swizzle. A run of positions is copied as it is, a
tap moves where its matrix begins by 16 bytes a position, and where x has eight channels or fewer two taps are the two pieces of a multiplication.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from codegen.plan.conv_product_sm90a.forms import Form
from codegen.plan.conv_product_sm90a.geometry import Geometry
from codegen.plan.model import Refusal

CONSUMERS = 2  # warpgroups that multiply
LANES = 32  # of a warp
WARP_ROWS = 16  # of the accumulators, of a warp
THREADS = 128 * (1 + CONSUMERS)
ROW_HALVES = 64  # of a row of 128 bytes, which the swizzle covers
GROUP_K = 16  # of one multiplication
PIECE = 8  # values of K that lie side by side in a run
PIECE_BYTES = 2 * PIECE
BARRIER_BYTES = 8
PATTERN_BYTES = 1024  # of the swizzle
LEAST_STAGES = 3
RUNS = (64, 32)  # results of a channel that a warp turns around at a time: the longer, unless it shortens the steps of K
MOST_UNROLLED = 9  # stages of 64 channels
MOST_TAPS = 5  # of 16 channels, which are a stage together where sums are not promoted
PROMOTED_PIXELS = {1: 128, 2: 96}  # of a warpgroup, by the columns of results that a pixel gives: with two, 96 sums and 48 of two groups in flight


@dataclass(frozen=True)
class Layout:
    """How channels and pixels lie on the multiplier.

    `block` channels make a step, `blocks` of them a tap; `taps` of a stage, of which each has a step, or two one. `form`: the operands' parts, and who shares a tile.
    `pixels` of a warpgroup: the two have 64 channels each of the same pixels, the same 64 channels and pixels of their own, or tiles of their own in turn. Where
    the taps of a stage are `shared`, they read the same pixels, each `tap_step` further on, and the last `halo` behind the tile. `unrolled` stages are
    multiplied without a pause. `columns` of results that a pixel gives. `runs`: how x and W lie. A warp has
    `warp_channels` of y, and turns `run` results of each of its channels around at a time.
    """

    form: Form
    block: int
    blocks: int
    taps: int
    tile_channels: int
    pixels: int
    shared: bool = False
    halo: int = 0
    tap_step: int = 1
    unrolled: int = 1
    columns: int = 1
    runs: bool = False
    warp_channels: int = WARP_ROWS
    run: int = RUNS[0]

    @property
    def parts(self) -> int:
        """Values of 16 bits of an operand."""
        return self.form.parts

    @property
    def tile_pixels(self) -> int:
        return self.pixels * (1 if self.form.in_turn or self.tile_channels == 64 * CONSUMERS else CONSUMERS)

    @property
    def padded_channels(self) -> int:
        """Channels of x, zeros behind the last included."""
        return self.block * self.blocks

    @property
    def planes(self) -> int:
        """Rows that the halves of a step's value are spread over."""
        return 1 if self.runs else max(1, self.block * self.parts // ROW_HALVES)

    @property
    def paired(self) -> bool:
        """Whether two taps are multiplied together: the taps of a stage are then counted with those that a last one lacks."""
        return self.block == PIECE

    @property
    def steps(self) -> int:
        """Steps of K of a stage."""
        return self.taps // 2 if self.paired else self.taps

    @property
    def step_block(self) -> int:
        """Values of K of a step."""
        return max(self.block, GROUP_K)

    @property
    def weight_tap(self) -> int:
        """Bytes of a step of W."""
        return 2 * self.tile_channels * self.step_block * self.parts // self.planes

    @property
    def pieces(self) -> int:
        """Runs of x of a stage."""
        return self.parts * self.block // PIECE

    @property
    def run_bytes(self) -> int:
        """Of one of them."""
        return (self.tile_pixels + self.halo) * PIECE_BYTES

    @property
    def mapped_rows(self) -> int:
        """Rows that the copy engine finds by a map for a stage: channels of W, and pixels."""
        if self.runs:
            return 0
        return self.planes * (self.tile_channels * self.taps + (self.tile_pixels + self.halo) * (1 if self.shared else self.taps))

    @property
    def zeros_bytes(self) -> int:
        """Of the zeros beside a tap without a partner: as far from those of the high halves as its own low ones lie from its high ones."""
        return self.pixels * PIECE_BYTES + (self.parts - 1) * self.run_bytes if self.paired else 0

    @property
    def row_bytes(self) -> int:
        return 2 * self.block * self.parts // self.planes

    @property
    def weight_part(self) -> int:
        """Bytes of one plane of W in a stage."""
        return self.weight_tap * self.steps

    @property
    def fetched_part(self) -> int:
        """Bytes of one plane of x in a stage."""
        return (self.tile_pixels + self.halo) * self.row_bytes * (1 if self.shared else self.taps)

    @property
    def input_part(self) -> int:
        """The same, rounded up to where a swizzle's pattern begins."""
        return math.ceil(self.fetched_part / PATTERN_BYTES) * PATTERN_BYTES

    @property
    def input_tap(self) -> int:
        """Bytes from the pixels of a tap to those of the next."""
        return (self.tap_step if self.shared else self.tile_pixels) * self.row_bytes

    @property
    def fetched_bytes(self) -> int:
        """Bytes that the copy engine brings for a stage."""
        return self.planes * (self.weight_part + self.fetched_part)

    @property
    def stage_bytes(self) -> int:
        return self.planes * (self.weight_part + self.input_part)

    @property
    def staged_pitch(self) -> int:
        """Floats from one channel to the next of the results on their way out: a run, and what keeps the pairs of four rows, or the fours of two, in banks of their own."""
        return self.run + 8 * self.columns

    @property
    def spread(self) -> bool:
        """Whether few channels of y are spread over the rows of all warps."""
        return self.warp_channels < WARP_ROWS

    @property
    def staged_channels(self) -> int:
        """Channels that a warp has room to turn around: those of eight lanes at least, which write theirs whether they are channels or not."""
        return max(8, self.warp_channels)

    @property
    def staged_bytes(self) -> int:
        """Of the channels of every multiplying warp."""
        return 4 * CONSUMERS * self.staged_channels * self.staged_pitch * 4

    @property
    def turn_bytes(self) -> int:
        """Of the barriers by which warpgroups take turns."""
        return CONSUMERS * BARRIER_BYTES if self.form.in_turn else 0

    def stages(self, limit: int) -> int:
        """As many as fit, with two barriers each."""
        return (limit - self.staged_bytes - self.zeros_bytes - self.turn_bytes) // (self.stage_bytes + 2 * BARRIER_BYTES)

    def shared_bytes(self, stages: int) -> int:
        return self.staged_bytes + self.zeros_bytes + self.turn_bytes + stages * (self.stage_bytes + 2 * BARRIER_BYTES)

    @property
    def halves(self) -> int:
        """Groups of multiplications of a tap: its channels in halves, where sums are promoted and that leaves 16 at least."""
        return 2 if self.parts == 2 and self.block > GROUP_K else 1

    @property
    def group_steps(self) -> int:
        """Multiplications along K in a group."""
        return self.step_block // (self.halves * GROUP_K)

    @property
    def weight_low(self) -> int:
        """Bytes from W's high halves to its low ones."""
        return self.step_block * 2 * self.tile_channels if self.runs else self._low(self.weight_part)

    @property
    def input_low(self) -> int:
        """The same of x."""
        return self.block // PIECE * self.run_bytes if self.runs else self._low(self.input_part)

    def _low(self, part_bytes: int) -> int:
        return part_bytes if self.planes == 2 else 2 * self.block

    def stages_of(self, taps: int) -> int:
        """Stages that the taps of a phase take, or its rows of taps."""
        return (taps if self.shared else math.ceil(taps / self.taps)) * self.blocks


def layout_of(form: Form, channels: int, results: int, geometry: Geometry, limit: int) -> Layout:
    """The layout for so many channels of x and of y: the longest steps that leave room for a ring in `limit` bytes."""
    columns = geometry.wide_phases
    pixels = PROMOTED_PIXELS[columns] if form.parts == 2 else 2 * form.sums // columns
    tile_channels = 64 if form.in_turn or results <= 64 else 128
    found = []
    for block, blocks in _blocks_of(channels, geometry):
        if geometry.shared:
            taps = 2 * len(geometry.row_pairs) if block == PIECE else len(geometry.row_taps)
        else:
            taps = _taps_of(form, geometry) if block == GROUP_K and not geometry.runs else 1
        for run in RUNS:
            if run <= LANES * geometry.vector:
                found.append(
                    Layout(form, block, blocks, taps, tile_channels, pixels, geometry.shared, geometry.halo, geometry.tap_step, columns=columns, runs=geometry.runs,
                           warp_channels=_warp_channels(results) if geometry.runs else WARP_ROWS, run=run)
                )  # fmt: skip
    layout = next((layout for layout in found if layout.stages(limit) >= LEAST_STAGES), None)
    if layout is None:
        raise Refusal(f"a row of {len(geometry.row_taps)} taps leaves no room for {LEAST_STAGES} stages in shared memory")
    if form.in_turn:
        return layout
    counts = [layout.stages_of(len(taps)) for phase in geometry.phases for taps in phase.taps]
    return replace(layout, unrolled=_unrolled(math.gcd(*counts), MOST_UNROLLED * ROW_HALVES // (layout.block * layout.taps)))


def _warp_channels(results: int) -> int:
    """Channels of y of a warp of four: few are spread over all of them, which finish side by side."""
    return next((count for count in (4, 8) if results <= 4 * count), WARP_ROWS)


def _taps_of(form: Form, geometry: Geometry) -> int:
    """Taps of 16 channels that are a stage. Those of a form without promotion are as many as go into all lists: where a tap were missing, zeros would meet
    values of x, of which some may be infinite."""
    if form.parts == 2:
        return 2
    count = math.gcd(*(len(taps) for phase in geometry.phases for taps in phase.taps))
    return _unrolled(count, MOST_TAPS) if count else 1


def _unrolled(stages: int, most: int) -> int:
    """The largest divisor of a tile's stages that is not too long."""
    return max(divisor for divisor in range(1, most + 1) if stages % divisor == 0)


def _blocks_of(channels: int, geometry: Geometry) -> Iterator[tuple[int, int]]:
    """(channels of a step, steps of a tap), the longest steps first that add no more zeros than shorter ones."""
    if channels <= PIECE and geometry.runs and geometry.shared and len(geometry.row_taps) > 1:
        yield PIECE, 1
        return
    padded = math.ceil(channels / 32)
    if channels > GROUP_K and padded % 2 == 0:
        yield 64, padded // 2
    yield (32, padded) if channels > GROUP_K else (GROUP_K, 1)

