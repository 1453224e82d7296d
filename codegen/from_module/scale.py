"""Sizes at which a layer can be checked: its own where they are cheap, else smaller ones of which forward makes the same chain.

The file's own Model is constructed for the smaller sizes and traced again, so what is compared is the file's code, with other numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from codegen.from_module.text import Given
from codegen.ir.flop import producer_flop
from codegen.ops import Kind
from codegen.spec import Spec

SAMPLES = 4
# Of a check: it goes through the layer forth and back in float64 some twenty times.
FLOP = 5e7
VALUES = 1 << 18  # of all results of operators together
WEIGHTS = 1 << 18
LEAST = 4  # a spatial axis is not made smaller than that
FACTORS = (16, 4, 2)


@dataclass(frozen=True)
class Sizes:
    """The constructor's arguments and the inputs of a layer, and the spec that follows."""

    init: tuple[Any, ...]
    inputs: tuple[Given, ...]
    spec: Spec


def samples_of(spec: Spec) -> int:
    """The samples of a check: all where that costs little."""
    return spec.batch if cost(spec, spec.batch) <= 1 else min(SAMPLES, spec.batch)


def cost(spec: Spec, samples: int = SAMPLES) -> float:
    """The largest share that a check of so many samples takes of what it may take."""
    share = min(samples, spec.batch) / spec.batch
    flop = sum(producer_flop(step) for step in spec.chain if step.operator.kind is Kind.PRODUCER) * share
    values = (sum(math.prod(step.output_shape) for step in spec.chain) + sum(math.prod(given.shape) for given in spec.inputs)) * share
    weights = sum(math.prod(shape) for _, shape in spec.parameters)
    return max(flop / FLOP, values / VALUES, weights / WEIGHTS)


def reduced(full: Sizes, sketch: Callable[[tuple[Any, ...], tuple[Given, ...]], Spec | None]) -> Sizes:
    """The first sizes, smaller move by move, that cost little enough; where no move is left, the last ones. `sketch` gives the spec of a layer with other
    arguments and inputs, None where there is none."""
    sizes = full
    while cost(sizes.spec) > 1:
        for init, inputs in _moves(sizes):
            spec = sketch(init, inputs)
            if spec is not None and _same_chain(full.spec, spec) and cost(spec) < cost(sizes.spec):
                sizes = Sizes(init, inputs, spec)
                break
        else:
            return sizes
    return sizes


def _moves(sizes: Sizes) -> Iterator[tuple[tuple[Any, ...], tuple[Given, ...]]]:
    """Smaller arguments and inputs: each spatial axis of all inputs, largest first, then each large number of the constructor."""
    first = sizes.inputs[0].shape
    spatial = sorted(range(2, len(first)), key=lambda axis: -first[axis]) if len(first) > 3 else []
    for factor in FACTORS:
        for axis in spatial:
            if first[axis] // factor >= LEAST:
                yield sizes.init, tuple(_divided(given, axis - len(first), factor) for given in sizes.inputs)
    numbers = sorted({number for value in sizes.init for number in (value if isinstance(value, (list, tuple)) else (value,)) if type(number) is int and number >= 32})
    for factor in FACTORS:
        for number in reversed(numbers):
            if number % factor == 0 and number // factor >= LEAST:
                init = tuple(_replaced(value, number, number // factor) for value in sizes.init)
                yield init, tuple(replace(given, shape=(given.shape[0], *_replaced(given.shape[1:], number, number // factor))) for given in sizes.inputs)
                yield init, tuple(replace(given, shape=(given.shape[0], *_replaced(given.shape[1:2], number, number // factor), *given.shape[2:])) for given in sizes.inputs)


def _divided(given: Given, axis: int, factor: int) -> Given:
    """The input with an axis, counted from the end, so many times smaller; the axes of batch and channels stay."""
    if len(given.shape) + axis < 2 or given.shape[axis] % factor:
        return given
    shape = list(given.shape)
    shape[axis] //= factor
    return replace(given, shape=tuple(shape))


def _replaced(value: Any, number: int, smaller: int) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(_replaced(item, number, smaller) for item in value)
    return smaller if type(value) is int and value == number else value


def _same_chain(full: Spec, small: Spec) -> bool:
    """Has the smaller layer the same operators, and axes of one value only where the other has them?"""
    if len(full.chain) != len(small.chain):
        return False
    for ours, theirs in zip(full.chain, small.chain, strict=True):
        if (ours.operator, ours.name, ours.tap, ours.reads, ours.owner) != (theirs.operator, theirs.name, theirs.tap, theirs.reads, theirs.owner):
            return False
        if [size == 1 for size in ours.output_shape] != [size == 1 for size in theirs.output_shape]:
            return False
    return True
