"""Groupings: which axes of a value a norm or a fold joins, and how its groups lie in memory."""

from __future__ import annotations

import math
from dataclasses import dataclass

from codegen.ops import Kind, Shape
from codegen.spec import Step


@dataclass(frozen=True)
class Grouping:
    """The groups of a value, batch first: every group is normalised, or folded to one value, by itself.

    `joined` lists the axes whose values lie in one group and `kept` the others, `split` says into how many groups the first joined axis is cut. A group has
    `size` values, and there are `count` of them; `contiguous` says that each is one span of memory. `affine` names what has a scale and a shift of
    its own: "channel", "element" or nothing.
    """

    joined: tuple[int, ...]
    kept: tuple[int, ...]
    split: int
    size: int
    count: int
    contiguous: bool
    affine: str | None = None

    @property
    def in_sample(self) -> bool:
        """Does every group lie within one sample?"""
        return 0 in self.kept

    def sample_groups(self, batch: int) -> int:
        """Groups of a sample. Raises ValueError where groups reach beyond one."""
        if not self.in_sample:
            raise ValueError(f"groups over the axes {self.joined} join samples")
        return self.count // batch


def grouping_of(step: Step) -> Grouping | None:
    """The grouping of a norm or a fold; None for operators that have none."""
    kind, shape = step.operator.kind, step.input_shape
    if kind is Kind.NORM:
        groups = step.operator.groups(step.values, shape)
        return _joined(shape, tuple(range(1, len(shape))), groups, "channel" if step.parameters else None)
    if kind is Kind.REDUCTION:
        return _joined(shape, (step.values["dim"],), 1, None)
    return None


def _joined(shape: Shape, joined: tuple[int, ...], split: int, affine: str | None) -> Grouping:
    kept = tuple(axis for axis in range(len(shape)) if axis not in joined)
    size = math.prod(shape[axis] for axis in joined) // split
    inner = math.prod(shape[axis] for axis in range(joined[0], len(shape)))
    contiguous = inner == math.prod(shape[axis] for axis in joined)
    return Grouping(joined, kept, split, size, math.prod(shape) // size, contiguous, affine)
