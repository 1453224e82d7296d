"""The kernels of segments as data: what templates/segments/* read."""

from __future__ import annotations

import re
from dataclasses import dataclass

from codegen.ir.grouping import Grouping
from codegen.ir.segment import Segment
from codegen.ir.window import Window
from codegen.numerics import Precision
from codegen.ops import Kind
from codegen.plan.model import Kernel
from codegen.plan.segments.program import Program, Tensor
from codegen.spec import Step
from codegen.targets import Target

# What is kept of a set of values while it grows, and what is made of it at the end, by statistic; field by field.
FIELDS = {
    "moments": ("count", "mean", "mean_rest", "m2"),
    "squares": ("sum", "rest"),
    "exponentials": ("top", "sum"),
    "sum": ("sum", "rest"),
    "min": ("best",),
    "max": ("best",),
}
FINISHED = {
    "group_norm": ("mean", "mean_rest", "rstd"), "rms_norm": ("rstd",), "softmax": ("top", "scale"), "log_softmax": ("top", "scale"),
}  # fmt: skip


def core_name(core: Step) -> str:
    """The name under which templates know a core: norms by moments are one, and so are minimum and amin."""
    name = core.operator.name
    if core.operator.kind is Kind.POOL:  # over whole planes
        return "max" if name.startswith("max") else "mean"
    if core.operator.kind is Kind.NORM and name != "rms_norm":
        return "group_norm"
    return name.removeprefix("a") if name in ("amin", "amax") else name


def statistic_of(core: str) -> str:
    """What is kept of a group's values for a core."""
    return {
        "group_norm": "moments", "rms_norm": "squares", "softmax": "exponentials", "log_softmax": "exponentials", "logsumexp": "exponentials", "mean": "sum",
    }.get(core, core)  # fmt: skip


@dataclass(frozen=True)
class Running:
    """New running statistics: keys of mean and variance, and of the count of batches where that is needed; the momentum, None for the mean over all so far."""

    keys: tuple[str, ...]
    momentum: float | None


@dataclass(frozen=True, kw_only=True)
class SegmentKernel(Kernel):
    """What templates/segments/* read.

    `before` makes the values that the core takes from what the segment reads, `after` goes on from the core's result, both for runs of neighbouring
    values: `width` of them, `result_width` behind a core that folds. `core` names the core and `statistic` what is kept of a group; `folds`: one
    result a group. `writes` and `reads_statistics` tell of kernels that share groups: partial statistics, finished ones.
    """

    precision: Precision
    stored: Precision  # the type of the result
    before: Program
    after: Program
    core: str = ""
    statistic: str = ""
    folds: bool = False
    grouping: Grouping | None = None
    window: Window | None = None
    running: Running | None = None
    tensors: tuple[Tensor, ...] = ()
    writes: str = "output"  # "partial" or "finished"
    reads_partial: bool = False
    width: int = 1
    result_width: int = 1
    items: int = 1  # runs that a thread holds at a time
    held: bool = True  # does a group stay in registers?
    lanes: int = 1
    slices: int = 1
    ragged: bool = False
    uneven: bool = False  # do threads hold different numbers of runs?
    partial: str = ""  # "strided" or "columns": the values of a partial kernel's share
    divisor: str = ""
    parallel: bool = True

    def file(self, target: Target) -> str:
        return f"{self.name}_{target.suffix}.{'cu' if target.language == 'cuda' else 'cpp'}"

    @property
    def fields(self) -> tuple[str, ...]:
        return FIELDS[self.statistic]

    @property
    def finished(self) -> tuple[str, ...]:
        """What is made of a group's statistics."""
        return FINISHED.get(self.core, ("value",))

    @property
    def functions(self) -> tuple[str, ...]:
        """The C functions that the programs and the core call."""
        core = ("exponential",) if self.statistic == "exponentials" or self.core == "softmax" else ()
        return (*self.before.functions, *self.after.functions, *core)

    @property
    def subtracts(self) -> bool:
        """Whether a mean is subtracted here."""
        return any("minus(" in line for program in self.programs for line in program.lines)

    @property
    def programs(self) -> tuple[Program, ...]:
        return (self.before, self.after)

    def _parameters(self, types: tuple[str, str, str], restrict: str = "") -> list[str]:
        storage, count, result = types
        listed = [f"const {'float' if tensor.statistics else storage}* {restrict}{tensor.pointer}" for tensor in self.tensors]
        if self.reads_partial:
            listed.append(f"const float* {restrict}partial")
        if self.running:
            listed += [f"const {storage}* {restrict}running_mean", f"const {storage}* {restrict}running_variance"]
            listed += [f"const {count}* {restrict}batches"] if self.running.momentum is None else []
        listed += [f"float* {restrict}{self.writes}"] if self.writes != "output" else [f"{result}* {restrict}output"]
        if self.running:
            listed += [f"{storage}* {restrict}new_mean", f"{storage}* {restrict}new_variance"]
        return listed

    def parameters(self, restrict: str = "") -> list[str]:
        """C parameters in CUDA."""
        return self._parameters((self.precision.c_type, "int64_t", self.stored.c_type), restrict)

    @property
    def cpu_parameters(self) -> list[str]:
        storage, result = ("std::uint16_t" if precision.itemsize == 2 else "float" for precision in (self.precision, self.stored))
        return self._parameters((storage, "std::int64_t", result))

    @property
    def names(self) -> list[str]:
        return [parameter.split()[-1] for parameter in self.parameters()]

    def row_parameters(self, storage: str) -> list[str]:
        """C++ parameters for the tensors of what goes over a group's values a second time."""
        return [f"const {storage}* {tensor.pointer}" for tensor in self.row_tensors]

    def row_names(self) -> str:
        return "".join(f", {tensor.pointer}" for tensor in self.row_tensors)

    @property
    def row_tensors(self) -> tuple[Tensor, ...]:
        return tuple(dict.fromkeys((*(() if self.held else self.before.tensors), *self.after.tensors)))

    def finished_of(self, text: str) -> list[str]:
        """C++: the finished numbers of group `e` from arrays of statistics, of which `text` has one group's."""
        arrays = re.sub(r"\b(mean|m2|sum|top|best)\b", r"\1[e]", text)
        return re.split(r", (?=static_cast|std::|top|best)", arrays)

    @property
    def half(self) -> bool:
        return self.precision.itemsize == 2

    @property
    def dtype(self) -> str:
        """The storage type, for templates that are shared."""
        return self.precision.dtype

    def loads(self) -> list[tuple[bool, list[int]]]:
        """(of our own floats?, widths) of the vectors that are read."""
        found: dict[bool, set[int]] = {False: set(), True: set()}
        for program, width in ((self.before, self.width), (self.after, self.result_width)):
            for access in program.accesses:
                if access.mode == "vector":
                    found[access.tensor.statistics].add(width)
        return [(own, sorted(widths)) for own, widths in found.items() if widths]

    @property
    def reads_scalars(self) -> bool:
        """Whether storage values are read one by one."""
        return any(access.mode != "vector" and not access.tensor.statistics for program in self.programs for access in program.accesses) or bool(self.running)


def summary_of(segment: Segment) -> str:
    """The segment in one line."""
    return " -> ".join(step.operator.name for step in segment.steps)
