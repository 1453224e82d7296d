"""The tiers of tests, and a sentence for a test that does dear work in the cheap one.

`make test` runs what has none of the markers of DEAR, `make test-all` the rest that needs no GPU. A test needs no marker unless it compiles CUDA, runs
kernels in the emulation, or takes long. One test for each template branch does the first two in `make test`: those are marked `representative`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

import pytest

Case = TypeVar("Case")

DEAR = ("gpu", "two_gpus", "nvcc", "emulated", "slow")
RULES = {
    "nvcc": "compiles CUDA with nvcc", "emulated": "runs a kernel in the emulation",
}  # fmt: skip
_running: pytest.Item | None = None  # of this process
SHARE = 5  # `make test` takes every fifth of a matrix's cases
shares = pytest.mark.parametrize("share", ["some", pytest.param("all", marks=pytest.mark.slow)])


def running(item: pytest.Item | None) -> None:
    """The test whose work is checked from here on."""
    global _running
    _running = item


def claim(marker: str) -> None:
    """Say that the running test now does what `marker` stands for. Fails a test of `make test` that is not representative; work outside of a test may go on."""
    if _running is None or any(_running.get_closest_marker(name) for name in (marker, "representative", "gpu")):
        return
    pytest.fail(
        f"{_running.nodeid} {RULES[marker]}, which takes seconds each time: mark it with @pytest.mark.{marker}, so that make test-all runs it, "
        "or, where no other test of make test covers this template branch, with @pytest.mark.representative.",
        pytrace=False,
    )


def complaints(item: pytest.Item) -> list[str]:
    """Sentences about markers of a test that contradict each other."""
    found = []
    if item.get_closest_marker("two_gpus") and not item.get_closest_marker("gpu"):
        found.append(f"{item.nodeid} is marked two_gpus and not gpu: make test-gpu would not run it.")
    dear = [name for name in DEAR if item.get_closest_marker(name)]
    if item.get_closest_marker("representative") and dear:
        found.append(f"{item.nodeid} is marked representative and {dear[0]}: make test would not run it.")
    return found


def share_of(share: str, names: Iterable[str], name: str, cases: Sequence[Case]) -> Sequence[Case]:
    """The cases that a test with the parameter `name`, one of `names`, runs under `shares`: in `make test` every fifth, at least one, and others for the
    next name; in `make test-all` all."""
    return cases if share == "all" else cases[list(names).index(name) % min(SHARE, len(cases)) :: SHARE]


def quick(values: Iterable, *kept: object) -> list:
    """Parameters of a test that takes long with each: `kept` in `make test`, the others in `make test-all`."""
    return _split(values, kept, (), (pytest.mark.slow,))


def emulated(values: Iterable, *representative: object) -> list:
    """Parameters of a test that runs kernels in the emulation: `representative` in `make test`, the others in `make test-all`.

    A value is a parameter or a tuple of parameters. Raises ValueError where a representative is none of the values.
    """
    return _split(values, representative, (pytest.mark.representative,), (pytest.mark.emulated,))


def _split(values: Iterable, chosen: tuple, marks: tuple, others: tuple) -> list:
    """A parameter for each value, with `marks` where it is one of `chosen`, else with `others`."""
    values = list(values)
    if missing := [value for value in chosen if value not in values]:
        raise ValueError(f"{missing} are not among the values")
    return [pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=marks if value in chosen else others) for value in values]
