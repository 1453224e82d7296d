"""The pass `identity`: steps that give what they take, NaN and infinities too, are left out.

Reductions over axes of one value, poolings with windows of one value, and bounds that what comes in cannot reach.
"""

from __future__ import annotations

from dataclasses import replace

from codegen.algebra.chain import joined_axes, new_step, splice
from codegen.algebra.intervals import ANYTHING, SAME_ABOVE, bounds_of, clamped, intervals
from codegen.algebra.rewriting import Rewriting
from codegen.ir.window import window_of
from codegen.numerics import Precision
from codegen.ops import Kind
from codegen.spec import Step


def identity(given: Rewriting) -> Rewriting | None:
    """Leave out the first step that changes nothing; a renaming of axes stays in its place where it dropped some."""
    spec = given.spec
    found = intervals(spec.chain, spec.precision)
    for step in spec.chain:
        reason = _reason(step, found[step.index - 1] if step.index else ANYTHING, spec.precision)
        if reason is None:
            continue
        renames = step.output_shape != step.input_shape
        left = splice(spec, step.index, step.index + 1, [new_step("view", sizes=step.output_shape)] if renames else [])
        if left is not None:
            return replace(given.to(left), applied=(*given.applied, ("identity", reason)))
    return None


def _reason(step: Step, before: tuple[float, float], precision: Precision) -> str | None:
    """Why a step gives what it takes; None where it may give something else."""
    name, kind = step.operator.name, step.operator.kind
    if kind is Kind.REDUCTION:
        return f"{name} over one value is that value" if all(step.input_shape[axis] == 1 for axis in joined_axes(step)) else None
    if kind is Kind.POOL:
        window = window_of(step)
        single = window is not None and {*window.size, *window.stride} == {1} and not any(window.padding) and window.divisor in (None, 1)
        return f"{name} over one value is that value" if single else None
    bounds = bounds_of(step, precision)
    if bounds and before != ANYTHING and clamped(before, bounds) == before:
        return f"{name} changes nothing: what comes in lies between {before[0]:.4g} and {before[1]:.4g}"
    if name in SAME_ABOVE and before[0] >= 0:
        return f"{name} changes nothing: what comes in is not below 0"
    return None
