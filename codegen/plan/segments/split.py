"""The CUDA kernels that share groups: partial statistics, their union, and a pass that applies it (see route.py)."""

from __future__ import annotations

import math
from dataclasses import replace

from codegen.ir.apply import Constant, rounded
from codegen.ir.grouping import Grouping
from codegen.plan.model import Buffer
from codegen.plan.segments.cuda import SHARE_VALUES, SLICES, STATIC_SHARED, THREADS, Whole
from codegen.plan.segments.kernel import FIELDS, FINISHED, SegmentKernel, statistic_of
from codegen.plan.segments.program import Program, Statements, Tensor, statistics_access
from codegen.plan.shared.values import register_limit


class Shared(Whole):
    """All CUDA kernels of segments."""

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
        shares = max(1, min(2 * self.sms // tiles, grouping.joined // (SLICES * 8), 1024))  # no more than one wave, two blocks an SM
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
            Constant("kTiles", str(tiles), "kRuns / kLanes" + rounded(columns % lanes != 0)),
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
            Constant("kBlocks", str(blocks), "kGroups / kTeams" + rounded(groups % teams != 0)),
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
        if any(found.mode == "vector" for found in accesses) and grouping.groups % min(width, 4):
            accesses = [replace(found, mode="element") for found in accesses]  # the second number of a group begins anywhere
        lines = program.lines[:at] + tuple(_named(line, names) for line in program.lines[at:])
        return replace(self.map(replace(program, accesses=(*program.accesses, *accesses), lines=lines), width, "apply"), core=self.core_name)


def _named(line: str, names: dict[str, str]) -> str:
    for field, name in sorted(names.items(), key=lambda item: -len(item[0])):
        line = line.replace(f"stat_{field}", name)
    return line
