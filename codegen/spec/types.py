"""The spec as a value: the operators of a layer with their exact shapes. `load_spec` (reader.py) makes one from YAML and checks it completely.

Everything that a Spec holds has been validated as a number or an identifier, so later stages may put it into sources as it is.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from codegen.numerics import PRECISIONS, Precision
from codegen.ops import Kind, Operator, Parameter, Shape, broadcast
from codegen.ops.axes import axes_of, view_shape
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

    `sources` maps an argument to the entry of the spec's args that gave its value, or to a list with such entries in it; `index` is its place in
    the chain, `tap` that of the step whose result it reuses, `reads` the name of the input that it takes beside the value in front, `owner` that of
    the step whose parameter it takes once more, and `owned` that parameter's key and shape.
    """

    operator: Operator
    name: str | None
    values: dict[str, Any]
    input_shape: Shape
    output_shape: Shape
    sources: dict[str, Any] = field(default_factory=dict)
    index: int = 0
    tap: int | None = None
    reads: str | None = None
    owner: int | None = None
    owned: tuple[str, Shape] | None = None

    @property
    def module(self) -> str | None:
        """The constructor's call that makes its module; None without one."""
        return self.operator.module(self.values, self.input_shape) if self.operator.module else None

    @property
    def operand(self) -> tuple[str, Shape] | None:
        """The key of the tensor that an element-wise step takes, its own or another's, and the shape under which it meets the value; None without one."""
        key, shape = (self.name, self.values.get("shape")) if self.owned is None else self.owned
        return None if shape is None or self.operator.kind is not Kind.ELEMENTWISE else (key, operand_shape(self.values, shape))

    @property
    def taps_itself(self) -> bool:
        """Does it take the value in front of it twice, as v + v does?"""
        return self.tap is not None and self.tap == self.index - 1

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        return self.operator.parameters(self.values, self.input_shape)

    @property
    def buffers(self) -> tuple[Parameter, ...]:
        """State that is not learned: running statistics."""
        return self.operator.buffers(self.values, self.input_shape)

    def key(self, parameter: Parameter) -> str:
        """The parameter's key in state_dict: `gemm.weight`, or the bare name of an nn.Parameter."""
        return f"{self.name}.{parameter.suffix}" if parameter.suffix else str(self.name)


@dataclass(frozen=True)
class Input:
    """An input of the layer: its shape, the batch first where it is `batched`, and how get_inputs fills it ("rand" or "randn")."""

    name: str
    shape: Shape
    values: str = "rand"
    batched: bool = True

    def at(self, batch: int) -> Input:
        """The same input for another batch."""
        return replace(self, shape=(batch, *self.shape[1:])) if self.batched else self


