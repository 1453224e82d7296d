"""A chain as segments over named values: the form in which planners see a spec.

    x --[linear]--> value:0 --[mish, group_norm, hardtanh]--> value:3 --[max_pool2d]--> y

It is cut so that every value that is reused further on is the result of a segment, or stays in a register of the one that computes it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from codegen.ir.apply import costly_step
from codegen.ir.grouping import grouping_of
from codegen.ir.layout import Layout
from codegen.ir.segment import Segment, role
from codegen.ir.sharding import Sharding, shard
from codegen.ir.value import Value, input_of, result_of
from codegen.ir.window import window_of
from codegen.ops import Kind
from codegen.spec import Spec, Step

AGAIN = 1.5  # windows that a value belongs to, from which on what stands in front of a pooling gets a pass of its own where it is costly


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

    def shard(self, tp: int, rank: int, split: Layout = None) -> Sharding:
        """The chain on rank `rank` of `tp`: what the rank computes alone at which local sizes, which parameters are divided, and what ranks exchange where.

        x and the other inputs are whole on each rank; x may be held in parts along its dimension `split` instead, as a row-parallel layer has it. A producer
        divides its output channels, and the norms behind it their groups. Raises ShardError where the chain cannot be divided so.
        """
        steps = tuple(step for segment in self.segments for step in segment.steps)
        return shard(self.inputs, steps, self.segments[0].training, tp, rank, split)


def chain_of(spec: Spec, training: bool = False) -> Chain:
    """The whole chain of a spec in one mode."""
    segments = segments_of(spec, 0, len(spec.chain), training)
    return Chain(tuple(input_of(spec, given.name) for given in spec.inputs), segments, segments[-1].gives)


def segments_of(spec: Spec, first: int, last: int, training: bool) -> tuple[Segment, ...]:
    """The steps from place `first` to `last`, not included, cut into segments."""
    found: list[Segment] = []
    at = first
    while at < last:
        run = _within_reach(spec, _longest(spec.chain[at:last], training))
        renames = all(role(step, training) == "rename" for step in run.steps)  # nothing is computed at all
        found += [_segment(spec, part, training) for part in (_singles(run) if renames else [run])]
        at = found[-1].last
    return tuple(found)


@dataclass(frozen=True)
class _Run:
    """The steps of a segment to be."""

    before: tuple[Step, ...] = ()
    core: Step | None = None
    after: tuple[Step, ...] = ()

    @property
    def steps(self) -> tuple[Step, ...]:
        return (*self.before, *((self.core,) if self.core else ()), *self.after)

    def until(self, place: int) -> _Run:
        """The steps in front of a place of the chain."""
        core = self.core if self.core and self.core.index < place else None
        return _Run(tuple(step for step in self.before if step.index < place), core, tuple(step for step in self.after if step.index < place))


def _singles(run: _Run) -> list[_Run]:
    return [_Run((step,)) for step in run.steps]


def _segment(spec: Spec, run: _Run, training: bool) -> Segment:
    first, last = run.steps[0].index, run.steps[-1].index
    reused = [result_of(spec, step.tap) for step in run.steps if step.tap is not None and step.tap < first]
    inputs = [input_of(spec, step.reads) for step in run.steps if step.reads is not None]
    reads = tuple(dict.fromkeys((result_of(spec, first - 1), *reused, *inputs)))
    return Segment(reads, run.before, run.core, run.after, result_of(spec, last), training)


def _longest(steps: Sequence[Step], training: bool) -> _Run:
    """The longest beginning with at most one core; a core for the library stands alone."""
    before: list[Step] = []
    after: list[Step] = []
    core: Step | None = None
    for step in steps:
        part = role(step, training)
        if part == "library" and not before and core is None:
            return _Run(core=step)
        enlarges = part == "map" and step.output_shape != step.input_shape
        if part == "library" or (enlarges and (before or core)) or (part == "core" and (core or not _joins(before, step))):
            break
        if part == "core":
            core = step
        else:
            (after if core else before).append(step)
    return _Run(tuple(before), core, tuple(after))


def _joins(before: Sequence[Step], core: Step) -> bool:
    """Whether what stands in front of a core is computed with it: windows that overlap would compute it again and again."""
    if core.operator.kind is not Kind.POOL or grouping_of(core):
        return True
    window = window_of(core)
    again = math.prod(size / stride for size, stride in zip(window.size, window.stride, strict=True))
    enlarged = bool(before) and before[0].output_shape != before[0].input_shape
    return not enlarged and (again <= AGAIN or not any(map(costly_step, before)))


def _within_reach(spec: Spec, run: _Run) -> _Run:
    """The longest beginning of a run whose inner values nobody needs that does not have them."""
    first, end = run.steps[0].index, run.steps[-1].index + 1
    last = end
    while True:
        wanted = [step.tap for step in spec.chain[last:] if step.tap is not None and first <= step.tap < last - 1]
        wanted += [step.tap for step in spec.chain[first:last] if _out_of_reach(spec, first, run.core, step)]
        if not wanted:
            return run if last == end else run.until(last)
        last = min(wanted) + 1


def _out_of_reach(spec: Spec, first: int, core: Step | None, step: Step) -> bool:
    """Whether a step takes a value of its own segment that no register holds any more, or holds for another element."""
    if step.tap is None or step.tap < first or step.taps_itself:
        return False
    across = core is not None and step.index > core.index > step.tap
    return across or spec.chain[step.tap].output_shape != step.input_shape


__all__ = ["Chain", "chain_of", "segments_of"]
