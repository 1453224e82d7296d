"""What a forward turned out to be: entries of a chain, faults, notes."""

from __future__ import annotations

import keyword
import re
from dataclasses import dataclass, field
from typing import Any

from codegen.from_module.faults import Fault
from codegen.ops import OPERATORS
from codegen.spec.reserved import RESERVED


@dataclass(frozen=True)
class Entry:
    """One operator of the chain: its argument values as the file has them (left out where PyTorch's default holds), and its line."""

    operator: str
    line: int
    name: str | None = None
    values: dict[str, Any] = field(default_factory=dict)

    @property
    def holds_parameter(self) -> bool:
        """Is it a parameter without a module, or has it one?"""
        return self.values.get("shape") is not None or ("init" in self.values and self.operator == "linear")

    @property
    def has_module(self) -> bool:
        return not self.holds_parameter and self.operator in OPERATORS and OPERATORS[self.operator].requires_name


@dataclass
class Traced:
    """What a forward turned out to be. `used`: attributes of Model that hold the parameters its operators take; `whole`: forward was
    followed to its end.
    """

    entries: list[Entry] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    notes: list[Fault] = field(default_factory=list)
    used: set[str] = field(default_factory=set)
    inputs: list[str] = field(default_factory=list)
    whole: bool = True


def is_name(text: str) -> bool:
    return bool(re.fullmatch(r"[A-Za-z][A-Za-z0-9_]{0,79}", text)) and not keyword.iskeyword(text) and text not in RESERVED
