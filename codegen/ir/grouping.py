"""Groupings: the axes of a value that a norm, a softmax or a fold joins, and how its groups lie in memory."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from codegen.ir.window import window_of
from codegen.ops import Kind, Shape
from codegen.ops.axes import axes_of, trailing
from codegen.spec import Step


@dataclass(frozen=True)
class Grouping:
    """The groups of a value: a tensor as (outer, before, inner, behind), of which `before` and `behind` are joined.

    Rows have before = inner = 1, columns have behind = 1, batch statistics have outer = 1. There are outer x inner groups, in this order.
    """

    outer: int
    before: int
    inner: int
    behind: int

    @property
    def groups(self) -> int:
        return self.outer * self.inner

    @property
    def joined(self) -> int:
        """Values of a group."""
        return self.before * self.behind

    @property
    def shape(self) -> Shape:
        return (self.outer, self.before, self.inner, self.behind)

    @property
    def form(self) -> str:
        """The name of the form: "rows", "columns" or "sandwich"."""
        return "columns" if self.behind == 1 else "rows" if self.before == 1 else "sandwich"

    @staticmethod
    def of(shape: Shape, joined: Iterable[int]) -> Grouping | None:
        """The grouping that joins the axes `joined` of `shape`; None where kept and joined axes alternate more often."""
        axes, runs = set(joined), []
        for axis, size in enumerate(shape):
            if size == 1:
                continue
            if runs and runs[-1][1] == (axis in axes):
                runs[-1] = (runs[-1][0] * size, runs[-1][1])
            else:
                runs.append((size, axis in axes))
        if not any(together for _, together in runs):  # groups of one value each
            return Grouping(1, 1, math.prod(shape), 1)
        if runs[0][1]:
            runs.insert(0, (1, False))
        if len(runs) == 2:
            return Grouping(runs[0][0], 1, 1, runs[1][0])
        sizes = [size for size, _ in runs]
        return Grouping(*sizes, *(1,) * (4 - len(sizes))) if len(sizes) <= 4 else None


def grouping_of(core: Step) -> Grouping | None:
    """The axes that a core joins; None for a pooling that is not over whole planes, and where no kernel takes them."""
    name, shape, values = core.operator.name, core.input_shape, core.values
    whole, rank = math.prod(shape), len(shape)
    if core.operator.kind is Kind.NORM:
        if name == "batch_norm":
            return Grouping.of(shape, (axis for axis in range(rank) if axis != 1))
        if name in ("layer_norm", "rms_norm"):
            joined = math.prod(trailing(values, shape, name))
        else:
            joined = whole // (shape[0] * core.operator.groups(values, shape))
        return Grouping.of((whole // joined, joined), (1,))
    if core.operator.kind in (Kind.SOFTMAX, Kind.REDUCTION):
        return Grouping.of(shape, axes_of(values["dim"], shape, name))
    if core.operator.kind is not Kind.POOL:
        return None
    window = window_of(core)
    if window is None or math.prod(window.output) > 1 or window.size != window.input or any(window.padding):
        return None
    return None if window.divisor else Grouping.of(shape, range(2, rank))
