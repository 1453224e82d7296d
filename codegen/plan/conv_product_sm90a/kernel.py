"""The convolution as a product on Hopper, as data: everything that templates/conv_product_sm90a/conv.cu.j2 reads."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from codegen.ir.apply import applies, called, costly
from codegen.ir.fused_form import FusedSpec
from codegen.ir.operand import c_identifier
from codegen.numerics import FP32, Precision
from codegen.plan.conv_product_sm90a.forms import operand_type
from codegen.plan.conv_product_sm90a.geometry import Geometry, Tap
from codegen.plan.conv_product_sm90a.layout import CONSUMERS, GROUP_K, LANES, PIECE, PIECE_BYTES, THREADS, WARP_ROWS, Layout
from codegen.plan.conv_product_sm90a.operands import WEIGHT_UNSCALE, X_COUNTS, X_UNSCALE, operand_names
from codegen.plan.model import Kernel
from codegen.plan.shared.axes import AXES
from codegen.plan.shared.pointers import Pointer
from codegen.plan.shared.values import LoadedOperand, ValueFunction, finish_product
from codegen.targets import Target

PRODUCER_REGISTERS, CONSUMER_REGISTERS = 24, 240  # 128 * 24 + 256 * 240 = 64512 of 65536


@dataclass(frozen=True)
class Multiplication:
    """One multiplication of 16 values of K: the column of results that it belongs to, bytes from the stage's W and x to its own, and from its first eight
    values of x to the others, which are zeros where it has `lead` None."""

    column: int
    weight: int
    input: int
    lead: int | None


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
        """C names of the tensors that the copy engine reads 16 bytes at a time, and of what is stored several results at a time."""
        return (self.input_operand, self.weight_operand, *(("y",) if self.geometry.vector > 1 else ()))

    @property
    def rows_at_once(self) -> int:
        """Channels whose runs a warp's lanes take together."""
        return LANES * self.geometry.vector // self.layout.run

    @property
    def at_once(self) -> int:
        """Accesses that a lane finishes side by side: of 16 results, or 8 of costly operators; 8 accesses at most, 4 where a thread has two columns of those."""
        most = min(4 if self.costly and self.wide_phases > 1 else 8, self.layout.warp_channels // self.rows_at_once)
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
    def runs(self) -> bool:
        return self.geometry.runs

    @property
    def filled_by(self) -> str:
        """Who keeps the ring full."""
        return "one warp" if self.runs else "one thread"

    @property
    def weight_step(self) -> int:
        """Bytes of W from one multiplication of a step to the next, where x lies in runs."""
        return GROUP_K // PIECE * self.layout.tile_channels * PIECE_BYTES

    @property
    def input_step(self) -> int:
        return GROUP_K // PIECE * self.layout.run_bytes

    @property
    def multiplications(self) -> tuple[Multiplication, ...]:
        """Those of a stage of runs, high halves by high halves."""
        layout = self.layout
        if not layout.paired:
            rows = zip(self.geometry.row_columns, (offset for _, offset in self.geometry.row_taps), strict=True)
            chunks = range(layout.block // GROUP_K)
            return tuple(
                Multiplication(column, tap * layout.weight_tap + chunk * self.weight_step, offset * PIECE_BYTES + chunk * self.input_step, layout.run_bytes)
                for tap, (column, offset) in enumerate(rows) for chunk in chunks
            )  # fmt: skip
        return tuple(
            Multiplication(pair.column, number * layout.weight_tap, pair.first[1] * PIECE_BYTES, (pair.second[1] - pair.first[1]) * PIECE_BYTES if pair.second else None)
            for number, pair in enumerate(self.geometry.row_pairs)
        )

    @property
    def groups(self) -> tuple[Multiplication, ...]:
        """The first multiplication of each group whose sums are promoted together."""
        return self.multiplications[:: self.layout.group_steps]

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
        """Of each tap, in positions of a run, or packed; one that fills a pair moves nothing."""
        if self.runs:
            return tuple(self.geometry.flat(tap.offsets) if tap else 0 for tap in ordered_taps(self.geometry, self.layout))
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
                taps = tuple(_moved(tap, place) for tap in taps for place in _row_places(geometry, layout))
            found += [*taps, *([None] * (-len(taps) % layout.taps))]
    return tuple(found)


def _row_places(geometry: Geometry, layout: Layout) -> tuple[int | None, ...]:
    """The numbers of the taps of a row; None where one is multiplied by zeros beside the last of a column."""
    if not layout.paired:
        return tuple(place for place, _ in geometry.row_taps)
    return tuple(tap and tap[0] for pair in geometry.row_pairs for tap in (pair.first, pair.second))


def _moved(tap: Tap, place: int | None) -> Tap | None:
    return None if place is None else replace(tap, place=tap.place + place)


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
        "conv", "conv_product_sm90a/conv.cu.j2", arguments, (), _summary(spec, geometry), shared, 168, THREADS, grid, notes,
        layout, geometry, pointers, (*plain, *split, *scales, *own, y), c_identifier(spec.weight), finish, called(items),
        (0,) * lost + tuple(values["padding"]), (1,) * lost + tuple(values["dilation"]),
        costly(items), units, channel_tiles, spec.channels % (layout.tile_channels // WARP_ROWS * layout.warp_channels) != 0, geometry.pixels % layout.tile_pixels != 0, debug,
        spec.precision, spec.result, types,
    )  # fmt: skip


def units_of(spec: FusedSpec, geometry: Geometry, layout: Layout) -> int:
    """Tiles of all samples, channels and phases."""
    return len(geometry.phases) * spec.batch * math.ceil(geometry.pixels / layout.tile_pixels) * math.ceil(spec.channels / layout.tile_channels)


def _summary(spec: FusedSpec, geometry: Geometry) -> str:
    return " -> ".join(step.operator.name for step in spec.chain) + f" in one kernel: {'bulk copies of runs' if geometry.runs else 'TMA im2col'}, warp-specialised wgmma"
