"""The pass `merge`: two bounds one behind the other become one, and so do two poolings."""

from __future__ import annotations

import math
from dataclasses import replace

from codegen.algebra.chain import new_step, splice
from codegen.algebra.intervals import bounds_of, clamped
from codegen.algebra.rewriting import Rewriting
from codegen.ir.window import Window, window_of
from codegen.numerics import Precision
from codegen.ops import Kind
from codegen.spec import Step


def merge(given: Rewriting) -> Rewriting | None:
    """Make one step of the first two that can be one."""
    spec = given.spec
    for one, two in zip(spec.chain, spec.chain[1:], strict=False):
        made = _bounds(one, two, spec.precision) or _pools(one, two)
        left = splice(spec, one.index, two.index + 1, [made[0]]) if made else None
        if left is not None:
            return replace(given.to(left), applied=(*given.applied, ("merge", made[1])))
    return None


def _bounds(one: Step, two: Step, precision: Precision) -> tuple[Step, str] | None:
    """One clamp for two; none where all values would become one, which no clamp may say."""
    first, second = bounds_of(one, precision), bounds_of(two, precision)
    if first is None or second is None:
        return None
    low, high = clamped(first, second)
    if not low < high:
        return None
    step = new_step("clamp", min=None if low == -math.inf else low, max=None if high == math.inf else high)
    return step, f"{one.operator.name} and {two.operator.name} are one clamp, from {low:.4g} to {high:.4g}"


def _pools(one: Step, two: Step) -> tuple[Step, str] | None:
    """One pooling for two without padding: of maxima where the first leaves no value out, of means where it takes each value once."""
    if one.operator.kind is not Kind.POOL or two.operator.kind is not Kind.POOL or one.operator.rank != two.operator.rank:
        return None
    first, second = window_of(one), window_of(two)
    if first is None or second is None or first.average != second.average or not (_plain(first) and _plain(second)):
        return None
    apart = [stride - size for size, stride in zip(first.size, first.stride, strict=True)]
    if any(apart) if first.average else max(apart) > 0:
        return None
    rank = one.operator.rank
    size = tuple(a + s * (b - 1) for a, s, b in zip(first.size, first.stride, second.size, strict=True))[-rank:]
    stride = tuple(s * t for s, t in zip(first.stride, second.stride, strict=True))[-rank:]
    name = f"{'avg' if first.average else 'max'}_pool{rank}d"
    shown = " x ".join(map(str, size))
    return new_step(name, kernel_size=size, stride=stride), f"{one.operator.name} and {two.operator.name} are one pooling with windows of {shown}"


def _plain(window: Window) -> bool:
    """Are all windows whole, their values neighbours, and means those of their values?"""
    return not window.clipped_anywhere and set(window.dilation) == {1} and window.divisor is None
