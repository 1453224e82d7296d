"""The CUDA kernels that hold whole groups: map, rows, columns and windows (see route.py)."""

from __future__ import annotations

import math
from dataclasses import replace

from codegen.ir.apply import Constant, rounded
from codegen.ir.grouping import Grouping
from codegen.ir.window import Window
from codegen.plan.segments.kernel import FIELDS, SegmentKernel, statistic_of
from codegen.plan.segments.planner import Planner, divisor_of
from codegen.plan.segments.program import Program
from codegen.plan.shared.values import register_limit

THREADS = 256  # of a block
ROW_RUNS = 4  # that a lane of a row takes, about
HELD, MOST_HELD = 32, 64  # values of a group in a thread's registers; the second in blocks of 512 threads, which may use 128
ROW_LANES = 512  # threads of a row, at most
SLICES = 16  # of columns, at most
BUSY_THREADS = 1024  # on an SM
SHARE_VALUES = 4096  # of a block that shares a group, at least
STATIC_SHARED = 48 * 1024


class Whole(Planner):
    """Kernels that hold whole groups."""

    def way(self, grouping: Grouping) -> str:
        """The kernel that takes the groups: "rows", "columns" or "split"."""
        if grouping.form == "sandwich":
            return "split"
        if grouping.form == "rows":
            return "split" if grouping.groups * 2 < self.sms and grouping.joined >= 4 * SHARE_VALUES else "rows"
        runs = grouping.groups // math.gcd(self.widest, grouping.inner)
        return "split" if runs * SLICES < self.sms * THREADS and grouping.joined >= 1024 else "columns"

    def map(self, program: Program | None = None, width: int | None = None, label: str = "map") -> SegmentKernel:
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
            Constant("kBlocks", str(blocks), "kRuns / (kThreads x kItems)" + rounded(runs % (THREADS * items) != 0)),
        ]
        made = self.kernel(
            "map", program, Program(), numbers=numbers, story="one pass", label=label, width=width, items=items, threads=THREADS, blocks=blocks,
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
            Constant("kBlocks", str(blocks), "kGroups / kTeams" + rounded(groups % teams != 0)),
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
            Constant("kBlocks", str(blocks), "kRuns / kLanes" + rounded(columns % lanes != 0)),
        ]
        return self.kernel(
            "columns", self.before(width), self.after(width), numbers=numbers, story="threads along the groups" + ("" if held else ", read twice"), width=width,
            result_width=width, items=items, held=held, lanes=lanes, slices=slices, threads=threads, blocks=blocks, ragged=columns % lanes != 0,
            uneven=joined % (slices * items) != 0, grouping=grouping, running=self.running,
            max_registers=register_limit(threads, 1 if threads == 512 else 2),
        )  # fmt: skip

    def windows(self, window: Window) -> SegmentKernel:
        outputs = math.prod(self.core.output_shape)
        width = self._window_access(window)
        windows = max(1, width // window.size[2])  # of a thread: neighbours
        runs = outputs // windows
        blocks = -(-runs // THREADS)
        numbers = [
            *self.window_numbers(window, outputs),
            Constant("kAccess", str(width), "values of one access"),
            Constant("kRun", str(windows), "neighbouring windows of a thread"),
            Constant("kRuns", str(runs), "kOutputs / kRun"),
            Constant("kThreads", str(THREADS), "threads of a block"),
            Constant("kBlocks", str(blocks), "kRuns / kThreads" + rounded(runs % THREADS != 0)),
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
