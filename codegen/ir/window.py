"""Windows: the places that a pooling joins, for every rank in one form."""

from __future__ import annotations

from dataclasses import dataclass

from codegen.ops import Shape
from codegen.spec import Step


DEPTH, ROWS, COLUMNS = range(3)  # the axes of windows


@dataclass(frozen=True)
class Window:
    """A pooling of rank 1 to 3 as one of rank 3: sizes, strides, paddings and dilations of depth, rows and columns."""

    input: Shape
    output: Shape
    size: Shape
    stride: Shape
    padding: Shape
    dilation: Shape
    average: bool
    counts_padding: bool = True
    divisor: int | None = None

    def last(self, axis: int) -> int:
        """The first place behind the last window of an axis, in places of the input."""
        return (self.output[axis] - 1) * self.stride[axis] - self.padding[axis] + self.dilation[axis] * (self.size[axis] - 1) + 1

    def clipped(self, axis: int) -> bool:
        """Whether windows leave the input along an axis."""
        return self.padding[axis] > 0 or self.last(axis) > self.input[axis]

    @property
    def clipped_anywhere(self) -> bool:
        return any(self.clipped(axis) for axis in range(3))

    @property
    def sees_nothing(self) -> bool:
        """Whether a window lies outside the input altogether: its maximum is -inf."""
        return any(
            not any(0 <= place * self.stride[axis] - self.padding[axis] + at * self.dilation[axis] < self.input[axis] for at in range(self.size[axis]))
            for axis in range(3)
            for place in (0, self.output[axis] - 1)
        )


def window_of(pool: Step) -> Window | None:
    """The windows of a pooling; None where those of an adaptive one have several sizes."""
    values, rank = pool.values, pool.operator.rank
    source, result = pool.input_shape[2:], pool.output_shape[2:]

    def three(given: Shape, fill: int) -> Shape:
        return (fill,) * (3 - rank) + tuple(given)

    ends = three(source, 1), three(result, 1)
    if "output_size" in values:
        if any(size % count for size, count in zip(source, result, strict=True)):
            return None
        size = tuple(whole // count for whole, count in zip(*ends, strict=True))
        return Window(*ends, size, size, (0, 0, 0), (1, 1, 1), True)
    size = three(values["kernel_size"], 1)
    stride = three(values["stride"] or values["kernel_size"], 1)
    dilation = three(values.get("dilation", (1,) * rank), 1)
    return Window(
        *ends, size, stride, three(values["padding"], 0), dilation, pool.operator.name.startswith("avg"), values.get("count_include_pad", True),
        values.get("divisor_override"),
    )  # fmt: skip
