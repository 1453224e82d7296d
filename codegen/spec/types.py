"""The spec as a value: the operators of a layer with their exact shapes. `load_spec` (reader.py) makes one from YAML and checks it completely.

Everything that a Spec holds has been validated as a number or an identifier, so later stages may put it into sources as it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from codegen.numerics import PRECISIONS, Precision
from codegen.ops import Kind, Operator, Parameter, Shape, broadcast
from codegen.source_text import is_source_text, printable
from codegen.spec.yaml_reader import Problem

MAX_ELEMENTS = 2**31 - 1
MAX_SIZES = 16  # of a range of batches: each is compiled
ELSEWHERE = ".../"  # stands for the folder of a spec outside the current one, so that sources do not depend on where it lies
PREPACKED = "_prepacked"  # ends the name of a package with prepared weights


class SpecError(Exception):
    """A spec that cannot be used. `problems` holds each fault with its place; str() is the whole report."""

    def __init__(self, path: str, problems: list[Problem]) -> None:
        self.path, self.problems = path, sorted(problems)
        super().__init__("\n".join(printable(f"{path}:{p.line}:{p.column}: {p.message}").replace("\n", "\\n") for p in self.problems))


@dataclass(frozen=True)
class Step:
    """One operator of the chain with its checked argument values and the shapes around it (batch first).

    `sources` maps an argument to the entry of the spec's args that gave its value, or to a list with such entries in it; `index` is its place in the chain, `tap` that of the step
    whose result it takes once more.
    """

    operator: Operator
    name: str | None
    values: dict[str, Any]
    input_shape: Shape
    output_shape: Shape
    sources: dict[str, Any] = field(default_factory=dict)
    index: int = 0
    tap: int | None = None

    @property
    def taps_itself(self) -> bool:
        """Does it take the value in front of it twice, as v + v does?"""
        return self.tap is not None and self.tap == self.index - 1

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        return self.operator.parameters(self.values, self.input_shape)

    def key(self, parameter: Parameter) -> str:
        """The parameter's key in state_dict: `gemm.weight`, or the bare name of an nn.Parameter."""
        return f"{self.name}.{parameter.suffix}" if parameter.suffix else str(self.name)


