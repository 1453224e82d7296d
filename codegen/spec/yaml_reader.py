"""YAML with positions, and only the safe part of it: scalars, lists and mappings, no tags, anchors or aliases.

PyYAML composes the node graph, nothing is constructed from it; scalars are resolved here to bool, int, float, str or None. Depth is limited while the
text is scanned, so that a small file cannot cost much time, and a number that the versions of YAML read differently is refused.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

import yaml

MAX_BYTES = 1 << 16
MAX_DEPTH = 16  # a spec has four levels
MAX_PROBLEMS = 100  # of what is no plain YAML: a file with more of them is no spec
_QUOTED = ("'", '"', "|", ">")  # styles in which a scalar is text whatever it holds
_INTEGER = re.compile(r"[-+]?(0|[1-9][0-9]*)")
_FLOAT = re.compile(r"[-+]?([0-9]+\.[0-9]*|\.[0-9]+|[0-9]+)([eE][-+]?[0-9]+)?")
_SEVERAL_READINGS = (  # what YAML 1.1, YAML 1.2 and Python take for different numbers, or some for none
    (re.compile(r"[-+]?0[0-9_]*[0-9][0-9_]*(\.[0-9_]*)?([eE][-+]?[0-9_]+)?"), "a leading zero, which marks octal numbers in some versions of YAML"),
    (re.compile(r"[-+]?0[xX][0-9a-fA-F_]+|[-+]?0[oO][0-7_]+|[-+]?0[bB][01_]+"), "a base other than ten"),
    (re.compile(r"[-+]?[0-9][0-9_]*(:[0-9_]+)+(\.[0-9_]*)?"), "colons, which count in sixties in some versions of YAML"),
    (re.compile(r"[-+]?(?=[0-9_.]*[0-9])(?=[0-9.eE+-]*_)[0-9.][0-9_.]*([eE][-+]?[0-9_]+)?"), "an underscore, which some versions of YAML skip"),
)
_SPECIAL = {
    **{word: True for word in ("true", "True", "TRUE")},
    **{word: False for word in ("false", "False", "FALSE")},
    **{word: None for word in ("null", "Null", "NULL", "~", "")},
    **{sign + word: float(sign + "inf") for sign in ("", "+", "-") for word in (".inf", ".Inf", ".INF", "inf", "Infinity")},
    **{word: float("nan") for word in (".nan", ".NaN", ".NAN", "nan", "NaN")},
}


@dataclass(frozen=True, order=True)
class Problem:
    """One thing wrong with a spec file, at a 1-based line and column."""

    line: int
    column: int
    message: str = field(compare=False)


@dataclass(frozen=True)
class Node:
    """A value with its place. `value` is a scalar, a list of Nodes, or a dict from key to (key Node, value Node). `source`: the word that stood for it."""

    value: object
    line: int
    column: int
    text: str = ""
    quoted: bool = False
    source: str = ""

    @property
    def is_mapping(self) -> bool:
        return isinstance(self.value, dict)

    @property
    def is_list(self) -> bool:
        return isinstance(self.value, list)

    def describe(self) -> str:
        """The value as a message shows it."""
        if self.is_mapping or self.is_list:
            return "a mapping" if self.is_mapping else "a list"
        if not self.text.isprintable() or not self.text:
            return repr(self.text)
        return f'"{self.text}"' if self.quoted else self.text

    def plain(self) -> object:
        """The value as plain Python data."""
        if isinstance(self.value, dict):
            return {key: node.plain() for key, (_, node) in self.value.items()}
        return [node.plain() for node in self.value] if isinstance(self.value, list) else self.value


class YamlError(Exception):
    """The file is no YAML of the safe subset; carries the problems found."""

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__("; ".join(p.message for p in problems))
        self.problems = problems


def read(path: Path) -> Node:
    """Parse `path`. Raises YamlError with positions, or OSError when the file cannot be read."""
    data = path.read_bytes()
    if len(data) > MAX_BYTES:
        raise YamlError([Problem(1, 1, f"the file has {len(data)} bytes, a spec has at most {MAX_BYTES}")])
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise YamlError([Problem(data[: error.start].count(b"\n") + 1, 1, "the file is not UTF-8 text")]) from None
    return parse(text)


def parse(text: str) -> Node:
    """Parse YAML text. Raises YamlError with every problem of the safe subset, or the one syntax error YAML stops at."""
    problems: list[Problem] = []
    depth = 0
    try:
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            _refuse_unsafe(event, problems)
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > MAX_DEPTH:
                problems.append(Problem(*_place(event), f"nested more than {MAX_DEPTH} levels deep; a spec has four: the file, its chain, an operator, a list"))
                raise YamlError(problems)
            if len(problems) >= MAX_PROBLEMS:
                raise YamlError(problems)
        if problems:
            raise YamlError(problems)
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line, column = (mark.line + 1, mark.column + 1) if mark else (1, 1)
        raise YamlError([Problem(line, column, f"not valid YAML: {error.problem or error.context}")]) from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise YamlError([Problem(line, error.position - text.rfind("\n", 0, error.position), f"not valid YAML: {error.reason}")]) from None
    except yaml.YAMLError as error:
        raise YamlError([Problem(1, 1, f"not valid YAML: {' '.join(str(error).split())}")]) from None
    if root is None:
        raise YamlError([Problem(1, 1, "the file is empty")])
    node = _convert(root, problems)
    if problems:
        raise YamlError(problems)
    return node


def _place(event: yaml.Event) -> tuple[int, int]:
    mark = event.start_mark
    return (mark.line + 1, mark.column + 1) if mark else (1, 1)


def _refuse_unsafe(event: yaml.Event, problems: list[Problem]) -> None:
    place = _place(event)
    if isinstance(event, yaml.AliasEvent):
        problems.append(Problem(*place, f"*{event.anchor}: aliases are not allowed, write the value out"))
    elif getattr(event, "anchor", None):
        problems.append(Problem(*place, f"&{event.anchor}: anchors are not allowed, write the value where it is needed"))
    elif getattr(event, "tag", None):
        problems.append(Problem(*place, f"{event.tag}: tags are not allowed in a spec"))


def _convert(node: yaml.Node, problems: list[Problem]) -> Node:
    line, column = node.start_mark.line + 1, node.start_mark.column + 1
    if isinstance(node, yaml.SequenceNode):
        return Node([_convert(item, problems) for item in node.value], line, column)
    if isinstance(node, yaml.MappingNode):
        entries: dict[str, tuple[Node, Node]] = {}
        for key_node, value_node in node.value:
            key = _convert(key_node, problems)
            if not isinstance(key_node, yaml.ScalarNode):
                problems.append(Problem(key.line, key.column, "a key must be a plain word"))
                continue
            if key.text in entries:
                first = entries[key.text][0]
                problems.append(Problem(key.line, key.column, f"{key.text}: given twice, first on line {first.line}"))
            entries.setdefault(key.text, (key, _convert(value_node, problems)))
        return Node(entries, line, column)
    how = next((how for pattern, how in _SEVERAL_READINGS if node.style not in _QUOTED and pattern.fullmatch(node.value)), None)
    if how:
        problems.append(Problem(line, column, f"{node.value[:40]}: has {how}; write the number in plain decimal digits"))
    return Node(_scalar(node), line, column, node.value, quoted=node.style in _QUOTED)


def _scalar(node: yaml.ScalarNode) -> object:
    text = node.value
    if node.style in _QUOTED:
        return text
    if text in _SPECIAL:
        return _SPECIAL[text]
    if _INTEGER.fullmatch(text) and len(text) < 40:
        return int(text)
    return float(text) if _FLOAT.fullmatch(text) and len(text) < 60 else text
