"""The sm_90a kernels as data: everything that templates/gemm_sm90a/*.cu.j2 read."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from codegen.ir.apply import Apply, Constant, called, costly, unique_constants
from codegen.ir.operand import Operand, c_identifier
from codegen.ir.fused_form import FusedSpec
from codegen.numerics import FP32, float_literal
from codegen.plan.gemm_sm90a.epilogue import distinct, epilogue, line, vector_count
from codegen.plan.gemm_sm90a.forms import restoring_factor
from codegen.plan.gemm_sm90a.layout import (
    CONSUMERS, TILE_K, Bands, Form, Layout, Memory, balanced, bands_of, by_rows, in_warpgroup, memory, row_parts, strip_blocks,
)  # fmt: skip
from codegen.plan.gemm_sm90a.split import WEIGHT_SPLIT, WEIGHT_UNSCALE, X_SPLIT, X_UNSCALE, padded_columns
from codegen.plan.gemm_sm90a.window import window
from codegen.plan.model import Kernel
from codegen.plan.shared.pointers import Pointer
from codegen.plan.shared.values import ValueFunction, finish_product
from codegen.targets import DeviceClass, Target

THREADS = 128 * (1 + CONSUMERS)
PRODUCER_REGISTERS, CONSUMER_REGISTERS = 24, 240  # 128 * 24 + 256 * 240 = 64512 of 65536


@dataclass(frozen=True)
class GemmSm90aKernel(Kernel):
    """The multiplication with its epilogue. `guarded`: fp32 operands, which halves may not be able to carry; `value_type` is the
    type of the parameters, `result_type` that of y."""

    form: Form | None = None
    layout: Layout | None = None
    pointers: tuple[Pointer, ...] = ()
    launch_pointers: tuple[Pointer, ...] = ()
    value_type: str = "float"
    operand_type: str = "__half"
    mma_type: str = "f16"
    weight_operand: str = ""
    input_operand: str = ""
    weight_pointer: str = ""
    guarded: bool = False
    group_width: int = 0
    sample_tail: bool = False
    channel_tail: bool = False
    debug: bool = False
    before: tuple[Apply, ...] = ()
    after: tuple[Apply, ...] = ()
    before_lines: tuple[str, ...] = ()
    finish: ValueFunction | None = None  # of a chain without a norm: what ends it, where values are stored
    before_parameters: tuple[Operand, ...] = ()
    after_lines: tuple[str, ...] = ()
    after_parameters: tuple[Operand, ...] = ()
    producer_bias: bool = False
    result_type: str = "float"
    in_features: int = 0
    result_pitch: int = 0  # values from one row of the result to the next, where that is not out_features
    bands: Bands | None = None
    restores: bool = False  # promotion gives back what truncation takes on average

    input_unscale = X_UNSCALE
    weight_unscale = WEIGHT_UNSCALE

    @property
    def calls_finish(self) -> bool:
        """Whether those operators are a function that is called: where a thread has 128 sums, exponentials for several of them at once spill (seen with nvcc 13)."""
        return self.form.blocks * self.form.tile_samples >= 256 and costly(self.before)

    @property
    def cluster(self) -> int:
        return self.layout.cluster

    @property
    def share(self) -> str:
        return self.layout.share

    @property
    def exchange(self) -> bool:
        return self.layout.exchange

    @property
    def statistics(self) -> str:
        return self.layout.statistics

    @property
    def sliced(self) -> bool:
        """Whether several CTAs or clusters share a tile, each with its own part of K."""
        return self.layout.slices > 1

    @property
    def held(self) -> bool:
        return self.layout.unit_tiles > 1

    @property
    def held_in_y(self) -> bool:
        """Whether waiting tiles lie in y."""
        return self.held and not self.by_rows

    @property
    def by_rows(self) -> bool:
        return by_rows(self.form, self.layout, 4 if self.result_type == "float" else 2)

    @property
    def row_channels(self) -> int:
        """Channels of a sample that a thread finishes."""
        return 64 * self.form.blocks

    @property
    def row_parts(self) -> int:
        """Parts of a group in a row."""
        return row_parts(self.form, self.layout, self.group_width, costly(self.before + self.after))[1]

    @property
    def functions(self) -> tuple[str, ...]:
        """The C functions that the epilogue calls."""
        return called(self.before + self.after)

    @property
    def vectors(self) -> tuple[Operand, ...]:
        """What the epilogue by rows keeps in shared memory."""
        return distinct(self.before_parameters + self.after_parameters)

    @property
    def reads_channels(self) -> bool:
        """Does the epilogue read what every channel has of its own: parameters, or the scales of prepared weights?"""
        return (self.guarded and not self.registers_a) or any(operand.per_channel for operand in self.vectors)

    @property
    def reads_values(self) -> bool:
        """Does it read any parameter?"""
        return self.reads_channels or bool(self.vectors)

    def vector_index(self, operand: Operand) -> int:
        return [vector.key for vector in self.vectors].index(operand.key)

    @property
    def row_before_lines(self) -> tuple[str, ...]:
        """What precedes the norm and is left to rows: all but the producer's bias, which comes before the sums are rounded."""
        return tuple(line.replace("_c[h]", "_c[e]") for line in self.before_lines[1 if self.producer_bias else 0 :])

    @property
    def row_before_parameters(self) -> tuple[Operand, ...]:
        return self.before_parameters[1 if self.producer_bias else 0 :]

    @property
    def row_after_lines(self) -> tuple[str, ...]:
        return tuple(line.replace("_c[h]", "_c[e]") for line in self.after_lines)

    @property
    def wide_pointers(self) -> tuple[str, ...]:
        """C names of the tensors that threads themselves access 16 bytes at a time."""
        return (("x", self.weight_pointer) if self.guarded and self.in_fours else ()) + (("y",) if self.held_in_y else ())

    @property
    def in_fours(self) -> bool:
        """Do all rows of x and W start at multiples of 16 bytes?"""
        return self.in_features % 4 == 0

    @property
    def row_pitch(self) -> str:
        """C name of the values from one row of an operand to the next."""
        return "kPitch" if self.guarded and self.in_features % 8 else "kInFeatures"

    @property
    def filled_by(self) -> str:
        """Who keeps the ring full, or the rings of two operands."""
        return "two threads" if self.registers_a else "one thread"

    @property
    def registers_a(self) -> bool:
        return self.form.registers

    @property
    def weight_split(self) -> bool:
        return self.form.registers and self.form.parts == 2

    @property
    def weight_parts(self) -> int:
        return 1 if self.form.registers else self.form.parts

    @property
    def input_parts(self) -> int:
        return self.form.parts

    @property
    def tile_samples(self) -> int:
        return self.form.tile_samples

    @property
    def promote(self) -> int:
        return self.form.promote

    @property
    def staggered(self) -> bool:
        """Whether the warpgroups promote at different k. A group in both would not be constant where its rows of W are equal. Where they convert W too, it costs time:
        0.64 ms for problem 94 on an H200, 0.58 with both in step."""
        return not self.registers_a and (64 * self.form.blocks) % self.group_width == 0

    @property
    def dependent(self) -> bool:
        return self.guarded

    @property
    def staged_store(self) -> bool:
        return self.result_type != "float"

    @property
    def names_channels(self) -> bool:
        """Whether a thread needs to know which channels it holds."""
        return not self.by_rows and (self.guarded or not self.staged_store or bool(self.vectors))

    @property
    def names_samples(self) -> bool:
        """Whether a thread needs to know which samples it holds."""
        return self.guarded or not self.staged_store or (self.statistics == "strips" and not self.by_rows)

    @property
    def strip_blocks(self) -> int:
        return strip_blocks(self.form, self.group_width)

    @property
    def strip_place(self) -> str:
        """C expression of where a warp's strip begins."""
        index = "self.warp" if self.strip_blocks == self.form.blocks else "block * 4 + self.warp"
        place = f"({index}) * kStripFloats" if "*" in index else f"{index} * kStripFloats"
        return place if self.warpgroup_groups else f"self.warpgroup * (kScratchBytes / 4) + {place}"

    @property
    def warpgroup_groups(self) -> bool:
        """Whether each group lies within one warpgroup's channels."""
        return self.statistics == "strips" and in_warpgroup(self.form, self.group_width)


