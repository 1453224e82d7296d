"""The convolution as a product, as data: everything that templates/conv_gemm/*.cu.j2 read."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from codegen.ir.apply import Constant
from codegen.ir.fused_form import FusedSpec
from codegen.numerics import FP32, Arithmetic
from codegen.ops import Shape
from codegen.plan.conv_gemm.shape import PIECE_BYTES, PLANE_PAD, Planes, Tiling, planes_of, shape_of
from codegen.plan.gemm.companions import WEIGHT_ROWS
from codegen.plan.gemm.kernel import RASTER_ROWS, TiledKernel, panel_constants, stage_counts, warp_constants
from codegen.plan.gemm.tiles import slice_stages
from codegen.plan.model import Kernel
from codegen.plan.shared.pointers import Pointer
from codegen.plan.shared.values import named_operand

PIXELS = "pixels"
COPY_THREADS = 256


@dataclass(frozen=True)
class ConvGemmKernel(TiledKernel):
    """The product. `strides`, `paddings` and `dilations` are (height, width); `padded` says that windows reach beyond x."""

    epilogue: Planes | None = None
    strides: tuple[int, int] = (1, 1)
    paddings: tuple[int, int] = (0, 0)
    dilations: tuple[int, int] = (1, 1)
    grouped: bool = False

    scaled = False

    @property
    def padded(self) -> bool:
        return self.paddings != (0, 0)

    @property
    def ragged(self) -> bool:
        """Whether a copy may find nothing to read."""
        return self.ragged_n or self.ragged_k or self.padded


@dataclass(frozen=True)
class ChannelsLastKernel(Kernel):
    """The copies of x and W; `weight` is W's C name, `ragged` says that a group's channels are no whole pieces: zeros follow them."""

    weight: str = ""
    grouped: bool = False
    ragged: bool = False


def conv_gemm_kernel(spec: FusedSpec, arithmetic: Arithmetic, choice: Tiling, notes: tuple[str, ...] = ()) -> ConvGemmKernel:
    """The product with the chosen tile."""
    tile, precision, shape, values = choice.tile, spec.precision, shape_of(spec), spec.producer.values
    itemsize = precision.itemsize
    sliced = choice.slices > 1
    slice_k = slice_stages(arithmetic, tile, shape.k, itemsize, choice.slices) * tile.stage_k(itemsize) if sliced else shape.k
    stages_per_chunk, stage_count = stage_counts(arithmetic, tile, slice_k, itemsize)
    tiles_m, tiles_n = math.ceil(shape.m / tile.m), math.ceil(shape.n / tile.n)
    raster = min(RASTER_ROWS, tiles_m)
    planes = planes_of(spec, tile, choice.slices)
    result = FP32 if sliced else precision
    pointers = (Pointer(precision.c_type, PIXELS), Pointer(precision.c_type, WEIGHT_ROWS), Pointer(result.c_type, "y", True))
    kernel = ConvGemmKernel(
        name="conv_gemm", template="conv_gemm/conv_gemm.cu.j2", arguments=(PIXELS, WEIGHT_ROWS, "y"), constants=(),
        summary=f"windows of pixels times filters by {arithmetic.summary}" + (f", {choice.slices} parts of K apart" if sliced else ""),
        smem_bytes=max(tile.smem_bytes, tile.n * planes.pitch * 4 * tile.warps_k), max_registers=tile.max_registers, threads=tile.threads,
        blocks=tiles_m * tiles_n * choice.slices * shape.groups, notes=notes, pointers=pointers, tile=tile, arithmetic=arithmetic, storage=precision.c_type,
        result=result, epilogue=planes, slices=choice.slices, strides=values["stride"], paddings=values["padding"], dilations=values["dilation"],
        grouped=shape.groups > 1, ragged_m=shape.m % tile.m != 0, ragged_n=shape.n % tile.n != 0,
        ragged_k=choice.slices * stage_count * tile.stage_k(itemsize) != shape.k, raster_remainder=tiles_m % raster != 0,
    )  # fmt: skip
    return replace(kernel, constants=(*_shape_constants(spec, shape), *_tile_constants(spec, kernel, shape, (tiles_m, tiles_n, raster), stage_count, stages_per_chunk)))


def _shape_constants(spec: FusedSpec, shape: Shape) -> tuple[Constant, ...]:
    c, values = Constant, spec.producer.values
    piece_values = PIECE_BYTES // spec.precision.itemsize
    height, width = spec.producer.output_shape[2:]
    channels = spec.input_shape[1] // shape.groups
    padded = f", zeros behind the first {channels}" if shape.pieces * piece_values != channels else ""
    pairs = [(f"k{key.capitalize()}{axis}", size, key) for key, plain in (("stride", 1), ("padding", 0), ("dilation", 1)) for axis, size in zip(("Height", "Width"), values[key], strict=True) if size != plain]
    return (
        c("kHeight", str(spec.input_shape[2]), "rows of x"),
        c("kWidth", str(spec.input_shape[3]), "columns of x"),
        c("kKernelWidth", str(values["kernel_size"][1]), f"columns of the filter, {values['kernel_size'][0]} x {values['kernel_size'][1]}"),
        *(c(name, str(size), f"conv2d's {key}") for name, size, key in pairs),
        c("kOutChannels", str(spec.channels), "out_channels"),
        c("kGroupOutChannels", str(shape.n), "out_channels / groups" if shape.groups > 1 else "out_channels"),
        c("kOutWidth", str(width), "columns of the convolution's result"),
        c("kOutPlane", str(height * width), f"results of a channel and sample: {height} x {width}"),
        c("kResults", f"{spec.batch} * kOutPlane", f"windows of all samples: {shape.m}"),
        c("kPieceValues", str(piece_values), "channels in a piece of 16 bytes"),
        c("kGroupPieces", str(shape.pieces), f"pieces of a pixel that a filter meets: {channels} channels{padded}"),
        c("kPixelPieces", f"{shape.groups} * kGroupPieces" if shape.groups > 1 else "kGroupPieces", "pieces of a pixel"),
        c("kInFeatures", str(shape.k), "K: taps * kGroupPieces * kPieceValues, values of a window and of a filter"),
    )  # fmt: skip


def _tile_constants(
    spec: FusedSpec, kernel: ConvGemmKernel, shape: Shape, tiles: tuple[int, int, int], stage_count: int, stages_per_chunk: int
) -> tuple[Constant, ...]:  # fmt: skip
    c, tile, itemsize, planes = Constant, kernel.tile, spec.precision.itemsize, kernel.epilogue
    deep = " * warps_k" if kernel.layered else ""
    per_group = " * kTilesN" + (f" * {shape.groups}" if shape.groups > 1 else "")
    constants = [
        c("kTileM", str(tile.m), "windows of a block's tile"),
        c("kTileN", str(tile.n), "filters of a block's tile"),
        c("kTilesM", "(kResults + kTileM - 1) / kTileM", f"results / tile_m, rounded up: {tiles[0]}"),
        c("kTilesN", "(kGroupOutChannels + kTileN - 1) / kTileN", f"channels / tile_n, rounded up: {tiles[1]}"),
        c("kRaster", str(tiles[2]), "tiles of windows that meet one tile of W before the next"),
        *warp_constants(tile),
        c("kBlocksM", str(tile.warp_m // 16), "warp_m / 16: multiplies along the rows"),
        c("kBlocksN", str(tile.warp_n // 8), "warp_n / 8: multiplies along the columns"),
        *panel_constants(tile, itemsize),
        c("kStageCount", str(stage_count), f"K / {'slices / ' if kernel.sliced else ''}stage_k, rounded up" + (" to whole partial sums" if kernel.arithmetic.parts == 2 else "")),
        c("kCopyRows", str(kernel.copy_rows), "rows that the block's threads copy at once, 16 bytes each: threads * 16 / row_bytes"),
        c("kWindows", "(kTileM + kCopyRows - 1) / kCopyRows", f"windows of which a thread copies its piece: {math.ceil(tile.m / kernel.copy_rows)}"),
        c("kStageBytes", str(tile.stage_bytes), f"(tile_m + tile_n) * row_bytes{deep}"),
        c("kSharedBytes", str(kernel.smem_bytes), f"bytes of {tile.stages} stages, reused by the staged tile" if kernel.smem_bytes == tile.smem_bytes else "bytes that are staged at once, more than the stages need"),
        *([
            c("kSlices", str(kernel.slices), "blocks that share a tile, each with its own part of K"),
            c("kSliceK", "kStageCount * kStageK", f"values of K in a slice: {stage_count * tile.stage_k(itemsize)}"),
        ] if kernel.sliced else []),
        c("kBlocks", f"kTilesM{per_group}" + (" * kSlices" if kernel.sliced else ""), str(kernel.blocks)),
        *([c("kStagesPerSum", str(stages_per_chunk), f"K = {stages_per_chunk * tile.panel_k(itemsize)} in one partial sum of a warp")] if kernel.arithmetic.parts == 2 else []),
        c("kRoundRows", str(planes.round_rows), "results of each channel staged at once, as many as fit into the stages' memory"),
        *([c("kRounds", "kTileM / kRoundRows", str(tile.m // planes.round_rows))] if planes.round_rows != tile.m else []),
        c("kPitch", str(planes.pitch), f"round_rows + {PLANE_PAD}: floats of a staged channel, without bank conflicts"),
        c("kVector", str(planes.vector), "results of one store: the most that a channel's plane allows"),
    ]  # fmt: skip
    return tuple(constants)


def channels_last_kernel(spec: FusedSpec) -> ChannelsLastKernel:
    """The kernel that copies x and W to where a pixel's, or a tap's, channels are neighbours."""
    shape, precision = shape_of(spec), spec.precision
    values = PIECE_BYTES // precision.itemsize
    channels, plane = spec.input_shape[1] // shape.groups, math.prod(spec.input_shape[2:])
    taps = math.prod(spec.producer.values["kernel_size"])
    pixel_pieces = shape.groups * shape.pieces
    lanes = next(lanes for lanes in (precision.itemsize, 2, 1) if lanes <= pixel_pieces)  # as many pieces as leave a sector of 32 bytes of neighbouring pixels in each channel
    piece_warps = math.ceil(pixel_pieces / lanes)
    warps = math.ceil(spec.batch * plane / (32 // lanes)) * piece_warps
    pixel_blocks = math.ceil(warps / (COPY_THREADS // 32))
    blocks = pixel_blocks + math.ceil(spec.channels * shape.pieces * taps / COPY_THREADS)
    weight = spec.weight
    c = Constant
    constants = (
        c("kInChannels", str(spec.input_shape[1]), "in_channels"),
        c("kGroupChannels", str(channels), "in_channels / groups: channels that a filter meets" if shape.groups > 1 else "in_channels: channels that a filter meets"),
        c("kPlane", str(plane), f"pixels of a sample: {spec.input_shape[2]} x {spec.input_shape[3]}"),
        c("kPixels", f"{spec.batch} * kPlane", "pixels of all samples"),
        c("kTaps", str(taps), "taps of a filter"),
        c("kOutChannels", str(spec.channels), "filters"),
        c("kPieceValues", str(values), "channels in a piece of 16 bytes"),
        c("kGroupPieces", str(shape.pieces), "pieces of a group's channels, rounded up"),
        c("kPixelPieces", f"{shape.groups} * kGroupPieces" if shape.groups > 1 else "kGroupPieces", "pieces of a pixel"),
        c("kPieceLanes", str(lanes), "pieces that a warp takes of each of its pixels"),
        c("kPieceWarps", "(kPixelPieces + kPieceLanes - 1) / kPieceLanes", "warps that share pixels"),
        c("kThreads", str(COPY_THREADS), "threads of a block"),
        c("kPixelBlocks", str(pixel_blocks), "blocks that copy x"),
        c("kBlocks", str(blocks), "blocks in all; those after kPixelBlocks copy W"),
    )
    return ChannelsLastKernel(
        name="channels_last", template="conv_gemm/channels_last.cu.j2", arguments=("x", weight, PIXELS, WEIGHT_ROWS), constants=constants,
        summary="copies x and W to where the channels of a pixel, or of a filter's tap, are neighbours", threads=COPY_THREADS, blocks=blocks, max_registers=64,
        weight=named_operand(weight).pointer, grouped=shape.groups > 1, ragged=channels % values != 0,
    )  # fmt: skip
