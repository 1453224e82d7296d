"""Chains as passes edit them: new steps, and a run of steps replaced by others."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from codegen.algebra.rewriting import ByChain
from codegen.ops import OPERATORS, REQUIRED, Kind, Shape
from codegen.ops.axes import axes_of
from codegen.spec import Spec, Step, result_shape

NEW = -2  # the index of a step that the chain as written has not
SCALES, SHIFTS = ("mul", "div"), ("add", "sub", "rsub")
AFFINE = (*SCALES, *SHIFTS)  # arithmetic that a sum or mean of its values goes through, where its operand allows


def new_step(operator: str, name: str | None = None, owned: tuple[str, Shape] | None = None, **values: Any) -> Step:
    """A step with defaults for the arguments that are not given, for `splice`, which gives it its place and shapes.

    `owned` is the key and shape of the tensor that arithmetic takes.
    """
    row = OPERATORS[operator]
    known = {argument.name: argument.default for argument in row.arguments if argument.default is not REQUIRED}
    return Step(row, name, {**known, **values}, (), (), index=NEW, owned=owned)


def splice(spec: Spec, first: int, last: int, middle: Sequence[Step]) -> Spec | None:
    """The spec with `middle` in place of the steps from `first` to `last`, not included. None where another step takes a value from among those, or nothing is left.

    Steps of `middle` that stood in the chain keep their index until then, and take no other step's value.
    """
    inside = any(step.tap is not None and first <= step.tap < last - 1 for step in spec.chain[last:])
    end = first + len(middle) - 1
    lost = end < 0 and any(step.tap == last - 1 for step in spec.chain[last:])  # the value in front is an input
    steps = (*spec.chain[:first], *middle, *spec.chain[last:])
    if inside or lost or not steps or any(step.tap is not None for step in middle):
        return None
    place = {step.index: at for at, step in enumerate(steps) if step.index != NEW}
    place[last - 1] = end
    made: list[Step] = []
    inputs = {given.name: given.shape for given in spec.inputs}
    shape = spec.inputs[0].shape
    for at, step in enumerate(steps):
        tap = None if step.tap is None else place[step.tap]
        other = inputs[step.reads] if step.reads else made[tap].output_shape if tap is not None else step.operand[1] if step.owned else None
        output = shape if step.operator.kind is Kind.NORM else result_shape(step.operator, step.values, shape, other)  # of one value a channel too, in evaluation
        made.append(replace(step, index=at, tap=tap, owner=place.get(step.owner), input_shape=shape, output_shape=output))
        shape = output
    return replace(spec, chain=tuple(made))


def chain_on(shape: Shape, *steps: Step) -> ByChain:
    """Steps of `new_step` one behind another on a value of `shape`."""
    made = []
    for at, step in enumerate(steps):
        output = result_shape(step.operator, step.values, shape)
        made.append(replace(step, index=at, input_shape=shape, output_shape=output))
        shape = output
    return ByChain(tuple(made))


def end_of(how: ByChain) -> Shape:
    """The shape that a derivation by a chain gives."""
    return how.steps[-1].output_shape


def behind(spec: Spec, producer: Step, ends: Callable[[Step], bool], through: Callable[[Step], bool]) -> Step | None:
    """The first step behind `producer` that `ends` the search, with steps alone in between that it goes `through`; None where there is none."""
    for step in spec.chain[producer.index + 1 :]:
        if ends(step):
            return step
        if not through(step):
            return None
    return None


def joined_axes(step: Step) -> tuple[int, ...]:
    """The axes that a reduction joins."""
    return axes_of(step.values["dim"], step.input_shape, step.operator.name)


def number_of(step: Step) -> float | None:
    """The number that arithmetic takes; None where it takes a tensor."""
    return step.values.get("value") if step.operator.kind is Kind.ELEMENTWISE else None


def one_each(step: Step, axes: Sequence[int]) -> bool:
    """Does arithmetic take a number, or a parameter with one value for all places along `axes` of the value, whose shape it leaves?"""
    if number_of(step) is not None:
        return True
    if step.operand is None or step.output_shape != step.input_shape:
        return False
    own = step.operand[1]
    return all(at < 0 or own[at] == 1 for axis in axes if (at := axis - len(step.input_shape) + len(own)) is not None)


def size_along(shape: Shape, axes: Sequence[int]) -> int:
    """Places along `axes` together."""
    return math.prod(shape[axis] for axis in axes)
