"""The one-pass convolution for Hopper as data: everything that templates/conv_sm90a/*.j2 read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from codegen.ir.apply import Apply, Constant, applies, called
from codegen.ir.fused_form import FusedSpec
from codegen.numerics import Arithmetic, Precision, float_literal
from codegen.plan.conv_sm90a.geometry import REGISTERS, Geometry
from codegen.plan.conv_sm90a.steps import Step, steps, uses_none
from codegen.plan.model import Kernel
from codegen.plan.shared.values import (
    LoadedOperand, ValueFunction, norm_constants, norm_operands, loaded, prepare_function, unique_operands,
)  # fmt: skip
from codegen.plan.shared.windows import (
    Windows, ceil_div, constant, shape_constants,
)  # fmt: skip
from codegen.spec import Step as ChainStep

WEIGHT_EXPONENT = {1: 4, 2: 14}  # of parts: below 2^-3, a scaled weight's second part loses bits
ALLOWED_LOSS = {1: 1e-4, 2: 2e-7}  # of parts: with the rest of the error, within what tf32 and fp32 allow


@dataclass(frozen=True, kw_only=True)
class ConvKernel(Kernel):
    """What templates/conv_sm90a reads.

    `operands` are the parameter tensors beside the weights; `direction` is the C expression of a channel's sign. `two_walks`: a
    tile's statistics are taken in two walks; otherwise a shift rides in an unused part of K. `transforms`: accumulators are turned into the norm's
    input one by one; otherwise what is left of them is, a strip's extremes and a sample's moments.
    `scaled`: x is multiplied by a power of two and split, so its range is checked. `fold_lines` update `factor` and `offset`, `finish` does the rest.
    `result` is the type of y.
    """

    geometry: Geometry
    steps: tuple[Step, ...]
    needs_none: bool
    operands: tuple[LoadedOperand, ...]
    applied: tuple[Apply, ...]
    prepare: ValueFunction | None
    prepare_operands: tuple[LoadedOperand, ...]
    finish: ValueFunction
    fold_lines: tuple[str, ...]
    fold_operands: tuple[LoadedOperand, ...]
    direction: str
    direction_operands: tuple[LoadedOperand, ...]
    bias: LoadedOperand | None
    two_walks: bool
    transforms: bool
    scaled: bool
    split: bool
    padded: bool
    operand_type: str
    result: Precision
    debug: bool = False

    @property
    def exact_route(self) -> bool:
        """Whether samples that tensor cores or fp32's squares cannot hold are computed again, value by value. fp16's own range needs no such route."""
        return self.scaled or self.operand_type == "__nv_bfloat16"

    @property
    def functions(self) -> tuple[str, ...]:
        """The C functions that it calls."""
        return called(self.applied)

    @property
    def channel_operands(self) -> tuple[LoadedOperand, ...]:
        """What a multiplying warpgroup needs of a channel: all that turns its values into the norm's input, or the bias alone."""
        return self.prepare_operands if self.transforms else (self.bias,) if self.bias else ()

    @property
    def channels_at_once(self) -> int:
        """Channels whose results a thread has under way: few where weights and accumulators leave few registers."""
        if self.two_walks and self.geometry.multiply_registers == max(registers for _, registers, *_ in REGISTERS):
            return 2
        return 4 if len(self.finish.lines) > 2 else 8 if self.transforms else 16

    def parameters(self, c_type: str) -> str:
        """The launcher's tensors, four to a line."""
        names = [f"const {c_type}* {name}" for name in ("x", "weight", *(o.pointer for o in self.operands))] + [f"{self.result.c_type}* y"]
        return ",\n    ".join(", ".join(names[i : i + 4]) for i in range(0, len(names), 4))


def two_walks_of(spec: FusedSpec, arithmetic: Arithmetic) -> bool:
    """Whether each tile gets a mean of its own: where operators precede the norm, and where fp32 is promised, since values less a shift that
    the first rows chose have lost the bits that a mean nearer to them would have kept."""
    return bool(spec.before_norm) or arithmetic.parts == 2


def _value(item: Apply) -> str | None:
    """The C name of the operator's parameter, for one channel."""
    return loaded(item.operand).value if item.operand else None


