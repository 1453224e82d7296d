"""The chain of a spec: operators, their arguments, shapes and places, each fault reported where it is written."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

from codegen import numerics, ops
from codegen.ops import FILLS, OPERATORS, REQUIRED, Argument, Kind, Operator
from codegen.ops.windows import AXES
from codegen.spec.scalars import INVALID, Scalars, meant, nearest
from codegen.spec.types import MAX_ELEMENTS, Step, operand_shape, result_shape
from codegen.spec.yaml_reader import Node

MAX_RANK = 8  # axes of a value
WINDOW_TYPES = {
    prefix + name: (rank, least)
    for prefix, least in (("", 1), ("count_", 0))
    for rank, name in enumerate(("single", "pair", "triple"), 1)
}  # (axes, least size) by an argument's type


@dataclass(frozen=True)
class Inputs:
    """The inputs as a spec gives them: shapes by name, batch included, and the spatial sizes of the first where its shape is left to the chain."""

    first: str = "x"
    shapes: dict[str, ops.Shape] = field(default_factory=dict)
    spatial: dict[str, int] = field(default_factory=dict)
    node: Node | None = None
    unsound: bool = False  # a fault in them was told


@dataclass(frozen=True)
class Other:
    """The second value of an operator: its shape, and the step that gives it, the input that it is, or the step whose parameter it is, with its key."""

    shape: ops.Shape
    tap: int | None = None
    reads: str | None = None
    owner: int | None = None
    owned: tuple[str, ops.Shape] | None = None


class ChainReader(Scalars):
    """Reads the operators. `args` are the constructor's arguments by name, which a value may stand for; all of them are known unless `args_unclear`.

    A fault is told once: what only follows from it, such as an argument that nothing but a refused operator uses, is none of its own.
    """

    def __init__(self) -> None:
        super().__init__()
        self.args: dict[str, Any] = {}
        self.args_unclear = False
        self.use_unclear = False  # an entry of the chain was not recognised: its name and what it used are not known
        self.used_args: set[str] = set()
        self.precision = numerics.FP32

    def chain(self, node: Node, batch: Any, given: Inputs) -> tuple[Step, ...]:
        """The steps, at `batch`. The first reads the first of the inputs, whose shape it may give where the spec does not."""
        if not node.is_list or not node.value:
            self.fault(node, "chain: expected a list of operators, such as `- linear: {name: fc, in_features: 64, out_features: 64}`")
            return ()
        steps: list[Step] = []
        names: dict[str, int] = {}
        shape: ops.Shape | None = None
        refused: set[str | None] = set()  # names of the entries in front that had faults
        own = None
        for index, item in enumerate(node.value):
            refused.add(own)
            own = _name(item)
            self.used_args |= words_within(item)
            parsed = self.operator(item)
            if parsed is None:
                shape = None if index == 0 else shape
                continue
            operator, name, values, sources, place = parsed
            if name is not None and name in names:
                self.fault(place, f"name: {name} is taken by the operator on line {names[name]}")
            elif name is not None and name in given.shapes:
                self.fault(place, f"name: {name} is the name of an input")
            elif name is not None:
                names[name] = place.line
            if values is None or (index and shape is None) or batch is INVALID:
                shape = None
                continue
            if index == 0:
                shape = self.input_shape(operator, values, batch, given, place)
                if shape is None:
                    continue
                given = replace(given, shapes=given.shapes | {given.first: shape})
            other = self.other(values["from"], steps, given, refused, place) if values.get("from") is not None else None
            if values.get("parameter") is not None:
                other = self.owner(values, steps, refused, place)
            step = self.step(operator, name, values, sources, shape, place, len(steps), other) if other is not INVALID else None
            shape = step.output_shape if step else None
            if step:
                steps.append(step)
                own = None
        return tuple(steps)

    def input_shape(self, operator: Operator, values: dict[str, Any], batch: int, given: Inputs, place: Node) -> ops.Shape | None:
        """The shape of the first input: the spec's, else what the first operator takes with the spatial sizes of the spec."""
        shape = given.shapes.get(given.first)
        if shape is not None or given.unsound:
            return shape
        if operator.kind is not Kind.PRODUCER:
            self.fault(place, f"{operator.name} comes first, so the input's shape is needed: add input: {{shape: [64, 32, 32]}}, that of a sample")
            return None
        if not operator.rank:
            if given.spatial:
                self.fault(given.node, f"input: {' and '.join(given.spatial)} belong to a convolution, not to {operator.name}")
            return (batch, values[operator.takes])
        axes = AXES[operator.rank]
        missing = [key for key in axes if key not in given.spatial]
        if missing:
            example = ", ".join(f"{key}: 128" for key in axes)
            self.fault(place, f"{operator.name} needs the input's {' and '.join(missing)}: add input: {{{example}}}")
            return None
        beyond = [key for key in given.spatial if key not in axes]
        if beyond:
            self.fault(given.node, f"input: {' and '.join(beyond)}: {operator.name} has no such axis")
        return (batch, values[operator.takes], *(given.spatial[key] for key in axes))

    def step(
        self, operator: Operator, name: str | None, values: dict[str, Any], sources: dict[str, Any], shape: ops.Shape, place: Node, index: int,
        other: Other | None,
    ) -> Step | None:  # fmt: skip
        try:
            output = result_shape(operator, values, shape, other.shape if other else None)
        except ops.ShapeError as error:
            self.fault(place, str(error))
            return None
        if len(output) > MAX_RANK:
            self.fault(place, f"{operator.name} gives {len(output)} axes, {output}; a value has at most {MAX_RANK}")
            return None
        met = other or Other(())
        step = Step(operator, name, values, shape, output, sources, index, met.tap, met.reads, met.owner, met.owned)
        for parameter in step.parameters:
            if math.prod(parameter.shape) > MAX_ELEMENTS:
                self.fault(place, f"{step.key(parameter)} would have more than {MAX_ELEMENTS} elements, which the kernels do not index")
                return None
        if max(math.prod(shape), math.prod(output)) > MAX_ELEMENTS:
            self.fault(place, f"{operator.name}: a tensor of {max(math.prod(shape), math.prod(output))} elements; the kernels index at most {MAX_ELEMENTS}")
            return None
        return step

    def other(self, name: str, steps: list[Step], given: Inputs, refused: set[str | None], place: Node) -> Any:
        """The value that `from: name` stands for: the result of an operator in front, or an input; `refused` are names of operators that had faults."""
        if name in given.shapes:
            return Other(given.shapes[name], reads=name)
        found = next((step for step in steps if step.name == name), None)
        if found is not None:
            return Other(found.output_shape, tap=found.index)
        if name in refused or self.use_unclear or given.unsound:
            return INVALID
        if any(step.name is None and step.operator.name == ops.ALIASES.get(name, name) for step in steps):
            return self.fault(place, f"from: {name} stands in front of this one and has no name; give {name} a name to use it")
        named = [step.name for step in steps if step.name]
        hint = nearest(name, [*named, *given.shapes]) if named or given.shapes else ""
        if steps and not named:
            hint += f"; give {steps[-1].operator.name} a name to use its result"
        return self.fault(place, f"from: {name} is no operator in front of this one and no input{hint}")

    def owner(self, values: dict[str, Any], steps: list[Step], refused: set[str | None], place: Node) -> Any:
        """The parameter that `parameter: name` stands for: that of an operator in front which has one of its own."""
        name = values["parameter"]
        able = [step for step in steps if step.operand is not None and step.parameters]
        found = next((step for step in able if step.name == name), None)
        if found is None:
            if name in refused or self.use_unclear:
                return INVALID
            hint = nearest(name, [step.name for step in able]) if able else "; there is none"
            return self.fault(place, f"parameter: {name} is no operator in front of this one with a shape of its own{hint}")
        try:
            return Other(operand_shape(values, found.values["shape"]), owner=found.index, owned=(found.name, found.values["shape"]))
        except ops.ShapeError as error:
            return self.fault(place, str(error))

    def operator(self, item: Node, words: dict[str, Operator] = OPERATORS) -> tuple[Operator, str | None, dict[str, Any] | None, dict[str, Any], Node] | None:
        """(operator, name, checked values or None, sources of the values, place) of one chain entry, or None when it is not recognisable."""
        if item.is_mapping and len(item.value) == 1:
            (word, (place, arguments)), = item.value.items()
        elif isinstance(item.value, str):
            word, place, arguments = item.value, item, None
        else:
            self.use_unclear = True
            self.fault(item, "each entry of the chain is an operator: `- mish` or `- hardtanh: {min_val: -2, max_val: 2}`")
            return None
        word = ops.ALIASES.get(word, word)
        if word not in words:
            self.fault(place, f"{word}: unknown operator{nearest(word, [*words, *ops.ALIASES])}")
            return None
        operator = words[word]
        if arguments is not None and arguments.value is None:
            arguments = None
        if arguments is not None and not arguments.is_mapping:
            self.fault(arguments, f"{word}: {arguments.describe()}; expected its arguments as a mapping")
            return operator, None, None, {}, place
        given = arguments.value if arguments is not None else {}
        sources = {key: node.plain() for key, (_, node) in given.items() if key not in ("name", "from", "parameter") and any(item.value in self.args for item in _words_of(node))}
        return (operator, *self.arguments(operator, arguments, place), sources, place)

    def arguments(self, operator: Operator, node: Node | None, place: Node) -> tuple[str | None, dict[str, Any] | None]:
        given: dict[str, tuple[Node, Node]] = node.value if node is not None else {}
        known = {a.name for a in operator.arguments} | ({"name"} if operator.takes_name else set())
        sound = True
        for key, (key_node, _) in given.items():
            if key not in known:
                self.fault(key_node, f"{key}: {operator.name} has no such argument{nearest(key, sorted(known)) if known else ''}")
                sound = False
        misspelt = {meant(key, known - set(given)) for key in given if key not in known}
        name = None
        if "name" in given:
            name = self.identifier(given["name"][1], "name")
            sound, name = sound and name is not INVALID, None if name is INVALID else name
        values: dict[str, Any] = {}
        for argument in operator.arguments:
            if argument.name in given:
                values[argument.name] = self.argument(operator, argument, given[argument.name][1])
            elif argument.default is REQUIRED and argument.name in misspelt:
                values[argument.name] = INVALID
            elif argument.default is REQUIRED:
                values[argument.name] = self.fault(place, f"{argument.name}: {operator.name} needs it")
            else:
                values[argument.name] = argument.default
        if not sound or INVALID in values.values():
            return name, None
        if operator.kind is Kind.POOL and values.get("stride", ()) is None:
            values["stride"] = values["kernel_size"]
        complaint = operator.check(values) or self.complaint_when_rounded(operator, values)
        if complaint:
            self.fault(place, f"{operator.name}: {complaint}")
            return name, None
        if name is None and (operator.requires_name or values.get("shape") is not None):
            self.fault(place, f"name: {operator.name} needs one: its parameters are stored under it")
            return None, None
        return name, values

    def complaint_when_rounded(self, operator: Operator, values: dict[str, Any]) -> str | None:
        """What is wrong with numbers that are sound as written, as the kernels hold them: two bounds may become one."""
        rounded = {key: numerics.constant(value, self.precision, operator.bounds) if isinstance(value, float) else value for key, value in values.items()}
        complaint = operator.check(rounded)
        return complaint and f"{complaint}, as {self.precision.dtype if operator.bounds else 'float32'} has them"

    def argument(self, operator: Operator, argument: Argument, node: Node) -> Any:
        """The checked value of one argument; a word that names an entry of args stands for it."""
        if argument.type in ("tap", "owner"):
            return None if node.value is None else self.reference(node, argument.name)
        node = self.substituted(argument, node)
        if node is INVALID:
            return INVALID
        kind = argument.type
        if isinstance(kind, tuple):
            return self.word(node, argument.name, kind)
        if kind == "flag":
            return self.flag(node, argument.name)
        if kind == "fill" and (node.value is None or isinstance(node.value, str)):
            return node.value if node.value is None and argument.default is None else self.word(node, argument.name, FILLS)
        if kind in ("number", "fill") or (kind == "bound" and node.value is not None):
            value = self.number(node, argument.name)
            reason = None if value is INVALID else argument.fault(value, self.precision, operator.bounds)
            return self.fault(node, f"{argument.name}: {node.describe()} {reason}") if reason else value
        if kind == "bound" or (node.value is None and argument.default is None):
            return None
        if kind == "shape" and node.is_list and not node.value:
            return ()
        if kind == "shape" or (kind == "extents" and node.is_list):
            return self.sizes(node, argument.name)
        if kind in WINDOW_TYPES:
            return self.per_axis(node, argument.name, *WINDOW_TYPES[kind])
        if kind == "axes" and node.value is None:
            return None
        if kind == "axis" or (kind == "axes" and not node.is_list):
            return self.integer(node, argument.name, -MAX_RANK, MAX_RANK - 1)
        if kind == "axes":
            return self.integers(node, argument.name, -MAX_RANK, MAX_RANK - 1)
        if kind == "view":
            return self.integers(node, argument.name, -1, MAX_ELEMENTS)
        if kind == "extents":
            size = self.size(node, argument.name)
            return size if size is INVALID else (size,)
        return self.size(node, argument.name)

    def substituted(self, argument: Argument, node: Node) -> Any:
        """The node with the values of the entries of args that it names, by itself or in a list."""
        if node.is_list:
            items = [self.substituted(argument, item) for item in node.value]
            return INVALID if INVALID in items else replace(node, value=items)
        if not isinstance(node.value, str):
            return node
        if node.value in self.args:
            self.used_args.add(node.value)
            value = self.args[node.value]
            if value is INVALID:
                return INVALID
            shown = str(list(value)) if isinstance(value, tuple) else str(value)
            word = node.value
            resolved = [Node(v, node.line, node.column, str(v), source=word) for v in value] if isinstance(value, tuple) else value
            return Node(resolved, node.line, node.column, f"{word} = {shown}", source=word)
        if not isinstance(argument.type, tuple) and argument.type != "fill":
            if self.args_unclear:
                return INVALID
            close = meant(node.value, self.args)
            self.used_args.add(close)
            self.use_unclear |= close is None
            hint = nearest(node.value, self.args) if self.args else "; the spec has no args"
            return self.fault(replace(node, source=node.value), f"{argument.name}: {node.describe()} is neither a value nor an entry of args{hint}")
        return node

    def check_names(self, chain: tuple[Step, ...], node: Node, unused: tuple[Step, ...] = (), unused_node: Node | None = None) -> None:
        """Refuse parameters that would share a C identifier, such as `norm.weight` and a bare `norm_weight`."""
        owners: dict[str, str] = {}
        entries = [*zip(chain, node.value, strict=True), *zip(unused, unused_node.value if unused_node else (), strict=True)]
        taken = {step.name for step in chain if step.name}
        for step, item in entries[len(chain) :]:
            if step.name in taken:
                self.fault(item, f"name: {step.name} is taken by another operator or parameter")
            taken.add(step.name)
        for step, item in entries:
            for parameter in step.parameters:
                key = step.key(parameter)
                other = owners.setdefault(key.replace(".", "_"), key)
                if other != key:
                    self.fault(item, f"name: {key} and {other} would be one identifier in the kernels; rename one")


def words_within(node: Node) -> set[str]:
    """Every word in an entry of the chain, at any depth: what a refused entry meant to use is used."""
    if node.is_mapping:
        return set().union(*(words_within(value) for _, value in node.value.values()))
    if node.is_list:
        return set().union(*(words_within(item) for item in node.value))
    return {node.value} if isinstance(node.value, str) else set()


def _name(item: Node) -> str | None:
    """The name that an entry of the chain gives its operator, None without one."""
    arguments = next(iter(item.value.values()))[1] if item.is_mapping and item.value else item
    name = arguments.value["name"][1].value if arguments.is_mapping and "name" in arguments.value else None
    return name if isinstance(name, str) else None


def _words_of(node: Node) -> list[Node]:
    """The words that may stand for entries of args: the node, or those in its list."""
    return [item for item in (node.value if node.is_list else [node]) if isinstance(item.value, str)]
