"""The element-wise operators of a segment as C statements on neighbouring values, and how each tensor that they read meets those."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from codegen.ir.apply import Constant, applies, describe
from codegen.ir.operand import c_identifier
from codegen.ir.grouping import Grouping
from codegen.ir.segment import Segment, evaluates
from codegen.ir.value import input_of, result_of
from codegen.numerics import float_literal
from codegen.ops import Kind, Shape
from codegen.plan.stages.kernel import element_offset
from codegen.spec import Spec, Step

_INDEX = re.compile(r"\bindex\b")


@dataclass(frozen=True)
class Tensor:
    """A tensor that a kernel reads: `argument` as plans name it, `pointer` its C name; `statistics` are floats of our own."""

    argument: str
    pointer: str
    statistics: bool = False


@dataclass(frozen=True)
class Access:
    """The part of a tensor that a run of neighbouring values meets.

    `mode` is "vector" (one after the other, aligned as the run is), "uniform" (one for all) or "element" (found one by one); `offset` is the C
    expression of the first one's place, from the flat `index` of the run's first value; `value` the C name of what is read.
    """

    tensor: Tensor
    value: str
    offset: str
    mode: str

    @property
    def element_offset(self) -> str:
        """The place of the run's element `e`."""
        return _INDEX.sub("(index + e)", self.offset)


@dataclass(frozen=True)
class Program:
    """`lines` are C statements on `v`, the values that `accesses` read, and `{stat}`, the statistics' struct; `functions` are the C functions that they call."""

    accesses: tuple[Access, ...] = ()
    lines: tuple[str, ...] = ()
    functions: tuple[str, ...] = ()
    constants: tuple[Constant, ...] = ()

    def text(self, language: str, stat: str) -> tuple[str, ...]:
        """The statements for element `e` of a run; `stat` is a format of the statistics: "f.{0}", or "f[e].{0}"."""
        names = {access.value: self._use(access, language) for access in self.accesses}
        words = re.compile(r"\b(" + "|".join(map(re.escape, names)) + r")\b") if names else None
        lines = (re.sub(r"\bstat_(\w+)\b", lambda found: stat.format(found[1]), line) for line in self.lines)
        return tuple(_outside_comment(line, lambda code: words.sub(lambda found: names[found[1]], code) if words else code) for line in lines)

    @staticmethod
    def _use(access: Access, language: str) -> str:
        if access.mode == "uniform":
            return access.value
        if language == "cpp" and access.mode == "vector" and not access.tensor.statistics:
            return f"read({access.value}[e])"
        return f"{access.value}[e]"

    @property
    def indexed(self) -> bool:
        """Whether any place depends on the index."""
        return any(_INDEX.search(access.offset) for access in self.accesses)

    def cuda_parameters(self, c_type: str) -> list[str]:
        """C parameters for the tensors, of the storage type `c_type`."""
        return [f"const {'float' if tensor.statistics else c_type}* {tensor.pointer}" for tensor in self.tensors]

    def pointer_names(self) -> str:
        """The same tensors as a call goes on with them."""
        return "".join(f", {tensor.pointer}" for tensor in self.tensors)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(dict.fromkeys(access.tensor for access in self.accesses))


def _outside_comment(line: str, change) -> str:
    code, mark, comment = line.partition("  //")
    return change(code) + mark + comment


def run_of(shape: Shape, whole: Shape) -> tuple[int, str]:
    """(length, mode) of the longest aligned runs of `whole`'s flat index along which a tensor of `shape`, broadcast to it, is one mode of access."""
    own = (1,) * (len(whole) - len(shape)) + tuple(shape)
    length, mode = 1, ""
    for mine, all_of in zip(reversed(own), reversed(whole), strict=True):
        if all_of == 1:
            continue
        kind = "vector" if mine == all_of else "uniform"
        if mode and kind != mode:
            break
        mode, length = kind, length * all_of
    return length, mode or "uniform"


def access(tensor: Tensor, shape: Shape, whole: Shape, width: int) -> Access:
    """How runs of `width` values of `whole` meet a tensor of `shape`."""
    length, mode = run_of(shape, whole)
    if width == 1 and mode == "vector":
        mode = "uniform"
    offset = "index" if math.prod(shape) == math.prod(whole) else element_offset(shape, whole)
    return Access(tensor, _value(tensor, offset), offset, mode if length % width == 0 else "element")


def _value(tensor: Tensor, offset: str) -> str:
    """The C name of what is read at an offset: one tensor may be read at two."""
    spot = "" if offset == "index" else "_" + re.sub(r"\W+", "_", offset.replace("/", "by").replace("%", "of").replace("*", "x").replace("+", "and"))
    return f"c_{tensor.pointer}{spot}"