def _fold(spec: FusedSpec, after: Sequence[ChainStep]) -> tuple[tuple[str, ...], tuple[LoadedOperand, ...], tuple[Apply, ...]]:
    """The norm's affine part and the affine operators right behind it as updates of factor and offset, and the operators left over."""
    lines, operands = [], list(norm_operands(spec))
    if operands:
        lines += ["factor *= c_gamma;", "offset = c_beta;"]
    items = applies(spec, after)
    done = 0
    for step, item in zip(after, items, strict=True):
        if not item.affine:
            break
        done += 1
        value = _value(item) or item.constants[0].name
        if item.operand:
            operands.append(loaded(item.operand))
        if step.operator.name == "add":
            lines.append(f"offset += {value};  // {item.comment}")
        else:
            lines += [f"factor *= {value};  // {item.comment}", f"offset *= {value};"]
    return tuple(lines), tuple(operands), items[done:]


def conv_kernel(spec: FusedSpec, g: Geometry, windows: Windows, arithmetic: Arithmetic, rising, after: Sequence[ChainStep], debug: bool) -> ConvKernel:
    producer = spec.producer
    two_walks = two_walks_of(spec, arithmetic)
    prepare = prepare_function(spec, True, spec.bias)
    fold_lines, fold_operands, left = _fold(spec, after)
    finish_operands = tuple(loaded(item.operand) for item in left if item.operand)
    finish = ValueFunction(
        "finish_value", "The result, from a value before the norm; `v`, the mean and `factor` carry the channel's sign.",
        ("v = fmaf(__fsub_rn(v, mean) - mean_rest, factor, offset);", *(f"v = {item.apply('v', _value(item))};  // {item.comment}" for item in left)),
        finish_operands, ("mean", "mean_rest", "factor", "offset"),
    )  # fmt: skip
    signs = ValueFunction("", "", (), rising.factors)
    operands = unique_operands(prepare, ValueFunction("", "", (), fold_operands), finish, signs)
    bias = next((o for o in operands if o.key == spec.bias), None)
    listed = steps_of(spec, g, two_walks)
    scaled = spec.precision.itemsize == 4
    applied = applies(spec, (*spec.before_norm, *after))
    return ConvKernel(
        name="conv", template="conv_sm90a/conv.cu.j2", arguments=("x", spec.weight, *(o.key for o in operands), "y"),
        constants=_constants(spec, g, windows, arithmetic, applied), summary=_summary(spec), smem_bytes=g.smem_bytes, max_registers=max_registers(g),
        threads=g.threads, blocks=g.clusters * g.layout.cluster, notes=_notes(spec, g, arithmetic), geometry=g, steps=listed, needs_none=uses_none(listed),
        operands=operands, applied=applied, prepare=prepare, prepare_operands=prepare.operands if prepare else (), finish=finish, fold_lines=fold_lines,
        fold_operands=fold_operands, direction=rising.expression, direction_operands=rising.factors, bias=bias, two_walks=two_walks, transforms=bool(spec.before_norm), scaled=scaled,
        split=arithmetic.parts == 2, padded=producer.values["padding"][0] > 0,
        operand_type="__nv_bfloat16" if spec.precision.name == "bf16" else "__half", debug=debug, result=spec.result,
    )  # fmt: skip


def steps_of(spec: FusedSpec, g: Geometry, two_walks: bool) -> tuple[Step, ...]:
    """The instructions along K."""
    return steps(spec.producer.values["kernel_size"], g.octets, g.pitch, g.plane, g.parts, not two_walks)


def max_registers(g: Geometry) -> int:
    """Registers that every thread has at launch, before setmaxnreg moves them between the roles."""
    return 65536 // g.threads // 8 * 8


