"""Where the pixels of a convolution lie: its axes, its taps, and the phases of a transposed convolution.

Every axis is one of codegen/plan/shared/axes.py. All phases of a transposed convolution start at the same pixels, which is what one map of the copy engine
describes, or where runs begin; a tap moves them by its offset.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace

from codegen.ir.fused_form import FusedSpec
from codegen.ops.windows import AXES
from codegen.plan.model import Refusal
from codegen.plan.shared.axes import POINT, Axis, axes_of

WIDEST_STRIDE = 8  # of pixels that the copy engine takes
CORNERS = {3: 16, 2: 128}  # by the axes of space: a box begins and ends less than so far outside x
OFFSETS = {3: 32, 2: 256}  # and a tap lies less than so far from the first one
WIDEST_HALO = 8  # pixels that taps of a row may reach behind a tile
VECTOR = 4  # results of a channel that leave together, at most
WIDE_PHASES = 2  # along the width, whose results a thread holds at once


@dataclass(frozen=True)
class Tap:
    """A tap: its place in W's kernel, and its offsets along depth, height and width."""

    place: int
    offsets: tuple[int, int, int]


@dataclass(frozen=True)
class RowPair:
    """Two taps of a row that give the same column of results, each its number and its offset; `second` is None where the column has no more."""

    column: int
    first: tuple[int, int]
    second: tuple[int, int] | None = None


@dataclass(frozen=True)
class Phase:
    """Results of one remainder along depth and height: `taps` of every remainder along the width."""

    depth: int
    height: int
    taps: tuple[tuple[Tap, ...], ...]


