"""Planning for mma.sync: a chain that starts with `conv2d`, in one read of x and two kernels.

    conv2d -> element-wise -> group_norm -> monotone or affine element-wise -> max_pool2d -> element-wise

The first kernel multiplies without im2col and keeps of each pooling window the one value before the norm that decides (the sign of what multiplies
the normalised value is known before the statistics are), and the statistics of every part of a sample. The second normalises what was kept.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from codegen.ir.apply import Apply, Constant, applies, unique_constants
from codegen.numerics import FAINT, FAINT_SHARE, FP32, Arithmetic, float_literal
from codegen.plan.conv_sm80.geometry import Geometry, candidates, choose
from codegen.plan.floor import floor
from codegen.plan.model import Buffer, Kernel, Launch, Plan, PlanError
from codegen.plan.shared.values import (
    NormKernel, Operand, ValueFunction, channel_mode, finish_function, norm_constants, prepare_function,
    share_constants, shares, unique_operands,
)  # fmt: skip
from codegen.plan.shared.windows import (
    ONE_READ, Direction, Windows, arithmetic_of, ceil_div, constant, direction_of, reasons, shape_constants,
    windows_of,
)  # fmt: skip
from codegen.spec import Spec
from codegen.targets import DeviceClass, Target

KEPT, STATISTICS = "kept", "part_statistics"  # buffers: a value of each window before the norm, and moments (float4) by sample, channel and part
FINISH_THREADS, FINISH_LANE_THREADS = 256, 128
FINISH_ACCESSES, FINISH_SETS = 4, 8  # of a lane, at most, where lanes share a group
FINISH_BLOCKS = 4  # of an SM: where a block for each group makes fewer than half as many, several share one


@dataclass(frozen=True, kw_only=True)
class ConvKernel(Kernel):
    """What templates/conv_sm80/conv.cu.j2 reads.

    `operands` are the parameter tensors beside the weights; `direction` is the C expression of a channel's sign. `scaled`: x and the weights are
    multiplied by powers of two before they become fp16; `split`: in two parts. Without `transforms` one fused multiply-add turns an accumulator
    into the norm's input: at most a bias lies between. `guard_rows`, `guard_columns`: pixels of a part may lie outside x.
    """

    geometry: Geometry
    operands: tuple[Operand, ...]
    applied: tuple[Apply, ...]
    prepare: ValueFunction | None
    bias: Operand | None
    direction: str
    direction_operands: tuple[Operand, ...]
    transforms: bool
    scaled: bool
    split: bool
    guard_rows: bool
    guard_columns: bool
    operand: str  # fp16 or bf16

    @property
    def channel_operands(self) -> tuple[Operand, ...]:
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


@dataclass(frozen=True, kw_only=True)
class FinishKernel(NormKernel):
    """What templates/conv_sm80/finish.cu.j2 reads: the norm of the values that were kept. `slices` blocks share a group, or `lanes` threads of a block
    each take one: `ragged` where the last access of some lies beyond it, `partial_block` where the last block has lanes without one."""

    slices: int = 1
    lanes: int = 0
    ragged: bool = False
    partial_block: bool = False

    @property
    def reads_single_values(self) -> bool:
        """Is a parameter taken one value at a time?"""
        return bool(self.operands) and (self.width == 1 or any(self.channel_mode != "vector" or not operand.per_channel for operand in self.operands))

    def device_parameters(self, c_type: str) -> list[str]:
        """Parameters of the CUDA kernel: the input is fp32 whatever the storage type."""
        listed = (f"const {c_type}* __restrict__ {operand.pointer}" for operand in self.operands)
        return ["const float* __restrict__ kept", "const float4* __restrict__ statistics", *listed, f"{self.result.c_type}* __restrict__ output"]


def plan_conv_sm_80(spec: Spec, target: Target, device: DeviceClass, geometry: Geometry | None = None) -> Plan:
    """The plan of a chain that starts with `conv2d`, in one read of x; a `geometry` forces one (for measurements).

    Raises PlanError, with the reason, where these kernels cannot serve the chain.
    """
    windows, arithmetic = windows_of(spec, strided=True), arithmetic_of(spec)
    rising = Direction((), False) if windows.size == (1, 1) else direction_of(spec)
    g = geometry or _geometry(spec, target, device, windows, arithmetic)
    conv = _conv_kernel(spec, device, g, windows, arithmetic, rising)
    finish = _finish_kernel(spec, device, g, windows)
    kept = Buffer(KEPT, (spec.batch, spec.channels, *windows.output), "float32")
    statistics = Buffer(STATISTICS, (spec.batch, spec.channels, g.sample_parts, 4), "float32")
    bound = floor(spec, device, len(arithmetic.products), device.fp16)
    return Plan(spec, target, device, (Launch(conv), Launch(finish)), (kept, statistics), bound, _why(spec, g, arithmetic))


def _geometry(spec: Spec, target: Target, device: DeviceClass, windows: Windows, arithmetic: Arithmetic) -> Geometry:
    bias = any(parameter.suffix == "bias" for parameter in spec.producer.parameters)
    listed = list(candidates(spec, windows, arithmetic.parts, 3 + bias + sum(len(step.parameters) for step in spec.before_norm)))
    if not listed:
        raise PlanError(
            f"pooling windows of {windows.size[1]} columns are wider than a warp's tile of 32" if windows.size[1] > 32
            else "the weights of this convolution, with a tile's accumulators, exceed the registers of a warp"
        )  # fmt: skip
    chosen = choose(listed, spec.batch, target, device)
    if chosen is None:
        least = min(g.smem_bytes for g in listed)
        raise PlanError(f"the rows of x of one pooled row take {least} bytes of shared memory a block; there are {target.smem_bytes}")
    return chosen


def _conv_kernel(spec: Spec, device: DeviceClass, g: Geometry, windows: Windows, arithmetic: Arithmetic, rising: Direction) -> ConvKernel:
    producer = spec.producer
    keys = {parameter.suffix: producer.key(parameter) for parameter in producer.parameters}
    prepare = prepare_function(spec, True, keys.get("bias"))
    signs = ValueFunction("", "", (), rising.factors)
    operands = unique_operands(prepare, signs)
    padding = producer.values["padding"]
    items = applies(spec, spec.before_norm)
    blocks = min(spec.batch * g.sample_parts * g.channel_tiles, device.sms * g.blocks_per_sm)
    last_row = (g.sample_parts * g.part_strips * g.window_rows - 1) * g.row_stride + g.reach - padding[0]
    kernel = ConvKernel(
        name="conv", template="conv_sm80/conv.cu.j2", arguments=("x", keys["weight"], *(o.key for o in operands), KEPT, STATISTICS), constants=(),
        summary="the convolution on tensor cores without im2col, in one read of x: statistics, and one value of each pooling window",
        smem_bytes=g.smem_bytes, max_registers=g.max_registers, threads=g.threads, blocks=blocks, notes=_notes(spec, g, arithmetic), geometry=g,
        operands=operands, applied=items, prepare=prepare, bias=next((o for o in operands if o.key == keys.get("bias")), None),
        direction=rising.expression, direction_operands=rising.factors, transforms=bool(spec.before_norm), scaled=spec.precision.itemsize == 4,
        split=arithmetic.parts == 2, guard_rows=padding[0] > 0 or last_row > spec.input_shape[2], guard_columns=padding[1] > 0,
        operand="bf16" if spec.precision.name == "bf16" else "fp16",
    )  # fmt: skip
    return replace(kernel, constants=_constants(spec, kernel, windows))


def _constants(spec: Spec, kernel: ConvKernel, windows: Windows) -> tuple[Constant, ...]:
    c, g = constant, kernel.geometry
    out_width, padding = spec.norm.input_shape[3], spec.producer.values["padding"]
    listed = [
        *shape_constants(spec, windows),
        c("kChannelWarps", g.channel_warps, "warps beside each other along the output channels"),
        c("kColumnWarps", g.column_warps, "warps that share a part's units"),
        c("kThreads", g.threads, "32 x kChannelWarps x kColumnWarps"),
        c("kMinBlocks", g.blocks_per_sm, f"blocks of an SM: {g.max_registers} registers a thread"),
        c("kRowTiles", g.row_tiles, "16 output channels each: what one instruction multiplies"),
        c("kChannels", g.channels, "output channels of a block: 16 x kRowTiles x kChannelWarps"),
        *([c("kChannelTiles", g.channel_tiles, "kOutChannels / kChannels, rounded up")] if g.channel_tiles > 1 else []),
        c("kOctets", g.octets, "planes of 8 input channels: kInChannels / 8, rounded up"),
        c("kHalves", "kOctets * kTaps", "halves of an instruction's K: a filter tap of 8 input channels each"),
        c("kSteps", "(kHalves + 1) / 2", "instructions along K"),
        *([c("kTileRows", g.tile_rows, "conv rows of a tile")] if g.tile_rows > 1 else []),
        c("kTileOctets", g.tile // 8, "8 pixels each"),
        c("kTileColumns", g.tile_columns, "columns of a tile" + ("" if g.tile_rows == 1 else f": {g.tile} pixels in all")),
        c("kUsedColumns", g.used_columns, "of them, those that belong to it: whole windows"),
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
        c("kLoads", g.loads, "pixels that a thread has on their way"),
        *([c("kLowPlanes", "kOctets * kPlanePixels", "the low parts lie behind the high ones")] if g.parts == 2 else []),
        c("kZeroPixel", g.planes * g.plane, "behind the planes: what an odd number of taps leaves over of K"),
        c("kFold", g.fold, "columns of a window that meet in a lane" if g.fold > 1 else "a column of a window each"),
        c("kPieces", g.pieces, "extremes of a channel in a unit"),
        c("kPiecePitch", g.piece_pitch, "values from one channel's to the next's: odd, for the banks"),
        c("kTileWindows", g.used_columns // windows.size[1], "pooling windows of a unit"),
        c("kWindowPieces", windows.size[1] // g.fold, "extremes of a window"),
        c("kSharedAt", g.operand_bytes, "the planes and the zero pixel, 16 bytes a pixel" if g.weight_bytes < g.operand_bytes else "the weights on their way, more than the planes"),
        c("kSharedBytes", g.smem_bytes, "+ struct Shared"),
        *([
            c("kFirstScale", "64.0f", "x is scaled by it before it becomes fp16, where that suits the part", "float"),
            c("kLargestFirst", "1023.0f", "kFirstScale x it is below fp16's 65504", "float"),
            c("kSmallestFirst", "0.00390625f", "a part whose largest value is below it would lose digits to fp16's range", "float"),
            c("kTargetExponent", 14, "other scales bring the largest value to 2^14 or up to twice that"),
            c("kLargestExponent", 48, "beyond 2^48, or below 2^-48, scales would leave fp32's range: such parts are multiplied in fp32"),
            c("kFaint", float_literal(2.0 ** FAINT[g.parts]), f"2^{FAINT[g.parts]}: scaled values below lose too many bits", "float"),
            c("kFaintLimit", f"kInChannels * kPartPixels / {FAINT_SHARE}", "with more such values of x a part gets a scale of its own, or is multiplied in fp32"),
            c("kFaintWeights", f"kInChannels * kTaps / {FAINT_SHARE}", "with more such values in a channel of the weight x is multiplied in fp32"),
        ] if kernel.scaled else []),
        *unique_constants(kernel.applied),
    ]  # fmt: skip
    return tuple(listed)


def _part_rows(spec: Spec) -> str:
    """How kPartRows comes about, in the source's constants."""
    stride, dilation = spec.producer.values["stride"][0], spec.producer.values["dilation"][0]
    if stride == dilation == 1:
        return "kPartStrips x kWindowHeight + kKernelHeight - 1"
    rows = f"(kPartStrips x kWindowHeight - 1){' x kStrideHeight' if stride > 1 else ''}"
    return f"{rows} + (kKernelHeight - 1){' x kDilationHeight' if dilation > 1 else ''} + 1"


