"""YAML nodes -> Spec: every check that a spec must stand, each fault reported where it is written."""

from __future__ import annotations

import difflib
import keyword
import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from codegen import numerics, ops
from codegen.ops import OPERATORS, REQUIRED, Argument, Kind, Operator
from codegen.reserved import RESERVED
from codegen.spec import MAX_ELEMENTS, PREPACKED, Spec, SpecError, Step
from codegen.targets import TARGETS
from codegen.yaml_reader import Node, Problem, YamlError, read

_IDENTIFIER = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
_TOP = ("name", "batch", "precision", "input", "args", "defaults", "chain", "targets", "math", "gemm", "prepack")
_INPUT_VALUES = ("rand", "randn")
_INVALID = object()

def read_spec(path: Path, shown: str, precision: str | None) -> Spec:
    """Read the file at `path`, named `shown` in messages. Raises SpecError with all problems."""
    try:
        root = read(path)
    except YamlError as error:
        raise SpecError(shown, error.problems) from None
    except OSError as error:
        raise SpecError(shown, [Problem(1, 1, f"cannot be read: {error.strerror}")]) from None
    return _Reader(root, shown).spec(precision)


def nearest(word: str, allowed: Iterable[str]) -> str:
    """A hint for a misspelt word: `; did you mean ...?` or the allowed words."""
    allowed = list(allowed)
    close = difflib.get_close_matches(word, allowed, 1, 0.6)
    return f"; did you mean {close[0]}?" if close else f"; allowed: {', '.join(allowed)}"