@dataclass(frozen=True)
class Spec:
    """A validated spec.

    `args` are the constructor's arguments in order, the last of which may have their values as defaults: `defaults` names those. `chain`
    starts with the first of `inputs`, at `batch`; operators may read the others. `path` is the file as emitted sources name it, a text of
    source_text: its other texts are identifiers.

    A range of batches has them in `batches`, in ascending order, and the largest as `batch`; `at` is the spec of one of them. It is empty where there is
    one batch and nothing to choose. `pad_batch`: a batch that is not listed runs the next larger one.

    `unused` are steps outside the chain, whose parameters state_dict holds and nothing reads; `ignored` are arguments that nothing reads; `created` has the names
    of what holds parameters in the order of creation, where that is not the chain's with `unused` behind.
    """

    name: str
    path: str
    batch: int
    precision: Precision
    inputs: tuple[Input, ...]
    args: tuple[tuple[str, Any], ...]
    chain: tuple[Step, ...]
    targets: tuple[str, ...] | None = None
    math: str | None = None
    gemm: str | None = None
    library: str | None = None  # "forbid" or "producers"; None: torch's library may compute whatever no kernel of ours takes
    prepack: bool = False
    prepack_asked: bool = False  # on the command line, not in the file
    algebra: bool = True  # may plans compute another chain that gives the same for all weights and inputs?
    singles: tuple[str, ...] = ()  # keys of operands of arithmetic that are float32 whatever the precision: tensors that a rewritten chain derives
    algebra_asked: bool = False  # `algebra` is the command line's, not the file's
    defaults: tuple[str, ...] = ()
    batches: tuple[int, ...] = ()
    pad_batch: bool = False
    named: str = field(default="", compare=False)  # the file for messages on the terminal: as `path`, but never shortened
    targets_at: tuple[tuple[int, int], ...] = field(default=(), compare=False)  # line and column of each of `targets`
    unused: tuple[Step, ...] = ()
    ignored: tuple[str, ...] = ()
    created: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not is_source_text(self.path):
            raise ValueError(f"{self.path!r} must not reach a source as it is; pass it through source_text")

    @property
    def sizes(self) -> tuple[Spec, ...]:
        """The specs of the single batches: of every one of a range, else this one."""
        return tuple(self.at(batch) for batch in self.batches) or (self,)

    @property
    def values(self) -> str:
        """How get_inputs fills x."""
        return self.inputs[0].values

    def at(self, batch: int) -> Spec:
        """The same layer for one batch. Raises ShapeError where the chain does not go with that many samples."""
        steps: list[Step] = []
        inputs = tuple(given.at(batch) for given in self.inputs)
        shapes = {given.name: given.shape for given in inputs}
        shape = inputs[0].shape
        for step in self.chain:
            other = shapes[step.reads] if step.reads else steps[step.tap].output_shape if step.tap is not None else step.operand[1] if step.owned else None
            output = result_shape(step.operator, step.values, shape, other)
            steps.append(replace(step, input_shape=shape, output_shape=output))
            shape = output
        return replace(self, batch=batch, inputs=inputs, chain=tuple(steps), batches=(), pad_batch=False)

    @property
    def rows_are_samples(self) -> bool:
        """Is row i of the result that of sample i, and of no other? Then rows may be added without changing the others."""
        first = self.inputs[0].batched and self.output_shape[:1] == (self.batch,)
        return first and all(samples_apart(step, self.batch) and self._meets_samples(step) for step in self.chain)

    def _meets_samples(self, step: Step) -> bool:
        """Does what a step takes beside its value go with each sample: rows of its own along the value's first axis, or the same for all of them?"""
        if step.tap is not None:
            return len(self.chain[step.tap].output_shape) == len(step.input_shape)
        given = next((given for given in self.inputs if given.name == step.reads), None)
        if given is not None and given.batched:
            return len(given.shape) == len(step.input_shape)
        own = given.shape if given is not None else step.operand[1] if step.operand is not None else ()
        return len(own) < len(step.input_shape) or (len(own) == len(step.input_shape) and own[0] == 1)

    @property
    def has_modes(self) -> bool:
        """Does training compute something else than evaluation?"""
        return any(step.operator.modes for step in self.chain)

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
        return self.inputs[0].shape

    @property
    def output_shape(self) -> Shape:
        return self.chain[-1].output_shape

    @property
    def parameters(self) -> tuple[tuple[str, Shape], ...]:
        """(key, shape) of every parameter that the chain reads, in nn.Module's state_dict order: the module's own first, then its children's."""
        dead = {step.name for step in self.unused}
        listed = [(step.key(p), p.shape) for step in self.creating if step.name not in dead for p in step.parameters]
        return tuple(sorted(listed, key=lambda item: "." in item[0]))

    @property
    def creating(self) -> tuple[Step, ...]:
        """The steps that hold parameters or state, in the order in which the constructor creates them."""
        steps = [step for step in (*self.chain, *self.unused) if step.parameters or step.buffers or step.module]
        place = {name: place for place, name in enumerate(self.created)}
        return tuple(sorted(steps, key=lambda step: place.get(step.name, len(place))))

    @property
    def buffers(self) -> tuple[tuple[str, Shape, str], ...]:
        """(key, shape, how it is filled) of every tensor of state that is not learned, in the chain's order."""
        return tuple((step.key(b), b.shape, b.initialiser) for step in self.chain for b in step.buffers)

    def kept(self, steps: Iterable[Step]) -> set[int]:
        """The places of results that some of `steps` take once more while another operator stands between."""
        return {step.tap for step in steps if step.tap is not None and not step.taps_itself}

    def with_precision(self, name: str) -> Spec:
        """The same spec at another precision (a forced `math` of the old precision is dropped)."""
        return self if name == self.precision.name else replace(self, precision=PRECISIONS[name], math=None)


def result_shape(operator: Operator, values: dict[str, Any], shape: Shape, other: Shape | None = None) -> Shape:
    """The shape that an operator gives for a value of `shape` and, where it takes one, another of shape `other`. Raises ShapeError."""
    output = operator.shape(values, shape)
    if values.get("shape") is not None and operator.kind is Kind.ELEMENTWISE:
        return broadcast(operand_shape(values, values["shape"]), output)
    return output if other is None else broadcast(other, output)


def operand_shape(values: dict[str, Any], shape: Shape) -> Shape:
    """The shape under which a parameter of `shape` meets the value. Raises ShapeError."""
    return shape if values.get("view") is None else view_shape({"sizes": values["view"]}, shape)


def samples_apart(step: Step, batch: int) -> bool:
    """Does a step leave axis 0 of its value to the samples and join none of them? `batch` samples come in along that axis."""
    kind, values, shape = step.operator.kind, step.values, step.input_shape
    if step.operator.name == "batch_norm" or shape[:1] != (batch,):
        return False
    if kind in (Kind.REDUCTION, Kind.SOFTMAX) or step.operator.name == "squeeze":
        return 0 not in axes_of(values["dim"], shape, step.operator.name)
    if kind is Kind.SHAPE:
        return step.output_shape[:1] == (batch,) and values.get("start_dim", 1) % len(shape) != 0 and values.get("dim", 1) != 0
    return True
