"""The numeric promises (the table in docs/numerics.md) as rules: what a measured error may be, and what is wrong where it is not.

    fp32         relative error <= max(1.1 x eager with TF32 off, 3e-7)
    tf32         <= 1.1 x (operands rounded to nearest at 10 mantissa bits, accumulated in float64), and never asked to beat fp32, nor eager with TF32
                 as far as truncated sums explain that one's error
    fp16, bf16   <= 1.05 x eager of that type, and never asked to beat the correctly rounded exact result (eager's own error may leave out
                 elements that overflowed there)

An fp32 arithmetic that a spec forces and whose own error is above that promise (bf16x3) is held to twice its documented error instead.

The promise compares two errors, ours and PyTorch's. Of a result of few groups both scatter: that of n independent values is known to about
1/sqrt(n); so do errors of which a few values hold all, as where one rounding carries a value from one bound to the other. Data whose errors are above
the promise are therefore drawn again with other seeds, and all draws together must keep it within three standard deviations (`pooled`); draws in
which PyTorch itself overflowed count only where it did in all. Where PyTorch's own error leaves no digit, as behind a division by values near zero, one element
makes it, and whose is larger is luck however many are drawn: there the medians of the errors are compared. Elements of which float64 itself says nothing are held to what roundings explain, and to no
promise (bench.doubt). A wrong shape, a lost NaN or other bits in a second run are wrong at once.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from bench.metrics import Errors
from codegen.ir.fused_form import fused
from codegen.numerics import ARITHMETICS
from codegen.ops import Kind
from codegen.plan.floor import producer_flop
from codegen.spec import Spec

FP32_FLOOR = 3e-7
FP32_MARGIN, TF32_MARGIN, HALF_MARGIN = 1.1, 1.1, 1.05
VALUES = 1000  # independent values that all draws together shall have
DRAWS = (4, 25)  # least and most
STEP = 8  # products of TF32 that a tensor core adds at once
NO_DIGIT = 0.5  # a relative error of which no digit is right
SIGMAS = 3.0
GROUP_LABELS = {"group_mean": "mean", "group_std": "standard deviation"}


@dataclass(frozen=True)
class Yardsticks:
    """What a result is held against, all on the same data.

    `eager`: PyTorch at the spec's precision; `eager_fp32`: with TF32 off (the same for all but tf32); `tf32`: relative error and elements
    outside of the TF32 model, None for other precisions; `rounded`: relative error of the exact result rounded to the storage type; `rms`:
    root mean square of the exact result; `overflowed`: PyTorch has no number where the exact result is one, so that its error says nothing of that.
    """

    eager: Errors
    eager_fp32: Errors
    tf32: Errors | None
    rounded: float
    rms: float
    overflowed: bool = False


def margin_of(spec: Spec) -> float:
    """How many times the yardstick's error a result's may be."""
    return {"fp32": FP32_MARGIN, "tf32": TF32_MARGIN}.get(spec.precision.name, HALF_MARGIN)


def allowed_error(spec: Spec, by: Yardsticks) -> float:
    """The largest relative error that keeps the promise."""
    name = spec.precision.name
    fp32 = max(FP32_MARGIN * by.eager_fp32.relative, FP32_FLOOR)
    if name == "fp32":
        return max(fp32, 2 * ARITHMETICS[spec.math].error) if lenient(spec) else fp32
    if name == "tf32":
        return max(TF32_MARGIN * by.tf32.relative, fp32, min(TF32_MARGIN * by.eager.relative, truncation(spec)))
    return HALF_MARGIN * max(by.eager.relative, by.rounded)


def truncation(spec: Spec) -> float:
    """What tensor cores lose of a TF32 sum of products of one sign at most: half a unit in the last place, on average, each time that they add STEP of them."""
    longest = max((producer_flop(step) / 2 / math.prod(step.output_shape) for step in spec.chain if step.operator.kind is Kind.PRODUCER), default=0.0)
    return longest / STEP * 2.0**-24


def lenient(spec: Spec) -> bool:
    """Is the spec's forced arithmetic one whose documented error is above the fp32 promise?"""
    return spec.precision.name == "fp32" and spec.math is not None and ARITHMETICS[spec.math].error > 2e-6