def _finish_kernel(spec: Spec, device: DeviceClass, g: Geometry, windows: Windows) -> FinishKernel:
    finish = finish_function(spec, spec.after_norm, "finish_value", "The norm and what follows it, for a value that was kept.")
    plane = math.prod(windows.output)
    size = spec.group_channels * plane
    width = math.gcd(4, size)
    groups, sets = spec.batch * spec.num_groups, spec.group_channels * g.sample_parts
    lanes = _lanes(size // width, sets)
    slices, share, threads = 1, size, FINISH_LANE_THREADS if lanes else FINISH_THREADS
    if not lanes:
        # A block merges all moments of its group, so one more of them is worth a round of values at least for each that a thread merges.
        round_values = threads * width
        most = size // (round_values * max(4, ceil_div(sets, threads)))
        slices, share = shares(size, round_values, min(most, FINISH_BLOCKS * device.sms // groups))
    blocks = ceil_div(groups, threads // lanes) if lanes else groups * slices
    partial = lanes > 0 and blocks * (threads // lanes) != groups
    rounds = ceil_div(size // width, lanes) if lanes else 0
    items = applies(spec, spec.after_norm)
    if lanes:
        layout = (
            Constant("kLanes", str(lanes), "threads of a group"),
            Constant("kThreads", str(threads), "threads of a block"),
            Constant("kGroupsPerBlock", str(threads // lanes), "kThreads / kLanes"),
            Constant("kRounds", str(rounds), "accesses of a thread: kPooledSize / kVector / kLanes" + (", rounded up" if rounds * lanes * width != size else "")),
            *((Constant("kGroups", str(groups), f"{spec.batch} samples x kNumGroups"),) if partial else ()),
            Constant("kBlocks", str(blocks), f"{spec.batch} samples x kNumGroups / kGroupsPerBlock" + (", rounded up" if partial else "")),
        )  # fmt: skip
    else:
        layout = (
            Constant("kThreads", str(threads), "threads of a block" + ("" if slices > 1 else ", which takes a group")),
            Constant("kWarps", str(threads // 32), "kThreads / 32"),
            *(share_constants(slices, share) if slices > 1 else ()),
            Constant("kBlocks", str(blocks), f"{spec.batch} samples x kNumGroups" + (" x kSlices" if slices > 1 else "")),
        )  # fmt: skip
    ragged = lanes > 0 and rounds * lanes * width != size
    constants = (
        Constant("kNumGroups", str(spec.num_groups), "groups of a sample"),
        Constant("kGroupChannels", str(spec.group_channels), f"{spec.channels} channels / kNumGroups"),
        Constant("kGroupSize", str(spec.group_size), "values of a group before pooling: kGroupChannels x {} x {}".format(*spec.norm.input_shape[2:])),
        Constant("kSets", str(sets), f"moments of a group: kGroupChannels x {g.sample_parts} parts of a sample"),
        Constant("kPooledPlane", str(plane), "values of a channel of y"),
        Constant("kPooledSize", "kGroupChannels * kPooledPlane", "values of a group in y"),
        Constant("kVector", str(width), "values of one access"),
        *layout,
        *norm_constants(spec, items),
    )  # fmt: skip
    return FinishKernel(
        name="conv_finish", template="conv_sm80/finish.cu.j2", entry="conv_finish", arguments=(KEPT, STATISTICS, *(o.key for o in finish.operands), "y"),
        constants=constants, summary=f"merges a group's statistics, then normalises the {size} values that were kept of it, and what follows",
        max_registers=64, threads=threads, blocks=blocks, slices=slices, lanes=lanes, partial_block=partial, ragged=ragged, input="kept", output="output",
        operands=unique_operands(finish), applied=items, prepare=None, finish=finish, width=width, io_widths=(width,),
        channel_mode=channel_mode(plane, width), groups=groups, min_blocks=1, storage=spec.precision, source=FP32, result=spec.result,
    )  # fmt: skip


def _lanes(accesses: int, sets: int) -> int:
    """Threads that share a group of so many accesses and moments: a few of each for a thread; 0 where a block takes it."""
    wanted = max(ceil_div(accesses, FINISH_ACCESSES), ceil_div(sets, FINISH_SETS))
    return 1 << (wanted - 1).bit_length() if wanted <= 32 else 0


def _notes(spec: Spec, g: Geometry, arithmetic: Arithmetic) -> tuple[str, ...]:
    parts = f"a block takes parts of a sample in turn: {g.part_strips} of {g.strips} rows of y, {g.part_rows} rows of x"
    if g.channel_tiles > 1:
        parts += f", {g.channels} of {spec.channels} channels"
    tile = f"{g.tile_rows} x {g.tile_columns}" if g.tile_rows > 1 else str(g.tile_columns)
    return (
        f"{arithmetic.summary.removesuffix(', promoted')}; a warp keeps the weights of {16 * g.row_tiles} channels in registers and multiplies {tile} pixels at a time",
        parts,
    )


def _why(spec: Spec, g: Geometry, arithmetic: Arithmetic) -> tuple[str, ...]:
    return (ONE_READ, *reasons(spec, arithmetic, "a part out of its scales' range"))