def ragged_result(spec: FusedSpec) -> bool:
    """Whether rows of 16-bit results do not start at multiples of 16 bytes, as the copy engine needs them."""
    return spec.precision.itemsize == 2 and spec.channels % 8 != 0


def result_pitch(spec: FusedSpec, layout: Layout) -> int:
    """Values from one row to the next of the temporary that such results are left in, for the norm kernel to read; 0 for all others."""
    return math.ceil(spec.channels / 8) * 8 if ragged_result(spec) and layout.slices == 1 else 0


def gemm_kernel(spec: FusedSpec, target: Target, form: Form, layout: Layout, device: DeviceClass, debug: bool, notes: tuple[str, ...]) -> GemmSm90aKernel:
    """The multiplication of `spec` in the given form and layout, which must fit (see `memory`). Slices leave fp32 sums without the bias."""
    if layout.slices > 1:
        spec = replace(spec, gives=FP32)
    precision = spec.precision
    batch = spec.input_shape[0]
    channels, width = spec.channels, spec.group_channels
    finished = layout.slices == 1 and (layout.statistics != "none" or not spec.has_norm)
    before, after, before_vectors, after_vectors = epilogue(spec, finished)
    bias = spec.bias if layout.slices == 1 else None
    if layout.slices > 1:
        before_vectors = []  # its bias
    before_lines = ([f"value + {c_identifier(bias)}_c[h]"] if bias else []) + [line(a) for a in before]
    affine = ["value * {}_c[h] + {}_c[h]".format(*map(c_identifier, spec.affine))] if spec.affine and layout.statistics != "none" else []
    after_lines = affine + [line(a) for a in after]

    guarded = precision.itemsize == 4
    vectors = tuple(dict.fromkeys(operand.key for operand in before_vectors + after_vectors))
    weight_operand = spec.weight if form.registers or not guarded else WEIGHT_SPLIT
    input_operand = X_SPLIT if guarded else "x"
    unscales = ((X_UNSCALE,) if form.registers else (X_UNSCALE, WEIGHT_UNSCALE)) if guarded else ()
    inside = (("x", spec.weight) if guarded else ()) + unscales + vectors + ("y",)
    arguments = tuple(dict.fromkeys(("x", spec.weight, input_operand, weight_operand, *unscales, *vectors, "y")))
    types = {X_SPLIT: "__half", WEIGHT_SPLIT: "__half", X_UNSCALE: "float", WEIGHT_UNSCALE: "float"}

    def pointer(name: str) -> Pointer:
        return Pointer(spec.result.c_type if name == "y" else types.get(name, precision.c_type), c_identifier(name), name == "y")

    where = memory(form, layout, width, spec.result.itemsize, target.smem_bytes, vector_count(spec))
    sample_tiles, channel_tiles = math.ceil(batch / form.tile_samples), math.ceil(channels / form.tile_channels)
    cluster_samples = layout.cluster if layout.share == "weight" else 1
    cluster_channels = layout.cluster if layout.share == "input" else 1
    sample_blocks = math.ceil(sample_tiles / cluster_samples)
    channel_blocks = math.ceil(channel_tiles / (cluster_channels * layout.unit_tiles))
    units = sample_blocks * channel_blocks * layout.slices
    clusters = balanced(units, device.sms // layout.cluster)
    x_bytes, rows = batch * spec.input_shape[1] * 2 * form.parts, cluster_samples * form.tile_samples
    bands = bands_of(sample_blocks, clusters, rows, cluster_channels * layout.unit_tiles * form.tile_channels, x_bytes if layout.slices == 1 else 0, device.l2 * 1e6)
    constants = _constants(spec, form, layout, where, before + after, sample_blocks, channel_blocks, bands, units, clusters)
    return GemmSm90aKernel(
        "gemm", "gemm_sm90a/gemm.cu.j2", arguments, constants, summary(spec, layout), where.total, 168, THREADS, clusters * layout.cluster, notes,
        form, layout, tuple(map(pointer, inside)), tuple(map(pointer, arguments)), precision.c_type,
        "__half" if guarded else precision.c_type, "bf16" if precision.dtype == "bfloat16" else "f16",
        c_identifier(weight_operand), input_operand, c_identifier(spec.weight), guarded, width,
        batch % form.tile_samples != 0 or sample_tiles % cluster_samples != 0,
        channels % (form.tile_channels * layout.unit_tiles * cluster_channels) != 0, debug, before, after,
        tuple(before_lines), finish_product(spec) if finished and not spec.has_norm else None, tuple(before_vectors), tuple(after_lines), tuple(after_vectors), bias is not None, spec.result.c_type, spec.input_shape[1],
        result_pitch(spec, layout), bands, restoring_factor(spec, form) is not None,
    )  # fmt: skip


def summary(spec: FusedSpec, layout: Layout) -> str:
    if layout.slices > 1:
        return f"x W^T, {layout.slices} parts of K apart: TMA, warp-specialised wgmma" + (", clusters" if layout.cluster > 1 else "")
    steps = [step.operator.name for step in (spec.chain if layout.statistics != "none" or not spec.has_norm else spec.chain[:1])]
    return " -> ".join(steps) + " in one kernel: TMA, warp-specialised wgmma" + (", clusters" if layout.cluster > 1 else "")


def _constants(
    spec: FusedSpec, form: Form, layout: Layout, where: Memory, items: tuple[Apply, ...], sample_blocks: int, channel_blocks: int, bands: Bands, units: int, clusters: int
) -> tuple[Constant, ...]:  # fmt: skip
    batch, k = spec.input_shape
    channels, width = spec.channels, spec.group_channels
    steps = layout.slice_steps(k)
    rows = [
        ("kBatch", batch, "rows of x and y"),
        ("kInFeatures", k, "columns of x and W"),
        *([("kPitch", padded_columns(k), "values from one row of a split operand to the next: a multiple of 16 bytes")] if spec.precision.itemsize == 4 and k % 8 else []),
        ("kOutFeatures", channels, "rows of W, columns of y"),
        *([("kResultPitch", pitch, "values from one row of the result to the next: a multiple of 16 bytes")] if (pitch := result_pitch(spec, layout)) else []),
    ]
    if layout.statistics != "none":
        rows.append(("kGroupWidth", width, "out_features / num_groups"))
    rows += [
        ("kTileChannels", form.tile_channels, "channels of a tile: rows of W, operand A"),
        ("kTileSamples", form.tile_samples, "samples of a tile: rows of x, operand B"),
        ("kTileK", TILE_K, "values of K in a stage"),
        ("kSteps", steps, "ceil(in_features / kTileK)" + (", over slices" if layout.slices > 1 else "")),
        *([("kSliceK", steps * TILE_K, "values of K in a slice")] if layout.slices > 1 else []),
        ("kStages", form.stages, "stages of the ring"),
        ("kCluster", layout.cluster, {"weight": "CTAs that share rows of W", "input": "CTAs that share rows of x", "none": "no cluster"}[layout.share]),
        ("kUnitTiles", layout.unit_tiles, "tiles of a unit: a CTA computes them before their groups are complete"),
        ("kSampleBlocks", sample_blocks, "clusters side by side along the batch"),
        *([("kBand", bands.width, "clusters side by side along the batch in a band, which goes over all channels before the next"), ("kBandUnits", bands.width * channel_blocks, "units of a band")] if bands.count > 1 else []),
        *([("kLastBand", bands.last, "those of the last band"), ("kBands", bands.count, "bands")] if bands.uneven else []),
        *([("kSliceUnits", units // layout.slices, "units of a slice")] if layout.slices > 1 else []),
        ("kUnits", units, "units of work; a cluster takes one at a time"),
        ("kGrid", clusters * layout.cluster, f"CTAs: at most {math.ceil(units / clusters)} units for each of {clusters} clusters"),
        ("kThreads", THREADS, "one warpgroup that fetches, two that multiply"),
        ("kConsumerWarps", 4 * CONSUMERS, "multiplying warps, each of which frees a stage once"),
        ("kProducerRegisters", PRODUCER_REGISTERS, "registers of a fetching thread"),
        ("kConsumerRegisters", CONSUMER_REGISTERS, "registers of a multiplying thread"),
        ("kBlocks", form.blocks, "blocks of 64 channels in a warpgroup's accumulators"),
        ("kAccumulators", form.tile_samples // 2, "registers of a block: 64 x kTileSamples values over 128 threads"),
    ]
    if form.promote:
        rows.append(("kPromoteSteps", form.promote, f"steps between two promotions to fp32 registers: {form.promote * TILE_K} values of K"))
    if form.registers:
        rows += [("kInFlight", 2, "pieces of 16 k in multiplication while the next ones are converted")]
    if layout.share == "input" or not form.registers or where.store_samples:
        rows.append(("kRowBytes", 128, "bytes of a row: kTileK halves"))
    if form.registers:
        rows += [("kPlaneRowBytes", 64, "bytes of a plane's row: 16 k of fp32"), ("kPlaneBytes", 64 * 64, "bytes of a plane: 64 rows of W"), ("kWeightBlockBytes", 64 * TILE_K * 4, "bytes of 64 rows of W")]
    else:
        rows += [("kWeightBlockBytes", 64 * TILE_K * 2, "bytes of 64 rows of W")]
    rows += [
        ("kWeightPartBytes", where.weight_part, "bytes of one part of W in a stage"),
        ("kInputPartBytes", where.input_part, "bytes of one part of x in a stage"),
        ("kStageBytes", where.stage, "bytes of a stage: all parts of W and x"),
    ]
    warpgroup_groups = layout.statistics == "strips" and in_warpgroup(form, width)
    if where.scratch:
        rows.append(("kScratchAt", where.scratch_at, "offset of the scratch memory, behind the stages"))
    if where.scratch:
        rows.append(("kScratchBytes", where.scratch, "bytes of scratch memory for each warpgroup"))
    if where.store_samples:
        rows += [("kStoreSamples", where.store_samples, "rows of y in a piece of a store"), ("kStoreBytes", where.store_samples * 128, "bytes of such a piece: 64 channels of 16 bits a row")]
    rows_finish = by_rows(form, layout, spec.result.itemsize)
    vectors = vector_count(spec) if rows_finish else 0
    part, parts = row_parts(form, layout, width, costly(items))
    if rows_finish:
        rows += [
            ("kRowChannels", 64 * form.blocks, "channels of a sample that a thread finishes"),
            ("kPartChannels", part, "channels that a thread holds in registers at a time"),
            *([("kGroupParts", parts, "parts of a group in a row")] if parts > 1 else []),
            *([("kVectors", vectors, "parameters of the epilogue"), ("kParametersAt", where.parameters_at, "offset of the parameters of all tiles of a unit")] if vectors else []),
            *([] if warpgroup_groups else [("kGroupsAt", where.groups_at, "offset of the moments that the warpgroups exchange")]),
        ]
    elif layout.statistics == "strips":
        blocks = strip_blocks(form, width)
        rows += [
            *([] if warpgroup_groups else [("kGroupsAt", where.groups_at, "offset of the normalisers of each sample's group")]),
            ("kStripFloats", 3 * form.tile_samples, "floats of a strip: three for each sample"),
            ("kStripValues", 16 * blocks, "channels of a strip: those of a group that one warp holds in a tile"),
            ("kGroupStrips", min(width, form.tile_channels) // (16 * blocks), "strips of a group in this CTA"),
            ("kTileGroups", form.tile_channels // width, "groups of a tile") if warpgroup_groups
            else ("kWarpgroupStrips", min(width, form.tile_channels) // (16 * blocks * CONSUMERS), "strips of one warpgroup"),
        ]
    if layout.exchange:
        rows.append(("kExchangeAt", where.exchange_at, "offset of the statistics from the other CTA, for two units"))
    rows += [("kBarriersAt", where.barriers_at, "offset of the barriers: full and empty" + (", of W and of x" if form.registers else "")), ("kSharedBytes", where.total, "bytes of shared memory")]
    constants = [Constant(name, str(value), why) for name, value, why in rows]
    if form.registers:
        constants += window(form, min(k, steps * TILE_K), steps * TILE_K * layout.slices - k, "in_features" if layout.slices == 1 else "kSliceK")
    if restoring := restoring_factor(spec, form):
        constants.append(Constant("kRestored", float_literal(restoring), "times a promoted sum, of which the tensor core cuts off so much on average", "float"))
    if layout.statistics != "none":
        constants.append(Constant("kEps", float_literal(spec.norm.values["eps"]), "added to the variance", "float"))
    return (*constants, *unique_constants(items))
