"""The chain of a spec: operators, their arguments, shapes and places, each fault reported where it is written."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from codegen import numerics, ops
from codegen.ops import OPERATORS, REQUIRED, Argument, Kind, Operator
from codegen.spec.types import MAX_ELEMENTS, Step, result_shape
from codegen.spec.scalars import INVALID, Scalars, meant, nearest
from codegen.spec.yaml_reader import Node


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

    def chain(self, node: Node, batch: Any, spatial: dict[str, Any], input_node: Node | None) -> tuple[Step, ...]:
        if not node.is_list or not node.value:
            self.fault(node, "chain: expected a list of operators, linear or conv2d first")
            return ()
        steps: list[Step] = []
        names: dict[str, int] = {}
        shape: ops.Shape | None = None
        words = [_word(item) for item in node.value]
        kinds = [OPERATORS[word].kind if word in OPERATORS else None for word in words]
        without_norm = Kind.NORM not in kinds and None not in kinds
        norm_at: Node | None = None
        reduced: Node | None = None
        for index, item in enumerate(node.value):
            self.used_args |= _words_within(item)
            parsed = self.operator(item)
            if parsed is None:
                shape = None if index == 0 else shape
                continue
            operator, name, values, sources, place = parsed
            if (operator.kind is Kind.PRODUCER) != (index == 0):
                if index or Kind.PRODUCER not in kinds:  # else the one that comes too late is told
                    self.fault(place, f"{operator.name}: a chain has exactly one linear or conv2d, and it comes first")
                norm_at = norm_at or (place if operator.kind is Kind.NORM else None)
                continue
            if operator.kind is Kind.NORM:
                if norm_at is not None:
                    self.fault(place, f"{operator.name}: the chain has a norm already, on line {norm_at.line}")
                    continue
                norm_at = place
            if operator.kind in (Kind.POOL, Kind.REDUCTION) and norm_at is None:
                if without_norm or None in kinds[:index]:  # the first is told below, once; a word that is no operator may mean the norm
                    shape = None
                    continue
                self.fault(place, f"{operator.name}: a {operator.kind.value} comes after the norm")
                continue
            if reduced is not None and operator.kind is not Kind.ELEMENTWISE:
                self.fault(place, f"{operator.name}: behind the reduction on line {reduced.line} come element-wise operators only")
                continue
            if operator.kind is Kind.REDUCTION:
                reduced = place
            if name is not None and name in names:
                self.fault(place, f"name: {name} is taken by the operator on line {names[name]}")
            elif name is not None:
                names[name] = place.line
            if values is None or (index and shape is None) or batch is INVALID:
                shape = None
                continue
            if index == 0:
                shape = self.input_shape(operator, values, batch, spatial, input_node, place)
                if shape is None:
                    continue
            refused = {_name(other) for other in node.value[:index]} - {step.name for step in steps}
            tap = self.tap(values["from"], steps, refused, shape, place) if values.get("from") is not None else None
            step = self.step(operator, name, values, sources, shape, place, steps, tap) if tap is not INVALID else None
            shape = step.output_shape if step else None
            if step:
                steps.append(step)
        if without_norm:
            self.fault(node, "chain: has no group_norm, layer_norm or instance_norm; a chain is linear or conv2d, element-wise operators, a norm, then anything after it")
        return tuple(steps)

    def input_shape(
        self, operator: Operator, values: dict[str, Any], batch: int, spatial: dict[str, Any], input_node: Node | None, place: Node
    ) -> ops.Shape | None:
        if operator.name == "linear":
            if input_node and input_node.is_mapping and {"height", "width"} & set(input_node.value):
                self.fault(input_node, "input: height and width belong to conv2d, not to linear")
            return (batch, values["in_features"])
        missing = [key for key in ("height", "width") if key not in spatial]
        if missing:
            self.fault(place, f"conv2d needs the input's {' and '.join(missing)}: add input: {{height: 128, width: 128}}")
            return None
        if INVALID in spatial.values():
            return None
        return (batch, values["in_channels"], spatial["height"], spatial["width"])

    def step(
        self, operator: Operator, name: str | None, values: dict[str, Any], sources: dict[str, Any], shape: ops.Shape, place: Node, earlier: list[Step],
        tap: int | None,
    ) -> Step | None:  # fmt: skip
        reduced = any(step.operator.kind is Kind.REDUCTION for step in earlier)
        try:
            output = result_shape(operator, values, shape, earlier)
        except ops.ShapeError as error:
            self.fault(place, str(error))
            return None
        axes = {a.name: values[a.name] % len(shape) for a in operator.arguments if a.type == "axis"}
        step = Step(operator, name, values | axes, shape, output, sources, len(earlier), tap)
        for parameter in step.parameters:
            if operator.kind is Kind.ELEMENTWISE and not reduced and not _per_channel(parameter.shape, shape):
                channel = "(C,)" if len(shape) == 2 else "(C, 1, 1)"
                self.fault(place, f"{operator.name}'s shape {parameter.shape} must be {channel.replace('C', str(shape[1]))} or (1,): one value per channel or one")
                return None
            if math.prod(parameter.shape) > MAX_ELEMENTS:
                self.fault(place, f"{step.key(parameter)} would have more than {MAX_ELEMENTS} elements, which the kernels do not index")
                return None
        if max(math.prod(shape), math.prod(output)) > MAX_ELEMENTS:
            self.fault(place, f"{operator.name}: a tensor of {max(math.prod(shape), math.prod(output))} elements; the kernels index at most {MAX_ELEMENTS}")
            return None
        return step

    def tap(self, name: str, steps: list[Step], refused: set[Any], shape: ops.Shape, place: Node) -> Any:
        """The place of the operator `name`, whose result an operator behind `steps` takes once more; `refused` are names of operators that had faults."""
        found = next((step for step in steps if step.name == name), None)
        if found is None and (name in refused or self.use_unclear):
            return INVALID
        if found is None:
            able = [step for step in steps if _out_of_reach(step, steps, shape) is None]
            if any(step.name is None and step.operator.name == ops.ALIASES.get(name, name) for step in able):
                return self.fault(place, f"from: {name} stands in front of this one and has no name; give {name} a name to use it")
            hint = nearest(name, [step.name for step in able if step.name]) if any(step.name for step in able) else ""
            if able and not hint:
                hint = f"; give {able[-1].operator.name} a name to use its result"
            return self.fault(place, f"from: {name} is no operator in front of this one{hint}")
        reason = _out_of_reach(found, steps, shape)
        return found.index if reason is None else self.fault(place, f"from: {name} {reason}")

    def operator(self, item: Node) -> tuple[Operator, str | None, dict[str, Any] | None, dict[str, Any], Node] | None:
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
        if word not in OPERATORS:
            self.fault(place, f"{word}: unknown operator{nearest(word, [*OPERATORS, *ops.ALIASES])}")
            return None
        operator = OPERATORS[word]
        if arguments is not None and arguments.value is None:
            arguments = None
        if arguments is not None and not arguments.is_mapping:
            self.fault(arguments, f"{word}: {arguments.describe()}; expected its arguments as a mapping")
            return operator, None, None, {}, place
        given = arguments.value if arguments is not None else {}
        sources = {key: node.plain() for key, (_, node) in given.items() if key not in ("name", "from") and any(item.value in self.args for item in _words_of(node))}
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
        if operator.kind is Kind.POOL and values["stride"] is None:
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
        if argument.type == "tap":
            return None if node.value is None else self.identifier(node, argument.name)
        node = self.substituted(argument, node)
        if node is INVALID:
            return INVALID
        kind = argument.type
        if isinstance(kind, tuple):
            return self.word(node, argument.name, kind)
        if kind == "axis":
            return self.axis(node, argument.name)
        if kind == "flag":
            return self.flag(node, argument.name)
        if kind == "number" or (kind == "bound" and node.value is not None):
            value = self.number(node, argument.name)
            reason = None if value is INVALID else argument.fault(value, self.precision, operator.bounds)
            return self.fault(node, f"{argument.name}: {node.describe()} {reason}") if reason else value
        if kind == "bound" or (node.value is None and argument.default is None):
            return None
        if kind == "shape" or (kind == "extents" and node.is_list):
            return self.sizes(node, argument.name)
        if kind in ("pair", "count_pair"):
            return self.pair(node, argument.name, 1 if kind == "pair" else 0)
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
        if not isinstance(argument.type, tuple):
            if self.args_unclear:
                return INVALID
            close = meant(node.value, self.args)
            self.used_args.add(close)
            self.use_unclear |= close is None
            hint = nearest(node.value, self.args) if self.args else "; the spec has no args"
            return self.fault(replace(node, source=node.value), f"{argument.name}: {node.describe()} is neither a value nor an entry of args{hint}")
        return node

    def check_names(self, chain: tuple[Step, ...], node: Node) -> None:
        """Refuse parameters that would share a C identifier, such as `norm.weight` and a bare `norm_weight`."""
        owners: dict[str, str] = {}
        for step, item in zip(chain, node.value, strict=True):
            for parameter in step.parameters:
                key = step.key(parameter)
                other = owners.setdefault(key.replace(".", "_"), key)
                if other != key:
                    self.fault(item, f"name: {key} and {other} would be one identifier in the kernels; rename one")


def _word(item: Node) -> str | None:
    """The operator that an entry of the chain names, None where it names nothing."""
    word = next(iter(item.value)) if item.is_mapping and len(item.value) == 1 else item.value
    return ops.ALIASES.get(word, word) if isinstance(word, str) else None


def _words_within(node: Node) -> set[str]:
    """Every word in an entry of the chain, at any depth: what a refused entry meant to use is used."""
    if node.is_mapping:
        return set().union(*(_words_within(value) for _, value in node.value.values()))
    if node.is_list:
        return set().union(*(_words_within(item) for item in node.value))
    return {node.value} if isinstance(node.value, str) else set()


def _name(item: Node) -> Any:
    """The name that an entry of the chain gives its operator, None without one."""
    arguments = next(iter(item.value.values()))[1] if item.is_mapping and item.value else item
    return arguments.value["name"][1].value if arguments.is_mapping and "name" in arguments.value else None


def _words_of(node: Node) -> list[Node]:
    """The words that may stand for entries of args: the node, or those in its list."""
    return [item for item in (node.value if node.is_list else [node]) if isinstance(item.value, str)]


def _out_of_reach(step: Step, steps: list[Step], shape: ops.Shape) -> str | None:
    """Why an operator behind `steps`, on a value of `shape`, cannot take the result of `step`; None where it can."""
    pool = next((later for later in steps[step.index + 1 :] if later.operator.kind in (Kind.POOL, Kind.REDUCTION)), None)
    if pool is not None:
        return f"lies in front of {pool.operator.name}, whose result has a shape of its own"
    if step.output_shape != shape:
        return f"gives {step.output_shape}, and the value here is {shape}"
    norm = next((other for other in steps if other.operator.kind is Kind.NORM), None)
    if norm is None or step.index >= norm.index - 1:
        return None
    last = steps[norm.index - 1]
    use = f"from: {last.name} takes it" if last.name else f"give {last.operator.name} a name to use it"
    return f"lies too far back: an operator behind the norm can take the norm's input or what follows, and its input is {last.operator.name}'s result; {use}"


def _per_channel(parameter: ops.Shape, shape: ops.Shape) -> bool:
    """Does a parameter of this shape broadcast over (batch, channels, ...) as one value per channel, or one for all?"""
    if math.prod(parameter) == 1:
        return len(parameter) <= len(shape)
    trailing = (1,) * (len(shape) - 2)
    return parameter in ((shape[1], *trailing), (1, shape[1], *trailing))
