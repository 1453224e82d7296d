"""What the Hopper GEMM does to its sums, as operators, parameters and lines of C."""

from __future__ import annotations

from codegen.ir.apply import Apply, applies
from codegen.ir.operand import Operand, operand_of
from codegen.ir.fused_form import FusedSpec
from codegen.plan.shared.values import kept_in_front


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


def statements(spec: FusedSpec) -> tuple[str, ...]:
    """C statements on `value`, a sum, that end a chain without a norm: the bias, then the operators. Results that are reused stay in variables."""
    made = [f"value = value + {operand_of(spec.bias).pointer}_c;"] if spec.bias else []
    made += kept_in_front(spec, spec.before_norm, 0, "value")
    for item in applies(spec, spec.before_norm):
        made.append(f"value = {item.apply('value', f'{item.operand.pointer}_c' if item.operand else None)};")
        made += [f"const float {item.keeps} = value;"] if item.keeps else []
    return tuple(made)
