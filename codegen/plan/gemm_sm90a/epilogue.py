"""What the Hopper GEMM does to its sums, as operators, parameters and lines of C."""

from __future__ import annotations

from codegen.ir.apply import Apply, applies
from codegen.ir.operand import Operand, operand_of
from codegen.ir.fused_form import FusedSpec


def epilogue(spec: FusedSpec, finished: bool) -> tuple[tuple[Apply, ...], tuple[Apply, ...], list[Operand], list[Operand]]:
    """What precedes the norm and what follows it, and the parameters of each, the producer's bias first, gamma and beta before others.
    Unless `finished`, another kernel does all but add the bias."""
    before = applies(spec, spec.before_norm) if finished else ()
    after = applies(spec, spec.after_norm) if finished else ()
    bias = [operand_of(spec.bias)] if spec.bias else []
    affine = [operand_of(key) for key in spec.affine] if finished else []
    return before, after, bias + [a.operand for a in before if a.operand], affine + [a.operand for a in after if a.operand]


def vector_count(spec: FusedSpec) -> int:
    """Parameters of the whole epilogue."""
    _, _, before, after = epilogue(spec, True)
    return len(distinct((*before, *after)))


def distinct(operands: tuple[Operand, ...]) -> tuple[Operand, ...]:
    return tuple({operand.key: operand for operand in operands}.values())


def line(item: Apply) -> str:
    """The C expression of an operator on `value`."""
    return item.apply("value", f"{item.operand.pointer}_c[h]" if item.operand else None)
