"""The intervals that an operator's results lie in, whatever comes in but NaN: what tells that a bound further on cannot bite."""

from __future__ import annotations

import math
from collections.abc import Sequence

from codegen.ir.apply import folded
from codegen.ir.window import window_of
from codegen.numerics import Precision
from codegen.ops import Kind
from codegen.spec import Step

Interval = tuple[float, float]
ANYTHING: Interval = (-math.inf, math.inf)
_FIXED = {"sigmoid": (0.0, 1.0), "hardsigmoid": (0.0, 1.0), "tanh": (-1.0, 1.0), "softsign": (-1.0, 1.0), "softmax": (0.0, 1.0)}
# v times a share between 0 and 1 of it: no more than v above 0, and no less than this.
_SHARES = {"gelu": -0.18, "silu": -0.28, "mish": -0.31, "hardswish": -0.376}
_KEEP = ("max", "min", "amax", "amin")
SAME_ABOVE = ("relu", "leaky_relu", "elu", "celu")  # v itself from 0 on


def bounds_of(step: Step, precision: Precision) -> Interval | None:
    """The bounds of an operator that is min(max(v, low), high); None of another."""
    name = step.operator.name
    if name in ("relu", "relu6"):
        return 0.0, math.inf if name == "relu" else 6.0
    if name not in ("clamp", "hardtanh"):
        return None
    keys = ("min", "max") if name == "clamp" else ("min_val", "max_val")
    low, high = (None if step.values[key] is None else folded(step, key, precision) for key in keys)
    return -math.inf if low is None else low, math.inf if high is None else high


def clamped(given: Interval, bounds: Interval) -> Interval:
    """The interval of clamped values."""
    low, high = (min(max(end, bounds[0]), bounds[1]) for end in given)
    return low, high


def intervals(chain: Sequence[Step], precision: Precision) -> list[Interval]:
    """For each step the interval of its results."""
    found: list[Interval] = []
    for step in chain:
        found.append(_interval(step, found[-1] if found else ANYTHING, precision))
    return found


def _interval(step: Step, given: Interval, precision: Precision) -> Interval:
    name, (low, high) = step.operator.name, given
    if bounds := bounds_of(step, precision):
        return clamped(given, bounds)
    if name in _FIXED:
        return _FIXED[name]
    if name in _SHARES:
        return min(max(low, _SHARES[name]), 0.0) if low < 0 else 0.0, max(high, 0.0)
    if name in SAME_ABOVE and low >= 0:
        return given
    if step.operator.kind is Kind.SHAPE or name in _KEEP:
        return given
    if step.operator.kind is Kind.POOL and name.startswith("max"):
        window = window_of(step)
        return ANYTHING if window is None or window.sees_nothing else given
    return ANYTHING