class _Reader:
    """Walks one spec file. Faults are collected, so that one run reports them all."""

    def __init__(self, root: Node, shown: str) -> None:
        self.root, self.shown = root, shown
        self.problems: list[Problem] = []
        self.args: dict[str, Any] = {}
        self.arg_nodes: dict[str, Node] = {}
        self.used_args: set[str] = set()

    def fault(self, node: Node, message: str) -> Any:
        self.problems.append(Problem(node.line, node.column, message))
        return _INVALID

    def spec(self, precision: str | None) -> Spec:
        if not self.root.is_mapping:
            self.fault(self.root, f"a spec is a mapping with the keys {', '.join(_TOP)}")
            raise SpecError(self.shown, self.problems)
        entries: dict[str, tuple[Node, Node]] = self.root.value
        for key, (key_node, _) in entries.items():
            if key not in _TOP:
                self.fault(key_node, f"{key}: unknown key{nearest(key, _TOP)}")
        for key in ("name", "batch", "chain"):
            if key not in entries:
                self.fault(self.root, f"{key}: is missing")
        nodes = {key: value for key, (_, value) in entries.items()}

        name = self.identifier(nodes["name"], "name") if "name" in nodes else _INVALID
        marks = {**{p.suffix: "precision" for p in numerics.PRECISIONS.values() if p.suffix}, PREPACKED: "prepared weights"}
        suffix = next((suffix for suffix in marks if name is not _INVALID and name.endswith(suffix)), None)
        if suffix:
            self.fault(nodes["name"], f"name: {name} ends in {suffix}, which marks a package's {marks[suffix]}; choose another name")
        batch = self.size(nodes["batch"], "batch") if "batch" in nodes else _INVALID
        chosen = self.word(nodes["precision"], "precision", numerics.PRECISIONS) if "precision" in nodes else "fp32"
        if precision is not None:
            if precision not in numerics.PRECISIONS:
                raise SpecError(self.shown, [Problem(1, 1, f"precision {precision!r}{nearest(precision, numerics.PRECISIONS)}")])
            overridden = precision != chosen
            chosen = precision
        else:
            overridden = False
        values, spatial = self.input(nodes.get("input"))
        for key in ("args", "defaults"):
            if key in nodes:
                self.read_args(nodes[key], key)
        targets = self.targets(nodes["targets"]) if "targets" in nodes else None
        math_node = nodes.get("math")
        math_choice = None
        if math_node is not None and chosen is not _INVALID and not overridden:
            math_choice = self.word(math_node, f"math at {chosen}", numerics.MATH_CHOICES[chosen])
        gemm = self.word(nodes["gemm"], "gemm", ("library", "generated")) if "gemm" in nodes else None
        prepack = self.flag(nodes["prepack"], "prepack") if "prepack" in nodes else False
        chain = self.chain(nodes["chain"], batch, spatial, nodes.get("input")) if "chain" in nodes else ()
        for unused in [a for a in self.args if a not in self.used_args]:
            self.fault(self.arg_nodes[unused], f"{unused}: is never used in the chain")
        if not self.problems and "chain" in nodes:
            self.check_names(chain, nodes["chain"])
            self.check_bounds(chain, nodes["chain"], numerics.PRECISIONS[chosen])
        if self.problems:
            raise SpecError(self.shown, self.problems)
        return Spec(
            name=name, path=self.shown, batch=batch, precision=numerics.PRECISIONS[chosen], values=values, args=tuple(self.args.items()), chain=chain,
            targets=targets, math=math_choice, gemm=gemm, prepack=prepack, defaults=tuple(nodes["defaults"].value) if "defaults" in nodes else (),
        )  # fmt: skip

    def check_names(self, chain: tuple[Step, ...], node: Node) -> None:
        """Refuse parameters that would share a C identifier, such as `norm.weight` and a bare `norm_weight`."""
        owners: dict[str, str] = {}
        for step, item in zip(chain, node.value, strict=True):
            for parameter in step.parameters:
                key = step.key(parameter)
                other = owners.setdefault(key.replace(".", "_"), key)
                if other != key:
                    self.fault(item, f"name: {key} and {other} would be one identifier in the kernels; rename one")

    def check_bounds(self, chain: tuple[Step, ...], node: Node, precision: numerics.Precision) -> None:
        """Refuse bounds beyond the storage type's range, as PyTorch does when it runs."""
        for step, item in zip(chain, node.value, strict=True):
            for argument in step.operator.constants(step.values) if step.operator.bounds else ():
                try:
                    numerics.round_to(precision, step.values[argument])
                except OverflowError:
                    self.fault(item, f"{argument}: {step.values[argument]} is beyond the range of {precision.dtype}")

    # Scalars. Each returns the value or _INVALID after recording the fault.

    def identifier(self, node: Node, what: str) -> Any:
        text = node.value
        if not isinstance(text, str) or not _IDENTIFIER.fullmatch(text) or len(text) > 80:
            return self.fault(node, f"{what}: {node.describe()} is no identifier (ASCII letters, digits and _, a letter first, at most 80)")
        if keyword.iskeyword(text) or text in RESERVED or text.startswith("__"):
            return self.fault(node, f"{what}: {text} has a meaning of its own in the generated code; choose another name")
        return text

    def word(self, node: Node, what: str, allowed: Iterable[str]) -> Any:
        allowed = list(allowed)
        if node.value in allowed and isinstance(node.value, str):
            return node.value
        return self.fault(node, f"{what}: {node.describe()}{nearest(str(node.value), allowed)}")

    def flag(self, node: Node, what: str) -> Any:
        return node.value if isinstance(node.value, bool) else self.fault(node, f"{what}: {node.describe()}; expected true or false")

    def size(self, node: Node, what: str, least: int = 1) -> Any:
        value = node.value
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MAX_ELEMENTS:
            return self.fault(node, f"{what}: {node.describe()}; expected an integer from {least} to {MAX_ELEMENTS}")
        return value

    def number(self, node: Node, what: str) -> Any:
        value = node.value
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            return self.fault(node, f"{what}: {node.describe()}; expected a finite number")
        try:
            numerics.to_float32(float(value))
        except OverflowError:
            return self.fault(node, f"{what}: {node.describe()} is beyond float32's range")
        return float(value)

    def sizes(self, node: Node, what: str, least: int = 1) -> Any:
        if not node.is_list or not node.value:
            return self.fault(node, f"{what}: {node.describe()}; expected a list of integers such as [64, 1, 1]")
        items = [self.size(item, what, least) for item in node.value]
        return _INVALID if _INVALID in items else tuple(items)

    def input(self, node: Node | None) -> tuple[Any, dict[str, Any]]:
        """(how x is filled, spatial sizes by name) from the optional `input:` mapping."""
        if node is None:
            return "rand", {}
        if not node.is_mapping:
            self.fault(node, f"input: {node.describe()}; expected a mapping such as {{height: 128, width: 128, values: rand}}")
            return "rand", {}
        values, spatial = "rand", {}
        for key, (key_node, value) in node.value.items():
            if key == "values":
                values = self.word(value, "input values", _INPUT_VALUES)
            elif key in ("height", "width"):
                spatial[key] = self.size(value, key)
            else:
                self.fault(key_node, f"{key}: unknown key of input{nearest(key, ('height', 'width', 'values'))}")
        return values, spatial

    def read_args(self, node: Node, what: str) -> None:
        if not node.is_mapping:
            self.fault(node, f"{what}: {node.describe()}; expected a mapping from constructor argument to value")
            return
        for key, (key_node, value) in node.value.items():
            if self.identifier(key_node, what) is _INVALID:
                self.used_args.add(key)
            if key in self.arg_nodes:
                self.fault(key_node, f"{key}: is an argument on line {self.arg_nodes[key].line} already")
                continue
            self.arg_nodes[key] = key_node
            if value.is_list:
                self.args[key] = self.sizes(value, key)
            elif isinstance(value.value, bool):
                self.args[key] = value.value
            elif isinstance(value.value, int) and abs(value.value) <= MAX_ELEMENTS:
                self.args[key] = value.value
            else:
                self.args[key] = self.number(value, key)

    def targets(self, node: Node) -> Any:
        items = node.value if node.is_list else [node]
        chosen = [self.word(item, "targets", TARGETS) for item in items]
        return None if _INVALID in chosen or not chosen else tuple(dict.fromkeys(chosen))

    # The chain.

    def chain(self, node: Node, batch: Any, spatial: dict[str, Any], input_node: Node | None) -> tuple[Step, ...]:
        if not node.is_list or not node.value:
            self.fault(node, "chain: expected a list of operators, linear or conv2d first")
            return ()
        steps: list[Step] = []
        names: dict[str, int] = {}
        shape: ops.Shape | None = None
        norm_at: Node | None = None
        for index, item in enumerate(node.value):
            parsed = self.operator(item)
            if parsed is None:
                shape = None if index == 0 else shape
                continue
            operator, name, values, sources, place = parsed
            if (operator.kind is Kind.PRODUCER) != (index == 0):
                self.fault(place, f"{operator.name}: a chain has exactly one linear or conv2d, and it comes first")
                continue
            if operator.kind is Kind.NORM:
                if norm_at is not None:
                    self.fault(place, f"{operator.name}: the chain has a norm already, on line {norm_at.line}")
                    continue
                norm_at = place
            if operator.kind is Kind.POOL and norm_at is None:
                self.fault(place, f"{operator.name}: pooling comes after the norm")
                continue
            if name is not None and name in names:
                self.fault(place, f"name: {name} is taken by the operator on line {names[name]}")
            elif name is not None:
                names[name] = place.line
            if values is None or (index and shape is None) or batch is _INVALID:
                shape = None
                continue
            if index == 0:
                shape = self.input_shape(operator, values, batch, spatial, input_node, place)
                if shape is None:
                    continue
            step = self.step(operator, name, values, sources, shape, place)
            shape = step.output_shape if step else None
            if step:
                steps.append(step)
        if norm_at is None and not self.problems:
            self.fault(node, "chain: has no group_norm; a chain is linear or conv2d, element-wise operators, group_norm, then anything after it")
        return tuple(steps)

    def input_shape(
        self, operator: Operator, values: dict[str, Any], batch: int, spatial: dict[str, Any], input_node: Node | None, place: Node
    ) -> ops.Shape | None:
        if operator.name == "linear":
            if spatial and input_node:
                self.fault(input_node, "input: height and width belong to conv2d, not to linear")
            return (batch, values["in_features"])
        missing = [key for key in ("height", "width") if key not in spatial]
        if missing:
            self.fault(place, f"conv2d needs the input's {' and '.join(missing)}: add input: {{height: 128, width: 128}}")
            return None
        if _INVALID in spatial.values():
            return None
        return (batch, values["in_channels"], spatial["height"], spatial["width"])

    def step(
        self, operator: Operator, name: str | None, values: dict[str, Any], sources: dict[str, str], shape: ops.Shape, place: Node
    ) -> Step | None:
        try:
            output = operator.shape(values, shape)
        except ops.ShapeError as error:
            self.fault(place, str(error))
            return None
        step = Step(operator, name, values, shape, output, sources)
        for parameter in step.parameters:
            if operator.kind is Kind.ELEMENTWISE and not _per_channel(parameter.shape, shape):
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

    def operator(self, item: Node) -> tuple[Operator, str | None, dict[str, Any] | None, dict[str, str], Node] | None:
        """(operator, name, checked values or None, sources of the values, place) of one chain entry, or None when it is not recognisable."""
        if item.is_mapping and len(item.value) == 1:
            (word, (place, arguments)), = item.value.items()
        elif isinstance(item.value, str):
            word, place, arguments = item.value, item, None
        else:
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
        sources = {key: node.value for key, (_, node) in given.items() if isinstance(node.value, str) and node.value in self.args and key != "name"}
        return (operator, *self.arguments(operator, arguments, place), sources, place)

    def arguments(self, operator: Operator, node: Node | None, place: Node) -> tuple[str | None, dict[str, Any] | None]:
        given: dict[str, tuple[Node, Node]] = node.value if node is not None else {}
        known = {a.name for a in operator.arguments} | ({"name"} if operator.takes_name else set())
        sound = True
        for key, (key_node, _) in given.items():
            if key not in known:
                self.fault(key_node, f"{key}: {operator.name} has no such argument{nearest(key, sorted(known)) if known else ''}")
                sound = False
        name = None
        if "name" in given:
            name = self.identifier(given["name"][1], "name")
            sound, name = sound and name is not _INVALID, None if name is _INVALID else name
        values: dict[str, Any] = {}
        for argument in operator.arguments:
            if argument.name in given:
                values[argument.name] = self.argument(argument, given[argument.name][1])
            elif argument.default is REQUIRED:
                values[argument.name] = self.fault(place, f"{argument.name}: {operator.name} needs it")
            else:
                values[argument.name] = argument.default
        if not sound or _INVALID in values.values():
            return name, None
        if operator.name == "max_pool2d" and values["stride"] is None:
            values["stride"] = values["kernel_size"]
        complaint = operator.check(values)
        if complaint:
            self.fault(place, f"{operator.name}: {complaint}")
            return name, None
        if name is None and (operator.requires_name or values.get("shape") is not None):
            self.fault(place, f"name: {operator.name} needs one: its parameters are stored under it")
            return None, None
        return name, values

    def argument(self, argument: Argument, node: Node) -> Any:
        """The checked value of one argument; a word that names an entry of args stands for it."""
        if isinstance(node.value, str) and node.value in self.args:
            self.used_args.add(node.value)
            value = self.args[node.value]
            if value is _INVALID:
                return _INVALID
            shown = str(list(value)) if isinstance(value, tuple) else str(value)
            resolved = [Node(v, node.line, node.column, str(v)) for v in value] if isinstance(value, tuple) else value
            node = Node(resolved, node.line, node.column, f"{node.text} = {shown}")
        elif isinstance(node.value, str) and not isinstance(argument.type, tuple):
            hint = nearest(node.value, self.args) if self.args else "; the spec has no args"
            return self.fault(node, f"{argument.name}: {node.value} is neither a value nor an entry of args{hint}")
        kind = argument.type
        if isinstance(kind, tuple):
            return self.word(node, argument.name, kind)
        if kind == "flag":
            return self.flag(node, argument.name)
        if kind == "number" or (kind == "bound" and node.value is not None):
            return self.number(node, argument.name)
        if kind == "bound" or (node.value is None and argument.default is None):
            return None
        if kind == "shape":
            return self.sizes(node, argument.name)
        if kind in ("pair", "count_pair"):
            return self.pair(node, argument.name, 1 if kind == "pair" else 0)
        return self.size(node, argument.name)

    def pair(self, node: Node, what: str, least: int) -> Any:
        if not node.is_list:
            value = self.size(node, what, least)
            return value if value is _INVALID else (value, value)
        if len(node.value) != 2:
            return self.fault(node, f"{what}: {len(node.value)} values; expected one or two")
        return self.sizes(node, what, least)


def _per_channel(parameter: ops.Shape, shape: ops.Shape) -> bool:
    """Does a parameter of this shape broadcast over (batch, channels, ...) as one value per channel, or one for all?"""
    if math.prod(parameter) == 1:
        return len(parameter) <= len(shape)
    trailing = (1,) * (len(shape) - 2)
    return parameter in ((shape[1], *trailing), (1, shape[1], *trailing))
