"""The comparison of two calls timed round by round: by what factor one is faster, and how sure that is."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95
LEAST_ROUNDS = 6  # the fewest whose extremes enclose the median with that confidence: 1 - 2 / 2**6 = 0.97


@dataclass(frozen=True)
class Comparison:
    """The other call's time over ours: the median of the rounds, and an interval that holds the true median."""

    ratio: float
    low: float
    high: float
    rounds: int

    @property
    def differs(self) -> bool:
        """Does the interval exclude that both take equally long?"""
        return self.low > 1.0 or self.high < 1.0

    def sentence(self, ours: str, other: str) -> str:
        """The conclusion in words, with the interval."""
        interval = f"{CONFIDENCE:.0%} interval {self.low:.2f} to {self.high:.2f}, {self.rounds} rounds"
        if not self.differs:
            return f"No difference shows between {ours} and {other}; their times' ratio is {self.ratio:.2f} ({interval})."
        word = "faster" if self.ratio > 1 else "slower"
        return f"{ours} is {word} than {other}, which takes {self.ratio:.2f} times as long ({interval})."


def compare_rounds(ours: Sequence[float], other: Sequence[float]) -> Comparison:
    """Compare times of the same rounds, pair by pair, so that what slows a whole round down cancels.

    The interval is the sign test's, from order statistics: it supposes nothing about how times scatter. Raises
    ValueError for fewer than LEAST_ROUNDS pairs.
    """
    ratios = sorted(b / a for a, b in zip(ours, other, strict=True))
    if len(ratios) < LEAST_ROUNDS:
        raise ValueError(f"{len(ratios)} rounds are too few for an interval; time at least {LEAST_ROUNDS}")
    cut = _outside(len(ratios))
    return Comparison(statistics.median(ratios), ratios[cut], ratios[-1 - cut], len(ratios))


def _outside(count: int) -> int:
    """The number of ordered values to leave out at each end, so that the rest enclose the median with CONFIDENCE.

    It is the largest k with P(Bin(count, 1/2) <= k) <= (1 - CONFIDENCE) / 2.
    """
    below, chance = 0, 0.0
    while True:
        chance += math.comb(count, below) / 2**count
        if chance > (1 - CONFIDENCE) / 2:
            return below - 1
        below += 1
