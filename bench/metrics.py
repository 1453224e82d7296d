"""How wrong a result is: every measure that verify and the bench report, in one place."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from bench.doubt import Doubt

MEDIAN_OF = 1 << 20


@dataclass(frozen=True)
class Errors:
    """One result against the exact one.

    `relative`: Frobenius norm of the difference over that of the exact result, over the elements where both are finite.
    `largest`: largest absolute difference there. `outside`: number of elements with |difference| > atol + rtol |exact|, atol = rtol = the
    precision's tolerance. `group_mean`, `group_std`: largest deviation of a (sample, group)'s mean and standard deviation; None where the result
    has no groups.
    `parity`: None when NaN, +inf and -inf stand where they must, else what is wrong. `concentration`: the sum of the differences' fourth powers over the square of
    the sum of their squares: 1 where one element holds all of the error, 3 / n where n are normal. `nearly_outside`: how many elements
    would be outside if all differences were as many times as large as the promise allows. `middle`: the median of absolute differences, of MEDIAN_OF elements at most.
    """

    relative: float
    largest: float
    outside: int
    elements: int
    group_mean: float | None
    group_std: float | None
    parity: str | None
    concentration: float = 0.0
    nearly_outside: int = 0
    middle: float = 0.0

    @property
    def outside_share(self) -> float:
        return self.outside / max(self.elements, 1)


def compare(
    y: torch.Tensor, exact: torch.Tensor, tolerance: float, groups: int | None, eager: torch.Tensor | None = None, margin: float = 1.0, doubt: Doubt | None = None,
) -> Errors:  # fmt: skip
    """Errors of `y` against the float64 result `exact` of the same shape.

    `groups` are those of a sample; None where the result has not the norm's channels any more. `eager` is PyTorch's result at the same precision: where one of the two is finite and the other is not (an intermediate overflowed in the
    storage type), or they are different infinities or NaN, `y` may be either. `margin` is how many times this result's errors another one's may be. Elements that `doubt` says are unknown are left out, and NaN and infinities
    may stand where any of its runs has them.
    """
    y64 = y.double()
    difference, inside = y64 - exact, exact
    ordinary = bool(torch.isfinite(difference.sum()))  # one NaN or infinity anywhere shows in the sum
    finite = None if ordinary and doubt is None else torch.isfinite(y64) & torch.isfinite(exact)
    if doubt is not None:
        finite &= doubt.known
    if finite is not None:
        difference, inside = torch.where(finite, difference, 0.0), torch.where(finite, exact, 0.0)
    norm = float(inside.norm())
    relative = float(difference.norm()) / norm if norm else float(difference.norm())
    outside, nearly_outside = _outside(difference, inside, tolerance, 1.0, margin)
    mean, std = (None, None) if groups is None else _group_deviation(y64, exact, finite, groups)
    parity = None if ordinary and y.dtype is not torch.float16 else _parity(y, exact, eager, doubt.others if doubt else ())
    largest, concentration = float(difference.abs().max()), _concentration(difference)
    return Errors(relative, largest, outside, exact.numel(), mean, std, parity, concentration, nearly_outside, _middle(difference))


def _outside(difference: torch.Tensor, exact: torch.Tensor, tolerance: float, *factors: float) -> list[int]:
    """How many elements are outside the tolerance where differences are multiplied by each of the factors."""
    off = difference.abs().div_(exact.abs().add_(1.0).mul_(tolerance))
    return [int((off > 1.0 / factor).sum()) for factor in factors]


def _middle(difference: torch.Tensor) -> float:
    every = -(-difference.numel() // MEDIAN_OF)
    return float(difference.flatten()[::every].abs().median())


def _concentration(difference: torch.Tensor) -> float:
    largest = float(difference.abs().max())
    if not 0.0 < largest < math.inf:
        return 0.0
    squares = (difference / largest).square()  # powers of small differences would vanish
    return float(squares.square().sum() / squares.sum() ** 2)


def _group_deviation(y: torch.Tensor, exact: torch.Tensor, finite: torch.Tensor | None, groups: int) -> tuple[float, float]:
    """Largest deviation of mean and standard deviation over the output's (sample, channel group) blocks that are finite throughout."""
    shape = (exact.shape[0] * groups, -1)
    a, b = y.reshape(shape), exact.reshape(shape)
    if finite is not None:
        whole = finite.reshape(shape).all(1)
        a, b = a[whole], b[whole]
    if not a.numel():
        return 0.0, 0.0
    mean = (a.mean(1) - b.mean(1)).abs().max()
    std = (a.std(1, correction=0) - b.std(1, correction=0)).abs().max()
    return float(mean), float(std)


def _parity(y: torch.Tensor, exact: torch.Tensor, eager: torch.Tensor | None, others: tuple[torch.Tensor, ...] = ()) -> str | None:
    """What is wrong with the places of NaN and infinities; None when nothing is. `others` may be the exact result as well."""
    rounded = exact.to(y.dtype)  # a value beyond the type's range is an infinity there
    theirs = rounded if eager is None else eager
    overflowed = torch.isfinite(rounded) & ~torch.isfinite(theirs)
    runs = [other.to(y.dtype) for other in others]
    for name, of in (("NaN", torch.isnan), ("+inf", torch.isposinf), ("-inf", torch.isneginf)):
        wanted, possible, got = of(rounded) & of(theirs), overflowed | of(theirs), of(y)
        for run in runs:  # the sign of an infinity is that of a zero
            wanted, possible = wanted & of(run), possible | (torch.isnan(run) if of is torch.isnan else torch.isinf(run))
        lost, extra = int((wanted & ~got).sum()), int((got & ~of(rounded) & ~possible).sum())
        if lost or extra:
            return f"{name}: {lost} lost, {extra} too many"
    return None


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Are two tensors equal bit for bit (NaN payloads and signs of zero included)?"""
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return bool(torch.equal(a.contiguous().view(integer), b.contiguous().view(integer)))
