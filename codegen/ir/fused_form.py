"""The form of chains that one fused plan computes: a producer, element-wise operators, a norm, then poolings and a reduction over channels.

A chain of another form is cut into parts (codegen/plan/parts.py), of which some may have this form, or its beginning: a producer and element-wise operators
alone, here called a product. A FusedSpec is a spec that has the form or is a product: what fused kernels ask of a chain, its one producer and its norm among
them, is asked of that and of no other spec.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property

from codegen.ir.grouping import Grouping, grouping_of
from codegen.numerics import Precision
from codegen.ops import OPERATORS, Kind, Shape
from codegen.ops.axes import axes_of
from codegen.spec import Spec, Step

PRODUCERS = {row.name: row.fused_axes for row in OPERATORS.values() if row.fused_axes}  # axes of what they take
NORMS = ("group_norm", "layer_norm", "instance_norm")
_HEADS = " or ".join(f"a {name} of a matrix" if axes == 2 else f"a {name}" for name, axes in PRODUCERS.items())
POOLS = ("max_pool2d", "avg_pool2d")
FOLDS = ("min", "max", "sum", "mean", "logsumexp")


@dataclass(frozen=True)
class FusedSpec(Spec):
    """A spec whose chain has the form or is a product; another is a ValueError. `gives` is the type of the result where it is another than the precision's."""

    gives: Precision | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        reason = departure(self.chain)
        if reason is not None and not is_product(self.chain):
            raise ValueError(f"the chain has not the form of fused plans: {reason}")

    @classmethod
    def of(cls, spec: Spec) -> FusedSpec:
        """The same spec, known to have the form. Raises ValueError."""
        return spec if isinstance(spec, cls) else cls(**{field.name: getattr(spec, field.name) for field in fields(spec)})

    @property
    def result(self) -> Precision:
        """The type of y."""
        return self.gives or self.precision

    @property
    def producer(self) -> Step:
        return self.chain[0]

    @property
    def weight(self) -> str:
        """State_dict key of the producer's weight."""
        return self.producer.key(self.producer.parameters[0])

    @property
    def bias(self) -> str | None:
        """That of its bias, where it has one."""
        return next((self.producer.key(parameter) for parameter in self.producer.parameters[1:]), None)

    @cached_property
    def has_norm(self) -> bool:
        """False for a product."""
        return any(step.operator.kind is Kind.NORM for step in self.chain)

    @cached_property
    def norm(self) -> Step:
        """The norm. Raises StopIteration for a product."""
        return next(step for step in self.chain if step.operator.kind is Kind.NORM)

    @property
    def before_norm(self) -> tuple[Step, ...]:
        """The element-wise operators between the producer and the norm, or all of a product."""
        return self.chain[1 : self.norm.index if self.has_norm else None]

    @property
    def after_norm(self) -> tuple[Step, ...]:
        return self.chain[self.norm.index + 1 :] if self.has_norm else ()

    @property
    def affine(self) -> tuple[str, ...]:
        """State_dict keys of the norm's scale and shift, or nothing."""
        return tuple(self.norm.key(parameter) for parameter in self.norm.parameters) if self.has_norm else ()

    @property
    def pools(self) -> tuple[Step, ...]:
        return tuple(step for step in self.after_norm if step.operator.kind is Kind.POOL)

    @property
    def runs(self) -> tuple[tuple[Step, ...], ...]:
        """What follows the norm but for poolings, parted by those: a run behind the norm and one behind each."""
        ends = [self.norm.index, *(pool.index for pool in self.pools), len(self.chain)]
        return tuple(self.chain[first + 1 : last] for first, last in zip(ends, ends[1:], strict=False))

    @cached_property
    def grouping(self) -> Grouping:
        """The norm's: every group is one span of memory within a sample."""
        return grouping_of(self.norm)

    @property
    def group_size(self) -> int:
        """Values in one group of one sample."""
        return self.grouping.joined

    @property
    def num_groups(self) -> int:
        """Groups of a sample: parts that the norm normalises by themselves; of a product every channel is one."""
        return self.grouping.groups // self.batch if self.has_norm else self.channels

    @property
    def channels(self) -> int:
        return self.producer.output_shape[1]

    @property
    def group_channels(self) -> int:
        """Channels in one group of the norm."""
        return self.channels // self.num_groups

    @property
    def spatial(self) -> int:
        """Positions per channel of what the producer gives: 1 after a linear."""
        return math.prod(self.producer.output_shape[2:])


def fused(spec: Spec) -> FusedSpec | None:
    """The spec as one of the form; None where it has another."""
    return FusedSpec.of(spec) if departure(spec.chain) is None else None


