"""The pass `pooled_taps`: an average pooling behind a convolution is a convolution whose filters' taps are summed over the pooling's windows.

A convolution of k taps and stride s, pooled by windows of n values a stride t apart, has k + s (n - 1) taps and stride s t:

    W'[m] = 1/n sum of W[j] over j = m - s i, i in [0, n)

A transposed convolution of stride s and padding p, pooled a multiple t of s apart, is a convolution of stride t / s. Its tap for the place u of x beside the
window's first has

    W'[u] = 1/n sum of W[j] over j = i + p - s u, i in [0, n)

What scales or shifts whole channels in between is applied to the means.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace

from codegen.algebra.chain import AFFINE, behind, new_step, one_each, splice
from codegen.algebra.precision import needs_single, single
from codegen.algebra.rewriting import ByTaps, Derived, Rewriting
from codegen.ir.flop import producer_flop
from codegen.ir.segment import evaluates
from codegen.ir.window import window_of
from codegen.ops import Kind, ShapeError
from codegen.spec import Spec, Step

MOST_TAPS = 32  # along an axis: a mask of them has a bit each


def pooled_taps(given: Rewriting) -> Rewriting | None:
    """Rewrite the first convolution whose results are averaged over windows, where that takes fewer products."""
    spec = given.spec
    for producer in spec.chain:
        if producer.operator.kind is not Kind.PRODUCER or not producer.operator.rank:
            continue
        pool = _pool_behind(spec, producer, given.training)
        axes = _axes(producer, pool) if pool else None
        if axes is None:
            continue
        made = _rewritten(spec, producer, pool, axes)
        if made is None or producer_flop(made[0].chain[producer.index]) >= producer_flop(producer):
            continue
        needs_single(spec, producer, f"{pool.operator.name} behind {producer.name}")
        left, derived = made
        step = left.chain[producer.index]
        text = (
            f"{pool.operator.name} behind {producer.name}: a {step.operator.name} with {_product(step.values['kernel_size'])} summed taps and stride "
            f"{_product(step.values['stride'])}, {producer_flop(producer) / producer_flop(step):.1f} times fewer products"
        )
        return replace(given.to(single(left), derived), applied=(*given.applied, ("pooled_taps", text)))
    return None


def _product(sizes: tuple[int, ...]) -> str:
    return " x ".join(map(str, sizes))


def whole_channels(step: Step, training: bool) -> bool:
    """Does a mean over places go through a step: is it a scale and shift for whole channels?"""
    return evaluates(step, training) or (step.operator.name in AFFINE and one_each(step, range(2, len(step.input_shape))))


def _pool_behind(spec: Spec, producer: Step, training: bool) -> Step | None:
    """The average pooling behind a convolution, with what it goes through in between."""
    found = behind(spec, producer, lambda step: step.operator.kind is Kind.POOL, lambda step: whole_channels(step, training))
    return found if found and found.operator.rank == producer.operator.rank else None


@dataclass(frozen=True)
class _Axis:
    """An axis of the rewritten convolution: which taps each of its taps sums, its stride and padding."""

    sums: tuple[tuple[int, ...], ...]
    stride: int
    padding: int


def _axes(producer: Step, pool: Step) -> list[_Axis] | None:
    """The axes of the rewritten convolution; None where there is none."""
    window, values, rank = window_of(pool), producer.values, producer.operator.rank
    if window is None or not window.average or window.clipped_anywhere or window.divisor is not None or values["groups"] > 1:
        return None
    found: list[_Axis] = []
    for axis in range(rank):
        size, apart = (numbers[3 - rank + axis] for numbers in (window.size, window.stride))
        given = [values[key][axis] for key in ("kernel_size", "stride", "padding", "dilation")]
        made = (_transposed if producer.operator.transposed else _plain)(*given, size, apart)
        if made is None or not all(made.sums) or len(made.sums) > MOST_TAPS or given[0] > MOST_TAPS:
            return None
        found.append(made)
    return found


def _plain(taps: int, stride: int, padding: int, dilation: int, size: int, apart: int) -> _Axis:
    meets: dict[int, list[int]] = {}  # taps of W by the place of x beside a window's first
    for i, j in itertools.product(range(size), range(taps)):
        meets.setdefault(stride * i + dilation * j, []).append(j)
    sums = tuple(tuple(sorted(meets.get(m, ()))) for m in range(max(meets) + 1))
    return _Axis(sums, stride * apart, padding)


def _transposed(taps: int, stride: int, padding: int, dilation: int, size: int, apart: int) -> _Axis | None:
    if apart % stride:
        return None
    first, last = -((dilation * (taps - 1) - padding) // stride), (size - 1 + padding) // stride
    if first > 0:
        return None  # the first places of x reach no result: a convolution with a padding below 0
    sums = tuple(
        tuple(j for j in range(taps) if 0 <= stride * u + dilation * j - padding < size) for u in range(first, last + 1)
    )  # fmt: skip
    return _Axis(sums, apart // stride, -first)


def _rewritten(spec: Spec, producer: Step, pool: Step, axes: list[_Axis]) -> tuple[Spec, tuple[Derived, ...]] | None:
    window, rank = window_of(pool), producer.operator.rank
    weight = producer.parameters[0]
    swaps = producer.operator.transposed
    how = ByTaps(tuple(axis.sums for axis in axes), 1.0 / math.prod(window.size), swaps)
    channels = {key: producer.values[key] for key in ("in_channels", "out_channels", "bias")}
    conv = new_step(
        f"conv{rank}d", producer.name, **channels, kernel_size=how.counts, stride=tuple(axis.stride for axis in axes), padding=tuple(axis.padding for axis in axes),
    )  # fmt: skip
    try:
        left = splice(spec, producer.index, pool.index + 1, [conv, *spec.chain[producer.index + 1 : pool.index]])
    except ShapeError:
        return None
    if left is None or left.chain[producer.index].output_shape != pool.output_shape:
        return None  # padding on one side alone
    shape = (producer.values["out_channels"], producer.values["in_channels"], *how.counts)
    return left, (Derived(producer.key(weight), shape, producer.key(weight), weight.shape, how),)