def allowed_outside(spec: Spec, by: Yardsticks, benchmark: bool) -> int | None:
    """How many elements may lie outside the tolerance; None where there is no rule.

    Zero on the benchmark's inputs in fp32, where PyTorch has none there itself. Else as many as a result has whose errors are all as large as the promise
    allows, the yardstick's times `margin_of`: n of them, and three times the root of n, by which a count scatters. (Errors of which a tenth more is right,
    and elements of which not one more is, would contradict each other.) The yardstick is eager, for tf32 the TF32 model or eager with TF32 off.
    """
    if lenient(spec):
        return None
    if _none_outside(spec, benchmark, by):
        return 0
    count = _counted(by).nearly_outside
    return math.floor(count + SIGMAS * math.sqrt(count))


def _counted(by: Yardsticks) -> Errors:
    """The yardstick whose elements outside are counted."""
    return max((by.eager_fp32, by.tf32), key=lambda errors: errors.nearly_outside) if by.tf32 else by.eager


def _none_outside(spec: Spec, benchmark: bool, *by: Yardsticks) -> bool:
    """Is no element at all allowed outside, however near to it the yardstick's are?"""
    return spec.precision.name == "fp32" and benchmark and not any(one.eager.outside for one in by)


def _excused(found: Errors, by: Sequence[Yardsticks]) -> int:
    """How many elements of several draws may lie outside where the yardstick has few or none there, though its worst error is no smaller.

    Two counts that are equal on average differ by three times the root of their sum at most: n - m <= 3 sqrt(n + m).
    """
    yardsticks = [_counted(one) for one in by]
    if found.largest > max(errors.largest for errors in yardsticks):
        return 0
    count = sum(errors.nearly_outside for errors in yardsticks)
    return math.floor(count + (SIGMAS**2 + math.sqrt(SIGMAS**4 + 8 * SIGMAS**2 * count)) / 2)


def allowed_group(by: Yardsticks, allowed: float, which: str) -> float:
    """How far a group's mean or standard deviation may be off.

    Twice eager's or the TF32 model's, or ten times the allowed error of an element: a group's mean averages many elements' errors, so only an error shared by
    the whole group (wrong statistics, padding counted in) comes near it.
    """
    theirs = [getattr(errors, which) or 0.0 for errors in (by.eager, by.tf32) if errors]
    return max(2 * max(theirs), 10 * allowed * by.rms)


def broken(spec: Spec, ours: Errors, by: Yardsticks, benchmark: bool) -> list[str]:
    """Every promise that `ours` breaks, as short sentences; empty when it keeps them all."""
    allowed = allowed_error(spec, by)
    groups = {which: allowed_group(by, allowed, which) for which in GROUP_LABELS}
    return _exceeded(ours, allowed, allowed_outside(spec, by, benchmark), groups) + ([ours.parity] if ours.parity else [])


def _exceeded(found: Errors, allowed: float, outside: int | None, groups: dict[str, float], over: str = "") -> list[str]:
    """The measures that are above their limits; `over` says of how many draws."""
    problems = []
    if not found.relative <= allowed:
        problems.append(f"relative error {found.relative:.2e} > {allowed:.2e}{over}")
    if outside is not None and found.outside > outside:
        problems.append(f"{found.outside} elements outside tolerance, {outside} allowed{over}")
    for which, limit in groups.items():
        off = getattr(found, which)
        if off is not None and off > limit:
            problems.append(f"a group's {GROUP_LABELS[which]} is off by {off:.2e} > {limit:.2e}{over}")
    return problems


def by_chance(spec: Spec, ours: Errors, by: Yardsticks, benchmark: bool) -> bool:
    """Is a measure above its limit all that is wrong, so that other data may show it to be luck?"""
    if not math.isfinite(ours.relative):
        return False
    return not broken(spec, replace(ours, relative=0.0, outside=0, group_mean=None, group_std=None), by, benchmark)


