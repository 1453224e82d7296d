"""The scalars of a spec: each method returns the checked value, or INVALID after recording the fault at its place."""

from __future__ import annotations

import difflib
import keyword
import math
import re
from collections.abc import Iterable
from typing import Any

from codegen.spec.reserved import FORWARD, RESERVED
from codegen.spec.types import MAX_ELEMENTS
from codegen.spec.yaml_reader import Node, Problem

_IDENTIFIER = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
INVALID = object()


def meant(word: str, allowed: Iterable[str]) -> str | None:
    """The allowed word that a misspelt one stands for, None where none is like it."""
    return next(iter(difflib.get_close_matches(word, list(allowed), 1, 0.6)), None)


def nearest(word: str, allowed: Iterable[str]) -> str:
    """A hint for a misspelt word: `; did you mean ...?` or the allowed words."""
    allowed = list(allowed)
    close = meant(word, allowed)
    return f"; did you mean {close}?" if close else f"; allowed: {', '.join(allowed)}"


class Scalars:
    """Collects faults, so that one run reports them all."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []
        self.sources: set[str] = set()  # the words that stood for a faulty value

    def fault(self, node: Node, message: str) -> Any:
        """Record what is wrong with a value, once for one that a word stands for in several places."""
        if node.source and node.source in self.sources:
            return INVALID
        self.sources.add(node.source)
        self.problems.append(Problem(node.line, node.column, message))
        return INVALID

    def identifier(self, node: Node, what: str) -> Any:
        text = node.value
        if not isinstance(text, str) or not _IDENTIFIER.fullmatch(text) or len(text) > 80:
            return self.fault(node, f"{what}: {node.describe()} is no identifier (ASCII letters, digits and _, a letter first, at most 80)")
        if keyword.iskeyword(text) or text in RESERVED or text.startswith("__"):
            return self.fault(node, f"{what}: {text} has a meaning of its own in the generated code; choose another name")
        return text

    def input_name(self, node: Node, what: str) -> Any:
        """The name of an input: a reference that hides no name of the emitted forwards, whose arguments the inputs are."""
        if isinstance(node.value, str) and node.value in FORWARD:
            return self.fault(node, f"{what}: {node.value} has a meaning of its own in the generated code; choose another name")
        return self.reference(node, what)

    def reference(self, node: Node, what: str) -> Any:
        """The name of an operator or of an input: an identifier, or one of those that layers give their inputs."""
        return node.value if node.value in ("x", "y") else self.identifier(node, what)

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
        return float(value)

    def sizes(self, node: Node, what: str, least: int = 1) -> Any:
        if not node.is_list or not node.value:
            return self.fault(node, f"{what}: {node.describe()}; expected a list of integers such as [64, 1, 1]")
        items = [self.size(item, what, least) for item in node.value]
        return INVALID if INVALID in items else tuple(items)

    def integer(self, node: Node, what: str, least: int, most: int) -> Any:
        value = node.value
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            return self.fault(node, f"{what}: {node.describe()}; expected an integer from {least} to {most}")
        return value

    def integers(self, node: Node, what: str, least: int, most: int) -> Any:
        if not node.is_list or not node.value:
            return self.fault(node, f"{what}: {node.describe()}; expected a list of integers such as [2, 3]")
        items = [self.integer(item, what, least, most) for item in node.value]
        return INVALID if INVALID in items else tuple(items)

    def per_axis(self, node: Node, what: str, rank: int, least: int) -> Any:
        """A size for each of `rank` axes: one for all, or a list."""
        if not node.is_list:
            value = self.size(node, what, least)
            return value if value is INVALID else (value,) * rank
        if len(node.value) != rank:
            wanted = "one" if rank == 1 else f"one or {rank}"
            return self.fault(node, f"{what}: {len(node.value)} values; expected {wanted}")
        return self.sizes(node, what, least)
