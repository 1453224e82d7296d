"""How the results of a direct convolution are dealt out to threads.

A block takes a tile of one plane of cells: rows and columns of them, for some channels. A cell is a result, or of a transposed convolution the `step` results
along each axis that begin at the same value of x. The x that the tile's windows meet lies in shared memory, a chunk of channels at a time, with W.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from codegen.ir.fused_form import FusedSpec
from codegen.plan.model import Refusal
from codegen.plan.shared.axes import POINT, Axis, axes_of

THREADS = 256
STATIC_SHARED = 48 * 1024  # bytes of a block
SUMS = 32  # that a thread holds, at most: more would leave room for fewer threads, and these wait longer for x
CHANNELS = (32, 24, 16, 8)  # of a thread
ACROSS = (256, 128, 64, 32, 16)  # threads along a row


@dataclass(frozen=True)
class Geometry:
    """A convolution's axes (depth, height, width) and the sizes of its kernel."""

    axes: tuple[Axis, Axis, Axis]
    kernel: tuple[int, int, int]

    @property
    def results(self) -> int:
        """Of a channel of a sample."""
        return math.prod(axis.results for axis in self.axes)

    @property
    def products(self) -> int:
        """Of a result with a channel of x, in the phase that has most taps."""
        return math.prod(max(map(len, axis.phases)) for axis in self.axes)


@dataclass(frozen=True)
class Tile:
    """`channels` of a thread; its cells, `cells_across` x `cells_down`; `across` x `down` threads; `chunk` channels of x at a time.

    `staged` is the x of a channel that the tile's windows meet: depth, rows, columns. `blocks` counts tiles of all samples and channels.
    """

    channels: int
    groups: int
    cells_across: int
    cells_down: int
    across: int
    down: int
    chunk: int
    staged: tuple[int, int, int]
    tiles: tuple[int, int, int]
    blocks: int

    @property
    def cells(self) -> int:
        return self.cells_across * self.cells_down

    @property
    def columns(self) -> int:
        return self.across * self.cells_across

    @property
    def rows(self) -> int:
        return self.down * self.cells_down


def geometry_of(spec: FusedSpec) -> Geometry:
    """The geometry of the spec's convolution."""
    producer, lost = spec.producer, 3 - spec.producer.operator.rank
    return Geometry((POINT,) * lost + axes_of(producer), (1,) * lost + tuple(producer.values["kernel_size"]))


def extent(axis: Axis, cells: int) -> int:
    """Values of x along an axis that the windows of neighbouring cells meet."""
    return (cells - 1) * axis.stride + 1 + axis.reach


def tile_of(spec: FusedSpec, geometry: Geometry) -> Tile:
    """The tile with the least work: results that are computed and thrown away count, and x that is brought more than once. Raises Refusal."""
    found = min(_tiles(spec, geometry), key=lambda item: item[0], default=None)
    if found is None:
        raise Refusal(f"the x that {THREADS} windows meet and W take more than {STATIC_SHARED // 1024} KB of shared memory for one channel of x")
    return found[1]


def _tiles(spec: FusedSpec, geometry: Geometry) -> Iterator[tuple[float, Tile]]:
    depth, height, width = geometry.axes
    taps, wide = math.prod(geometry.kernel), width.step
    for channels, across in itertools.product(CHANNELS, ACROSS):
        most = SUMS // (channels * wide)
        if not most or across > THREADS or (across == ACROSS[-1] and width.count > across):
            continue
        groups, down = math.ceil(spec.channels / channels), THREADS // across
        for cells_across in (1, 2, 4, 8):
            cells_down = most // cells_across
            if not cells_down or (cells_across > 1 and across * cells_across >= 2 * width.count):
                continue
            while cells_down > 1 and down * cells_down >= 2 * height.count:
                cells_down //= 2
            rows, columns = down * cells_down, across * cells_across
            staged = (extent(depth, 1), extent(height, rows), extent(width, columns))
            each = 4 * (math.prod(staged) + taps * channels)
            fitting = [chunk for chunk in range(1, spec.input_shape[1] + 1) if spec.input_shape[1] % chunk == 0 and chunk * each <= STATIC_SHARED]
            if not fitting:
                continue
            tiles = (depth.count, math.ceil(height.count / rows), math.ceil(width.count / columns))
            blocks = spec.batch * math.prod(tiles) * groups
            tile = Tile(channels, groups, cells_across, cells_down, across, down, fitting[-1], staged, tiles, blocks)
            yield blocks * work(spec, geometry, tile), tile


def work(spec: FusedSpec, geometry: Geometry, tile: Tile) -> float:
    """Instructions of a block's threads together: products, loads of x and W for them, and what brings x and W into shared memory."""
    depth, height, width = geometry.axes
    phases = depth.step * height.step
    taps = math.prod(geometry.kernel)  # of all phases: each of W's is in one
    sums = tile.channels * tile.cells
    multiply = THREADS * taps * (sums + tile.channels / 4 + tile.cells)
    stagings = phases if tile.chunk < spec.input_shape[1] else 1
    stage = stagings * (8.0 * math.prod(tile.staged) + 6.0 * taps * tile.channels)
    results = THREADS * 6.0 * sums * phases * width.step
    return spec.input_shape[1] * (multiply + stage) + results