@dataclass(frozen=True)
class Geometry:
    """A convolution's axes (depth, height, width), the kernel's sizes, and its phases, those with most taps first.

    `windows` are the axes of x itself, `axes` those that a fetch sees. They differ where a row of taps along the width is one tap to it. `row` says
    how: "folded", for few channels, where the kernel that splits x writes those of a whole row of taps side by side, one such row for each result; or
    "shared", where the taps of a row, of all phases along the width, read the same pixels in shared memory, each so many further on, and a row of pixels is as
    much wider than one of results.

    Or "runs": x lies in a `grid` of positions that holds the padding too, eight channels of a position side by side, and the values of a tap, or of a row of taps that
    are `shared`, for a tile of windows are a run of it. Windows are counted as positions are; those that begin where none is give results that nobody stores.
    """

    windows: tuple[Axis, Axis, Axis]
    axes: tuple[Axis, Axis, Axis]
    kernel: tuple[int, int, int]
    rank: int
    transposed: bool
    phases: tuple[Phase, ...]
    row: str = ""
    shared: bool = False

    @property
    def runs(self) -> bool:
        return self.row == "runs"

    @property
    def folded(self) -> bool:
        return self.row == "folded"

    @property
    def grid(self) -> tuple[int, int, int]:
        """Positions along each axis that x and its padding take, where they lie in runs."""
        depth, height, width = self.windows
        return depth.count + depth.reach, height.count + height.reach, self.axes[2].count

    def flat(self, offsets: tuple[int, int, int]) -> int:
        """Positions from a window's first to a tap's."""
        _, rows, columns = self.grid
        depth, height, width = offsets
        return (depth * rows + height) * columns + width

    @property
    def pixels(self) -> int:
        """Results of a phase, those counted that lie behind the last of an axis."""
        if self.runs:
            return 1 + self.flat(tuple(axis.count - 1 for axis in self.windows))
        return math.prod(axis.count for axis in self.axes)

    @property
    def wide_phases(self) -> int:
        """Columns of results that a pixel gives."""
        return len(self.windows[2].phases)

    @property
    def wide_lists(self) -> int:
        """Lists of taps of a phase: one for each such column, unless the taps of all are one row."""
        return len(self.axes[2].phases)

    @property
    def _row(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Number and offset of the taps of a row, by the column of results that they give."""
        return self.windows[2].phases if self.folded or self.shared else POINT.phases

    @property
    def row_taps(self) -> tuple[tuple[int, int], ...]:
        """Number and offset of the taps of a row that is one to the copy engine; one tap without an offset where none is."""
        return tuple(tap for taps in self._row for tap in taps)

    @property
    def row_columns(self) -> tuple[int, ...]:
        """Which of the columns that a pixel gives each tap of a row belongs to."""
        return tuple(column for column, taps in enumerate(self._row) for _ in taps)

    @property
    def row_pairs(self) -> tuple[RowPair, ...]:
        """The taps of a row in twos of one column each: those of a column follow each other, and its last one may lack a partner."""
        return tuple(RowPair(column, *taps[i : i + 2]) for column, taps in enumerate(self._row) for i in range(0, len(taps), 2))

    @property
    def tap_step(self) -> int:
        """Places along the width from a tap of a row to the next, where they are all as many; 1 where a row is one tap."""
        return self.row_taps[1][1] if len(self.row_taps) > 1 else 1

    @property
    def folded_taps(self) -> int:
        """Taps that are channels."""
        return len(self.row_taps) if self.folded else 1

    @property
    def halo(self) -> int:
        """Pixels behind those of a tile that its taps read."""
        return max(offset for _, offset in self.row_taps) if self.shared else 0

    @property
    def gathered(self) -> int:
        """Pixels of a sample of x, as they are fetched."""
        return math.prod(self.grid) if self.runs else math.prod(axis.size for axis in self.axes)

    @property
    def contiguous(self) -> bool:
        """Do the results of a channel follow each other as the pixels do?"""
        return all(axis.step == 1 and axis.count == axis.results for axis in self.axes)

    @property
    def vector(self) -> int:
        """Results of a channel that always follow each other in memory, from a multiple of as many on: a lane stores them together."""
        width = self.axes[2]
        row = math.prod(axis.results for axis in self.axes) if self.contiguous else math.gcd(width.results, width.count * self.wide_phases)
        return math.gcd(row, VECTOR)


def rows_of(spec: FusedSpec, of_phases: bool) -> tuple[str, ...]:
    """The ways to take the taps along the width: each by itself, and as a row where they are several; those `of_phases` share pixels too where that is asked for. Windows
    that move by one position are runs, unless a row gives columns of results that each fetch their own: measured on an H200, 2 and 78 in fp32 then take 1.2 and 1.35 times
    as long."""
    values = spec.producer.values
    transposed, kernel, stride = spec.producer.operator.transposed, values["kernel_size"][-1], values["stride"][-1]
    near = (kernel - 1) * values["dilation"][-1] <= WIDEST_HALO * (stride if transposed else 1)
    if kernel == 1:
        rows = ("",)
    elif transposed and stride > 1:
        rows = ("", "shared") if of_phases and near else ("",)
    else:
        rows = ("", "folded", "shared") if stride == 1 and near else ("", "folded")
    by_one = all(step == 1 for step in values["stride"]) or transposed and (of_phases or stride == 1)
    return (*rows, "runs") if by_one else rows


def geometry_of(spec: FusedSpec, row: str = "", of_phases: bool = False) -> Geometry:
    """The geometry of the spec's convolution. Raises Refusal where the copy engine cannot gather its pixels."""
    producer, rank = spec.producer, spec.producer.operator.rank
    values, transposed = producer.values, producer.operator.transposed
    axes = axes_of(producer)
    kernel = (1,) * (3 - rank) + tuple(values["kernel_size"])
    windows = (POINT,) * (3 - rank) + axes
    width, one = axes[-1], (((0, 0),),)
    shared = row == "shared"
    if row == "folded":
        axes = (*axes[:-1], Axis(width.count, width.results, width.count, 1, 1, 0, one))
    elif row == "shared":
        axes = (*axes[:-1], replace(width, count=width.count + width.reach, phases=one))
    elif row == "runs":
        shared = width.reach <= WIDEST_HALO and (of_phases or width.step == 1)
        even = math.gcd(width.results, VECTOR) // math.gcd(width.step, VECTOR) or 1  # so that a row of positions keeps results together that are so in y
        columns = math.ceil((width.count + width.reach) / even) * even
        counted = [*windows[:2], replace(windows[2], count=columns, phases=one if shared else width.phases)]
        if rank == 3:
            counted[1] = replace(counted[1], count=counted[1].count + counted[1].reach)
        axes = tuple(counted[3 - rank :])
    if width.step > WIDE_PHASES:
        raise Refusal(f"stride: results of a transposed convolution are {width.step} apart along the {AXES[rank][-1]}, and a thread holds {WIDE_PHASES} side by side")
    if row != "runs":
        _refuse_far(axes, rank)
    axes = (POINT,) * (3 - rank) + axes
    return Geometry(windows, axes, kernel, rank, transposed, _phases(axes, kernel), row, shared)


def _phases(axes: tuple[Axis, ...], kernel: tuple[int, ...]) -> tuple[Phase, ...]:
    _, rows, columns = kernel
    depths, heights, widths = (axis.phases for axis in axes)
    found = [
        Phase(d, h, tuple(
            tuple(Tap((kd * rows + kh) * columns + kw, (od, oh, ow)) for (kd, od), (kh, oh), (kw, ow) in itertools.product(depths[d], heights[h], width))
            for width in widths
        ))
        for d, h in itertools.product(range(len(depths)), range(len(heights)))
    ]  # fmt: skip
    return tuple(sorted(found, key=lambda phase: -sum(map(len, phase.taps))))


def _refuse_far(axes: tuple[Axis, ...], rank: int) -> None:
    """Raises Refusal for a convolution beyond the copy engine's reach."""
    space = max(rank, 2)
    for name, axis in zip(AXES[rank], axes, strict=True):
        if axis.stride > WIDEST_STRIDE:
            raise Refusal(f"stride: {axis.stride} along the {name} is more than the {WIDEST_STRIDE} that the copy engine takes")
        if not -CORNERS[space] <= min(axis.lower, axis.upper) <= max(axis.lower, axis.upper) < CORNERS[space]:
            raise Refusal(f"padding: the windows along the {name} reach further beyond x, or end further inside, than the copy engine counts")
        if axis.reach >= OFFSETS[space]:
            raise Refusal(f"kernel_size: the taps along the {name} lie further apart than the copy engine counts")
