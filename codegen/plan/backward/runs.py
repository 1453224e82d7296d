"""Runs of element-wise operators, backwards: what both backwards and those of stages turn into functions."""

from __future__ import annotations

import re
from dataclasses import dataclass

from codegen.ir.apply import Apply, called
from codegen.ir.operand import Operand


@dataclass(frozen=True, kw_only=True)
class SummedOperand(Operand):
    """A parameter whose gradient is a sum: `index` is its place among the sums."""

    index: int


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
    reads: tuple[SummedOperand, ...]
    operands: tuple[SummedOperand, ...]
    sums: tuple[SummedOperand, ...]
    forward: tuple[Apply, ...]
    functions: tuple[str, ...]
    keeps: str | None = None
    given: str | None = None
    takes_given: bool = False


def back_run(
    name: str, what: str, ops: tuple[Apply, ...], operands: dict[str, SummedOperand], forward: bool, keeps: str | None = None, given: str | None = None
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
        pointer = op.operand.pointer if op.operand else None
        p = f"{pointer}_c" if pointer else op.taps or (op.constants[0].name if op.constants else None)
        if needed:
            values.insert(0, (names[i + 1], op.apply(v, p)))
            functions += op.functions
            reads += [pointer] if pointer else []
        if op.keeps in met:
            lines.append(f"g = g + {op.keeps}_second;")
        if op.functions:
            functions.append(f"{op.functions[0]}_grad")
            lines.append(f"g = g * {functions[-1]}({', '.join([v, *(c.name for c in op.constants)])});")
            needed = True
            continue
        shares = (("v", op.derivative.doubled),) if op.doubles else op.derivative.taken(bool(pointer or op.taps))
        for whose, share in shares:
            head = "g =" if whose == "v" else f"{pointer}_g =" if pointer else _second(op.taps, op.taps in met, given)
            lines.append(f"{head} {share.format(v=v, p=p)};")
        met |= {op.taps} - {None}
        reads += [pointer] if pointer and any("{p}" in share for _, share in shares) else []
        needed = needed or any("{v}" in share for _, share in shares)
    if keeps in met:
        lines.append(f"g = g + {keeps}_second;")
    text = " ".join([*lines, *(expression for _, expression in values)])
    if keeps and _mentions(text, keeps):
        values.insert(0, (keeps, "v"))
    own = tuple(operands[op.operand.pointer] for op in ops if op.operand)
    read = tuple(operand for operand in own if operand.pointer in reads)
    functions += called(ops) if forward else ()
    return BackRun(
        name, what, bool(ops), tuple(values), tuple(lines), needed, read, own if forward else read, own, ops if forward else (), tuple(functions),
        keeps, given, given is not None and _mentions(text, given),
    )  # fmt: skip


def _second(name: str, met: bool, given: str | None) -> str:
    """The beginning of the statement that adds to the gradient of a value by its second way, or declares that."""
    return f"{name}_second +=" if met else f"{name}_second =" if name == given else f"float {name}_second ="


def _mentions(text: str, name: str) -> bool:
    return re.search(rf"\b{name}\b", text) is not None


__all__ = ["BackRun", "SummedOperand", "back_run"]
