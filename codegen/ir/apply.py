"""A chain's element-wise operators as templates see them: named constants, per-channel parameters and one line of C each."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

from codegen.ir.operand import Operand, operand_of
from codegen.numerics import SMALLEST, Precision, constant, float_literal, to_float32
from codegen.ops import Kind
from codegen.ops.derivative import Derivative
from codegen.spec import Spec, Step


@dataclass(frozen=True)
class Constant:
    """`constexpr <c_type> <name> = <text>;  // <why>`"""

    name: str
    text: str
    why: str
    c_type: str = "int"

    def __str__(self) -> str:
        return f"constexpr {self.c_type} {self.name} = {self.text};  // {self.why}"


def rounded(up: bool) -> str:
    """What the derivation of a quotient ends in: whether it is rounded up."""
    return ", rounded up" if up else ""


@dataclass(frozen=True, kw_only=True)
class Apply:
    """One element-wise operator applied to a register: `apply("v", "bias_v")` is the C expression of its result.

    `operand` is the parameter that it takes, None without one. `functions` are the C functions that the expression calls, `derivative` is that of an
    expression without any. `monotone`: non-decreasing in v whatever the parameters; `affine`: a*v + b with a, b from the channel alone; `multiplies`: mul by
    a parameter, whose sign is known only at run time; `doubles`: v meets itself (v + v, v * v). The expression may name a variable that an earlier operator of
    the same function left: `keeps` is the name under which this one leaves its result, `taps` that of the variable that it takes.
    """

    comment: str
    expression: str
    constants: tuple[Constant, ...]
    functions: tuple[str, ...]
    operand: Operand | None
    derivative: Derivative | None
    monotone: bool
    affine: bool
    multiplies: bool
    doubles: bool
    keeps: str | None
    taps: str | None

    def apply(self, v: str, p: str | None = None) -> str:
        return self.expression.format(v=v, p=p or (self.operand and self.operand.pointer))


def _camel(text: str) -> str:
    return "".join(part.capitalize() for part in re.split(r"[_.]", text) if part)


def applies(spec: Spec, steps: Iterable[Step]) -> tuple[Apply, ...]:
    """The element-wise steps among `steps` (all from spec.chain), in order."""
    steps = tuple(steps)
    kept = spec.kept(steps)
    return tuple(_apply(spec, step, step.index in kept) for step in steps if step.operator.kind is Kind.ELEMENTWISE)


def kept_name(step: Step) -> str:
    """The variable that holds a step's result for an operator that takes it once more."""
    return f"{step.name}_kept"


def _apply(spec: Spec, step: Step, kept: bool) -> Apply:
    op, values = step.operator, step.values
    same = [s for s in spec.chain if s.operator is op]
    stem = "k" + _camel(op.name) + (str(same.index(step) + 1) if len(same) > 1 else "")
    constants = tuple(
        Constant(stem + _camel(arg), float_literal(folded(step, arg, spec.precision)), _why(step, arg, spec.precision), "float")
        for arg in op.constants(values)
    )
    parameter = step.parameters[0] if step.parameters else None
    if step.tap is not None:  # of a sum or product
        expression = op.expression.format(v="{v}", p="{v}" if step.taps_itself else kept_name(spec.chain[step.tap]))
        functions: tuple[str, ...] = () if op.function is None else (op.function(values),)
    elif op.function is None:
        pattern = "{v} * (1.0f / {p})" if parameter is None and op.name == "div" and invertible(values["value"]) else op.expression
        expression = pattern.format(v="{v}", p="{p}" if parameter else constants[0].name)
        functions = ()
    else:
        functions = (op.function(values),)
        expression = f"{functions[0]}({', '.join(['{v}', *(['{p}'] if parameter else []), *(c.name for c in constants)])})"
    tapped = step.tap is not None and not step.taps_itself
    return Apply(
        comment=describe(step), expression=expression, constants=constants, functions=functions, derivative=op.derivative,
        operand=operand_of(step.key(parameter), math.prod(parameter.shape) > 1) if parameter else None,
        monotone=op.monotone(values) or (step.taps_itself and op.name == "add"), affine=op.affine and step.tap is None,
        multiplies=op.name == "mul" and parameter is not None, doubles=step.taps_itself, keeps=kept_name(step) if kept else None,
        taps=kept_name(spec.chain[step.tap]) if tapped else None,
    )  # fmt: skip


def invertible(value: float) -> bool:
    """Whether 1 / `value` is a normal float32 number: then a division multiplies by it, as PyTorch's does on a GPU, for a tenth of the instructions."""
    value = abs(to_float32(value))
    return SMALLEST["float32"] <= value <= 1.0 / SMALLEST["float32"]


def folded(step: Step, arg: str, precision: Precision) -> float:
    """An argument's value as the kernels use it. PyTorch compares with a bound of the storage type; every other scalar stays a float."""
    return constant(step.values[arg], precision, step.operator.bounds)


def _why(step: Step, arg: str, precision: Precision) -> str:
    value = step.values[arg]
    note = "" if precision.itemsize == 4 or folded(step, arg, precision) == to_float32(value) else f", {value} in {precision.dtype}"
    return f"{step.operator.name}'s {arg}{note}"


def describe(step: Step) -> str:
    """The step in one line for headers and comments: `hardtanh(min_val=-2.0, max_val=2.0)`."""
    hidden = {"init"} if step.values.get("shape") is None else set()
    hidden |= set() if step.values.get("detach") else {"detach"}
    shown = ", ".join(f"{k}={v}" for k, v in step.values.items() if v is not None and k in {a.name for a in step.operator.arguments} - hidden)
    return f"{step.operator.name}({shown})"


def unique_constants(items: Iterable[Apply]) -> tuple[Constant, ...]:
    """All constants of the applied operators, in order, each once."""
    return tuple({c.name: c for item in items for c in item.constants}.values())


def called(items: Iterable[Apply]) -> tuple[str, ...]:
    """The C functions that the applied operators call, in order."""
    return tuple(name for item in items for name in item.functions)


def parameter_keys(items: Iterable[Apply]) -> tuple[str, ...]:
    """State_dict keys of the operators' parameters, in order."""
    return tuple(item.operand.key for item in items if item.operand)


# Functions of comparisons and products alone.
SPARING = frozenset({"relu", "relu6", "leaky_relu", "hardtanh", "clamp", "clamp_min", "clamp_max", "hardswish", "hardsigmoid", "softshrink"})


def costly_step(step: Step) -> bool:
    """Whether an element-wise operator takes an exponential or more."""
    return step.operator.function is not None and step.operator.function(step.values) not in SPARING


def costly(items: tuple[Apply, ...]) -> bool:
    """Whether an operator takes many registers: its value and an exponential of it, for as many values at once as the compiler finds room for."""
    return any(name not in SPARING for name in called(items))
