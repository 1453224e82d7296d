"""A chain as segments over named values: the form in which planners see a spec.

    x --[produce: linear, bias, mish]--> s0 --[normalise: group_norm, hardtanh]--> y

A segment has at most one core, an operator that is more than element-wise: it produces, normalises, folds or slides a window. Element-wise operators stand
behind it. Where one of them gives its value another shape, it begins a segment without a core.
"""

from __future__ import annotations

from dataclasses import dataclass

from codegen.ir.grouping import Grouping, grouping_of
from codegen.numerics import FP32, Precision
from codegen.ops import Kind, Shape
from codegen.spec import Spec, Step


@dataclass(frozen=True)
class Value:
    """A tensor between segments: its name, its shape with the batch first, and the type that it has where it is stored."""

    name: str
    shape: Shape
    storage: Precision


@dataclass(frozen=True)
class Segment:
    """A core, or None, with the element-wise steps in front of it and behind it.

    `reads` are the value in front and results of earlier operators that are reused; `made` is what the core gives (without one, what the segment reads),
    `gives` what the steps behind leave of it. `grouping` is that of a norm or a fold. `saves` names the values that its gradient needs.
    """

    core: Step | None
    reads: tuple[Value, ...]
    before: tuple[Step, ...]
    after: tuple[Step, ...]
    grouping: Grouping | None
    made: Value
    gives: Value

    @property
    def kind(self) -> Kind:
        """The core's kind; element-wise without one."""
        return self.core.operator.kind if self.core else Kind.ELEMENTWISE

    @property
    def steps(self) -> tuple[Step, ...]:
        """All operators in order."""
        return (*self.before, *((self.core,) if self.core else ()), *self.after)

    @property
    def first(self) -> int:
        """The place of its first operator in the chain."""
        return self.steps[0].index

    @property
    def saves(self) -> tuple[Value, ...]:
        """The values that its gradient needs of a forward: what a producer made. All else is computed again from that."""
        return (self.made,) if self.kind is Kind.PRODUCER else ()


@dataclass(frozen=True)
class Chain:
    """Segments in order, from the inputs to the result."""

    inputs: tuple[Value, ...]
    segments: tuple[Segment, ...]
    result: Value

    @property
    def saves(self) -> tuple[Value, ...]:
        """The values that gradients need of a forward."""
        return tuple(value for segment in self.segments for value in segment.saves)

    def only(self, kind: Kind) -> Segment:
        """The one segment of a kind. Raises ValueError where there are none or several."""
        found = [segment for segment in self.segments if segment.kind is kind]
        if len(found) != 1:
            raise ValueError(f"{len(found)} segments are of the kind {kind.value}, and exactly one is expected here")
        return found[0]


def chain_of(spec: Spec) -> Chain:
    """The chain of a spec. A producer's result is named `t0`, `t1`, ...; what a segment gives `s0`, `s1`, ..., and the last one `y`."""
    parts = _parts(spec)
    results = {step.index: Value(step.name, step.output_shape, FP32) for step in spec.chain if step.name}
    value = x = Value("x", spec.input_shape, spec.precision)
    segments: list[Segment] = []
    for number, steps in enumerate(parts):
        core, after = (steps[0], steps[1:]) if _is_core(steps[0]) else (None, steps)
        last = number == len(parts) - 1
        gives = Value("y" if last else f"s{number}", steps[-1].output_shape, spec.result if last else FP32)
        produced = sum(segment.kind is Kind.PRODUCER for segment in segments)
        stored = core is not None and core.operator.kind is Kind.PRODUCER
        made = Value(f"t{produced}", core.output_shape, spec.precision) if stored else Value(f"c{number}", core.output_shape, FP32) if core else value
        reused = tuple(results[step.tap] for step in steps if step.tap is not None and step.tap < steps[0].index and not step.taps_itself)
        segments.append(Segment(core, (value, *reused), (), after, grouping_of(core) if core else None, made, gives))
        value = gives
    return Chain((x,), tuple(segments), value)


def _is_core(step: Step) -> bool:
    return step.operator.kind is not Kind.ELEMENTWISE


def _parts(spec: Spec) -> list[tuple[Step, ...]]:
    """The steps, cut in front of every core and of every element-wise operator that gives its value another shape."""
    parts: list[list[Step]] = []
    for step in spec.chain:
        if _is_core(step) or step.output_shape != step.input_shape or not parts:
            parts.append([])
        parts[-1].append(step)
    return [tuple(part) for part in parts]
