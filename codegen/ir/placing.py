"""The placing of a chain's steps on several ranks: which part of each value, parameter and argument is a rank's own.

Steps are placed one after another, each by the layout of the value in front of it. A producer divides its output channels, so that what follows works on whole
channels; a value that is divided along what a producer multiplies over gives partial products; where a norm, a softmax or a fold joins values of several ranks
there is a merge.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from codegen.ir.layout import GroupParts, Layout, ShardError, part_of, renamed, shared_by_all, straddling
from codegen.ir.segment import evaluates
from codegen.ops import Kind, Shape
from codegen.ops.axes import axes_of, trailing
from codegen.spec import Step

EXTREMES = ("min", "max", "amin", "amax")


@dataclass(frozen=True)
class Merge:
    """What ranks do together for a step, in the order of their ranks.

    `kind` is "product" (partial products are added, behind the step's kernel), "extremes" (the largest or least of what each rank found, behind it too), "moments"
    (mean and M2 of groups, in the step's place), "rows" (maximum and sum, in its place) or "sum" (in its place). `axis` is that along which the value in front is
    divided; `scatter` that along which the result is, of a product.
    """

    kind: str
    axis: int
    scatter: Layout = None
    groups: GroupParts | None = None

    @property
    def behind(self) -> bool:
        """Whether the step's own kernel runs first."""
        return self.kind in ("product", "extremes")


@dataclass(frozen=True)
class Placed:
    """A step on a rank: the layouts of the value in front, of the second value and of the result (behind a merge), local arguments, and its parameters' layouts."""

    step: Step
    takes: Layout
    gives: Layout
    values: dict[str, Any]
    other: Layout = None
    parameters: dict[str, Layout] = field(default_factory=dict)
    merge: Merge | None = None


class Placing:
    """Places steps over `tp` ranks, as `rank` sees it. `parameters` are the layouts of those placed so far, by key."""

    def __init__(self, tp: int, rank: int, training: bool) -> None:
        self.tp, self.rank, self.training = tp, rank, training
        self.parameters: dict[str, Layout] = {}

    def place(self, step: Step, layout: Layout, other: tuple[Layout, Shape] | None) -> Placed:
        """Place a step behind a value of `layout`; `other` are the second value's layout and its shape. Raises ShardError."""
        kind, shape = step.operator.kind, step.input_shape
        if kind is Kind.DROPOUT and self.training and step.values["p"] > 0:
            raise ShardError(f"{_called(step)}: in training each rank would draw a mask of its own; shard the chain in evaluation, or leave dropout out of it")
        if self.tp == 1:
            placed = Placed(step, None, None, step.values, parameters=self._whole(step))
        elif kind is Kind.PRODUCER:
            placed = self._producer(step, layout)
        elif kind is Kind.ELEMENTWISE:
            placed = self._elementwise(step, layout, other)
        elif layout is None:
            placed = Placed(step, None, None, step.values, parameters=self._whole(step))
        elif kind is Kind.NORM:
            placed = self._norm(step, layout)
        elif kind is Kind.SOFTMAX:
            joined = axes_of(step.values["dim"], shape, step.operator.name) == (layout,)
            placed = Placed(step, layout, layout, step.values, merge=Merge("rows", layout) if joined else None)
        elif kind is Kind.REDUCTION:
            placed = self._fold(step, layout)
        elif kind is Kind.SHAPE:
            axis = renamed(shape, layout, step.output_shape, self.tp)
            placed = Placed(step, None if axis is None else layout, axis, step.values)
        elif kind is Kind.POOL and layout > 1:
            placed = Placed(step, None, None, step.values)
        else:
            placed = Placed(step, layout, layout, step.values)
        for key, own in placed.parameters.items():
            if self.parameters.setdefault(key, own) != own:
                raise ShardError(f"{_called(step)}: takes {key} divided otherwise than the operator in front that takes it too; give each a parameter of its own")
        return placed

    def _whole(self, step: Step) -> dict[str, Layout]:
        keys = [step.key(entry) for entry in (*step.parameters, *step.buffers)]
        return dict.fromkeys([*keys, *([step.owned[0]] if step.owned else [])])

    def _producer(self, step: Step, layout: Layout) -> Placed:
        operator, values, tp = step.operator, step.values, self.tp
        axis = 1 if operator.rank else len(step.input_shape) - 1  # of the channels, taken and given
        taken, given, groups = values[operator.takes], values[operator.gives], values.get("groups", 1)
        if layout is not None and layout != axis and (layout == 0 or not operator.rank):
            return Placed(step, layout, layout, values, parameters=self._whole(step))
        if groups > 1:
            if groups % tp == 0:
                local = {operator.takes: taken // tp, operator.gives: given // tp, "groups": groups // tp}
                return Placed(step, axis, axis, values | local, parameters=self._vectors(step, 0))
            if not any(own is not None for own in self.parameters.values()):
                raise ShardError(f"{_called(step)}: {groups} groups over {tp} ranks: each rank must have whole groups")
            return Placed(step, None, None, values, parameters=self._whole(step))
        inner, outer = (0, 1) if "output_padding" in values else (1, 0)  # the weight's dimensions of what is taken and given
        if layout == axis:
            scatter = axis if given % tp == 0 else None
            local = {operator.takes: taken // tp} | ({"bias": False} if values["bias"] else {})
            bias = {step.key(entry): 0 if scatter is not None else None for entry in step.parameters if entry.suffix == "bias"}
            weight = {step.key(entry): inner for entry in step.parameters if entry.suffix != "bias"}
            return Placed(step, axis, scatter, values | local, parameters=weight | bias, merge=Merge("product", axis, scatter))
        if given % tp:
            if not any(own is not None for own in self.parameters.values()):
                raise ShardError(f"{_called(step)}: {operator.gives} {given} over {tp} ranks: {tp} does not divide it, and each rank must have as many")
            return Placed(step, None, None, values, parameters=self._whole(step))
        return Placed(step, None, axis, values | {operator.gives: given // tp}, parameters=self._vectors(step, outer))

    def _vectors(self, step: Step, weight: int) -> dict[str, Layout]:
        """The layouts of a producer whose output channels are divided: its weight's along dimension `weight`, its bias's along the only one."""
        return {step.key(entry): 0 if entry.suffix == "bias" else weight for entry in step.parameters}

    def _elementwise(self, step: Step, layout: Layout, other: tuple[Layout, Shape] | None) -> Placed:
        """All that meet are divided along the same axis of the result: the value's, else the second value's. What is whole there takes its own part."""
        rank = len(step.output_shape)

        def of_result(own: Layout, shape: Shape) -> Layout:
            return None if own is None else own + rank - len(shape)

        def of_own(axis: int, shape: Shape) -> Layout:
            at = axis - (rank - len(shape))
            return at if at >= 0 and shape[at] > 1 else None

        axis = of_result(layout, step.input_shape)
        axis = of_result(*other) if axis is None and other else axis
        if axis is None:
            return Placed(step, None, None, step.values, parameters=self._whole(step))
        values, parameters = step.values, {}
        if step.operand is not None:
            key, met = step.operand
            stored = step.owned[1] if step.owned else values["shape"]
            at = of_own(axis, met)
            dimension = None if at is None else renamed(met, at, stored, self.tp)
            if at is not None and dimension is None:
                raise ShardError(f"{_called(step)}: its view of {list(stored)} as {list(met)} mixes what belongs to different ranks")
            parameters[key] = dimension
            if dimension is not None:
                own = {"shape": part_of(stored, dimension, self.tp)} if step.owned is None else {}
                values = values | own | ({} if values["view"] is None else {"view": part_of(met, at, self.tp)})
        return Placed(step, of_own(axis, step.input_shape), axis, values, of_own(axis, other[1]) if other else None, parameters)

    def _norm(self, step: Step, layout: int) -> Placed:
        name, values, shape, tp = step.operator.name, step.values, step.input_shape, self.tp
        local = part_of(shape, layout, tp)
        if name in ("layer_norm", "rms_norm"):
            joined = len(trailing(values, shape, name))
            at = layout - (len(shape) - joined)
            if at < 0:
                return Placed(step, layout, layout, values, parameters=self._whole(step))
            own = {step.key(entry): at for entry in step.parameters}
            groups = shared_by_all(math.prod(local[:-joined]), (1,), math.prod(local[-joined:]), tp)
            return Placed(step, layout, layout, values, parameters=own, merge=Merge("moments", layout, groups=groups))
        whole = self._whole(step)
        if layout == 0 and name != "batch_norm" or (name == "batch_norm" and layout != 1 and evaluates(step, self.training)):
            return Placed(step, layout, layout, values, parameters=whole)
        if name == "batch_norm" and layout != 1:
            return Placed(step, None, None, values, parameters=whole)
        if layout == 1:
            own = {key: 0 for key in whole} | {step.key(entry): None for entry in step.buffers if not entry.shape}
            if name == "group_norm" and values["num_groups"] % tp:
                groups = straddling(shape[0], shape[1], values["num_groups"], math.prod(shape[2:]), tp, self.rank)
                return Placed(step, layout, layout, values, parameters=own, merge=Merge("moments", layout, groups=groups))
            counted = "num_groups" if name == "group_norm" else "num_features"
            return Placed(step, layout, layout, values | ({} if values[counted] is None else {counted: values[counted] // tp}), parameters=own)
        count = step.operator.groups(values, shape)  # parts of every group, along a spatial axis
        groups = shared_by_all(shape[0], (shape[1] // count,) * count, math.prod(local[2:]), tp)
        return Placed(step, layout, layout, values, parameters=whole, merge=Merge("moments", layout, groups=groups))

    def _fold(self, step: Step, layout: int) -> Placed:
        joined = axes_of(step.values["dim"], step.input_shape, step.operator.name)
        if layout in joined:
            return Placed(step, layout, None, step.values, merge=Merge(_fold_kind(step.operator.name), layout))
        gives = layout if step.values["keepdim"] else layout - sum(axis < layout for axis in joined)
        return Placed(step, layout, gives, step.values)


def _fold_kind(name: str) -> str:
    return "extremes" if name in EXTREMES else "rows" if name == "logsumexp" else "sum"


def _called(step: Step) -> str:
    """The step as messages name it."""
    return step.name or step.operator.name


def entry_of(placed: Placed, tp: int, names: dict[str, str]) -> Any:
    """The step as an entry of a spec's chain with local sizes. `names` has the inputs that stand for its second value ("from") or parameter ("parameter")."""
    step, values = placed.step, dict(placed.values)
    named = {"name": step.name} if step.name else {}
    if step.operator.kind is Kind.SHAPE and placed.takes is not None:
        return {"view": named | {"sizes": list(part_of(step.output_shape, placed.gives, tp))}}
    if "parameter" in names:
        values |= {"parameter": None, "view": None, "from": names["parameter"]}
    elif "from" in names:
        values["from"] = names["from"]
    given = {
        argument.name: list(value) if isinstance(value := values[argument.name], tuple) else value
        for argument in step.operator.arguments
        if not (values[argument.name] is None and argument.default is None) and not (argument.name == "detach" and not values[argument.name])
    }
    return {step.operator.name: named | given} if named or given else step.operator.name


__all__ = ["EXTREMES", "Merge", "Placed", "Placing", "entry_of"]