@dataclass(frozen=True)
class Spec:
    """A validated spec.

    `args` are the constructor's arguments in order, the last of which may have their values as defaults: `defaults` names those. `chain`
    starts with the producer, at `batch`; `values` says how get_inputs fills x ("rand" or "randn"). `path` is the file as emitted sources name it, a text of
    source_text: its other texts are identifiers. `gives` is the type
    of the result of a part of a chain where it is another than the precision's.

    A range of batches has them in `batches`, in ascending order, and the largest as `batch`; `at` is the spec of one of them. It is empty where there is
    one batch and nothing to choose. `pad_batch`: a batch that is not listed runs the next larger one.
    """

    name: str
    path: str
    batch: int
    precision: Precision
    values: str
    args: tuple[tuple[str, Any], ...]
    chain: tuple[Step, ...]
    targets: tuple[str, ...] | None = None
    math: str | None = None
    gemm: str | None = None
    prepack: bool = False
    prepack_asked: bool = False  # on the command line, not in the file
    defaults: tuple[str, ...] = ()
    gives: Precision | None = None
    batches: tuple[int, ...] = ()
    pad_batch: bool = False
    named: str = field(default="", compare=False)  # the file for messages on the terminal: as `path`, but never shortened
    targets_at: tuple[tuple[int, int], ...] = field(default=(), compare=False)  # line and column of each of `targets`

    def __post_init__(self) -> None:
        if not is_source_text(self.path):
            raise ValueError(f"{self.path!r} must not reach a source as it is; pass it through source_text")

    @property
    def result(self) -> Precision:
        """The type of y."""
        return self.gives or self.precision

    @property
    def sizes(self) -> tuple[Spec, ...]:
        """The specs of the single batches: of every one of a range, else this one."""
        return tuple(self.at(batch) for batch in self.batches) or (self,)

    def at(self, batch: int) -> Spec:
        """The same layer for one batch. Raises ShapeError where a parameter does not broadcast with that many samples."""
        steps: list[Step] = []
        shape = (batch, *self.input_shape[1:])
        for step in self.chain:
            output = result_shape(step.operator, step.values, shape, steps)
            steps.append(replace(step, input_shape=shape, output_shape=output))
            shape = output
        return replace(self, batch=batch, chain=tuple(steps), batches=(), pad_batch=False)

    @property
    def rows_are_samples(self) -> bool:
        """Is row i of the result that of sample i, and of no other? Not where a parameter behind a reduction changes the shape in front."""
        broadcasting = [(p.shape, step) for step in self.chain if step.operator.kind is Kind.ELEMENTWISE for p in step.parameters]
        return all(
            len(shape) < len(step.input_shape) or (len(shape) == len(step.input_shape) and shape[0] == 1) for shape, step in broadcasting
        )

    @property
    def package(self) -> str:
        """The folder and import name of what is emitted: the name, the precision unless it is fp32, and whether weights are prepared."""
        return self.name + self.precision.suffix + (PREPACKED if self.prepack else "")

    @property
    def init_values(self) -> tuple[Any, ...]:
        """What get_init_inputs gives: the arguments without those that have defaults."""
        return tuple(value for name, value in self.args if name not in self.defaults)

    @property
    def input_shape(self) -> Shape:
        return self.chain[0].input_shape

    @property
    def output_shape(self) -> Shape:
        return self.chain[-1].output_shape

    @property
    def producer(self) -> Step:
        return self.chain[0]

    @property
    def norm_index(self) -> int:
        """The place of the norm. Raises ValueError unless there is exactly one."""
        places = [i for i, step in enumerate(self.chain) if step.operator.kind is Kind.NORM]
        if len(places) != 1:
            raise ValueError(f"{len(places)} norms are in the chain, and exactly one is expected here")
        return places[0]

    @property
    def norm(self) -> Step:
        return self.chain[self.norm_index]

    @property
    def before_norm(self) -> tuple[Step, ...]:
        """The element-wise operators between the producer and the norm."""
        return self.chain[1 : self.norm_index]

    @property
    def after_norm(self) -> tuple[Step, ...]:
        return self.chain[self.norm_index + 1 :]

    @property
    def channels(self) -> int:
        return self.producer.output_shape[1]

    @property
    def num_groups(self) -> int:
        """Groups of a sample: parts that the norm normalises by themselves."""
        return self.norm.operator.groups(self.norm.values, self.norm.input_shape)

    @property
    def group_channels(self) -> int:
        """Channels in one group of the norm."""
        return self.channels // self.num_groups

    @property
    def spatial(self) -> int:
        """Positions per channel at the norm: 1 after a linear."""
        return math.prod(self.norm.input_shape[2:])

    @property
    def group_size(self) -> int:
        """Values in one group of one sample."""
        return self.group_channels * self.spatial

    @property
    def parameters(self) -> tuple[tuple[str, Shape], ...]:
        """(key, shape) of every parameter in nn.Module's state_dict order: the module's own first, then its children's."""
        listed = [(step.key(p), p.shape) for step in self.chain for p in step.parameters]
        return tuple(sorted(listed, key=lambda item: "." in item[0]))

    def kept(self, steps: Iterable[Step]) -> set[int]:
        """The places of results that some of `steps` take once more while another operator stands between."""
        return {step.tap for step in steps if step.tap is not None and not step.taps_itself}

    @property
    def taps_across_norm(self) -> bool:
        """Does an operator behind the norm take the norm's input once more?"""
        return self.norm_index - 1 in self.kept(self.after_norm)

    def with_precision(self, name: str) -> Spec:
        """The same spec at another precision (a forced `math` of the old precision is dropped)."""
        return self if name == self.precision.name else replace(self, precision=PRECISIONS[name], math=None)


def result_shape(operator: Operator, values: dict[str, Any], shape: Shape, earlier: Iterable[Step]) -> Shape:
    """The shape that an operator gives behind the steps `earlier`. Raises ShapeError."""
    output = operator.shape(values, shape)
    if values.get("shape") is not None and any(step.operator.kind is Kind.REDUCTION for step in earlier):
        return broadcast(values["shape"], shape)
    return output
