"""The pass `row_sum`: a sum or mean over all features of a linear, with scalars and constants between, is x times the column sums of W, plus the sum of b.

    sum over n of (x W^T + b)[n]  =  sum over k of x[k] (sum over n of W[n, k])  +  sum over n of b[n]

W is read once a call, and nothing of the size of the linear's result is made.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from codegen.algebra.chain import NEW, SCALES, SHIFTS, behind, chain_on, end_of, joined_axes, new_step, number_of, one_each, splice
from codegen.algebra.rewriting import Declined, Derived, Rewriting
from codegen.ir.operand import c_identifier
from codegen.numerics import FP32, ConstantError, constant
from codegen.ops import Shape
from codegen.spec import Spec, Step


def row_sum(given: Rewriting) -> Rewriting | None:
    """Rewrite the first linear whose features are summed."""
    spec = given.spec
    for producer in spec.chain:
        fold = _fold_behind(spec, producer) if producer.operator.name == "linear" else None
        if fold is None or _work(producer, 1) >= _work(producer, producer.values["out_features"]):
            continue
        made = _rewritten(spec, producer, fold)
        if made is not None:
            left, derived = made
            count, name = producer.values["out_features"], fold.operator.name
            text = f"{name} over the {count} features of {producer.name}: x times the {name} of W's rows, {spec.chain[producer.index].parameters[0].shape} read once"
            return replace(given.to(left, derived), applied=(*given.applied, ("row_sum", text)))
    return None


def _fold_behind(spec: Spec, producer: Step) -> Step | None:
    """The sum or mean over the features of `producer`, with nothing in between that it does not go through."""
    last = len(producer.output_shape) - 1

    def through(step: Step) -> bool:
        name = step.operator.name
        return (name in SCALES and one_each(step, range(last + 1))) or (name in SHIFTS and one_each(step, range(last)))

    found = behind(spec, producer, lambda step: step.operator.name in ("sum", "mean"), through)
    return found if found and joined_axes(found) == (last,) else None


def _work(producer: Step, rows: int) -> float:
    """Multiply-adds of a product with so many rows of W, and additions that make them where they are sums of W's."""
    weight = math.prod(producer.parameters[0].shape)
    return math.prod(producer.input_shape) * rows + (weight if rows == 1 else 0)


def _rewritten(spec: Spec, producer: Step, fold: Step) -> tuple[Spec, tuple[Derived, ...]] | None:
    name, count = fold.operator.name, producer.values["out_features"]
    last = len(producer.output_shape) - 1
    derived: list[Derived] = []
    taken = {c_identifier(key) for key, _ in spec.parameters}

    def summed(key: str, shape: Shape, *steps: Step) -> tuple[str, Shape]:
        how = chain_on(shape, *steps)
        own = f"{key}.{name}"
        while c_identifier(own) in taken:
            own += "_"
        made = Derived(own, end_of(how), key, shape, how)
        if made not in derived:
            derived.append(made)
        return made.key, made.shape

    weight, *bias = producer.parameters
    owned = summed(producer.key(weight), weight.shape, new_step(name, dim=0))
    middle = [_taking("mul", owned), new_step("sum", dim=last, keepdim=True)]
    for parameter in bias:
        middle.append(_taking("add", summed(producer.key(parameter), parameter.shape, new_step(name, dim=0, keepdim=True))))
    for step in spec.chain[producer.index + 1 : fold.index]:
        middle.append(_through(step, name, count, summed))
    if not fold.values["keepdim"]:
        middle.append(new_step("view", sizes=fold.output_shape))
    left = splice(spec, producer.index, fold.index + 1, middle)
    return None if left is None else (left, tuple(derived))


def _taking(operator: str, owned: tuple[str, Shape]) -> Step:
    return new_step(operator, owned=owned, parameter=owned[0])


def _through(step: Step, fold: str, count: int, summed: Callable[..., tuple[str, Shape]]) -> Step:
    """A scale or shift as it stands behind the fold."""
    if step.operator.name in SCALES:
        return step
    number = number_of(step)
    if number is not None:
        return step if fold == "mean" else replace(step, index=NEW, values={**step.values, "value": _times(number, count)})
    key, _ = step.operand
    shape = step.values["shape"] if step.owned is None else step.owned[1]
    size = math.prod(shape)
    if size == 1 and fold == "mean":
        return step
    end = new_step("mul", value=float(count)) if size == 1 else new_step(fold, dim=0, keepdim=True)
    return _taking(step.operator.name, summed(key, (size,), end))


def _times(number: float, count: int) -> float:
    try:
        return constant(number * count, FP32, False)
    except ConstantError as error:
        raise Declined(f"{number} times {count} {error}") from None
