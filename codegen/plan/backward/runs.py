"""Runs of element-wise operators, backwards: what both backwards and those of stages turn into functions."""

from __future__ import annotations

import re
from dataclasses import dataclass

from codegen.ir.apply import Apply


@dataclass(frozen=True)
class Operand:
    """A parameter of the chain: its C name, whether it has a value per channel, and its place among the sums."""

    pointer: str
    per_channel: bool
    index: int = 0


@dataclass(frozen=True)
class BackRun:
    """A run of element-wise operators, backwards: `<name>_grad(v, g, ...)` turns the gradient g of its result into that of v.

    `values` are (name, expression) of what has to be computed again, `lines` the statements that change g; `takes_v`: they need v itself.
    `reads` are the parameters whose values they need, `sums` those whose gradients they give. `forward` computes the result from v, empty
    where nothing needs it; `operands` are the parameters whose values either way needs. `keeps` is the name of v, and `given` that of another value, where
    operators take them once more: `<given>_second` is then one more gradient that the function gives, and `takes_given` says that it needs the value.
    """

    name: str
    comment: str
    exists: bool
    values: tuple[tuple[str, str], ...]
    lines: tuple[str, ...]
    takes_v: bool
    reads: tuple[Operand, ...]
    operands: tuple[Operand, ...]
    sums: tuple[Operand, ...]
    forward: tuple[Apply, ...]
    functions: tuple[str, ...]
    keeps: str | None = None
    given: str | None = None
    takes_given: bool = False


def back_run(
    name: str, what: str, ops: tuple[Apply, ...], operands: dict[str, Operand], forward: bool, keeps: str | None = None, given: str | None = None
) -> BackRun:
    """The derivatives of `ops`; `forward`: their result is needed too, by the norm or a pooling behind them.

    A value that operators take once more has a gradient for each of its ways: they meet in `<its name>_second`, and there where the value was made they
    are added to what came back along the chain.
    """
    lines: list[str] = []
    functions: list[str] = []
    values: list[tuple[str, str]] = []
    reads: list[str] = []
    met: set[str] = set()  # values whose second way has been gone back
    needed = False  # is the operator's result needed by the derivatives of those behind it?
    names = ["v", *(op.keeps or f"v{i + 1}" for i, op in enumerate(ops))]
    for i in reversed(range(len(ops))):
        op, v = ops[i], names[i]
        p = f"{op.pointer}_c"
        if needed:
            values.insert(0, (names[i + 1], op.apply(v, p)))
            functions += op.functions
            reads += [op.pointer] if op.pointer else []
        if op.keeps in met:
            lines.append(f"g = g + {op.keeps}_second;")
        if op.taps:
            share = f"g * {v}" if op.operator == "mul" else "g"
            head = f"{op.taps}_second +=" if op.taps in met else f"{op.taps}_second =" if op.taps == given else f"float {op.taps}_second ="
            lines += [f"{head} {share};", *([f"g = g * {op.taps};"] if op.operator == "mul" else [])]
            met.add(op.taps)
        elif op.doubles:
            lines.append(f"g = g * (2.0f * {v});" if op.doubles == "mul" else "g = g + g;")
        elif op.functions:
            functions.append(f"{op.functions[0]}_grad")
            lines.append(f"g = g * {functions[-1]}({', '.join([v, *(c.name for c in op.constants)])});")
        elif op.multiplies:
            lines += [f"{op.pointer}_g = g * {v};", f"g = g * {p};"]
            reads.append(op.pointer)
        elif op.pointer and op.operator == "div":
            lines += [f"g = g / {p};", f"{op.pointer}_g = -(g * ({v} / {p}));"]
            reads.append(op.pointer)
        elif op.pointer:
            lines.append(f"{op.pointer}_g = {'-' if op.operator == 'sub' else ''}g;")
        elif op.operator == "div":
            lines.append(f"g = g / {op.constants[0].name};")
        elif "*" in op.expression:
            lines.append(f"g = g * {op.constants[0].name};")
        multiplies = op.multiplies or (op.operator == "mul" and (op.doubles or op.taps) is not None)
        needed = needed or bool(op.functions) or multiplies or (op.operator == "div" and op.pointer is not None)
    if keeps in met:
        lines.append(f"g = g + {keeps}_second;")
    text = " ".join([*lines, *(expression for _, expression in values)])
    if keeps and _mentions(text, keeps):
        values.insert(0, (keeps, "v"))
    own = tuple(operands[op.pointer] for op in ops if op.pointer)
    read = tuple(operand for operand in own if operand.pointer in reads)
    functions += [function for op in ops if forward for function in op.functions]
    return BackRun(
        name, what, bool(ops), tuple(values), tuple(lines), needed, read, own if forward else read, own, ops if forward else (), tuple(functions),
        keeps, given, given is not None and _mentions(text, given),
    )  # fmt: skip


def _mentions(text: str, name: str) -> bool:
    return re.search(rf"\b{name}\b", text) is not None


__all__ = ["BackRun", "Operand", "back_run"]