def independent(spec: Spec, elements: int) -> int:
    """How many of a result's `elements`, of all samples or of some, err by themselves: those of a group share its statistics, and of a chain
    without the norm of fused kernels those of a sample may share anything."""
    form = fused(spec)
    groups = spec.batch * (form.num_groups if form else 1) * elements // math.prod(spec.output_shape)
    return max(1, min(groups, elements))


def draws_for(values: int) -> int:
    """How often a result of so many independent values is drawn."""
    return max(DRAWS[0], min(DRAWS[1], -(-VALUES // values)))


def margin(draws: int, values: int) -> float:
    """What the limits are multiplied by for that many draws."""
    return 1 + SIGMAS / math.sqrt(draws * values)


def scatter(errors: Sequence[Errors], by: Sequence[Yardsticks]) -> float:
    """By how much the errors of several draws may differ from another result's by chance, as a share of them, one standard deviation.

    The variance of a mean of squares is that of the squares, which fourth powers tell: half of sum(e^4) / sum(e^2)^2 is the variance of the ratio of two
    such roots. It is 1.5 / n for n normal errors, and 1/2 where one value holds all.
    """
    squares = [e.elements * (e.relative * one.rms) ** 2 for e, one in zip(errors, by, strict=True)]
    fourth = sum(e.concentration * square**2 for e, square in zip(errors, squares, strict=True))
    return math.sqrt(fourth / 2) / sum(squares) if sum(squares) else 0.0


def root_mean_square(values: Sequence[float | None]) -> float | None:
    """None where a value is missing."""
    return None if None in values else math.sqrt(sum(value * value for value in values) / len(values))


def pooled_errors(errors: Sequence[Errors]) -> Errors:
    """The errors of several draws as one."""
    mean = {name: root_mean_square([getattr(e, name) for e in errors]) for name in ("relative", *GROUP_LABELS)}
    largest, outside, elements = max(e.largest for e in errors), sum(e.outside for e in errors), sum(e.elements for e in errors)
    middle = statistics.median(e.middle for e in errors)
    return Errors(**mean, largest=largest, outside=outside, elements=elements, parity=None, middle=middle)


def pooled(spec: Spec, ours: Sequence[Errors], by: Sequence[Yardsticks], benchmark: bool) -> tuple[float, int | None, list[str]]:
    """Of several draws together: the error and the number of elements outside that are allowed, and every promise that is broken."""
    found, few = pooled_errors(ours), margin(len(ours), independent(spec, ours[0].elements))
    factor = max(few, 1 + SIGMAS * max(scatter(ours, by), scatter([one.eager for one in by], by)))
    limits = [allowed_error(spec, one) for one in by]
    allowed = factor * root_mean_square(limits)
    counts = [allowed_outside(spec, one, benchmark) for one in by]
    outside = None if None in counts else max(math.floor(few * sum(counts)), 0 if _none_outside(spec, benchmark, *by) else _excused(found, by))
    groups = {which: factor * root_mean_square([allowed_group(one, most, which) for one, most in zip(by, limits, strict=True)]) for which in GROUP_LABELS}
    over = f" over {len(ours)} draws"
    yardsticks = [max(filter(None, (one.eager, one.tf32)), key=lambda errors: errors.relative) for one in by]
    if pooled_errors(yardsticks).relative <= NO_DIGIT:
        return allowed, outside, _exceeded(found, allowed, outside, groups, over)
    most = (1 + 2 * (few - 1)) * margin_of(spec) * pooled_errors(yardsticks).middle  # medians scatter more than means do
    wrong = [] if found.middle <= most else [f"median error {found.middle:.2e} > {most:.2e}{over}, where PyTorch has no digit either"]
    return allowed, outside, wrong + _exceeded(replace(found, relative=0.0), allowed, outside, groups, over)
