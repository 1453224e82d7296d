"""The direct convolution as data: everything that templates/conv_direct/conv.cu.j2 reads."""

from __future__ import annotations

from dataclasses import dataclass, replace

from codegen.ir.apply import Constant, applies, called, unique_constants
from codegen.ir.fused_form import FusedSpec
from codegen.ir.operand import c_identifier
from codegen.numerics import Precision
from codegen.plan.conv_direct.tile import THREADS, Geometry, Tile
from codegen.plan.shared.axes import AXES, Axis
from codegen.plan.shared.pointers import Pointer, PointerKernel
from codegen.plan.shared.values import LoadedOperand, ValueFunction, finish_product, register_limit

MIN_BLOCKS = 3  # on an SM, so that some multiply while another brings its x
FEW_BLOCKS = 2  # the same where a thread keeps its place in x beside the sums of a phase, or whole sums beside partial ones
LISTED_PLANES = 3  # of taps, whose products are listed one by one
SUM_PRODUCTS = 128  # of a result that are added one after the other, at most; sums of more are added up from partial ones
PARTIAL_PRODUCTS = 64  # of a partial sum, unless one channel of x has more
BROUGHT = 8  # values of x that a thread has on their way at once


@dataclass(frozen=True)
class Taps:
    """The taps of an axis as its loops count them. Of each phase: how many, the first, and its offset in x; from one to the next `tap_step` and `offset_step`."""

    counts: tuple[int, ...]
    firsts: tuple[int, ...]
    offsets: tuple[int, ...]
    tap_step: int
    offset_step: int

    @classmethod
    def of(cls, axis: Axis) -> Taps:
        several = next((taps for taps in axis.phases if len(taps) > 1), None)
        tap_step, offset_step = (several[1][i] - several[0][i] for i in (0, 1)) if several else (1, 1)
        first = [taps[0] if taps else (0, 0) for taps in axis.phases]
        return cls(tuple(map(len, axis.phases)), tuple(tap for tap, _ in first), tuple(offset for _, offset in first), tap_step, offset_step)


@dataclass(frozen=True, kw_only=True)
class DirectKernel(PointerKernel):
    """The convolution with its epilogue. `min_blocks` must fit on an SM. `channel_tail`: the last group of channels is not whole; `tails`: has the last tile along
    an axis cells without a result?"""

    precision: Precision
    geometry: Geometry
    tile: Tile
    weight: str
    finish: ValueFunction | None
    functions: tuple[str, ...]
    min_blocks: int
    channel_tail: bool
    tails: tuple[bool, bool, bool]
    partial: int

    portable = True

    @property
    def rolled(self) -> bool:
        """Whether planes of taps are a loop of the code too: unrolled, so many would not stay in the instruction cache."""
        return self.geometry.kernel[0] > LISTED_PLANES

    @property
    def operands(self) -> tuple[LoadedOperand, ...]:
        return self.finish.operands if self.finish else ()

    def finished(self, value: str) -> str:
        """C: the result of a sum."""
        return self.finish.call(value) if self.finish else value

    @property
    def axes(self) -> tuple[tuple[str, Axis, Taps], ...]:
        return tuple((name, axis, Taps.of(axis)) for name, axis in zip(AXES, self.geometry.axes, strict=True))

    @property
    def phases(self) -> tuple[tuple[int, int], ...]:
        """Of depth and height, those with most taps first."""
        depth, height, _ = self.geometry.axes
        pairs = [(d, h) for d in range(depth.step) for h in range(height.step)]
        return tuple(sorted(pairs, key=lambda pair: -len(depth.phases[pair[0]]) * len(height.phases[pair[1]])))

    @property
    def wide(self) -> int:
        return self.geometry.axes[2].step

    @property
    def rows_wrap(self) -> bool:
        """Whether a thread's next value may lie more than a plane further on."""
        _, rows, columns = self.tile.staged
        return THREADS // columns + 1 >= rows

    @property
    def neighbours(self) -> bool:
        """Whether a warp's cells are neighbours in a row, so that its lanes can exchange results of two phases and store runs."""
        return self.wide == 2 and self.tile.across % 32 == 0


def direct_kernel(spec: FusedSpec, geometry: Geometry, tile: Tile) -> DirectKernel:
    """The kernel of `spec`."""
    finish, c_type = finish_product(spec), spec.precision.c_type
    operands = finish.operands if finish else ()
    weight = c_identifier(spec.weight)
    pointers = (Pointer(c_type, "x"), Pointer(c_type, weight), *(Pointer(c_type, operand.pointer) for operand in operands), Pointer(c_type, "y", True))
    depth, height, _ = axes = geometry.axes
    partial = _partial(spec, geometry)
    blocks = FEW_BLOCKS if partial or (tile.chunk < spec.input_shape[1] and depth.step * height.step > 1) else MIN_BLOCKS
    tails = tuple(axis.count % cells != 0 or axis.count * axis.step != axis.results for axis, cells in zip(axes, (1, tile.rows, tile.columns), strict=True))
    kernel = DirectKernel(
        name="conv", template="conv_direct/conv.cu.j2", arguments=("x", spec.weight, *(operand.key for operand in operands), "y"), constants=(),
        summary=" -> ".join(step.operator.name for step in spec.chain) + " in one kernel: sums of all channels in registers",
        max_registers=register_limit(THREADS, blocks), threads=THREADS, blocks=tile.blocks, notes=_notes(spec, tile), pointers=pointers,
        precision=spec.precision, geometry=geometry, tile=tile, weight=weight, finish=finish, functions=called(applies(spec, spec.before_norm)),
        min_blocks=blocks, channel_tail=spec.channels % tile.channels != 0, tails=tails, partial=partial,
    )  # fmt: skip
    return replace(kernel, constants=_constants(spec, kernel))


