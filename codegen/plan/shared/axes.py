"""The axes of a convolution: which values of x a result meets, and through which taps.

Along each axis

    result[step * j + phase] = sum over the phase's taps of x[stride * j + lower + offset] * W[tap],   j in [0, count)

A convolution has one phase, and offsets that are multiples of its dilation. A transposed convolution has `step` phases, one for each remainder of a result's
place, each with its own taps: they are exactly the products that are not with zeros in between.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from codegen.spec import Step

AXES = ("Depth", "Height", "Width")  # of space, as constants are named by them
CONVOLUTIONS = frozenset(f"conv{kind}{rank}d" for kind in ("", "_transpose") for rank in (1, 2, 3))


@dataclass(frozen=True)
class Axis:
    """An axis of space: `size` of x and `results` of y; of a tap that each of `phases` lists, its number and its offset."""

    size: int
    results: int
    count: int
    stride: int
    step: int
    lower: int
    phases: tuple[tuple[tuple[int, int], ...], ...]

    @property
    def upper(self) -> int:
        """From the end of x to that of the box of first pixels."""
        return self.lower + (self.count - 1) * self.stride + 1 - self.size

    @property
    def reach(self) -> int:
        """The largest offset of a tap."""
        return max((offset for taps in self.phases for _, offset in taps), default=0)


POINT = Axis(1, 1, 1, 1, 1, 0, (((0, 0),),))  # an axis that a convolution of lower rank has not


def axes_of(producer: Step) -> tuple[Axis, ...]:
    """The axes of a convolution or transposed convolution of any rank."""
    made = transposed_axis_of if producer.operator.transposed else axis_of
    numbers = zip(*(producer.values[key] for key in ("kernel_size", "stride", "padding", "dilation")), strict=True)
    return tuple(made(size, result, *given) for size, result, given in zip(producer.input_shape[2:], producer.output_shape[2:], numbers, strict=True))


def axis_of(size: int, results: int, kernel: int, stride: int, padding: int, dilation: int) -> Axis:
    return Axis(size, results, results, stride, 1, -padding, (tuple((tap, tap * dilation) for tap in range(kernel)),))


def transposed_axis_of(size: int, results: int, kernel: int, stride: int, padding: int, dilation: int) -> Axis:
    """Result o meets x[i] through tap t where o + padding = stride i + dilation t."""
    met = [
        [(tap, (phase + padding - dilation * tap) // stride) for tap in range(kernel) if (phase + padding - dilation * tap) % stride == 0]
        for phase in range(stride)
    ]
    lower = min(place for taps in met for _, place in taps)
    phases = tuple(tuple(sorted(((tap, place - lower) for tap, place in taps), key=lambda item: item[1])) for taps in met)
    return Axis(size, results, math.ceil(results / stride), 1, stride, lower, phases)