class Statements:
    """Collects a program for runs of `width` values, step by step."""

    def __init__(self, spec: Spec, segment: Segment, width: int) -> None:
        self.spec, self.segment, self.width = spec, segment, width
        self.accesses: dict[str, Access] = {}
        self.runs: list[int] = []  # along which an access is one mode
        self.lines: list[str] = []
        self.functions: list[str] = []
        self.constants: dict[str, Constant] = {}

    def program(self) -> Program:
        return Program(tuple(self.accesses.values()), tuple(self.lines), tuple(self.functions), tuple(self.constants.values()))

    def read(self, tensor: Tensor, shape: Shape, whole: Shape) -> str:
        """Read a tensor that is broadcast to `whole`; the C name of its value."""
        found = access(tensor, shape, whole, self.width)
        self.accesses[found.value] = found
        self.runs.append(run_of(shape, whole)[0])
        return found.value

    def source(self) -> None:
        """Begin with what comes into the segment."""
        first = self.segment.steps[0]
        enlarges = first.operator.kind is Kind.ELEMENTWISE and first.output_shape != first.input_shape
        shape = first.input_shape if enlarges else self.segment.shape
        self.lines.append(f"v = {self.read(result_tensor(self.spec, self.segment.first - 1), shape, self.segment.shape)};")

    def steps(self, steps: Sequence[Step]) -> None:
        taken = {step.tap for step in self.segment.steps if step.tap is not None and not step.taps_itself}
        for step in steps:
            self._step(step)
            if step.index in taken and step.index < self.segment.last - 1:
                self.keep(step)

    def keep(self, step: Step) -> None:
        self.lines.append(f"const float kept_{step.index} = v;")

    def _step(self, step: Step) -> None:
        if evaluates(step, self.segment.training):
            return self._evaluate(step)
        if step.operator.kind is not Kind.ELEMENTWISE:
            return None
        other = self._other(step)
        if other is None:
            (item,) = applies(self.spec, (step,))
            self.functions += item.functions
            self.constants |= {constant.name: constant for constant in item.constants}
            text = item.apply("v")
        else:
            text = step.operator.expression.format(v="v", p=other)
            if step.operator.function is not None:
                self.functions.append(step.operator.function(step.values))
        self.lines.append(f"v = {text};  // {describe(step)}")

    def _other(self, step: Step) -> str | None:
        """The C name of the second value that a step takes; None without one."""
        whole = step.output_shape
        if step.taps_itself:
            return "v"
        if step.tap is not None and step.tap >= self.segment.first:
            return f"kept_{step.tap}"
        if step.tap is not None:
            return self.read(result_tensor(self.spec, step.tap), result_of(self.spec, step.tap).shape, whole)
        if step.reads is not None:
            given = input_of(self.spec, step.reads)
            return self.read(Tensor(given.name, "t_x" if given.name == "x" else f"in_{step.reads}"), given.shape, whole)
        if step.operand is None:
            return None
        key, shape = step.operand
        return self.learned(key, shape, whole)

    def parameter(self, step: Step, number: int, shape: Shape, whole: Shape) -> str:
        return self.learned(step.key(step.parameters[number]), shape, whole)

    def learned(self, key: str, shape: Shape, whole: Shape) -> str:
        """The C name of a parameter's value, of which `shape` is the form that meets a value of shape `whole`."""
        return self.read(Tensor(key, f"p_{c_identifier(key)}", statistics=key in self.spec.singles), shape, whole)

    def _evaluate(self, step: Step) -> None:
        """Normalise by running statistics."""
        whole = step.output_shape
        shape = (step.input_shape[1], *(1,) * (len(whole) - 2))
        mean, variance = (self.read(Tensor(step.key(buffer), f"p_{c_identifier(step.key(buffer))}"), shape, whole) for buffer in step.buffers[:2])
        eps = self.eps(step, step.values["eps"])
        self.lines.append(f"v = (v - {mean}) * (1.0f / sqrtf({variance} + {eps}));  // {describe(step)}")
        self.affine(step)

    def eps(self, step: Step, value: float) -> str:
        name = f"kEps{step.index}"
        self.constants[name] = Constant(name, float_literal(value), f"{step.operator.name}'s eps", "float")
        return name

    def affine(self, step: Step) -> None:
        """gamma and beta of a norm, where it has them."""
        whole, rank = step.output_shape, len(step.output_shape)
        shapes = [p.shape if step.operator.name in ("layer_norm", "rms_norm") else (*p.shape, *(1,) * (rank - 2)) for p in step.parameters]
        names = [self.parameter(step, number, shape, whole) for number, shape in enumerate(shapes)]
        if len(names) == 2:
            self.lines.append(f"v = v * {names[0]} + {names[1]};")
        elif names:
            self.lines.append(f"v = v * {names[0]};")

    def normalise(self, core: Step) -> None:
        """What a norm or softmax does to a value, its group's statistics known."""
        name = core.operator.name
        if name in ("softmax", "log_softmax"):
            self.lines.append("v = exponential(v - stat_top) * stat_scale;" if name == "softmax" else "v = (v - stat_top) - stat_scale;")
        elif name == "rms_norm":
            self.lines.append("v = v * stat_rstd;")
            self.affine(core)
        else:
            self.lines.append("v = (minus(v, stat_mean) - stat_mean_rest) * stat_rstd;")
            self.affine(core)
        if any(step.tap == core.index and not step.taps_itself for step in self.segment.after):
            self.keep(core)


def result_tensor(spec: Spec, place: int) -> Tensor:
    """The result of the step in `place`, as later kernels read it; what comes in for -1."""
    return Tensor(result_of(spec, place).name, "t_x" if place < 0 else f"t_{place}")


def statistics_access(tensor: Tensor, grouping: Grouping, width: int) -> Access:
    """How runs of values meet a number for each group."""
    return access(tensor, (grouping.outer, 1, grouping.inner, 1), grouping.shape, width)