def departure(chain: Sequence[Step]) -> str | None:
    """Why `chain`, whose taps lie within it, does not have the form, in a sentence; None where it has."""
    if not chain or PRODUCERS.get(chain[0].operator.name) != len(chain[0].input_shape):
        return f"it starts with {chain[0].operator.name if chain else 'nothing'}, not with {_HEADS}"
    return _departure(chain) or (None if any(step.operator.kind is Kind.NORM for step in chain) else "it has no norm")


def is_product(chain: Sequence[Step]) -> bool:
    """Is `chain`, whose taps lie within it, a product and element-wise operators that its epilogue computes, without a norm?

    Gradients of such a part are the reference's, so that neither values without a gradient nor a weight without a module make a difference.
    """
    if not chain or chain[0].operator.kind is not Kind.PRODUCER or len(chain[0].input_shape) != chain[0].operator.rank + 2:
        return False
    return _departure(chain, product=True) is None and all(step.operator.kind in (Kind.PRODUCER, Kind.ELEMENTWISE) for step in chain)


def _departure(chain: Sequence[Step], product: bool = False) -> str | None:
    """What of a chain with a producer in front fused kernels do not take."""
    if chain[0].module is None and not product:
        return f"{chain[0].operator.name} has a weight without a module"
    norm: Step | None = None
    fold: Step | None = None
    for place, step in enumerate(chain[1:], 1):
        name, kind = step.operator.name, step.operator.kind
        if step.reads is not None:
            return f"{name} reads another input"
        if kind is Kind.NORM and norm is None and (reason := _other_norm(step)) is None:
            norm = step
            continue
        if kind is Kind.ELEMENTWISE:
            reason = _other_elementwise(chain, place, norm, fold, product)
        elif norm is None:
            reason = f"{name} comes before a norm"
        elif fold is not None:
            reason = f"{name} follows a reduction"
        elif kind is Kind.POOL:
            reason = None if name in POOLS else f"{name} is no pooling of fused kernels"
        elif kind is Kind.REDUCTION:
            channels = axes_of(step.values["dim"], step.input_shape, name) == (1,)
            reason, fold = None if name in FOLDS and channels else f"{name} is no reduction over channels alone", step
        elif kind is Kind.NORM:
            reason = f"{name} is a second norm" if norm is not None else _other_norm(step)
        else:
            reason = f"{name} follows"
        if reason is not None:
            return reason
    return None


def _other_norm(step: Step) -> str | None:
    name, shape, values = step.operator.name, step.input_shape, step.values
    if name == "layer_norm":
        if values["normalized_shape"] not in (None, shape[1:]):
            return "layer_norm joins a part of what follows the batch"
        return "layer_norm has a scale for each element of a plane" if len(shape) > 2 and values["elementwise_affine"] else None
    if name == "instance_norm":
        return None if len(shape) == 4 else "instance_norm is not over planes"
    return None if name == "group_norm" else f"{name} joins other values than groups of a sample's channels"


def _other_elementwise(chain: Sequence[Step], place: int, norm: Step | None, fold: Step | None, product: bool) -> str | None:
    step = chain[place]
    name, shape, values = step.operator.name, step.input_shape, step.values
    if name in ("rsub", "rdiv") or (name in ("minimum", "maximum") and values["value"] is None):
        return f"{name} is no element-wise operator of fused kernels"
    for key, what in (("detach", "a value without its gradient"), ("view", "a parameter under another shape"), ("parameter", "an earlier operator's parameter")):
        if values.get(key) and not (product and key == "detach"):
            return f"{name} takes {what}"
    if step.tap is not None:
        return _out_of_reach(chain, place, norm)
    for parameter in step.parameters:
        if fold is None and not per_channel(parameter.shape, shape):
            return f"{name} has a parameter of shape {parameter.shape}, which is not one value a channel"
    return None


def _out_of_reach(chain: Sequence[Step], place: int, norm: Step | None) -> str | None:
    """Why the step in `place` cannot reuse the result that it names."""
    step = chain[place]
    if step.operator.name not in ("add", "mul"):
        return f"{step.operator.name} takes an earlier result"
    tapped = next(at for at, other in enumerate(chain) if other.index == step.tap)
    if any(other.operator.kind in (Kind.POOL, Kind.REDUCTION) for other in chain[tapped + 1 : place]):
        return f"{step.operator.name} takes a result from in front of a pooling or reduction"
    if chain[tapped].output_shape != step.input_shape:
        return f"{step.operator.name} takes a result of another shape"
    if norm is not None and chain[tapped].index < norm.index - 1:
        return f"{step.operator.name} takes a result from before the norm's input"
    return None


def per_channel(parameter: Shape, shape: Shape) -> bool:
    """Does a parameter of this shape broadcast over (batch, channels, ...) as one value per channel, or one for all?"""
    if math.prod(parameter) == 1:
        return len(parameter) <= len(shape)
    trailing = (1,) * (len(shape) - 2)
    return parameter in ((shape[1], *trailing), (1, shape[1], *trailing))
