"""The one-pass convolution for mma.sync as data: everything that templates/conv_sm80/conv.cu.j2 reads."""

from __future__ import annotations

from dataclasses import dataclass, replace

from codegen.ir.apply import Apply, Constant, applies, called, unique_constants
from codegen.ir.fused_form import FusedSpec
from codegen.numerics import FAINT, FAINT_SHARE, Arithmetic, float_literal
from codegen.plan.conv_sm80.finish import KEPT, STATISTICS
from codegen.plan.conv_sm80.geometry import Geometry
from codegen.plan.model import Kernel
from codegen.plan.shared.values import (
    LoadedOperand, ValueFunction, prepare_function,
    unique_operands,
)  # fmt: skip
from codegen.plan.shared.windows import (
    Direction, Windows, constant, shape_constants,
)  # fmt: skip
from codegen.targets import DeviceClass


@dataclass(frozen=True, kw_only=True)
class ConvKernel(Kernel):
    """What templates/conv_sm80/conv.cu.j2 reads.

    `operands` are the parameter tensors beside the weights; `direction` is the C expression of a channel's sign. `scaled`: x and the weights are
    multiplied by powers of two before they become fp16; `split`: in two parts. Without `transforms` one fused multiply-add turns an accumulator
    into the norm's input: at most a bias lies between. `guard_rows`, `guard_columns`: pixels of a part may lie outside x.
    """

    geometry: Geometry
    operands: tuple[LoadedOperand, ...]
    applied: tuple[Apply, ...]
    prepare: ValueFunction | None
    bias: LoadedOperand | None
    direction: str
    direction_operands: tuple[LoadedOperand, ...]
    transforms: bool
    scaled: bool
    split: bool
    guard_rows: bool
    guard_columns: bool
    operand: str  # fp16 or bf16

    @property
    def functions(self) -> tuple[str, ...]:
        """The C functions that it calls."""
        return called(self.applied)

    @property
    def channel_operands(self) -> tuple[LoadedOperand, ...]:
        """What a lane needs of a channel, beside its sign and its scale."""
        return self.prepare.operands if self.transforms and self.prepare else ()

    def pointers(self, c_type: str) -> list[str]:
        """The launcher's tensors."""
        return [f"const {c_type}* {name}" for name in ("x", "weight", *self.operand_names)] + ["float* kept", "float4* statistics"]

    def device_parameters(self, c_type: str) -> list[str]:
        """The same as parameters of the CUDA kernel."""
        return [parameter.replace("* ", "* __restrict__ ") for parameter in self.pointers(c_type)]

    def operand_parameters(self, c_type: str) -> list[str]:
        """Those of `operands` alone."""
        return [f"const {c_type}* __restrict__ {name}" for name in self.operand_names]

    @property
    def operand_names(self) -> list[str]:
        return [o.pointer for o in self.operands]


def conv_kernel(spec: FusedSpec, device: DeviceClass, g: Geometry, windows: Windows, arithmetic: Arithmetic, rising: Direction) -> ConvKernel:
    producer = spec.producer
    prepare = prepare_function(spec, True, spec.bias)
    signs = ValueFunction("", "", (), rising.factors)
    operands = unique_operands(prepare, signs)
    padding = producer.values["padding"]
    items = applies(spec, spec.before_norm)
    blocks = g.blocks(spec.batch, device)
    last_row = (g.sample_parts * g.part_strips * g.window_rows - 1) * g.row_stride + g.reach - padding[0]
    kernel = ConvKernel(
        name="conv", template="conv_sm80/conv.cu.j2", arguments=("x", spec.weight, *(o.key for o in operands), KEPT, STATISTICS), constants=(),
        summary="the convolution on tensor cores without im2col, in one read of x: statistics, and one value of each pooling window",
        smem_bytes=g.smem_bytes, max_registers=g.max_registers, threads=g.threads, blocks=blocks, notes=_notes(spec, g, arithmetic), geometry=g,
        operands=operands, applied=items, prepare=prepare, bias=next((o for o in operands if o.key == spec.bias), None),
        direction=rising.expression, direction_operands=rising.factors, transforms=bool(spec.before_norm), scaled=spec.precision.itemsize == 4,
        split=arithmetic.parts == 2, guard_rows=padding[0] > 0 or last_row > spec.input_shape[2], guard_columns=padding[1] > 0,
        operand="bf16" if spec.precision.name == "bf16" else "fp16",
    )  # fmt: skip
    return replace(kernel, constants=_constants(spec, kernel, windows))


