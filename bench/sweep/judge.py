"""A verdict on a random spec: bench.verify's promise, and for results too small to tell luck from error, the same promise on more data.

The promise compares two errors, ours and PyTorch's. Of a result of few groups both scatter: that of n independent groups is known to about
1/sqrt(n). A family whose errors are above the promise is therefore drawn again with other seeds, and all draws together must keep the promise
within three standard deviations. A wrong shape, a lost NaN or other bits in a second run are wrong at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from bench.children import Result
from bench.promise import allowed_group, broken
from bench.subject import Subject
from bench.verify import Finding, rounded, verify

FAMILIES = ("benchmark", "normal", "offset", "constant groups", "nonfinite")  # of data that a sweep judges by
GROUPS = 1000  # groups that all draws together shall have
DRAWS = (4, 25)  # least and most
SIGMAS = 3.0


def judge(subject: Subject, families: tuple[str, ...] = ()) -> list[Result]:
    """One row for each family that applies: family, ok, rel_error, allowed, eager_rel_error, problems, draws."""
    return [_row(found, 1) if found.ok or _certain(subject, found) else _again(subject, found) for found in verify(subject, families, repeats=1)]


def _certain(subject: Subject, found: Finding) -> bool:
    """Is more wrong than a measure above its limit?"""
    if not math.isfinite(found.ours.relative):
        return True
    chance = set(broken(subject.spec, found.ours, found.by, found.family.initial))
    certain = set(broken(subject.spec, replace(found.ours, relative=0.0, outside=0, group_mean=0.0, group_std=0.0), found.by, found.family.initial))
    return bool(set(found.problems) - chance or certain)


def draws_for(groups: int) -> int:
    """How often a result of so many groups is drawn."""
    return max(DRAWS[0], min(DRAWS[1], -(-GROUPS // groups)))


def margin(draws: int, groups: int) -> float:
    """What the limit is multiplied by for that many draws."""
    return 1 + SIGMAS / math.sqrt(draws * groups)


def _again(subject: Subject, first: Finding) -> Result:
    groups = subject.spec.batch * subject.spec.num_groups
    draws = [found for seed in range(1, draws_for(groups) + 1) for found in verify(subject, (first.family.name,), repeats=0, seed=1000 * seed)]
    bad = next((found for found in draws if not found.ok and _certain(subject, found)), None)
    return _row(bad, 1) if bad else _row(replace(first, problems=tuple(_pooled(draws, margin(len(draws), groups)))), len(draws), draws)


def _pooled(draws: Sequence[Finding], factor: float) -> list[str]:
    """What is wrong with all draws together."""
    problems = []
    relative, allowed = _root_mean_square([f.ours.relative for f in draws]), factor * _root_mean_square([f.allowed for f in draws])
    if not relative <= allowed:
        problems.append(f"relative error {relative:.2e} > {allowed:.2e} over {len(draws)} draws")
    if all(f.allowed_outside is not None for f in draws):
        outside, most = sum(f.ours.outside for f in draws), math.floor(factor * sum(f.allowed_outside for f in draws))
        if outside > most:
            problems.append(f"{outside} elements outside tolerance, {most} allowed over {len(draws)} draws")
    for which, label in (("group_mean", "mean"), ("group_std", "standard deviation")):
        off = _root_mean_square([getattr(f.ours, which) for f in draws])
        limit = factor * _root_mean_square([allowed_group(f.by, f.allowed, which) for f in draws])
        if off > limit:
            problems.append(f"a group's {label} is off by {off:.2e} > {limit:.2e} over {len(draws)} draws")
    return problems


def _root_mean_square(values: Sequence[float]) -> float:
    return math.sqrt(sum(value * value for value in values) / len(values))


def _row(found: Finding, count: int, draws: Sequence[Finding] = ()) -> Result:
    of = draws or (found,)
    pooled = lambda values: rounded(_root_mean_square(values))  # noqa: E731
    return {
        "family": found.family.name, "ok": found.ok, "rel_error": pooled([f.ours.relative for f in of]), "allowed": pooled([f.allowed for f in of]),
        "eager_rel_error": pooled([f.by.eager.relative for f in of]), "problems": list(found.problems), "draws": count,
    }  # fmt: skip
