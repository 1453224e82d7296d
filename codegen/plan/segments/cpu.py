"""The C++ of segments: one function each."""

from __future__ import annotations

import math
from dataclasses import replace

from codegen.ir.apply import Constant
from codegen.ir.grouping import Grouping
from codegen.plan.segments.kernel import SegmentKernel
from codegen.plan.segments.planner import Planner, divisor_of
from codegen.plan.segments.program import Program

CPU_PIECE, COLUMNS_PIECE = 1024, 128  # values that C++ takes at a time
CPU_HELD = 16384  # values of a group that C++ keeps
CPU_GROUPS = 64  # fewer are shared by threads
SHORT_RUN = 16  # shorter runs are read value by value
PARALLEL_VALUES = 32768  # fewer are not worth a second thread


class Processor(Planner):
    """C++ functions of segments."""

    def cpu(self) -> list[SegmentKernel]:
        """One C++ function for the whole segment."""
        grouping, window = self.segment.grouping, self.segment.window
        if self.core is None:
            return [self._cpu("map", None, self.count, CPU_PIECE)]
        if window is not None:
            outputs = math.prod(self.core.output_shape)
            made = self.kernel(
                "windows", self.before(1), self.after(1), numbers=[*self.window_numbers(window, outputs), Constant("kPiece", "1", "values at a time")],
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