def _constants(spec: FusedSpec, kernel: ConvKernel, windows: Windows) -> tuple[Constant, ...]:
    c, g = constant, kernel.geometry
    out_width, padding = spec.norm.input_shape[3], spec.producer.values["padding"]
    listed = [
        *shape_constants(spec, windows),
        c("kChannelWarps", g.channel_warps, "warps beside each other along the output channels"),
        c("kColumnWarps", g.column_warps, "warps that share a part's units"),
        c("kThreads", g.threads, "32 x kChannelWarps x kColumnWarps"),
        c("kMinBlocks", g.blocks_per_sm, f"blocks of an SM: {g.max_registers} registers a thread"),
        c("kRowTiles", g.row_tiles, "tiles of 16 output channels, the rows of one instruction"),
        c("kChannels", g.channels, "output channels of a block: 16 x kRowTiles x kChannelWarps"),
        *([c("kChannelTiles", g.channel_tiles, "kOutChannels / kChannels, rounded up")] if g.channel_tiles > 1 else []),
        c("kOctets", g.octets, "planes of 8 input channels: kInChannels / 8, rounded up"),
        c("kHalves", "kOctets * kTaps", "halves of an instruction's K: a filter tap of 8 input channels each"),
        c("kSteps", "(kHalves + 1) / 2", "instructions along K"),
        *([c("kTileRows", g.tile_rows, "conv rows of a tile")] if g.tile_rows > 1 else []),
        c("kTileOctets", g.tile // 8, "octets of pixels in a tile"),
        c("kTileColumns", g.tile_columns, "columns of a tile" + ("" if g.tile_rows == 1 else f": {g.tile} pixels in all")),
        c("kUsedColumns", g.used_columns, "columns of a tile that belong to whole windows"),
        *([c("kColumnTiles", g.column_tiles, "tiles beside each other")] if g.column_tiles > 1 else []),
        c("kLastColumns", out_width - (g.column_tiles - 1) * g.used_columns, f"columns of the {'last ' if g.column_tiles > 1 else ''}tile that exist"),
        c("kStrips", g.strips, "strips of a sample: kWindowHeight conv rows each, the last may be short"),
        c("kPartStrips", g.part_strips, "strips of a part, whose rows of x a block holds at once"),
        c("kParts", g.sample_parts, "parts of a sample"),
        c("kUnits", g.units, "units of a part: a tile's columns of a strip each"),
        c("kPartRows", g.part_rows, "rows of x of a part: " + _part_rows(spec)),
        c("kPitch", g.pitch, "pixels of a row in shared memory: kWidth" + (" and the padding" if padding[1] else "")),
        c("kPartPixels", "kPartRows * kPitch", "pixels of a plane"),
        c("kPlanePixels", g.plane, f"kPartPixels + {g.slack} that the last tile reads and drops" if g.slack else "kPartPixels"),
        c("kLoads", g.loads, "pixels that a thread has in flight"),
        *([c("kLowPlanes", "kOctets * kPlanePixels", "first plane of the low parts, behind the high ones")] if g.parts == 2 else []),
        c("kZeroPixel", g.planes * g.plane, "index of the zero pixel behind the planes; pads an odd number of taps"),
        c("kPiecePitch", g.piece_pitch, "values from one channel's to the next's: odd, for the banks"),
        c("kTileWindows", g.used_columns // windows.size[1], "pooling windows of a unit"),
        c("kWindowPieces", windows.size[1] // g.fold, "extremes of a window"),
        c("kSharedAt", g.operand_bytes, "offset of struct Shared: planes and zero pixel, 16 bytes a pixel" if g.weight_bytes < g.operand_bytes else "offset of struct Shared: the weights in transit need more than the planes"),
        c("kSharedBytes", g.smem_bytes, "+ struct Shared"),
        *([
            c("kFirstScale", "64.0f", "first scale of x before its conversion to fp16, if it suits the part", "float"),
            c("kLargestFirst", "1023.0f", "largest |x|: kFirstScale times it is below fp16's 65504", "float"),
            c("kSmallestFirst", "0.00390625f", "least maximum of a part, for fp16's range", "float"),
            c("kTargetExponent", 14, "exponent to which other scales bring the largest value: [2^14, 2^15)"),
            c("kLargestExponent", 48, "exponent range of a part's maximum; parts beyond are multiplied in fp32"),
            c("kFaint", float_literal(2.0 ** FAINT[g.parts]), f"2^{FAINT[g.parts]}: scaled values below lose too many bits", "float"),
            c("kFaintLimit", f"kInChannels * kPartPixels / {FAINT_SHARE}", "faint values that a part may have without its own scale"),
            c("kFaintWeights", f"kInChannels * kTaps / {FAINT_SHARE}", "faint weights that a channel may have without fp32"),
        ] if kernel.scaled else []),
        *unique_constants(kernel.applied),
    ]  # fmt: skip
    return tuple(listed)


def _part_rows(spec: FusedSpec) -> str:
    """How kPartRows comes about, in the source's constants."""
    stride, dilation = spec.producer.values["stride"][0], spec.producer.values["dilation"][0]
    if stride == dilation == 1:
        return "kPartStrips x kWindowHeight + kKernelHeight - 1"
    rows = f"(kPartStrips x kWindowHeight - 1){' x kStrideHeight' if stride > 1 else ''}"
    return f"{rows} + (kKernelHeight - 1){' x kDilationHeight' if dilation > 1 else ''} + 1"


def _notes(spec: FusedSpec, g: Geometry, arithmetic: Arithmetic) -> tuple[str, ...]:
    parts = f"a block takes parts of a sample in turn: {g.part_strips} of {g.strips} rows of y, {g.part_rows} rows of x"
    if g.channel_tiles > 1:
        parts += f", {g.channels} of {spec.channels} channels"
    tile = f"{g.tile_rows} x {g.tile_columns}" if g.tile_rows > 1 else str(g.tile_columns)
    return (
        f"{arithmetic.summary.removesuffix(', promoted')}; a warp keeps the weights of {16 * g.row_tiles} channels in registers and multiplies {tile} pixels at a time",
        parts,
    )
