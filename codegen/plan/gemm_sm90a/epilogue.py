"""What the Hopper GEMM does to its sums, as operators, parameters and lines of C."""

from __future__ import annotations

from codegen.ir.apply import Apply, applies, c_identifier
from codegen.ir.fused_form import FusedSpec


def epilogue(spec: FusedSpec, finished: bool) -> tuple[tuple[Apply, ...], tuple[Apply, ...], list[Apply], list[Apply]]:
    """What precedes the norm and what follows it, and the parameters of each, the producer's bias first, gamma and beta before others.
    Unless `finished`, the norm's kernel does all but add the bias."""
    before = applies(spec, spec.before_norm) if finished else ()
    after = applies(spec, spec.after_norm) if finished else ()
    bias = [vector(spec.producer.key(p)) for p in spec.producer.parameters if p.suffix == "bias"]
    affine = [vector(spec.norm.key(p)) for s in ("weight", "bias") for p in spec.norm.parameters if p.suffix == s] if finished else []
    return before, after, bias + [a for a in before if a.parameter], affine + [a for a in after if a.parameter]


def vector_count(spec: FusedSpec) -> int:
    """Parameters of the whole epilogue."""
    _, _, before, after = epilogue(spec, True)
    return len(distinct((*before, *after)))


def distinct(items: tuple[Apply, ...]) -> tuple[Apply, ...]:
    return tuple({item.parameter: item for item in items}.values())


def vector(key: str) -> Apply:
    """A per-channel parameter that is no operator of the chain: the bias, gamma, beta."""
    return Apply("", "", (), (), key, c_identifier(key), True, False, False, False)


def line(item: Apply) -> str:
    return item.apply("value", f"{item.pointer}_c[h]" if item.parameter else None)
