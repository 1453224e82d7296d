"""Segments of a chain: element-wise operators around at most one core, an operator that is more than element-wise.

    [element-wise or shape]*  core?  [element-wise or shape]*        core = producer | norm | softmax | fold | pooling | dropout

Operators that give axes other names move nothing: the flat index of a value stays.
"""

from __future__ import annotations

from dataclasses import dataclass

from codegen.ir.grouping import Grouping, grouping_of
from codegen.ir.value import Value
from codegen.ir.window import Window, window_of
from codegen.ops import Kind, Shape
from codegen.spec import Step


@dataclass(frozen=True)
class Segment:
    """Steps that follow one another, in a mode (`training` or evaluation).

    `reads` are the value in front, then results of earlier segments that are reused, then other inputs; `gives` is what the last step leaves.
    """

    reads: tuple[Value, ...]
    before: tuple[Step, ...]
    core: Step | None
    after: tuple[Step, ...]
    gives: Value
    training: bool

    @property
    def steps(self) -> tuple[Step, ...]:
        return (*self.before, *((self.core,) if self.core else ()), *self.after)

    @property
    def first(self) -> int:
        """The place of its first step in the chain."""
        return self.steps[0].index

    @property
    def last(self) -> int:
        """The place behind its last step."""
        return self.steps[-1].index + 1

    @property
    def kind(self) -> Kind:
        """The core's kind; element-wise without one."""
        return self.core.operator.kind if self.core else Kind.ELEMENTWISE

    @property
    def grouping(self) -> Grouping | None:
        """What the core joins where that is the same for all its results; see grouping_of."""
        return grouping_of(self.core) if self.core else None

    @property
    def window(self) -> Window | None:
        """The windows of a pooling that is not over whole planes."""
        return window_of(self.core) if self.kind is Kind.POOL and self.grouping is None else None

    @property
    def shape(self) -> Shape:
        """The shape at whose flat index everything up to the core, that included, is computed: the first step may enlarge what comes in."""
        return self.before[0].output_shape if self.before else self.steps[0].input_shape

    @property
    def alone(self) -> bool:
        """Is it one step that the kernels of segments have no part in? It is torch's library's, unless a fused plan takes it, or moves nothing."""
        return role(self.steps[0], self.training) in ("library", "rename") if len(self.steps) == 1 else False

    @property
    def saves(self) -> tuple[Value, ...]:
        """The values that its gradient needs of a forward: what a producer made. All else is computed again from that."""
        return (self.gives,) if self.kind is Kind.PRODUCER else ()


def role(step: Step, training: bool) -> str:
    """The part that a step takes in a segment: "map", "rename" or "core"; "library" for a core that no kernel of segments computes."""
    kind = step.operator.kind
    if kind is Kind.ELEMENTWISE:
        return "map"
    if kind is Kind.SHAPE or (kind is Kind.DROPOUT and not training):
        return "rename"
    if kind is Kind.NORM:
        return "map" if evaluates(step, training) else "core"
    if kind in (Kind.SOFTMAX, Kind.REDUCTION):
        return "core" if grouping_of(step) else "library"
    return "core" if kind is Kind.POOL and (grouping_of(step) or window_of(step)) else "library"


def evaluates(step: Step, training: bool) -> bool:
    """Whether the step normalises by running statistics."""
    return step.operator.name == "batch_norm" and not training and bool(step.buffers)
