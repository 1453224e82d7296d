"""Chain entries and constructor arguments -> the spec's YAML, each of its lines tied to the line of the problem file it came from."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Any

from codegen.from_module.creation import Arguments, source_of
from codegen.from_module.faults import Fault
from codegen.from_module.graph import Entry
from codegen.ops import OPERATORS, Argument
from codegen.source_text import source_text

ALIKE = 0.6  # the share of letters that two names have in common from which on they count as alike


@dataclass(frozen=True)
class Text:
    """A spec's text; `origin` maps its 1-based lines to those of the problem file."""

    yaml: str
    origin: dict[int, int]


def references(entries: list[Entry], arguments: Arguments, defaults: Arguments) -> dict[tuple[int, str], str]:
    """Which values of the chain (entry's index, argument) are arguments of the constructor.

    First those whose value is known to be the argument's. An argument that reaches the chain on no such way (a flag, a list, or a file that repeats
    the number) stands for the equal value whose name is most like its own; one that is left at its default only where the names are alike.
    """
    optional = {name for name, _ in defaults}
    found = {(i, key): source for i, entry in enumerate(entries) for key, value in entry.values.items() if (source := source_of(value))}
    candidates = []
    for name, value in (*arguments, *defaults):
        if name in found.values():
            continue
        for i, entry in enumerate(entries):
            for argument in OPERATORS[entry.operator].arguments:
                slot = (i, argument.name)
                if slot in found or argument.name not in entry.values or _is_implied(i, entry, argument.name, found):
                    continue
                likeness = _likeness(name, entry, argument.name)
                if _stands_for(value, entry.values[argument.name], argument) and (name not in optional or likeness >= ALIKE):
                    candidates.append((likeness, -i, name, slot))
    for _, _, name, slot in sorted(candidates, key=lambda c: c[:3], reverse=True):
        if slot not in found and name not in found.values():
            found[slot] = name
    return found


def _is_implied(index: int, entry: Entry, key: str, found: dict[tuple[int, str], str]) -> bool:
    """Is this the stride of a pooling that moves by whole windows? The spec has that by default."""
    if entry.operator not in ("max_pool2d", "avg_pool2d") or key != "stride":
        return False
    stride, kernel = pair(entry.values.get("stride")), pair(entry.values["kernel_size"])
    return stride is None or (stride == kernel and found.get((index, key)) in (None, found.get((index, "kernel_size"))))


def _stands_for(value: Any, given: Any, argument: Argument) -> bool:
    """Would the spec's reader take the argument `value` for `given` in this place?"""
    kind = argument.type
    if isinstance(value, bool) or isinstance(given, bool):
        return kind == "flag" and value is given
    if kind in ("number", "bound"):
        return isinstance(value, (int, float)) and isinstance(given, (int, float)) and value == given
    if isinstance(value, float) or isinstance(kind, tuple) or kind == "flag":
        return False
    if kind in ("pair", "count_pair") and isinstance(value, int):
        return pair(given) == (value, value)
    if kind == "extents" and isinstance(value, int):
        return given == (value,)
    return value == (pair(given) if kind in ("pair", "count_pair") else given)


def pair(value: Any) -> Any:
    """A window's size as two numbers."""
    return (value, value) if isinstance(value, int) else value


def _likeness(name: str, entry: Entry, key: str) -> float:
    spellings = (key, f"{entry.name or entry.operator}_{key}", f"{entry.operator}_{key}".replace("_val", ""))
    return max(difflib.SequenceMatcher(None, name, spelling).ratio() for spelling in spellings)


def unreached(arguments: Arguments, found: dict[tuple[int, str], str], line: int) -> list[Fault]:
    """Arguments of the constructor that no value of the chain is."""
    return [
        Fault(line, f"{name} = {value!r}: this argument of Model reaches no operator as it is (it is unused, or only part of a computation); "
              "a spec's arguments are values of its chain")
        for name, value in arguments if name not in found.values()
    ]  # fmt: skip


def spec_text(
    name: str, origin: str, precision: str | None, shape: tuple[int, ...], values: str, arguments: Arguments, defaults: Arguments, entries: list[Entry],
    init_line: int,
) -> Text:  # fmt: skip
    """The spec of a chain that takes x of `shape`, filled as `values` says; `origin` is the file's name, for the first line."""
    found = references(entries, arguments, defaults)
    rows: list[tuple[str, int]] = [
        (f"# From {source_text(origin)}: {' -> '.join(entry.operator for entry in entries)}", 0),
        (f"name: {name}", 0),
        (f"batch: {shape[0]}", 0),
    ]
    if precision:
        rows.append((f"precision: {precision}", 0))
    about_x = [f"{key}: {size}" for key, size in zip(("height", "width"), shape[2:], strict=False)] + ([] if values == "rand" else [f"values: {values}"])
    if about_x:
        rows.append((f"input: {{{', '.join(about_x)}}}", 0))
    for key, listed in (("args", arguments), ("defaults", defaults)):
        if listed:
            rows.append((f"{key}:", 0))
            rows += [(f"  {name}: {literal(value)}", init_line) for name, value in listed]
    rows.append(("chain:", 0))
    width = max(len(entry.operator) for entry in entries) + 1
    for i, entry in enumerate(entries):
        given = [f"name: {entry.name}"] if entry.name else []
        given += [f"{key}: {text}" for key, text in _values(i, entry, found)]
        row = f"{entry.operator + ':':<{width}} {{{', '.join(given)}}}" if given else entry.operator
        rows.append((f"  - {row}", entry.line))
    return Text("\n".join(row for row, _ in rows) + "\n", {i: line for i, (_, line) in enumerate(rows, 1)})


def _values(index: int, entry: Entry, found: dict[tuple[int, str], str]) -> list[tuple[str, str]]:
    """The entry's arguments as the spec writes them: defaults and what follows from another argument are left out."""
    written = []
    for argument in OPERATORS[entry.operator].arguments:
        value = entry.values.get(argument.name)
        source = found.get((index, argument.name))
        if argument.type in ("pair", "count_pair"):
            value = pair(value)
        if _is_implied(index, entry, argument.name, found):
            continue
        if source is None and (value is None or (value == argument.default and argument.name != "init")):
            continue
        written.append((argument.name, source or (literal(value) if argument.type in ("pair", "count_pair") else _listed(value))))
    return written


def _listed(value: Any) -> str:
    """A value that is no pair: lists stay lists."""
    return f"[{', '.join(str(int(v)) for v in value)}]" if isinstance(value, tuple) else literal(value)


def literal(value: Any) -> str:
    """A value as the spec's YAML has it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return str(int(value[0])) if len(value) == 2 and value[0] == value[1] else f"[{', '.join(str(int(v)) for v in value)}]"
    return repr(float(value)) if isinstance(value, float) else str(int(value)) if isinstance(value, int) else str(value)