def _partial(spec: FusedSpec, geometry: Geometry) -> int:
    """Channels of x of a partial sum; 0 where there is none. 216 products one after the other err by 3.3e-7 of the result, 288 by 3.9e-7, where cuDNN errs by 1.9e-7."""
    return max(1, PARTIAL_PRODUCTS // geometry.products) if spec.input_shape[1] * geometry.products > SUM_PRODUCTS else 0


def _notes(spec: FusedSpec, tile: Tile) -> tuple[str, ...]:
    chunk = "all channels" if tile.chunk == spec.input_shape[1] else f"{tile.chunk} channels at a time"
    return (
        f"tiles of {tile.channels} channels x {tile.rows} rows x {tile.columns} columns; a thread has {tile.cells} of their cells",
        f"x that a tile's windows meet is in shared memory, {chunk}, W beside it",
    )


def _constants(spec: FusedSpec, kernel: DirectKernel) -> tuple[Constant, ...]:
    tile, producer = kernel.tile, spec.producer
    depth, rows, columns = tile.staged
    taps = kernel.geometry.kernel
    table: list[tuple[str, object, str]] = [
        ("kChannels", spec.input_shape[1], "channels of x"),
        *((f"k{name}", axis.size, f"{what} of x") for (name, axis, _), what in zip(kernel.axes, ("depth", "rows", "columns"), strict=True)),
        ("kOutChannels", spec.channels, "channels of y"),
        *((f"kOut{name}", axis.results, f"{what} of y") for (name, axis, _), what in zip(kernel.axes, ("depth", "rows", "columns"), strict=True)),
        ("kPlane", kernel.geometry.results, "results of a channel of a sample: " + " x ".join(map(str, producer.output_shape[2:]))),
        *((f"kKernel{name}", size, f"size of W along the {name.lower()}") for name, size in zip(AXES, taps, strict=True)),
        ("kTaps", taps[0] * taps[1] * taps[2], "taps: all of W's for a channel of x and one of y"),
    ]
    for name, axis, taps in kernel.axes:
        along = f"along the {name.lower()}"
        table += [(f"kStride{name}", axis.stride, f"values of x from one cell to the next {along}")] if axis.stride > 1 else []
        table += [(f"kLower{name}", axis.lower, f"first value of x that the first cell meets {along}")]
        table += [(f"kStep{name}", axis.step, f"results of a cell {along}: {producer.operator.name}'s stride")] if axis.step > 1 else []
        table += [(f"kTapStep{name}", taps.tap_step, f"from one tap of a phase to the next {along}")] if taps.tap_step != 1 and axis.step > 1 else []
        table += [(f"kOffsetStep{name}", taps.offset_step, f"values of x between them{'' if axis.step > 1 else ': the dilation'}")] if taps.offset_step != 1 else []
    staged = depth * rows * columns
    table += [
        ("kGroup", tile.channels, "channels of y that a thread sums"),
        ("kGroups", tile.groups, "groups of channels" + (", the last one not whole" if kernel.channel_tail else "")),
        ("kAcross", tile.across, "threads along a row of cells"),
        ("kDown", tile.down, "rows of threads"),
        ("kCellsAcross", tile.cells_across, "cells of a thread along a row, kAcross apart"),
        ("kCells", tile.cells, f"cells of a thread: {tile.cells_across} x {tile.cells_down}, rows kDown apart"),
        ("kTileColumns", tile.columns, "columns of a tile: kAcross x kCellsAcross"),
        ("kTileRows", tile.rows, f"rows of a tile: kDown x {tile.cells_down}"),
        ("kColumnTiles", tile.tiles[2], f"tiles of {kernel.geometry.axes[2].count} columns of cells"),
        ("kRowTiles", tile.tiles[1], f"tiles of {kernel.geometry.axes[1].count} rows of cells"),
        ("kDepthTiles", tile.tiles[0], "planes of cells"),
        ("kStagedDepth", depth, "planes of x that a tile meets"),
        ("kStagedRows", rows, "rows of them"),
        ("kStagedColumns", columns, "columns of them"),
        ("kStaged", staged, "values of them: kStagedDepth x kStagedRows x kStagedColumns"),
        ("kNextColumns", THREADS % columns, "from a value that a thread brings to its next: kThreads are so many columns"),
        ("kNextRows", THREADS // columns, "and so many rows"),
        ("kChunk", tile.chunk, "channels of x in shared memory at once"),
        *([("kPartial", kernel.partial, "channels of x of a partial sum")] if kernel.partial else []),
        ("kThreads", THREADS, "threads of a block: kAcross x kDown"),
        ("kBrought", BROUGHT, "values of x that a thread has on their way at once"),
        ("kBlocks", tile.blocks, f"{spec.batch} samples x kDepthTiles x kRowTiles x kColumnTiles x kGroups"),
    ]
    return (*(Constant(name, str(value), why) for name, value, why in table), *unique_constants(applies(spec, spec.before_norm)))
