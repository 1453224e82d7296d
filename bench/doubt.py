"""How much of a float64 result is known: what the roundings of float64 itself leave of each of its elements.

A reference judges a result of some type only where it is right to that type's last bit itself. The mean of normalised values is 0 but for roundings, and so is
a constant behind a norm: float64 gives 1e-17 there, fp32 1e-8, eager in 16 bits 0, and a number over it is anything, infinities among it. No error relative to
that says anything.

The reference is therefore computed several times side by side, the operands of every function off by up to ROUNDINGS of float64's, at random and each by itself
(a sum of n terms is off by about the root of n). An element is unknown where that moves it by more than the storage type's own rounding: by 2^-24 of itself in
fp32, so that its condition is above 2^26 and fp32 arithmetic leaves no digit of it. What it may be instead follows from the same runs, for errors grow with the unit
of rounding: it may be as many times further off than they are as the type's unit is larger than float64's. An intermediate value that is unknown may as well be 0,
which one more run makes it: only so is it seen that a division by it may be infinite.

Infinities of the storage type have their own doubt: `overflows` says where an intermediate value's last bit decides whether there is one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakIdKeyDictionary

from codegen.numerics import Precision

ROUNDINGS = 8  # of an operand: what sums of some hundred terms leave
RUNS = 6  # beside the reference itself: in fewer, all may by chance come out near an element that is rounding alone
UNIT, TF32_UNIT = 2.0**-53, 2.0**-11  # of rounding to nearest
_SEED = 11
_PLAIN = frozenset(("__get__", "__set__", "__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__"))  # attributes, and what writes


@dataclass(frozen=True)
class Doubt:
    """What is not known of a float64 result.

    `known`: where it is right to the storage type's last bit, or all runs have the same NaN or infinity; `limit`: how far from it a result of the type may be
    elsewhere; `others`: what it came out as in the other runs, the last of them with zeros for what is unknown.
    """

    known: torch.Tensor
    limit: torch.Tensor
    others: tuple[torch.Tensor, ...]

    @property
    def unknown(self) -> int:
        """The number of elements that are unknown."""
        return int((~self.known).sum())

    @property
    def any(self) -> bool:
        """Is an element unknown, or may one be no number where the reference has one?"""
        return self.unknown > 0 or any(not torch.equal(torch.isfinite(other), torch.isfinite(self.others[0])) for other in self.others)

    def beyond(self, y: torch.Tensor, exact: torch.Tensor) -> int:
        """How many unknown elements of `y` are further from the reference than roundings of its type explain."""
        off = (y.double() - exact).abs()
        return int((~self.known & torch.isfinite(off) & ~(off <= self.limit)).sum())


def doubt_of(run: Callable[[], torch.Tensor], precision: Precision) -> Doubt:
    """What roundings leave of the float64 result that `run` gives."""
    step = 2.0 ** -(precision.mantissa_bits + 1)
    with Roundings(step) as roundings:
        exact = run()
    others = roundings.others(exact)
    spread = torch.stack([_distance(exact, other) for other in others[:RUNS]]).amax(0)
    coarsest = TF32_UNIT if precision.name == "tf32" else step
    return Doubt(spread <= step * exact.abs().nan_to_num(0.0, 0.0, 0.0), spread * (coarsest / UNIT), others)


def _distance(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """|a - b|: 0 where both are the same NaN or infinity, infinite where one is none or another."""
    same = (a == b) | (torch.isnan(a) & torch.isnan(b))
    return torch.where(same, 0.0, (a - b).abs().nan_to_num(torch.inf, torch.inf))


class Roundings(TorchFunctionMode):
    """Inside, every function of float64 tensors is computed RUNS times more with operands that are off by roundings, and once more with zeros for values that
    these move by more than `step` of themselves. Functions that write into an operand are left alone."""

    def __init__(self, step: float) -> None:
        super().__init__()
        self.step = step
        self._others = WeakIdKeyDictionary()
        self._generators: dict[torch.device, torch.Generator] = {}

    def others(self, value: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """What a value came out as in the other runs."""
        return self._others.get(value) or (value,) * (RUNS + 1)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in _PLAIN or (name.endswith("_") and not name.endswith("__")) or not any(map(_doubled, tree_leaves((args, kwargs)))):
            return func(*args, **kwargs)
        results = []
        for number in range(RUNS + 1):
            own = tree_map(lambda value: self._operand(value, number) if _doubled(value) else value, (args, kwargs))  # noqa: B023
            results.append(tree_leaves(func(*own[0], **own[1])))
        result = func(*args, **kwargs)
        for place, value in enumerate(tree_leaves(result)):
            if _doubled(value):
                others = [one[place] for one in results]
                spread = torch.stack([_distance(value, other) for other in others[:RUNS]]).amax(0)
                unknown = torch.isfinite(value) & torch.isfinite(others[RUNS]) & (spread > self.step * value.abs())
                others[RUNS] = torch.where(unknown, 0.0, others[RUNS])
                self._others[value] = tuple(others)
        return result

    def _operand(self, value: torch.Tensor, number: int) -> torch.Tensor:
        """An operand as one of the other runs takes it; a copy, for a function may write into it."""
        other = self.others(value)[number]
        if number == RUNS:
            return other.clone()
        generator = self._generators.setdefault(value.device, torch.Generator(value.device).manual_seed(_SEED))
        noise = torch.rand(other.shape, dtype=other.dtype, device=other.device, generator=generator)
        return other * (noise * 2.0 - 1.0).mul_(ROUNDINGS * UNIT).add_(1.0)


class Neighbours(TorchFunctionMode):
    """Inside, every result of a floating type comes out as a neighbour of itself: one unit in the last place larger in magnitude, or smaller, at random;
    `turned` has them the other way round."""

    def __init__(self, seed: int, turned: bool) -> None:
        super().__init__()
        self.seed, self.turned = seed, turned
        self._generators: dict[torch.device, torch.Generator] = {}

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if name in _PLAIN or (name.endswith("_") and not name.endswith("__")):
            return result
        given = {leaf.untyped_storage().data_ptr() for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}  # a view of them is no rounding
        return tree_map(lambda value: self._moved(value) if _rounded(value) and value.untyped_storage().data_ptr() not in given else value, result)

    def _moved(self, value: torch.Tensor) -> torch.Tensor:
        """Steps from one number of a type to the next are steps of its bits, which hold the magnitude in all but the first; 0 has neighbours above alone."""
        generator = self._generators.setdefault(value.device, torch.Generator(value.device).manual_seed(self.seed))
        larger = (torch.rand(value.shape, device=value.device, generator=generator) < 0.5) ^ self.turned
        bits = value.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[value.element_size()])
        step = torch.where(larger | (value == 0), 1, -1).to(bits.dtype)
        return torch.where(torch.isfinite(value), (bits + step).view(value.dtype), value)


def overflows(run: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Where roundings of intermediate values decide whether PyTorch's result of `run` is a number.

    A value at the end of its type's range, or at the other end in front of a division, is finite or not as its last bit falls, of which any order of summation
    is right. What both neighbours of every value show in two runs, many runs show of several values at once.
    """
    finite = torch.isfinite(run())
    sometimes, always = finite, finite
    for seed in range(RUNS // 2):
        for turned in (False, True):
            with Neighbours(seed, turned):
                finite = torch.isfinite(run())
            sometimes, always = sometimes | finite, always & finite
    return sometimes & ~always


def _rounded(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _doubled(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype is torch.float64
