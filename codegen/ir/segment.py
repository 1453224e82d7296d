"""Segments of a chain: element-wise operators around at most one core, which one kernel (or a few) of ours computes.

    [element-wise or shape]*  core?  [element-wise or shape]*        core = norm | softmax | reduction | pooling

Operators that give axes other names move nothing: the flat index of a value stays. A chain is cut so that every value that is reused further on is
the result of a segment, or stays in a register of the one that computes it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from codegen.ir.apply import SPARING
from codegen.ops import Kind, Shape
from codegen.ops.axes import axes_of, trailing
from codegen.spec import Spec, Step

AGAIN = 1.5  # windows that a value belongs to, from which on what stands in front of a pooling gets a pass of its own where it is costly


@dataclass(frozen=True)
class Grouping:
    """How axes are joined: a tensor as (outer, before, inner, behind), of which `before` and `behind` are joined.

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


@dataclass(frozen=True)
class Window:
    """A pooling of rank 1 to 3 as one of rank 3: sizes, strides, paddings and dilations of depth, height and width."""

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


@dataclass(frozen=True)
class Segment:
    """The steps of a segment, in places `first` to `last` of the chain, the latter not included; `training`: of the mode."""

    first: int
    last: int
    before: tuple[Step, ...]
    core: Step | None
    after: tuple[Step, ...]
    training: bool

    @property
    def steps(self) -> tuple[Step, ...]:
        return (*self.before, *((self.core,) if self.core else ()), *self.after)

    @property
    def shape(self) -> Shape:
        """The shape at whose flat index everything up to the core, that included, is computed: the first step may enlarge what comes in."""
        return self.before[0].output_shape if self.before else (self.core or self.after[0]).input_shape

    @property
    def renames(self) -> bool:
        """Whether nothing is computed at all."""
        return self.core is None and all(role(step, self.training) == "rename" for step in self.steps)


def role(step: Step, training: bool) -> str:
    """The part that a step takes in a segment: "map", "rename" or "core"; "library" where torch's library computes it."""
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
    window = window_of(core)
    if window is None or math.prod(window.output) > 1 or window.size != window.input or any(window.padding):
        return None
    return None if window.divisor else Grouping.of(shape, range(2, rank))


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


def segments_of(spec: Spec, first: int, last: int, training: bool) -> tuple[Segment | Step, ...]:
    """The steps from place `first` to `last`, not included, cut into segments; a step that stands alone is one of torch's library."""
    found: list[Segment | Step] = []
    at = first
    while at < last:
        if role(spec.chain[at], training) == "library":
            found.append(spec.chain[at])
            at += 1
            continue
        segment = _cut(spec, _longest(spec, at, last, training))
        found.extend(segment.steps if segment.renames else (segment,))
        at = segment.last
    return tuple(found)


def _longest(spec: Spec, first: int, last: int, training: bool) -> Segment:
    made = Segment(first, first, (), None, (), training)
    for step in spec.chain[first:last]:
        part = role(step, training)
        enlarges = part == "map" and step.output_shape != step.input_shape
        if part == "library" or (enlarges and made.steps) or (part == "core" and (made.core or not _joins(made.before, step))):
            break
        place = "core" if part == "core" else "after" if made.core else "before"
        made = replace(made, last=made.last + 1, **{place: step if part == "core" else (*getattr(made, place), step)})
    return made


def _joins(before: Sequence[Step], core: Step) -> bool:
    """Whether what stands in front of a core is computed with it: windows that overlap would compute it again and again."""
    if core.operator.kind is not Kind.POOL or grouping_of(core):
        return True
    window = window_of(core)
    again = math.prod(size / stride for size, stride in zip(window.size, window.stride, strict=True))
    names = {step.operator.function(step.values) for step in before if step.operator.function}
    enlarged = bool(before) and before[0].output_shape != before[0].input_shape
    return not enlarged and (again <= AGAIN or names <= SPARING)


def _cut(spec: Spec, segment: Segment) -> Segment:
    """The longest beginning of a segment whose inner values nobody needs that does not have them."""
    last = segment.last
    while True:
        wanted = [step.tap for step in spec.chain[last:] if step.tap is not None and segment.first <= step.tap < last - 1]
        wanted += [step.tap for step in spec.chain[segment.first : last] if _out_of_reach(spec, segment, step)]
        if not wanted:
            break
        last = min(wanted) + 1
    if last == segment.last:
        return segment
    kept = [step for step in segment.steps if step.index < last]
    core = segment.core if segment.core in kept else None
    return replace(
        segment,
        last=last,
        core=core,
        before=tuple(step for step in kept if step in segment.before),
        after=tuple(step for step in kept if step in segment.after),
    )


def _out_of_reach(spec: Spec, segment: Segment, step: Step) -> bool:
    """Whether a step takes a value of its own segment that no register holds any more, or holds for another element."""
    if step.tap is None or step.tap < segment.first or step.taps_itself:
        return False
    core = segment.core
    across = core is not None and step.index > core.index > step.tap
    return across or spec.chain[step.tap].output_shape != step.input_shape


__all__ = ["Grouping", "Segment", "Window", "evaluates", "grouping_of", "role", "segments_of", "window_of"]
