"""The convolution as a product on Hopper, as data: everything that templates/conv_product_sm90a/conv.cu.j2 reads."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from codegen.ir.apply import Constant, applies, called, costly, unique_constants
from codegen.ir.fused_form import FusedSpec
from codegen.ir.operand import c_identifier
from codegen.numerics import FP32, Precision, float_literal
from codegen.plan.conv_product_sm90a.forms import operand_type
from codegen.plan.conv_product_sm90a.geometry import Geometry, Tap
from codegen.plan.conv_product_sm90a.layout import CONSUMERS, LANES, THREADS, Layout
from codegen.plan.conv_product_sm90a.operands import WEIGHT_UNSCALE, X_COUNTS, X_UNSCALE, input_constants, near_constant, operand_names, weight_constants
from codegen.plan.model import Kernel
from codegen.plan.shared.halves import RESTORED
from codegen.plan.shared.axes import AXES
from codegen.plan.shared.pointers import Pointer
from codegen.plan.shared.values import LoadedOperand, ValueFunction, finish_product
from codegen.targets import Target

PRODUCER_REGISTERS, CONSUMER_REGISTERS = 24, 240  # 128 * 24 + 256 * 240 = 64512 of 65536


@dataclass(frozen=True)
class ConvProductKernel(Kernel):
    """The multiplication with its epilogue. `costly`: operators that take exponentials; `channel_tail`, `pixel_tail`: tiles that reach behind the last
    channel, or pixel of a sample. `storage` is the type of the parameters, `result` that of y;
    `operand_type` that of what is multiplied."""

    layout: Layout | None = None
    geometry: Geometry | None = None
    pointers: tuple[Pointer, ...] = ()
    launch_pointers: tuple[Pointer, ...] = ()
    weight_pointer: str = ""
    finish: ValueFunction | None = None
    functions: tuple[str, ...] = ()
    paddings: tuple[int, ...] = ()
    dilations: tuple[int, ...] = ()
    costly: bool = False
    units: int = 0
    channel_tiles: int = 1
    channel_tail: bool = False
    pixel_tail: bool = False
    debug: bool = False
    storage: Precision = FP32
    result: Precision = FP32
    operand_type: str = "__half"

    registers_a = exchange = False  # of the ring that it shares with the GEMM

    @property
    def input_operand(self) -> str:
        return operand_names(self.layout.form)[0]

    @property
    def weight_operand(self) -> str:
        return operand_names(self.layout.form)[1]

    @property
    def mma_type(self) -> str:
        return "bf16" if self.operand_type == "__nv_bfloat16" else "f16"

    @property
    def promoted(self) -> bool:
        """Whether the tensor core's sums are added to others."""
        return self.layout.parts == 2

    @property
    def in_turn(self) -> bool:
        return self.layout.form.in_turn

    @property
    def scaled(self) -> bool:
        return self.layout.form.scaled

    @property
    def restored(self) -> bool:
        """Whether sums get back what the tensor core cuts off on average: those of fp32 operands that are not promoted."""
        return self.scaled and not self.promoted

    @property
    def operands(self) -> tuple[LoadedOperand, ...]:
        """Parameters of what ends the chain."""
        return self.finish.operands if self.finish else ()

    @property
    def reads_channels(self) -> bool:
        return any(operand.per_channel for operand in self.operands)

    def finished(self, value: str) -> str:
        """C: the result of a sum."""
        return self.finish.call(value) if self.finish else value

    @property
    def wide_pointers(self) -> tuple[str, ...]:
        """C names of the tensors that the copy engine reads, and of what is stored several results at a time."""
        return (self.input_operand, self.weight_operand, *(("y",) if self.geometry.vector > 1 else ()))

    @property
    def rows_at_once(self) -> int:
        """Channels whose runs a warp's lanes take together."""
        return LANES * self.geometry.vector // self.layout.run

    @property
    def at_once(self) -> int:
        """Accesses that a lane finishes side by side: of 16 results, or 8 of costly operators; 8 accesses at most, 4 where a thread has two columns of those."""
        most = 4 if self.costly and self.wide_phases > 1 else 8
        return min((8 if self.costly else 16) // self.geometry.vector, most)

    @property
    def result_word(self) -> str:
        """C: the type of the results that a lane stores together."""
        vector = self.geometry.vector
        if vector == 1:
            return self.result.c_type
        return f"float{vector}" if self.result.itemsize == 4 else {2: "uint32_t", 4: "uint2"}[vector]

    @property
    def weight_parts(self) -> int:
        """Planes of an operand in a stage."""
        return self.layout.planes

    @property
    def channels_apart(self) -> bool:
        """Whether the warpgroups have channels of their own, and not pixels."""
        return self.layout.tile_channels == 64 * CONSUMERS

    @property
    def pixels_apart(self) -> bool:
        """Whether they have pixels of their own of a tile that they share."""
        return not self.channels_apart and not self.in_turn

    @property
    def deep(self) -> bool:
        return self.geometry.rank == 3

    @property
    def wide_phases(self) -> int:
        return self.geometry.wide_phases

    @property
    def wide_lists(self) -> int:
        return self.geometry.wide_lists

    @property
    def phases(self) -> int:
        return len(self.geometry.phases)

    @property
    def phase_tiles(self) -> int:
        """Tiles of a phase."""
        return self.units // self.phases

    @property
    def bands(self) -> bool:
        """Whether CTAs go through the phases several times: results of 16 bits, of which a phase has more tiles than there are CTAs.

        Measured on an H200, the convolution alone: 91 in bf16 takes 0.49 ms instead of 0.85, 93 0.70 instead of 0.83, 100 2.3 instead of 3.1; 2 and 10 in fp32
        1 and 4 % more.
        """
        return self.phases > 1 and self.result.itemsize == 2 and self.phase_tiles > self.blocks

    @property
    def last_band(self) -> int:
        """Tiles of a phase in the last band, where these are fewer than in the others; else 0."""
        return self.phase_tiles % self.blocks

    @property
    def tap_lists(self) -> int:
        return self.phases * self.wide_lists

    @property
    def stage_taps(self) -> tuple[tuple[int, int], ...]:
        """Of each tap of a stage, the column of results that it belongs to, and the bytes to its pixels from the first tap's."""
        if self.layout.shared:
            offsets = (offset for _, offset in self.geometry.row_taps)
            return tuple((column, offset * self.layout.row_bytes) for column, offset in zip(self.geometry.row_columns, offsets, strict=True))
        return tuple((0, tap * self.layout.input_tap) for tap in range(self.layout.taps))

    @property
    def taps(self) -> int:
        """Places for taps in all lists."""
        return len(ordered_taps(self.geometry, self.layout))

    @property
    def offsets(self) -> tuple[int, ...]:
        """Of each tap, packed; one that fills a pair moves nothing."""
        return tuple(sum(offset << 8 * axis for axis, offset in enumerate(tap.offsets)) if tap else 0 for tap in ordered_taps(self.geometry, self.layout))

    @property
    def first_taps(self) -> tuple[int, ...]:
        places = [0]
        for phase in self.geometry.phases:
            for taps in phase.taps:
                places.append(places[-1] + self.layout.stages_of(len(taps)) // self.layout.blocks * self.layout.taps)
        return tuple(places)

    @property
    def stage_counts(self) -> tuple[str, ...]:
        """C: the stages of each list of taps of `phase`."""
        if self.tap_lists == 1:
            return ("kSteps",)
        first = "" if self.phases == 1 else "phase" if self.wide_lists == 1 else f"{self.wide_lists} * phase"
        return tuple(f"stages_of({' + '.join(filter(None, (first, str(number) if number or not first else '')))})" for number in range(self.wide_lists))

    @property
    def summed_steps(self) -> tuple[str, ...]:
        """C: the steps of K of each column of results that a pixel gives."""
        if self.layout.shared:
            columns = self.geometry.row_columns
            return tuple(f"{columns.count(column)} * {self.stage_counts[0]}" for column in range(self.wide_phases))
        return tuple(f"{self.layout.taps} * {count}" if self.layout.taps > 1 else count for count in self.stage_counts)

    @property
    def phase_depths(self) -> tuple[int, ...]:
        return tuple(phase.depth for phase in self.geometry.phases)

    @property
    def phase_heights(self) -> tuple[int, ...]:
        return tuple(phase.height for phase in self.geometry.phases)

    @property
    def strides(self) -> tuple[int, ...]:
        return tuple(axis.stride for axis in self.geometry.axes)

    @property
    def window_strides(self) -> tuple[int, ...]:
        return tuple(axis.stride for axis in self.geometry.windows)

    @property
    def steps(self) -> tuple[int, ...]:
        return tuple(axis.step for axis in self.geometry.axes)

    def axis(self, name: str) -> int:
        return AXES.index(name)

    @property
    def ragged_width(self) -> bool:
        """Whether a row of pixels ends behind the last result."""
        axis = self.geometry.axes[2]
        return axis.count * axis.step != axis.results

    @property
    def result_row(self) -> str:
        """C: from a row of pixels to one of results."""
        return self._result(1, "kPhaseHeight")

    @property
    def result_depth(self) -> str:
        return self._result(0, "kPhaseDepth")

    def _result(self, axis: int, phase: str) -> str:
        step = self.geometry.axes[axis].step
        return f" * {step} + {phase}[at.phase]" if step > 1 else ""


def ordered_taps(geometry: Geometry, layout: Layout) -> tuple[Tap | None, ...]:
    """The taps of all phases in the order of their steps; None where a stage takes two and one is missing."""
    found: list[Tap | None] = []
    for phase in geometry.phases:
        for taps in phase.taps:
            if geometry.shared:
                taps = tuple(replace(tap, place=tap.place + place) for tap in taps for place, _ in geometry.row_taps)
            found += [*taps, *([None] * (-len(taps) % layout.taps))]
    return tuple(found)


def conv_kernel(spec: FusedSpec, target: Target, geometry: Geometry, layout: Layout, sms: int, debug: bool, notes: tuple[str, ...]) -> ConvProductKernel:
    """The multiplication of `spec`."""
    finish, items, form = finish_product(spec), applies(spec, spec.before_norm), layout.form
    own = tuple(Pointer(spec.precision.c_type, operand.pointer) for operand in (finish.operands if finish else ()))
    keys = tuple(operand.key for operand in (finish.operands if finish else ()))
    types, (x, weight) = operand_type(form, spec.precision), operand_names(form)
    split = (Pointer(types, x), Pointer(types, weight))
    y = Pointer(spec.result.c_type, "y", True)
    if form.scaled:
        plain = (Pointer("float", "x"), Pointer("float", c_identifier(spec.weight)))
        scales = (Pointer("float", X_UNSCALE), Pointer("uint2", X_COUNTS), Pointer("float", WEIGHT_UNSCALE))
        arguments = ("x", spec.weight, x, weight, X_UNSCALE, X_COUNTS, WEIGHT_UNSCALE, *keys, "y")
    else:
        plain, scales, arguments = (), (), (x, weight, *keys, "y")
    pointers = (*plain, *scales, *own, y)
    channel_tiles = math.ceil(spec.channels / layout.tile_channels)
    units = units_of(spec, geometry, layout)
    grid = math.ceil(units / math.ceil(units / sms))
    shared = layout.shared_bytes(layout.stages(target.smem_bytes))
    values = spec.producer.values
    lost = 3 - geometry.rank
    return ConvProductKernel(
        "conv", "conv_product_sm90a/conv.cu.j2", arguments, (), _summary(spec), shared, 168, THREADS, grid, notes,
        layout, geometry, pointers, (*plain, *split, *scales, *own, y), c_identifier(spec.weight), finish, called(items),
        (0,) * lost + tuple(values["padding"]), (1,) * lost + tuple(values["dilation"]),
        costly(items), units, channel_tiles, spec.channels % layout.tile_channels != 0, geometry.pixels % layout.tile_pixels != 0, debug,
        spec.precision, spec.result, types,
    )  # fmt: skip


def units_of(spec: FusedSpec, geometry: Geometry, layout: Layout) -> int:
    """Tiles of all samples, channels and phases."""
    return len(geometry.phases) * spec.batch * math.ceil(geometry.pixels / layout.tile_pixels) * math.ceil(spec.channels / layout.tile_channels)


def _summary(spec: FusedSpec) -> str:
    return " -> ".join(step.operator.name for step in spec.chain) + " in one kernel: TMA im2col, warp-specialised wgmma"


def conv_constants(spec: FusedSpec, kernel: ConvProductKernel) -> tuple[Constant, ...]:
    """The table of the multiplication's constants."""
    geometry, layout = kernel.geometry, kernel.layout
    depth, height, width = geometry.axes
    plane = math.prod(spec.producer.output_shape[2:])
    sample_tiles = math.ceil(geometry.pixels / layout.tile_pixels)
    stages = layout.stages(kernel.smem_bytes)
    rows = [
        ("kSamples", spec.batch, "batch"),
        *input_constants(spec, geometry),
        ("kDepth", depth.size, "depth of x"),
        ("kHeight", height.size, "rows of x"),
        *weight_constants(spec, geometry),
        *((f"kKernel{name}", size, f"size of W along the {name.lower()}") for name, size in zip(AXES, geometry.kernel, strict=True)),
        *((f"kStride{name}", axis.stride, f"{spec.producer.operator.name}'s stride") for name, axis in zip(AXES, geometry.windows, strict=True)),
        *((f"kStep{name}", axis.step, f"{spec.producer.operator.name}'s stride") for name, axis in zip(AXES, geometry.axes, strict=True)),
        *((f"kPadding{name}", size, f"{spec.producer.operator.name}'s padding") for name, size in zip(AXES, kernel.paddings, strict=True)),
        *((f"kDilation{name}", size, f"{spec.producer.operator.name}'s dilation") for name, size in zip(AXES, kernel.dilations, strict=True)),
        *(
            (f"kLower{name}", axis.lower, f"first pixel of the first window along the {name.lower()}")
            for name, axis in zip(AXES, geometry.windows, strict=True)
        ),
        *(
            (f"kUpper{name}", axis.upper, f"from the end of x to the end of the box of windows' first pixels, {axis.count} along the {name.lower()}")
            for name, axis in zip(AXES, geometry.axes, strict=True)
        ),
        ("kOutDepth", depth.results, "depth of y"),
        ("kOutHeight", height.results, "rows of y"),
        ("kOutWidth", width.results, "columns of y"),
        ("kPlane", plane, "results of a channel of a sample: " + " x ".join(map(str, spec.producer.output_shape[2:]))),
        ("kRows", height.count, "rows of pixels" + (" of a phase" if height.step > 1 else "")),
        ("kColumns", width.count, "columns of pixels" + (" of a phase" if width.step > 1 else "")),
        ("kTileChannels", layout.tile_channels, "channels of a tile: rows of W, operand A"),
        ("kWarpgroupPixels", layout.pixels, "pixels of a warpgroup"),
        ("kTilePixels", layout.tile_pixels, "pixels of a tile: operand B"),
        ("kSampleTiles", sample_tiles, f"tiles of a sample's {geometry.pixels} pixels"),
        ("kChannelTiles", kernel.channel_tiles, "tiles of out_channels"),
        ("kPhases", kernel.phases, "remainders of a result's depth and height by the stride"),
        (
            "kWidePhases",
            kernel.wide_phases,
            "remainders of a column of results by the stride: a thread has the sums of all"
            if kernel.wide_phases > 1
            else "a thread has the sums of a tile once",
        ),
        ("kTapLists", kernel.tap_lists, "lists of taps: one for each remainder"),
        ("kTaps", kernel.taps, "taps" + (", pairs completed" if layout.taps == 2 else "") + (" of all phases" if kernel.tap_lists > 1 else "")),
        ("kBlocks", layout.blocks, "blocks of channels of x"),
        ("kWeightSteps", kernel.taps * layout.blocks, "steps of K: a block of channels of a tap each"),
        ("kSteps", kernel.taps // layout.taps * layout.blocks, "stages of a tile"),
        ("kPhaseUnits", kernel.phase_tiles, "units of a phase"),
        ("kLastTiles", kernel.last_band, "those of a phase that are left for the last turn"),
        ("kUnits", kernel.units, "units of work: tiles; a CTA takes one at a time"),
        ("kGrid", kernel.blocks, f"CTAs: at most {math.ceil(kernel.units / kernel.blocks)} units each"),
        ("kThreads", THREADS, "one warpgroup that fetches, two that multiply" + (", tiles in turn" if layout.form.in_turn else "")),
        ("kConsumerWarps", 4 * (1 if layout.form.in_turn else CONSUMERS), f"multiplying warps{' of a tile' if layout.form.in_turn else ''}, each of which frees a stage once"),
        ("kProducerRegisters", PRODUCER_REGISTERS, "registers of a fetching thread"),
        ("kConsumerRegisters", CONSUMER_REGISTERS, "registers of a multiplying thread"),
        ("kAccumulators", layout.pixels // 2, "registers of sums: 64 x kWarpgroupPixels values over 128 threads"),
        ("kStages", stages, "stages of the ring"),
        ("kUnrolled", layout.unrolled, "stages that are multiplied without a pause: a divisor of a tile's"),
        ("kRowHalves", layout.row_bytes // 2, "halves of a row"),
        (
            "kRowBytes",
            layout.row_bytes,
            "bytes of a row: "
            + f"{layout.block} channels"
            + ("" if layout.parts == 1 else ", high halves or low ones" if layout.planes == 2 else ", high halves, then low ones"),
        ),
        ("kWeightPartBytes", layout.weight_part, "bytes of W in a stage" if layout.planes == 1 else "bytes of one part of W in a stage"),
        ("kInputPartBytes", layout.input_part, "bytes of x in a stage" if layout.planes == 1 else "bytes of one part of x in a stage"),
        ("kInputTapBytes", layout.input_tap, "bytes from the pixels of a tap to those of the next"),
        ("kStageBytes", layout.stage_bytes, "bytes of a stage"),
        ("kWeightLow", layout.low(layout.weight_part), "bytes from W's high halves to its low ones"),
        ("kInputLow", layout.low(layout.input_part), "bytes from x's high halves to its low ones"),
        ("kFetchedBytes", layout.fetched_bytes, "bytes that the copy engine brings for a stage"),
        ("kGroups", layout.taps * layout.halves, "groups of multiplications in a stage: " + ("halves of a tap's channels" if layout.halves == 2 else "taps")),
        ("kHalfBytes", layout.block, "bytes from a group's channels to those of the other half"),
        ("kWeightTapBytes", layout.tile_channels * layout.row_bytes, "bytes of W for a tap"),
        ("kGroupSteps", layout.group_steps, "multiplications along K in a group"),
        ("kHalo", geometry.halo, "pixels behind those of a tile that its taps read"),
        ("kRun", layout.run, "results of a channel that a warp turns around at a time"),
        ("kStagedPitch", layout.staged_pitch, "floats from one channel that a warp has staged to the next: its lanes meet no bank twice"),
        ("kStagedAt", stages * layout.stage_bytes, "offset of the staged sums, 16 channels x kRun results of each warp"),
        ("kBarriersAt", stages * layout.stage_bytes + layout.staged_bytes, "offset of the barriers: full and empty"),
        ("kSharedBytes", kernel.smem_bytes, "bytes of shared memory"),
    ]
    near = (near_constant(),) if layout.form.scaled else ()
    if kernel.restored:
        lost = float_literal(RESTORED.value * layout.block)
        near += (Constant("kLost", lost, "of a sum that the tensor core cuts off on average, for each step of K", "float"),)
    return (*(Constant(name, str(value), why) for name, value, why in rows), *near, *unique_constants(applies(spec, spec.before_norm)))
