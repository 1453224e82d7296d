"""The pass `summed_input`: a sum or mean over whole spatial axes behind a convolution is a product with sums of x over those axes.

Along a summed axis each tap of the filter meets one range of x's places: all of them where no padding cuts any off. So x is summed over each distinct range
first, and taps with the same range are summed too:

    sum over o of (sum over j of x[i(o, j)] W[j])  =  sum over ranges r of (sum of x over r) (sum of W[j] over the j with range r)

Where all axes are summed, a linear of channels x ranges is left; where the leading ones are, a convolution of the others with ranges as channels. What
scales or shifts whole channels in between is applied to the means.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from codegen.algebra.chain import behind, joined_axes, new_step, size_along, splice
from codegen.algebra.pooled_taps import MOST_TAPS, whole_channels
from codegen.algebra.precision import needs_single, single
from codegen.algebra.rewriting import ByRanges, ByTaps, Derived, Rewriting
from codegen.ir.flop import producer_flop
from codegen.ir.grouping import grouping_of
from codegen.ops import Kind
from codegen.spec import Spec, Step

MOST_RANGES = 32  # combinations, of which each has sums in registers


def summed_input(given: Rewriting) -> Rewriting | None:
    """Rewrite the convolution that the chain starts with, where its results are summed over whole axes."""
    spec = given.spec
    producer = spec.chain[0]
    if producer.operator.kind is not Kind.PRODUCER or not producer.operator.rank or producer.values["groups"] > 1 or producer.name in _rewritten_by(given):
        return None
    fold = _fold_behind(spec, given.training)
    axes = _axes(producer, fold) if fold else None
    if axes is None or math.prod(len(axis.ranges) for axis in axes) > MOST_RANGES or any(step.reads == spec.inputs[0].name for step in spec.chain):
        return None
    left, derived = _rewritten(spec, producer, fold, axes)
    count = math.prod(len(axis.ranges) for axis in axes)
    if left is None or producer_flop(left.chain[0]) + 2 * count * math.prod(producer.input_shape) >= producer_flop(producer):
        return None
    needs_single(spec, producer, f"{fold.operator.name} behind {producer.name}")
    ranges = f"{count} ranges" if count > 1 else "whole axes"
    text = f"{fold.operator.name} behind {producer.name}: x is summed over {ranges} of places first, and a {left.chain[0].operator.name} of {derived[0].shape[1]} channels is left"
    return replace(given.to(single(left), derived), applied=(*given.applied, ("summed_input", text)))


def _rewritten_by(given: Rewriting) -> set[str]:
    """The keys of what is derived already."""
    return {tensor.key.split(".")[0] for tensor in given.derived}


def _fold_behind(spec: Spec, training: bool) -> Step | None:
    """The sum or mean over leading spatial axes behind the first step, with what it goes through in between."""
    ends = lambda step: step.operator.name in ("sum", "mean") or step.operator.kind is Kind.POOL  # noqa: E731
    found = behind(spec, spec.chain[0], ends, lambda step: whole_channels(step, training))
    if found is None:
        return None
    if found.operator.kind is Kind.POOL:
        return found if "avg" in found.operator.name and grouping_of(found) is not None else None
    axes = joined_axes(found)
    return found if axes == tuple(range(2, 2 + len(axes))) else None


@dataclass(frozen=True)
class _Axis:
    """A summed axis: the distinct ranges of x's places, and for each the taps that meet it."""

    ranges: tuple[tuple[int, int], ...]
    taps: tuple[tuple[int, ...], ...]


def _summed(fold: Step) -> tuple[int, ...]:
    """The axes that a fold or a pooling over whole planes sums."""
    return joined_axes(fold) if fold.operator.kind is Kind.REDUCTION else tuple(range(2, len(fold.input_shape)))


def _axes(producer: Step, fold: Step) -> list[_Axis] | None:
    """The summed axes; None where a tap meets places that are no range."""
    values, found = producer.values, []
    for axis in _summed(fold):
        size, results = producer.input_shape[axis], producer.output_shape[axis]
        taps, stride, padding, dilation = (values[key][axis - 2] for key in ("kernel_size", "stride", "padding", "dilation"))
        if taps > MOST_TAPS:
            return None
        meets: dict[tuple[int, int], list[int]] = {}
        for tap in range(taps):
            if producer.operator.transposed:  # result stride * i - padding + dilation * tap
                first, last = -((dilation * tap - padding) // stride), (results - 1 + padding - dilation * tap) // stride + 1
            elif stride == 1:  # x's place result - padding + dilation * tap
                first, last = dilation * tap - padding, results - padding + dilation * tap
            else:
                return None
            reached = max(first, 0), min(last, size)
            if reached[0] < reached[1]:
                meets.setdefault(reached, []).append(tap)
        if not meets:
            return None
        found.append(_Axis(tuple(meets), tuple(map(tuple, meets.values()))))
    return found


def _rewritten(spec: Spec, producer: Step, fold: Step, axes: list[_Axis]) -> tuple[Spec | None, tuple[Derived, ...]]:
    values, rank, summed = producer.values, producer.operator.rank, _summed(fold)
    weight, turned, kept = producer.parameters[0], producer.operator.transposed, rank - len(summed)
    by_ranges = ByRanges(tuple(axis.ranges for axis in axes))
    x_shape = (producer.input_shape[0], values["in_channels"] * by_ranges.count, *producer.input_shape[2 + len(summed) :])
    stays = tuple(tuple((tap,) for tap in range(size)) for size in values["kernel_size"][len(summed) :])
    by_taps = ByTaps(
        (*(axis.taps for axis in axes), *stays), 1.0 / size_along(producer.output_shape, summed), swaps=turned and not kept, front=len(summed) if turned and kept else 0,
    )  # fmt: skip
    given, gives = x_shape[1], values["out_channels"]
    if kept:
        names = ("kernel_size", "stride", "padding", "dilation", *(("output_padding",) if turned else ()))
        product = new_step(
            f"conv{'_transpose' if turned else ''}{kept}d", producer.name, in_channels=given, out_channels=gives, bias=values["bias"],
            **{key: values[key][len(summed) :] for key in names},
        )  # fmt: skip
        shape = (given, gives) if turned else (gives, given)
    else:
        product, shape = new_step("linear", producer.name, in_features=given, out_features=gives, bias=values["bias"]), (gives, given)
    places = tuple(1 if axis in summed else size for axis, size in enumerate(producer.output_shape))
    middle = [product, new_step("view", sizes=places), *spec.chain[1 : fold.index]]
    if fold.operator.name == "sum":
        middle.append(new_step("mul", value=float(size_along(producer.output_shape, summed))))
    if fold.output_shape != places:
        middle.append(new_step("view", sizes=fold.output_shape))
    inner = replace(spec, inputs=(replace(spec.inputs[0], shape=x_shape), *spec.inputs[1:]))
    left = splice(inner, 0, fold.index + 1, middle)
    key = producer.key(weight)
    return left, (
        Derived("x", x_shape, "x", producer.input_shape, by_ranges),
        Derived(key, (*shape, *values["kernel_size"][len(summed) :]), key, weight.shape, by_taps),
    )