def _constants(spec: FusedSpec, g: Geometry, windows: Windows, arithmetic: Arithmetic, applied: Sequence[Apply]) -> tuple[Constant, ...]:
    width, out_width = spec.input_shape[3], spec.norm.input_shape[3]
    scaled = spec.precision.itemsize == 4
    bf16 = spec.precision.name == "bf16"
    exponent = WEIGHT_EXPONENT[arithmetic.parts]

    c = constant
    whose = "a sample or of a thread's part of it" if arithmetic.parts == 2 else "a sample"
    listed = [
        *shape_constants(spec, windows, window_width=scaled or bf16),
        c("kGroupChannels", spec.group_channels, f"{spec.channels} channels / {spec.num_groups} groups"),
        c("kMerged", g.merged, "channels of a group whose moments meet in a warp"),
        c("kSetsOfGroup", spec.group_channels // g.merged, "kGroupChannels / kMerged"),
        c("kGroupSize", spec.group_size, "kGroupChannels x kOutHeight x kOutWidth"),
        c("kChannels", g.channels, "output channels of a CTA" + (", padded to the 64 rows of a tile" if g.channels < 64 else ": the rows of a tile")),
        *([c("kChannelTiles", g.channel_tiles, "kOutChannels / kChannels")] if g.channel_tiles > 1 else []),
        c("kOctets", g.octets, "planes of 8 input channels: kInChannels / 8, rounded up"),
        c("kHalves", "kOctets * kTaps", "fragments of 8 along K, in order of planes and taps"),
        c("kPitch", g.pitch, "pixels of a row in shared memory: kWidth and the padding, to a multiple of 8"),
        *([c("kTileRows", g.tile_rows, "conv rows of a tile, contiguous in shared memory")] if g.tile_rows > 1 else []),
        c("kTileColumns", g.tile_columns, "conv columns of a tile" if g.tile_rows == 1 else "columns of a tile: kPitch, of which kOutWidth are used"),
        *([c("kColumnTiles", g.column_tiles, "tiles beside each other")] if g.column_tiles > 1 else []),
        c("kLastColumns", out_width - (g.column_tiles - 1) * g.tile_columns, f"columns of the {'last ' if g.column_tiles > 1 else ''}tile that exist"),
        c("kAccumulators", g.tile_values, f"64 channels x {g.tile} pixels / 128 threads"),
        c("kStrips", g.strips, "strips of kWindowHeight conv rows, the last may be short"),
        c("kUnits", g.units, "strips of a part" if g.layout.cluster > 1 else "strips of a sample"),
        *([c("kCluster", g.layout.cluster, "CTAs of a cluster; they share a sample, one part each")] if g.layout.cluster > 1 else []),
        c("kClusters", g.clusters, f"{'clusters' if g.layout.cluster > 1 else 'CTAs'}: {spec.batch} samples in {g.items} round{'s' if g.items > 1 else ''}"
          + (f" x {g.channel_tiles} channel tiles" if g.channel_tiles > 1 else "")),
        c("kItems", g.items, "samples of a cluster, at most" if g.layout.cluster > 1 else "samples of a CTA, at most"),
        c("kMultiplyGroups", g.layout.warpgroups, "multiplying warpgroups, one strip each at a time; one more converts x"),
        c("kThreads", g.threads, "128 x (kMultiplyGroups + 1)"),
        c("kMultiplyRegisters", g.multiply_registers, "registers of a multiplying thread"),
        c("kConvertRegisters", g.convert_registers, "registers of a converting thread"),
        c("kRing", g.ring, "rows of x in shared memory: those of kMultiplyGroups strips, and a chunk being converted"),
        c("kRepeats", g.repeats, "first rows of the ring, repeated behind it so that a tile's rows stay contiguous"),
        c("kChunkRows", g.chunk, "rows of a chunk, which are converted at once"),
        *([
            c("kRawStages", g.raw_stages, "chunks in flight from global memory"),
            c("kRawValues", g.raw_stage_bytes // spec.precision.itemsize, "kInChannels x kChunkRows x kWidth"),
            c("kConvertBarrier", g.layout.warpgroups + 2, "named barrier of the converting warpgroup"),
        ] if g.raw_stages else [c("kPrefetchChunks", 3, "chunks by which the prefetch into the L2 cache runs ahead")]),
        *([c("kTurnBarrier", g.layout.warpgroups + 3, "named barrier of the first multiplying warpgroup's turn")] if g.turns else []),
        *([c("kPixelsAtOnce", g.pixels_at_once, "pixels of a chunk that a thread holds at once")] if g.raw_stages else []),
        c("kChunkPixels", ceil_div(g.chunk * width, 128), "pixels of a chunk for each converting thread"),
        c("kPlanePixels", "(kRing + kRepeats) * kPitch", "pixels of a plane"),
        c("kPlanes", g.planes, "kOctets" + (", high and low parts" if g.parts == 2 else "")),
        *([c("kConstantPixels", g.constants_bytes // 16, "pixels of equal values, by which a constant is added to every column")] if g.constants else []),
        *([c("kFolds", g.folds, f"pieces of {g.fold} columns in a window of {windows.size[1]}")] if g.folds > 1 else []),
        c("kRowThreads", g.row_threads, "threads that write a row of y together"),
        c("kEntries", g.entries, "extremes of a channel in a strip"),
        c("kSlotPitch", g.slot_pitch, "values from one channel to the next: odd, for the banks"),
        c("kSlotValues", "kChannels * kSlotPitch", "extremes of a strip"),
        c("kStripBarriers", g.strip_barriers, "strips by which the converter may lag"),
        *([c("kConstantsAt", g.operand_bytes, "offset of the constant pixels: kPlanes x kPlanePixels x 16 bytes")] if g.constants else []),
        c("kSlotsAt", g.operand_bytes + g.constants_bytes, "offset of the slots: kConstantsAt + kConstantPixels x 16" if g.constants else "offset of the slots: kPlanes x kPlanePixels x 16 bytes"),
        *([c("kRawAt", g.operand_bytes + g.constants_bytes + g.slots_bytes, "offset of the raw rows: kSlotsAt + kUnits x kSlotValues x 4")] if g.raw_stages else []),
        c("kSharedAt", g.passing_bytes, f"offset of struct Shared: kRawAt + kRawStages x {g.raw_stage_bytes}" if g.raw_stages else "offset of struct Shared: kSlotsAt + kUnits x kSlotValues x 4"),
        c("kSharedBytes", g.smem_bytes, "bytes of shared memory"),
        *([
            c("kConstant", "1.0f" if bf16 else "32768.0f", "value of the constant pixels" + ("" if bf16 else ": times 65504 it exceeds any sum of products"), "float"),
        ] if g.constants else []),
        *([] if bf16 else [c("kWeightExponent", exponent, f"a channel's largest weight is scaled to {1 << exponent} .. {2 << exponent}" + ("" if scaled else ", not down"))]),
        *([
            c("kInputScale", "64.0f", "scale of x before its conversion to fp16", "float"),
            c("kLargestInput", "1023.0f", "largest |x|: kInputScale times it is below fp16's 65504", "float"),
            c("kSmallestInput", "0.00390625f", f"least maximum of {whose}, for fp16's range", "float"),
            c("kWeightScale", float_literal(2.0**exponent), "2 ^ kWeightExponent", "float"),
            c("kLostShare", float_literal(math.sqrt(spec.input_shape[1] * math.prod(spec.producer.values["kernel_size"])) * 2.0 ** (exponent + 1 + 6 - 26)), "sqrt(kInChannels * kTaps) * 2 * kWeightScale * kInputScale * 2^-26", "float"),
            c("kAllowedLoss", float_literal(ALLOWED_LOSS[arithmetic.parts]), "allowed loss to fp16's range, relative to a group's spread", "float"),
        ] if scaled else []),
        *norm_constants(spec, applied),
    ]  # fmt: skip
    return tuple(listed)


def _summary(spec: FusedSpec) -> str:
    return "the whole chain in one kernel that reads x once; the convolution on tensor cores without im2col"


def _notes(spec: FusedSpec, g: Geometry, arithmetic: Arithmetic) -> tuple[str, ...]:
    parts = f"a cluster of {g.layout.cluster} CTAs takes a sample, a part of its rows each" if g.layout.cluster > 1 else "a CTA takes a sample"
    if g.channel_tiles > 1:
        parts += f" and {g.channels} of {spec.channels} channels"
    return (
        f"{arithmetic.summary}; tiles of 64 channels x {g.tile} pixels",
        f"{parts}: {g.items} round{'s' if g.items > 1 else ''} of {g.units} strips over {g.layout.warpgroups} warpgroups, one more converts x",
        f"pooled values before the norm wait in shared memory ({g.slots_bytes} bytes) and are written while the next sample is multiplied",
    )
