"""From a segment to its kernels.

map       element-wise operators alone: a thread takes 16 bytes of the result
rows      a group lies in one piece: a team of threads, up to a block, holds it in registers where it fits, else reads it twice
columns   groups lie side by side: threads along them, slices share a group's values
windows   a thread takes a window
split     few large groups, or groups in pieces: blocks leave partial statistics, a second kernel merges them, a third goes over the values again
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from codegen.ir.apply import Constant
from codegen.ir.segment import Grouping, Segment, Window, grouping_of, window_of
from codegen.numerics import float_literal
from codegen.ops import Kind
from codegen.plan.model import Buffer
from codegen.plan.segments.kernel import FIELDS, FINISHED, Running, SegmentKernel, core_name, statistic_of, summary_of
from codegen.plan.segments.program import Program, Statements, Tensor, statistics_access
from codegen.plan.shared.names import value_name
from codegen.plan.shared.values import VECTOR_BYTES, register_limit
from codegen.spec import Spec
from codegen.targets import DeviceClass, Target

THREADS = 256  # of a block
ROW_RUNS = 4  # that a lane of a row takes, about
HELD, MOST_HELD = 32, 64  # values of a group in a thread's registers; the second in blocks of 512 threads, which may use 128
ROW_LANES = 512  # threads of a row, at most
SLICES = 16  # of columns, at most
BUSY_THREADS = 1024  # on an SM
SHARE_VALUES = 4096  # of a block that shares a group, at least
STATIC_SHARED = 48 * 1024
CPU_PIECE, COLUMNS_PIECE = 1024, 128  # values that C++ takes at a time
CPU_HELD = 16384  # values of a group that C++ keeps
CPU_GROUPS = 64  # fewer are shared by threads
SHORT_RUN = 16  # shorter runs are read value by value
PARALLEL_VALUES = 32768  # fewer are not worth a second thread
EPSILON = {"float32": 1.1920928955078125e-07, "float16": 0.0009765625, "bfloat16": 0.0078125}  # of rms_norm where it has no eps: the storage type's own


def plan_segment(spec: Spec, segment: Segment, name: str, target: Target, device: DeviceClass) -> tuple[list[SegmentKernel], list[Buffer]]:
    """The kernels of a segment in order, and the buffers between them; files begin with `name`."""
    planner = _Planner(spec, segment, name, target, device)
    if target.language == "cpp":
        return planner.cpu(), []
    if segment.core is None:
        return [planner.map(f"{name}_map")], []
    grouping = grouping_of(segment.core)
    if grouping is None:
        return [planner.windows(window_of(segment.core))], []
    way = planner.way(grouping)
    if way == "rows":
        return [planner.rows(grouping)], []
    return ([planner.columns(grouping)], []) if way == "columns" else planner.split(grouping)


class _Planner:
    def __init__(self, spec: Spec, segment: Segment, name: str, target: Target, device: DeviceClass) -> None:
        self.spec, self.segment, self.name, self.target, self.device = spec, segment, name, target, device
        self.precision = spec.precision
        self.core = segment.core
        self.core_name = core_name(segment.core) if segment.core else ""
        self.folds = segment.core is not None and segment.core.operator.kind in (Kind.REDUCTION, Kind.POOL)
        self.result = value_name(spec, segment.last - 1)
        self.count = math.prod(segment.shape)
        self.sms = max(1, device.sms)

    @property
    def widest(self) -> int:
        return VECTOR_BYTES // self.precision.itemsize

    def way(self, grouping: Grouping) -> str:
        """The kernel that takes the groups: "rows", "columns" or "split"."""
        if grouping.form == "sandwich":
            return "split"
        if grouping.form == "rows":
            return "split" if grouping.groups * 2 < self.sms and grouping.joined >= 4 * SHARE_VALUES else "rows"
        runs = grouping.groups // math.gcd(self.widest, grouping.inner)
        return "split" if runs * SLICES < self.sms * THREADS and grouping.joined >= 1024 else "columns"

    # ---- programs ---------------------------------------------------------------------------------------------------

    def before(self, width: int) -> Program:
        return self._before(width).program()

    def _before(self, width: int) -> Statements:
        made = Statements(self.spec, self.segment, width)
        made.source()
        made.steps(self.segment.before)
        return made

    def after(self, width: int) -> Program:
        return self._after(width).program()

    def _after(self, width: int) -> Statements:
        made = Statements(self.spec, self.segment, width)
        if self.core is not None:
            self._core(made)
        made.steps(self.segment.after)
        return made

    def _core(self, made: Statements) -> None:
        if self.folds:
            if any(step.tap == self.core.index and not step.taps_itself for step in self.segment.after):
                made.keep(self.core)
        else:
            made.normalise(self.core)

    def kernel(self, kind: str, before: Program, after: Program, extra: Sequence[str] = (), results: Sequence[str] | None = None, **more) -> SegmentKernel:
        """A kernel whose file is named by its kind; `extra` are buffers that it reads behind the tensors of its programs."""
        tensors = tuple(dict.fromkeys((*before.tensors, *after.tensors)))
        running: Running | None = more.get("running")
        state = running.keys if running else ()
        outputs = [self.result] if results is None else list(results)
        outputs += [f"state:{key}" for key in state[:2]]
        template = f"segments/{'segment.cpp' if self.target.language == 'cpp' else kind + '.cu'}.j2"
        constants = tuple({c.name: c for c in (*more.pop("numbers", ()), *before.constants, *after.constants, *self.numbers())}.values())
        return SegmentKernel(
            name=f"{self.name}_{more.pop('label', kind)}", template=template,
            arguments=(*(tensor.argument for tensor in tensors), *extra, *state, *outputs), constants=constants,
            summary=f"{summary_of(self.segment)}: {more.pop('story')}", precision=self.precision, before=before, after=after, tensors=tensors,
            core=self.core_name, statistic=statistic_of(self.core_name) if self.core_name else "", folds=self.folds, **more,
        )  # fmt: skip

    def numbers(self) -> list[Constant]:
        """What the core's arithmetic needs."""
        if self.core is None:
            return []
        found, name = [], self.core.operator.name
        if self.core_name in ("group_norm", "rms_norm"):
            given = self.core.values["eps"]
            found.append(Constant("kEps", float_literal(EPSILON[self.precision.dtype] if given is None else given), f"{name}'s eps", "float"))
        running = self.running
        if running and running.momentum is not None:
            found.append(Constant("kMomentum", float_literal(running.momentum), f"{name}'s momentum: the share of the new statistics", "float"))
        return found

    @property
    def running(self) -> Running | None:
        core = self.core
        if core is None or core.operator.name != "batch_norm" or not core.buffers:
            return None
        momentum = core.values["momentum"]
        return Running(tuple(core.key(buffer) for buffer in core.buffers[: 3 if momentum is None else 2]), momentum)

    # ---- kernels ----------------------------------------------------------------------------------------------------

    def map(self, label: str, program: Program | None = None, width: int | None = None, extra: Sequence[str] = (), label_kind: str = "map") -> SegmentKernel:
        width = width or math.gcd(self.widest, self.count)
        program = program or self.before(width)
        runs = self.count // width
        items = 2 if runs >= 4 * self.sms * BUSY_THREADS else 1
        blocks = -(-runs // (THREADS * items))
        numbers = [
            Constant("kRuns", str(runs), "runs of neighbouring values"),
            Constant("kWidth", str(width), f"values of a run: {width * self.precision.itemsize} bytes"),
            Constant("kItems", str(items), "runs of a thread"),
            Constant("kThreads", str(THREADS), "threads of a block"),
            Constant("kBlocks", str(blocks), "kRuns / (kThreads x kItems)" + (", rounded up" if runs % (THREADS * items) else "")),
        ]
        made = self.kernel(
            "map", program, Program(), numbers=numbers, story="one pass", label=label_kind, width=width, items=items, threads=THREADS, blocks=blocks,
            ragged=runs % (THREADS * items) != 0, max_registers=register_limit(THREADS, 2), grouping=None,
        )  # fmt: skip
        return replace(made, core="", statistic="", folds=False)

    def rows(self, grouping: Grouping) -> SegmentKernel:
        joined, groups = grouping.joined, grouping.groups
        width = math.gcd(self.widest, joined)
        runs = joined // width
        lanes = 1
        while lanes < ROW_LANES and (lanes * ROW_RUNS < runs or (groups * lanes < self.sms * BUSY_THREADS and lanes * 2 <= runs)):
            lanes *= 2
        threads = max(lanes, THREADS)
        items = -(-runs // lanes)
        held = items * width <= (MOST_HELD if threads == ROW_LANES else HELD)
        if not held:
            items = max(1, 16 // width)
        teams = threads // lanes
        blocks = -(-groups // teams)
        numbers = [
            Constant("kGroups", str(groups), "groups, each in one piece"),
            Constant("kJoined", str(joined), "values of a group"),
            Constant("kWidth", str(width), f"values of a run: {width * self.precision.itemsize} bytes"),
            Constant("kRuns", str(runs), "kJoined / kWidth"),
            Constant("kLanes", str(lanes), "threads of a group"),
            Constant("kItems", str(items), "runs of a thread" + ("" if held else " at a time")),
            Constant("kThreads", str(threads), "threads of a block"),
            Constant("kTeams", str(teams), "kThreads / kLanes: groups of a block"),
            Constant("kWarps", str(-(-lanes // 32)), "warps of a group"),
            Constant("kBlocks", str(blocks), "kGroups / kTeams" + (", rounded up" if groups % teams else "")),
        ]
        result_width = 1 if self.folds else width
        return self.kernel(
            "rows", self.before(width), self.after(result_width), numbers=numbers, story="a team of threads a group" + ("" if held else ", read twice"),
            width=width, result_width=result_width, items=items, held=held, lanes=lanes, threads=threads, blocks=blocks, ragged=groups % teams != 0,
            uneven=runs % (lanes * items) != 0, grouping=grouping, running=self.running, max_registers=register_limit(threads, 1 if threads == ROW_LANES else 2),
        )  # fmt: skip

    def _columns_shape(self, grouping: Grouping) -> tuple[int, int, bool]:
        """(width, slices, held) of columns: the widest runs with which a group stays in registers."""
        fields = len(FIELDS[statistic_of(self.core_name)])
        widths = [width for width in (8, 4, 2, 1) if math.gcd(self.widest, grouping.inner) % width == 0]
        least = max(1, 4 // self.precision.itemsize)

        def slices_for(width: int, most: int) -> int:
            slices = 1
            while (
                slices < most
                and slices * 2 <= grouping.joined
                and (-(-grouping.joined // slices) * width > HELD or grouping.groups // width * slices < self.sms * BUSY_THREADS)
            ):
                slices *= 2
            return slices

        for width in widths:
            most = SLICES
            while most > 1 and most * 32 * width * fields * 4 > STATIC_SHARED:
                most //= 2
            slices = slices_for(width, most)
            limit = MOST_HELD if slices == SLICES else HELD
            if -(-grouping.joined // slices) * width <= limit and (width >= least or width == widths[-1]):
                return width, slices, True
        width = widths[min(1, len(widths) - 1)]
        return width, slices_for(width, SLICES if SLICES * 32 * width * fields * 4 <= STATIC_SHARED else SLICES // 2), False

    def columns(self, grouping: Grouping) -> SegmentKernel:
        width, slices, held = self._columns_shape(grouping)
        joined = grouping.joined
        lanes = max(32, THREADS // slices)
        columns = grouping.groups // width
        items = -(-joined // slices) if held else max(1, 16 // width)
        threads, blocks = lanes * slices, -(-columns // lanes)
        numbers = [
            Constant("kJoined", str(joined), "values of a group"),
            Constant("kInner", str(grouping.inner), "groups side by side: the step from a group's value to its next"),
            Constant("kWidth", str(width), "groups of a thread: neighbours"),
            Constant("kRuns", str(columns), f"{grouping.groups} groups / kWidth"),
            Constant("kLanes", str(lanes), "threads side by side"),
            Constant("kSlices", str(slices), "threads that share a group's values"),
            Constant("kItems", str(items), "values of a group in a thread" + ("" if held else " at a time")),
            Constant("kThreads", str(threads), "kLanes x kSlices"),
            Constant("kBlocks", str(blocks), "kRuns / kLanes" + (", rounded up" if columns % lanes else "")),
        ]
        return self.kernel(
            "columns", self.before(width), self.after(width), numbers=numbers, story="threads along the groups" + ("" if held else ", read twice"), width=width,
            result_width=width, items=items, held=held, lanes=lanes, slices=slices, threads=threads, blocks=blocks, ragged=columns % lanes != 0,
            uneven=joined % (slices * items) != 0, grouping=grouping, running=self.running,
            max_registers=register_limit(threads, 1 if threads == 512 else 2),
        )  # fmt: skip

    def split(self, grouping: Grouping) -> tuple[list[SegmentKernel], list[Buffer]]:
        """Partial statistics, their union, and unless that is all the values once more."""
        fields = FIELDS[statistic_of(self.core_name)]
        partial, shares = self._columns_partial(grouping) if grouping.form == "columns" else self._strided_partial(grouping)
        finished = FINISHED.get(self.core_name, ("value",))
        groups = grouping.groups
        buffers = [Buffer(partial.arguments[-1], (len(fields), shares, groups), "float32")]
        merged = self._merge(grouping, shares, partial.arguments[-1])
        if self.folds:
            return [partial, merged], buffers
        buffers.append(Buffer(merged.arguments[len(merged.arguments) - 1 - (2 if merged.running else 0)], (len(finished), groups), "float32"))
        return [partial, merged, self._apply(grouping, buffers[1].name)], buffers

    def _share_count(self, groups: int, joined: int) -> int:
        """Blocks that share a group."""
        return max(1, min(-(-4 * self.sms // groups), joined // SHARE_VALUES, 1024))

    def _strided_partial(self, grouping: Grouping) -> tuple[SegmentKernel, int]:
        width = math.gcd(self.widest, grouping.behind)
        runs = grouping.joined // width
        shares = self._share_count(grouping.groups, grouping.joined)
        share = -(-runs // shares)
        shares = -(-runs // share)
        items = max(1, 16 // width)
        blocks = grouping.groups * shares
        numbers = [
            Constant("kGroups", str(grouping.groups), "groups"),
            Constant("kBefore", str(grouping.before), "pieces of a group"),
            Constant("kInner", str(grouping.inner), "groups whose pieces alternate"),
            Constant("kBehind", str(grouping.behind), "values of a piece"),
            Constant("kWidth", str(width), f"values of a run: {width * self.precision.itemsize} bytes"),
            Constant("kRuns", str(runs), "runs of a group"),
            Constant("kShares", str(shares), "blocks of a group"),
            Constant("kShare", str(share), "runs of a block" + (", at most" if runs % share else "")),
            Constant("kItems", str(items), "runs of a thread at a time"),
            Constant("kThreads", str(THREADS), "threads of a block"),
            Constant("kWarps", str(THREADS // 32), "kThreads / 32"),
            Constant("kBlocks", str(blocks), "kGroups x kShares"),
        ]
        made = self.kernel(
            "partial", self.before(width), Program(), results=(f"{self.name}:partial",), numbers=numbers, story="partial statistics of blocks that share a group",
            width=width, items=items, lanes=THREADS, threads=THREADS, blocks=blocks, uneven=True, grouping=grouping, writes="partial", partial="strided",
            max_registers=register_limit(THREADS, 2),
        )  # fmt: skip
        return made, shares

    def _columns_partial(self, grouping: Grouping) -> tuple[SegmentKernel, int]:
        width = math.gcd(self.widest, grouping.inner)
        fields = len(FIELDS[statistic_of(self.core_name)])
        while width > 1 and SLICES * 32 * width * fields * 4 > STATIC_SHARED:
            width //= 2
        lanes, columns = 32, grouping.groups // width
        tiles = -(-columns // lanes)
        shares = max(1, min(-(-2 * self.sms // tiles), grouping.joined // (SLICES * 8), 1024))
        share = -(-grouping.joined // shares)
        shares = -(-grouping.joined // share)
        items = max(1, 16 // width)
        blocks, threads = tiles * shares, lanes * SLICES
        numbers = [
            Constant("kGroups", str(grouping.groups), "groups"),
            Constant("kJoined", str(grouping.joined), "values of a group"),
            Constant("kInner", str(grouping.inner), "groups side by side: the step from a group's value to its next"),
            Constant("kWidth", str(width), "groups of a thread: neighbours"),
            Constant("kRuns", str(columns), f"{grouping.groups} groups / kWidth"),
            Constant("kLanes", str(lanes), "threads side by side"),
            Constant("kSlices", str(SLICES), "threads that share a group's values"),
            Constant("kItems", str(items), "values of a group in a thread at a time"),
            Constant("kTiles", str(tiles), "kRuns / kLanes" + (", rounded up" if columns % lanes else "")),
            Constant("kShares", str(shares), "blocks of a group"),
            Constant("kShare", str(share), "values of a group in a block" + (", at most" if grouping.joined % share else "")),
            Constant("kThreads", str(threads), "kLanes x kSlices"),
            Constant("kBlocks", str(blocks), "kTiles x kShares"),
        ]
        made = self.kernel(
            "columns", self.before(width), Program(), results=(f"{self.name}:partial",), numbers=numbers, story="partial statistics of blocks that share groups",
            label="partial", width=width, items=items, held=False, lanes=lanes, slices=SLICES, threads=threads, blocks=blocks, ragged=columns % lanes != 0,
            uneven=True, grouping=grouping, writes="partial", partial="columns", max_registers=register_limit(threads, 2),
        )  # fmt: skip
        return made, shares

    def _merge(self, grouping: Grouping, shares: int, partial: str) -> SegmentKernel:
        groups, teams = grouping.groups, THREADS // 32
        blocks = -(-groups // teams)
        numbers = [
            Constant("kGroups", str(groups), "groups"),
            Constant("kJoined", str(grouping.joined), "values of a group"),
            Constant("kShares", str(shares), "partial statistics of a group"),
            Constant("kThreads", str(THREADS), "threads of a block"),
            Constant("kTeams", str(teams), "warps of a block: groups"),
            Constant("kBlocks", str(blocks), "kGroups / kTeams" + (", rounded up" if groups % teams else "")),
        ]
        after = self.after(1) if self.folds else Program()
        results = None if self.folds else (f"{self.name}:finished",)
        return self.kernel(
            "merge", Program(), after, extra=(partial,), results=results, numbers=numbers, story="the union of partial statistics, a warp a group", lanes=32,
            threads=THREADS, blocks=blocks, ragged=groups % teams != 0, grouping=grouping, writes="output" if self.folds else "finished", reads_partial=True,
            running=self.running, max_registers=register_limit(THREADS, 2),
        )  # fmt: skip

    def _apply(self, grouping: Grouping, finished: str) -> SegmentKernel:
        """The pass over the values that normalises them, from finished statistics."""
        width = math.gcd(self.widest, self.count)
        made = Statements(self.spec, self.segment, width)
        made.source()
        made.steps(self.segment.before)
        at = len(made.lines)
        made.normalise(self.core)
        made.steps(self.segment.after)
        program = made.program()
        tensor = Tensor(finished, "finished", statistics=True)
        accesses, names = [], {}
        for number, field in enumerate(FINISHED[self.core_name]):
            found = statistics_access(tensor, grouping, width)
            shift = f"{number * grouping.groups} + " if number else ""
            names[field] = f"s_{field}"
            accesses.append(replace(found, value=names[field], offset=shift + found.offset))
        if any(found.mode == "vector" for found in accesses) and (grouping.groups % width or width > 4):
            accesses = [replace(found, mode="element") for found in accesses]  # the second number of a group begins anywhere
        lines = program.lines[:at] + tuple(_named(line, names) for line in program.lines[at:])
        return self._with_core(self.map("", replace(program, accesses=(*program.accesses, *accesses), lines=lines), width, label_kind="apply"))

    def _with_core(self, kernel: SegmentKernel) -> SegmentKernel:
        return replace(kernel, core=self.core_name)

    def windows(self, window: Window) -> SegmentKernel:
        outputs = math.prod(self.core.output_shape)
        width = self._window_access(window)
        windows = max(1, width // window.size[2])  # of a thread: neighbours
        runs = outputs // windows
        blocks = -(-runs // THREADS)
        numbers = [
            *self._window_numbers(window, outputs),
            Constant("kAccess", str(width), "values of one access"),
            Constant("kRun", str(windows), "neighbouring windows of a thread"),
            Constant("kRuns", str(runs), "kOutputs / kRun"),
            Constant("kThreads", str(THREADS), "threads of a block"),
            Constant("kBlocks", str(blocks), "kRuns / kThreads" + (", rounded up" if runs % THREADS else "")),
        ]
        made = self.kernel(
            "windows", self.before(width), self.after(windows), numbers=numbers, story="a thread a window" if windows == 1 else f"a thread {windows} windows",
            threads=THREADS, blocks=blocks, ragged=runs % THREADS != 0, width=width, result_width=windows, window=window,
            divisor=divisor_of(window) if window.average else "", max_registers=register_limit(THREADS, 2),
        )  # fmt: skip
        return replace(made, core="windows", statistic="sum" if window.average else "max")

    def _window_access(self, window: Window) -> int:
        """Values of one access: those of whole windows side by side where these share none and leave none out, else 1."""
        size = window.size[2]
        apart = size == window.stride[2] and window.dilation[2] == 1 and not window.clipped(2) and window.output[2] * size == window.input[2]
        width = math.gcd(self.widest, window.input[2])
        return width if apart and width % size == 0 and not (window.average and window.clipped_anywhere) else 1

    def _window_numbers(self, window: Window, outputs: int) -> list[Constant]:
        name = self.core.operator.name
        numbers = [Constant("kOutputs", str(outputs), "results")]
        for axis, word in enumerate(AXES):
            numbers += [
                Constant(f"k{word}", str(window.input[axis]), f"{word.lower()} of what comes in"),
                Constant(f"kPooled{word}", str(window.output[axis]), f"{word.lower()} of the result"),
                Constant(f"kWindow{word}", str(window.size[axis]), f"{name}'s kernel size"),
                Constant(f"kStride{word}", str(window.stride[axis]), f"{name}'s stride"),
                Constant(f"kPadding{word}", str(window.padding[axis]), f"{name}'s padding"),
                Constant(f"kDilation{word}", str(window.dilation[axis]), f"{name}'s dilation"),
            ]
        return numbers

    # ---- the CPU ----------------------------------------------------------------------------------------------------

    def cpu(self) -> list[SegmentKernel]:
        """One C++ function for the whole segment."""
        grouping = grouping_of(self.core) if self.core else None
        if self.core is None:
            return [self._cpu("map", None, self.count, CPU_PIECE)]
        if grouping is None:
            window = window_of(self.core)
            outputs = math.prod(self.core.output_shape)
            made = self.kernel(
                "windows", self.before(1), self.after(1), numbers=[*self._window_numbers(window, outputs), Constant("kPiece", "1", "values at a time")],
                story="window by window", partial="windows", window=window, divisor=divisor_of(window) if window.average else "",
                parallel=self.count >= PARALLEL_VALUES,
            )  # fmt: skip
            return [replace(made, core="windows", statistic="sum" if window.average else "max", folds=True)]
        if grouping.form == "columns":
            return [self._cpu("columns", grouping, grouping.inner, COLUMNS_PIECE)]
        return [self._cpu("rows", grouping, grouping.behind, CPU_PIECE)]

    def _cpu(self, form: str, grouping: Grouping | None, line: int, most: int) -> SegmentKernel:
        """`line`: neighbouring values, which are taken in pieces of at most `most` along which every tensor is read in one way."""
        runs = self._before(1).runs + (self._after(1).runs if self.core and (form == "columns" or not self.folds) else [])
        stretch = math.gcd(line, *(run for run in runs if run >= SHORT_RUN))
        if stretch < SHORT_RUN:
            stretch = line
        piece = min(stretch, most)
        per_stretch = -(-stretch // piece)
        pieces = line // stretch * per_stretch
        numbers = [
            Constant("kStretch", str(stretch), "neighbouring values, for which each tensor is read in one way"),
            Constant("kPiece", str(piece), "values at a time"),
            Constant("kPerStretch", str(per_stretch), "pieces of a stretch"),
            Constant("kPieces", str(pieces), "pieces of a line"),
        ]
        shares, held = 1, False
        if grouping is not None:
            numbers += [
                Constant("kOuter", str(grouping.outer), "groups that lie apart"),
                Constant("kBefore", str(grouping.before), "lines of a group"),
                Constant("kInner", str(grouping.inner), "groups whose lines alternate"),
                Constant("kBehind", str(grouping.behind), "neighbouring values of a group"),
                Constant("kGroups", str(grouping.groups), "groups"),
                Constant("kJoined", str(grouping.joined), "values of a group"),
            ]
            held = grouping.joined * (piece if form == "columns" else 1) <= CPU_HELD and not self.folds
            if form == "rows" and grouping.groups < CPU_GROUPS and self.count >= PARALLEL_VALUES:
                whole = grouping.before * pieces
                share = max(1, whole // min(whole, -(-CPU_GROUPS // grouping.groups)))
                shares = whole // share
                numbers += [
                    Constant("kShares", str(shares), "parts of a group's pieces, for as many threads"),
                    Constant("kShare", str(share), "pieces of a part, but for the last"),
                ]
        width = stretch
        return self.kernel(
            form, self.before(width), self.after(1 if form == "rows" and self.folds else width) if self.core else Program(), numbers=numbers,
            story={"map": "one pass", "rows": "group by group", "columns": "groups side by side"}[form], partial=form, grouping=grouping, held=held and shares == 1,
            slices=shares, running=self.running, parallel=self.count >= PARALLEL_VALUES,
        )  # fmt: skip


AXES = ("Depth", "Height", "Width")


def _named(line: str, names: dict[str, str]) -> str:
    for field, name in sorted(names.items(), key=lambda item: -len(item[0])):
        line = line.replace(f"stat_{field}", name)
    return line


def divisor_of(window: Window) -> str:
    """C: what a window's sum is divided by, from the window's first places `depth`, `height` and `width`."""
    if window.divisor:
        return str(window.divisor)
    extents = []
    for axis, word in enumerate(AXES):
        first, size = f"first_{word.lower()}", f"k{word}"
        beyond = window.last(axis) > window.input[axis] + window.padding[axis]
        if not window.clipped(axis) or (window.counts_padding and not beyond):
            extents.append(f"kWindow{word}")
        elif window.counts_padding:
            extents.append(f"(least({first} + kWindow{word}, {size} + kPadding{word}) - {first})")
        else:
            extents.append(f"(least({first} + kWindow{word}, {size}) - most({first}, 0))")
    return " * ".join(extents)
