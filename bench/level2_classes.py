"""The problems of KernelBench's level 2 whose result says little, with the reason of each. All others are ordinary.

All of them are computed in full: nothing that holds only for some data or weights is folded. They are listed apart and left out of every mean.
"""

from __future__ import annotations

ORDINARY, CONSTANT, DATA, TOLERANCE, UNPASSABLE = "ordinary", "constant", "data", "tolerance", "unpassable"

MEANINGS = {
    CONSTANT: "the result is a constant, for every input at these weights",
    DATA: "the result is a constant for the benchmark's inputs, not for others",
    TOLERANCE: "a constant, or a number of the weights alone, lies within the benchmark's tolerance of the result",
    UNPASSABLE: "the reference itself would not agree with itself",
}

CLASSES: dict[int, tuple[str, str]] = {
    9: (DATA, "relu((v - 2) * 1.5) of sums whose standard deviation is 1/3: none of them exceeds 2"),
    23: (CONSTANT, "the mean over all of a GroupNorm's result is the mean of beta, 0 at the initial weights and where gamma is 1"),
    36: (DATA, "a sum of 256 minima is below -60, where gelu is 0: what is left is the added bias"),
    38: (TOLERANCE, "a softmax over 131072 positions of values in [0, 1] is at most 2.1e-5 everywhere"),
    65: (TOLERANCE, "a sum of 3e5 sigmoids deviates by 6 from sample to sample, and the tolerance there is 29"),
    66: (UNPASSABLE, "dropout in training: the second run is not seeded again, so its mask is another"),
    80: (CONSTANT, "the mean over an axis of one value is that value, so the difference is 0, and gelu(0) is 0"),
    83: (CONSTANT, "min(v, 0) clamped to [0, 1] is 0"),
    93: (DATA, "min(v + 0.5, 0) is not 0 for three values in a million"),
}  # fmt: skip


def class_of(problem: int) -> str:
    """The class of a problem, by its number."""
    return CLASSES.get(problem, (ORDINARY, ""))[0]


def reason_of(problem: int) -> str:
    """Why a problem is not ordinary, in a line; empty where it is."""
    return CLASSES.get(problem, (ORDINARY, ""))[1]
