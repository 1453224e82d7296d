"""The kernels that turn x and W into what the convolution multiplies, as data.

fp32 becomes halves (measure.cu.j2, split.cu.j2 or runs.cu.j2, filters.cu.j2): a sample of x has one scale, a power of two, and a filter of W another; they factor out of every
sum, and zeros of the padding stay zeros. Values of 16 bits change their places alone (arrange.cu.j2 or runs.cu.j2, arrange_filters.cu.j2).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from codegen.ir.apply import Constant
from codegen.ir.fused_form import FusedSpec
from codegen.ir.operand import c_identifier
from codegen.plan.conv_product_sm90a.forms import Form, operand_dtype
from codegen.plan.conv_product_sm90a.geometry import Geometry, Tap
from codegen.plan.conv_product_sm90a.layout import PIECE, PIECE_BYTES, Layout
from codegen.plan.model import Buffer, Launch
from codegen.plan.shared.axes import AXES
from codegen.plan.shared.halves import scale_constants, small_constant
from codegen.plan.shared.pointers import Pointer, PointerKernel

X_SPLIT, X_LARGEST, X_UNSCALE, X_COUNTS = "x_split", "x_largest", "x_unscale", "x_counts"
WEIGHT_SPLIT, WEIGHT_UNSCALE = "weight_split", "weight_unscale"
X_PIXELS, WEIGHT_STEPS = "x_pixels", "weight_steps"  # of 16 bits as they come
SPLIT_PIXELS = 128  # of a block
SPLIT_THREADS = 256
SLICES = 32  # of a sample, at least, whose largest values a warp looks through
SLICES_PER_SM = 8  # in all
LARGEST_EXPONENT = 96  # of a value: sums of 2^15 x 2^15, unscaled by it, stay below 2^128 with 2^16 of them
NEAR_FOR_SMALL = 64  # values near the largest that excuse a small one


@dataclass(frozen=True)
class MeasureKernel(PointerKernel):
    """The largest value of each slice of a sample; `in_fours`: samples begin at multiples of 16 bytes."""

    in_fours: bool = True


@dataclass(frozen=True)
class SplitKernel(PointerKernel):
    """x as halves in `parts`, or of 16 bits as it comes, a pixel's channels side by side; `blocks_deep`: blocks of channels, `channel_tail`: the last has fewer
    channels than others; `in_pairs`: two pixels of a channel are a word."""

    blocks_deep: int = 1
    channel_tail: bool = False
    geometry: Geometry | None = None
    parts: int = 2
    in_pairs: bool = False

    @property
    def folded(self) -> bool:
        return self.geometry.folded

    @property
    def stride(self) -> int:
        """Of the windows along the width."""
        return self.geometry.windows[2].stride

    @property
    def tap_step(self) -> int:
        """Columns from one folded tap to the next."""
        return self.geometry.tap_step


@dataclass(frozen=True)
class RunsKernel(PointerKernel):
    """x in runs of positions, eight channels of a position side by side: as halves in `parts` where it is `scaled`, or of 16 bits as it comes. `channel_tail`: the last
    eight are fewer."""

    geometry: Geometry | None = None
    parts: int = 1
    scaled: bool = False
    channel_tail: bool = False

    @property
    def deep(self) -> bool:
        return self.geometry.rank == 3


@dataclass(frozen=True)
class FiltersKernel(PointerKernel):
    """W as halves in `parts`, or of 16 bits as it comes, step by step; `order`: the taps in the order of their steps, empty where that is their own; `phased`: those of several phases;
    `folded`: those along the width are channels, the last of them first where `turned`. Those of a stage,
    `stage_taps`, follow each other. `runs`: eight values of K of the channels of a tile follow each other, those of two taps where they are `paired`; few channels
    are `spread` over the rows of all warps."""

    weight: str = ""
    order: tuple[int, ...] = ()
    phased: bool = False
    folded: bool = False
    turned: bool = False
    stage_taps: int = 1
    parts: int = 2
    runs: bool = False
    paired: bool = False
    spread: bool = False


def operand_names(form: Form) -> tuple[str, str]:
    """The buffers of x and of W as they are multiplied."""
    return (X_SPLIT, WEIGHT_SPLIT) if form.scaled else (X_PIXELS, WEIGHT_STEPS)


def near_constant() -> Constant:
    return Constant("kNearForSmall", str(NEAR_FOR_SMALL), "values near the largest that excuse one that loses bits")


def input_constants(spec: FusedSpec, geometry: Geometry) -> list[tuple[str, int, str]]:
    """(name, value, why) of x as it comes."""
    return [
        ("kInChannels", spec.input_shape[1], "in_channels"),
        ("kWidth", geometry.windows[2].size, "columns of x"),
        ("kInPlane", math.prod(spec.input_shape[2:]), "pixels of a channel of a sample: " + " x ".join(map(str, spec.input_shape[2:]))),
    ]


def weight_constants(spec: FusedSpec, geometry: Geometry) -> list[tuple[str, int, str]]:
    """(name, value, why) of W as it comes."""
    taps, channels = math.prod(geometry.kernel), spec.channels
    return [
        ("kOutChannels", channels, "out_channels"),
        ("kFilter", taps * (1 if geometry.transposed else spec.input_shape[1]), "values of W from one channel of y to the next"),
        ("kFilterStep", taps * (channels if geometry.transposed else 1), "values of W from one channel of x to the next"),
    ]


def fold_constants(spec: FusedSpec, geometry: Geometry) -> list[tuple[str, int, str]]:
    """(name, value, why) of taps that become channels."""
    taps = geometry.folded_taps
    return [
        ("kFolded", taps, "taps along the width, which become channels"),
        ("kChannels", spec.input_shape[1] * taps, "in_channels * folded"),
    ]


def operand_steps(spec: FusedSpec, geometry: Geometry, layout: Layout, taps: tuple[Tap | None, ...], sms: int) -> tuple[list[Launch], list[Buffer]]:
    """The launches in front of the multiplication, that of W first, and their buffers."""
    form, (x, weight) = layout.form, operand_names(layout.form)
    dtype = operand_dtype(form, spec.precision)
    steps, pieces = len(taps) // layout.taps * layout.steps * layout.blocks, spec.batch * layout.blocks * layout.pieces * geometry.gathered
    if geometry.runs:
        channels = math.ceil(spec.channels / layout.tile_channels) * layout.tile_channels
        weights = Buffer(weight, (steps, channels, layout.parts * layout.step_block), dtype)
        pixels = Buffer(x, (pieces + layout.run_bytes // PIECE_BYTES, PIECE), dtype)  # a run behind the last position is fetched for results that nobody stores
    else:
        weights = Buffer(weight, (steps, spec.channels, layout.parts * layout.block), dtype)
        pixels = Buffer(x, (spec.batch * geometry.gathered, layout.parts * layout.padded_channels), dtype)
    if not form.scaled:
        filters = Launch(_filters_kernel(spec, geometry, layout, taps), prepares=(weight,) if spec.prepack else ())
        return [filters, Launch(_runs_kernel(spec, geometry, layout) if geometry.runs else _arrange_kernel(spec, geometry, layout))], [weights, pixels]
    slices = SLICES * max(1, math.ceil(SLICES_PER_SM * sms / (SLICES * spec.batch)))
    buffers = [
        weights,
        Buffer(WEIGHT_UNSCALE, (spec.channels,), "float32"),
        Buffer(X_LARGEST, (spec.batch, slices), "float32"),
        Buffer(X_COUNTS, (spec.batch, 2), "float32"),
        pixels,
        Buffer(X_UNSCALE, (spec.batch,), "float32"),
    ]
    filters = Launch(_filters_kernel(spec, geometry, layout, taps), prepares=(weight, WEIGHT_UNSCALE) if spec.prepack else ())
    return [filters, Launch(_measure_kernel(spec, slices)), Launch(_runs_kernel(spec, geometry, layout, slices) if geometry.runs else _split_kernel(spec, geometry, layout, slices))], buffers


def _constants(*rows: tuple[str, int, str]) -> list[Constant]:
    return [Constant(name, str(value), why) for name, value, why in rows]


def _scales(what: str, layout: Layout) -> list[Constant]:
    largest = Constant("kLargestExponent", str(LARGEST_EXPONENT), "from here on, unscaled sums could leave fp32's range")
    return [*scale_constants(what), largest, small_constant(layout.parts)]


def _measure_kernel(spec: FusedSpec, slices: int) -> MeasureKernel:
    values = math.prod(spec.input_shape[1:])
    fours = values % 4 == 0
    constants = _constants(
        ("kSlices", slices, "blocks that share a sample"),
        ("kThreads", SPLIT_THREADS, "threads of a block"),
        ("kPieces", values // 4 if fours else values, f"{'pieces of four' if fours else 'values'} of a sample"),
        ("kBlocks", spec.batch * slices, "batch * slices"),
    )
    return MeasureKernel(
        name="measure", template="conv_product_sm90a/measure.cu.j2", arguments=("x", X_LARGEST, X_COUNTS), constants=tuple(constants),
        summary="finds the largest magnitude of every sample of x", threads=SPLIT_THREADS, blocks=spec.batch * slices, max_registers=64,
        pointers=(Pointer("float", "x"), Pointer("uint32_t", X_LARGEST, True), Pointer("uint2", X_COUNTS, True)), in_fours=fours,
    )  # fmt: skip


def _pixel_constants(spec: FusedSpec, geometry: Geometry, layout: Layout) -> tuple[list[Constant], int]:
    """What the kernel that turns x around knows of it, and its blocks."""
    width = geometry.windows[2]
    pixel_blocks = math.ceil(geometry.gathered / SPLIT_PIXELS)
    blocks = spec.batch * pixel_blocks * layout.blocks
    return _constants(
        *input_constants(spec, geometry),
        ("kStrideWidth", width.stride, "stride along the width"),
        ("kLowerWidth", width.lower, "column of the first result's first tap"),
        *fold_constants(spec, geometry),
        ("kTapStep", geometry.tap_step, "columns from one of these taps to the next"),
        ("kColumns", geometry.axes[2].size, "columns of pixels, one for each result"),
        ("kPixels", geometry.gathered, "pixels of a sample as they are gathered"),
        ("kThreads", SPLIT_THREADS, "threads of a block"),
        ("kBlockPixels", SPLIT_PIXELS, "pixels of a block"),
        ("kPixelBlocks", pixel_blocks, "blocks side by side along a sample's pixels"),
        ("kBlock", layout.block, "channels of a block"),
        ("kBlocks", blocks, "blocks of threads"),
        ("kChannelBlocks", layout.blocks, "blocks of channels of x"),
        ("kPieces", layout.parts * layout.block // 8, "pieces of eight halves of a pixel in a block" if layout.form.scaled else "pieces of eight values of a pixel in a block"),
    ), blocks


def _split_kernel(spec: FusedSpec, geometry: Geometry, layout: Layout, slices: int) -> SplitKernel:
    constants, blocks = _pixel_constants(spec, geometry, layout)
    slice_count = Constant("kSlices", str(slices), "slices of a sample, each with its largest value")
    place = next(number for number, constant in enumerate(constants) if constant.name == "kThreads")
    constants = [*constants[:place], slice_count, *constants[place:], *_scales("sample", layout)]
    return SplitKernel(
        name="split_x", template="conv_product_sm90a/split.cu.j2", arguments=("x", X_LARGEST, X_SPLIT, X_UNSCALE, X_COUNTS), constants=tuple(constants),
        summary=f"x {_made(layout)}, the channels of a pixel side by side, samples scaled by powers of two",
        smem_bytes=4 * (SPLIT_PIXELS * (layout.block + 1) + SPLIT_THREADS // 32), threads=SPLIT_THREADS, blocks=blocks, max_registers=128,
        pointers=(
            Pointer("float", "x"), Pointer("uint32_t", X_LARGEST), Pointer("uint4", X_SPLIT, True), Pointer("float", X_UNSCALE, True), Pointer("uint2", X_COUNTS, True),
        ),
        blocks_deep=layout.blocks, channel_tail=_channel_tail(spec, geometry, layout), geometry=geometry, parts=layout.parts,
    )  # fmt: skip


def _runs_kernel(spec: FusedSpec, geometry: Geometry, layout: Layout, slices: int = 0) -> RunsKernel:
    form, (_, rows, columns) = layout.form, geometry.grid
    position_blocks, planes = math.ceil(geometry.gathered / SPLIT_THREADS), layout.padded_channels // PIECE
    blocks = spec.batch * position_blocks * planes
    depth, height, width = geometry.windows
    constants = _constants(
        *input_constants(spec, geometry),
        ("kHeight", height.size, "rows of x"),
        ("kDepth", depth.size, "depth of x"),
        *((f"kLower{name}", axis.lower, f"first position along the {name.lower()}") for name, axis in zip(AXES, geometry.windows, strict=True)),
        ("kColumns", columns, "columns of positions"),
        ("kRows", rows, "rows of positions"),
        ("kPositions", geometry.gathered, "positions of a sample"),
        *([("kSlices", slices, "slices of a sample, each with its largest value")] if form.scaled else []),
        ("kThreads", SPLIT_THREADS, "threads of a block, one a position"),
        ("kPositionBlocks", position_blocks, "blocks side by side along a sample's positions"),
        ("kBlock", layout.block // PIECE, "pieces of eight channels of a step of K"),
        ("kPlanes", planes, "pieces of eight channels of x"),
        ("kBlocks", blocks, "blocks of threads"),
    )
    x, y = Pointer("float" if form.scaled else "uint16_t", "x"), Pointer("uint4", operand_names(form)[0], True)
    scales = (Pointer("uint32_t", X_LARGEST), Pointer("float", X_UNSCALE, True), Pointer("uint2", X_COUNTS, True))
    pointers = (x, scales[0], y, *scales[1:]) if form.scaled else (x, y)
    made = f"x {_made(layout)}" if form.scaled else "x"
    return RunsKernel(
        name="split_x" if form.scaled else "arrange_x", template="conv_product_sm90a/runs.cu.j2", arguments=tuple(pointer.name for pointer in pointers),
        constants=(*constants, *(_scales("sample", layout) if form.scaled else ())), threads=SPLIT_THREADS, blocks=blocks, max_registers=64,
        summary=f"{made}, eight channels of a position side by side, its padding with it" + (", samples scaled by powers of two" if form.scaled else ""),
        pointers=pointers, geometry=geometry, parts=layout.parts, scaled=form.scaled, channel_tail=spec.input_shape[1] != layout.padded_channels,
    )  # fmt: skip


def _made(layout: Layout) -> str:
    return "split into two halves a value" if layout.parts == 2 else "rounded to halves"


def _channel_tail(spec: FusedSpec, geometry: Geometry, layout: Layout) -> bool:
    return spec.input_shape[1] * geometry.folded_taps != layout.padded_channels


def _arrange_kernel(spec: FusedSpec, geometry: Geometry, layout: Layout) -> SplitKernel:
    constants, blocks = _pixel_constants(spec, geometry, layout)
    in_pairs = not geometry.folded and geometry.gathered % 2 == 0
    return SplitKernel(
        name="arrange_x", template="conv_product_sm90a/arrange.cu.j2", arguments=("x", X_PIXELS), constants=tuple(constants),
        summary="x with the channels of a pixel side by side", smem_bytes=SPLIT_PIXELS * (2 * layout.block + 4),
        threads=SPLIT_THREADS, blocks=blocks, max_registers=64, pointers=(Pointer("uint32_t" if in_pairs else "uint16_t", "x"), Pointer("uint4", X_PIXELS, True)),
        blocks_deep=layout.blocks, channel_tail=_channel_tail(spec, geometry, layout), geometry=geometry, parts=1, in_pairs=in_pairs,
    )  # fmt: skip


def _filters_kernel(spec: FusedSpec, geometry: Geometry, layout: Layout, taps: tuple[Tap | None, ...]) -> FiltersKernel:
    order = tuple(tap.place if tap else -1 for tap in taps)
    constants = _constants(
        ("kInChannels", spec.input_shape[1], "in_channels"),
        *weight_constants(spec, geometry),
        *fold_constants(spec, geometry),
        *([("kTaps", math.prod(geometry.kernel), "taps of a filter")] if layout.form.scaled else []),
        ("kTapSteps", len(taps) // layout.taps * layout.steps, "pairs of taps in the order of their steps" if layout.paired else "taps in the order of their steps" + (", pairs completed" if -1 in order else "")),
        ("kStageTaps", layout.steps, "pairs of taps of a stage" if layout.paired else "taps of a stage"),
        ("kBlock", layout.step_block, "values of K of a step: eight channels of two taps" if layout.paired else "channels of a step"),
        ("kTileChannels", layout.tile_channels, "channels of y of a tile"),
        ("kWarpChannels", layout.warp_channels, "channels of y of a warp, which multiplies 16 rows"),
        ("kChannelBlocks", layout.blocks, "blocks of channels of x"),
        ("kThreads", SPLIT_THREADS, "threads of a block"),
        ("kBlocks", spec.channels, "blocks, one a channel of y"),
    )
    weight = c_identifier(spec.weight)
    common = dict(
        threads=SPLIT_THREADS, blocks=spec.channels, max_registers=64, weight=weight, order=() if order == tuple(range(len(order))) and not layout.paired else order,
        phased=len(geometry.phases) * geometry.wide_phases > 1, folded=geometry.folded, turned=geometry.folded and geometry.row_taps[0][0] > 0,
        stage_taps=layout.steps, parts=layout.parts, runs=layout.runs, paired=layout.paired, spread=layout.spread,
    )  # fmt: skip
    if not layout.form.scaled:
        return FiltersKernel(
            name="arrange_weight", template="conv_product_sm90a/arrange_filters.cu.j2", arguments=(spec.weight, WEIGHT_STEPS), constants=tuple(constants),
            summary="W step by step", pointers=(Pointer("uint16_t", weight), Pointer("uint32_t", WEIGHT_STEPS, True)), **common,
        )  # fmt: skip
    return FiltersKernel(
        name="split_weight", template="conv_product_sm90a/filters.cu.j2", arguments=(spec.weight, WEIGHT_SPLIT, WEIGHT_UNSCALE),
        constants=(*constants, *_scales("filter", layout), near_constant()), summary=f"W {_made(layout)}, step by step, filters scaled by powers of two",
        pointers=(Pointer("float", weight), Pointer("uint32_t", WEIGHT_SPLIT, True), Pointer("float", WEIGHT_UNSCALE, True)), **common,
    )  # fmt: skip
