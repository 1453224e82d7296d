"""Chain entries and constructor arguments -> the spec's YAML, each of its lines tied to the line of the problem file it came from."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Any

from codegen.from_module.creation import Arguments, source_of
from codegen.from_module.entries import Entry
from codegen.ops import OPERATORS, PARAMETER, REQUIRED, Argument, Kind
from codegen.ops.windows import AXES
from codegen.source_text import source_text
from codegen.spec.chain_reader import WINDOW_TYPES

ALIKE = 0.6  # the share of letters that two names have in common from which on they count as alike


@dataclass(frozen=True)
class Text:
    """A spec's text; `origin` maps its 1-based lines to those of the problem file."""

    yaml: str
    origin: dict[int, int]


@dataclass(frozen=True)
class Given:
    """An input as get_inputs gives it: forward's name for it, its shape, and the word for how it is filled."""

    name: str
    shape: tuple[int, ...]
    values: str = "rand"


@dataclass(frozen=True)
class Layer:
    """All that a spec says: `origin` is the file's name, `ignored` are arguments of the constructor that reach nothing, `created` the order of creation
    where the spec has to give it."""

    name: str
    origin: str
    precision: str | None
    inputs: tuple[Given, ...]
    arguments: Arguments
    defaults: Arguments
    chain: tuple[Entry, ...]
    unused: tuple[Entry, ...] = ()
    ignored: tuple[str, ...] = ()
    created: tuple[str, ...] = ()
    algebra: bool = True


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
            for argument in arguments_of(entry):
                slot = (i, argument.name)
                if slot in found or argument.name not in entry.values or _is_implied(i, entry, argument, found):
                    continue
                likeness = _likeness(name, entry, argument.name)
                if _stands_for(value, entry.values[argument.name], argument) and (name not in optional or likeness >= ALIKE):
                    candidates.append((likeness, -i, name, slot))
    for _, _, name, slot in sorted(candidates, key=lambda c: c[:3], reverse=True):
        if slot not in found and name not in found.values():
            found[slot] = name
    return found


def arguments_of(entry: Entry) -> tuple[Argument, ...]:
    return (PARAMETER if entry.operator == "parameter" else OPERATORS[entry.operator]).arguments


def _is_implied(index: int, entry: Entry, argument: Argument, found: dict[tuple[int, str], str]) -> bool:
    """Is this the stride of a pooling that moves by whole windows? The spec has that by default."""
    if argument.name != "stride" or argument.default is not None:
        return False
    stride, kernel = (spread(entry.values.get(key), argument) for key in ("stride", "kernel_size"))
    return stride is None or (stride == kernel and found.get((index, "stride")) in (None, found.get((index, "kernel_size"))))


def _stands_for(value: Any, given: Any, argument: Argument) -> bool:
    """Would the spec's reader take the argument `value` for `given` in this place?"""
    kind = argument.type
    if isinstance(value, bool) or isinstance(given, bool):
        return kind == "flag" and value is given
    if kind in ("number", "bound", "fill"):
        return isinstance(value, (int, float)) and isinstance(given, (int, float)) and value == given
    if isinstance(value, float) or isinstance(kind, tuple) or kind in ("flag", "tap", "owner"):
        return False
    if kind in WINDOW_TYPES and isinstance(value, int):
        return spread(given, argument) == spread(value, argument)
    if kind == "extents" and isinstance(value, int):
        return given == (value,)
    return value == spread(given, argument)


def spread(value: Any, argument: Argument) -> Any:
    """A window's size for each of its axes; whatever else as it is."""
    return (value,) * WINDOW_TYPES[argument.type][0] if argument.type in WINDOW_TYPES and isinstance(value, int) else value


def _likeness(name: str, entry: Entry, key: str) -> float:
    spellings = (key, f"{entry.name or entry.operator}_{key}", f"{entry.operator}_{key}".replace("_val", ""))
    return max(difflib.SequenceMatcher(None, name, spelling).ratio() for spelling in spellings)


def spec_text(layer: Layer, init_line: int) -> Text:
    """The spec of a layer."""
    entries = layer.chain
    found = references([*entries, *layer.unused], layer.arguments, layer.defaults)
    batch = layer.inputs[0].shape[0]
    rows: list[tuple[str, int]] = [
        (f"# From {source_text(layer.origin)}: {' -> '.join(entry.operator for entry in entries)}", 0),
        (f"name: {layer.name}", 0),
        (f"batch: {batch}", 0),
    ]
    if layer.precision:
        rows.append((f"precision: {layer.precision}", 0))
    if not layer.algebra:
        rows.append(("algebra: false", 0))
    rows += [(row, entries[0].line) for row in _inputs(layer, batch)]
    for key, listed in (("args", layer.arguments), ("defaults", layer.defaults)):
        if listed:
            rows.append((f"{key}:", 0))
            rows += [(f"  {name}: {_listed(value)}", init_line) for name, value in listed]
    if layer.ignored:
        rows.append((f"ignored: [{', '.join(layer.ignored)}]", init_line))
    for key, listed, first in (("chain", entries, 0), ("unused", layer.unused, len(entries))):
        if listed:
            rows.append((f"{key}:", 0))
            width = max(len(entry.operator) for entry in listed) + 1
            rows += [(_row(entry, width, _values(first + i, entry, found)), entry.line) for i, entry in enumerate(listed)]
    if layer.created:
        rows.append((f"created: [{', '.join(layer.created)}]", init_line))
    return Text("\n".join(row for row, _ in rows) + "\n", {i: line for i, (_, line) in enumerate(rows, 1)})


def _row(entry: Entry, width: int, values: list[tuple[str, str]]) -> str:
    given = [f"name: {entry.name}"] if entry.name else []
    given += [f"{key}: {text}" for key, text in values]
    return f"  - {entry.operator + ':':<{width}} {{{', '.join(given)}}}" if given else f"  - {entry.operator}"


def _inputs(layer: Layer, batch: int) -> list[str]:
    """The lines of `input:` or `inputs:`; of one x, what its first operator does not say."""
    first, operator = layer.inputs[0], OPERATORS[layer.chain[0].operator]
    if len(layer.inputs) == 1 and first.name == "x" and operator.kind is Kind.PRODUCER and len(first.shape) == operator.rank + 2:
        sizes = [f"{key}: {size}" for key, size in zip(AXES.get(operator.rank, ()), first.shape[2:], strict=True)]
        about = sizes + ([] if first.values == "rand" else [f"values: {first.values}"])
        return [f"input: {{{', '.join(about)}}}"] if about else []
    given = {entry.name: ", ".join(_about(entry, batch)) for entry in layer.inputs}
    if list(given) == ["x"]:
        return [f"input: {{{given['x']}}}"]
    return ["inputs:", *(f"  {name}: {{{about}}}" for name, about in given.items())]


def _about(entry: Given, batch: int) -> list[str]:
    batched = entry.shape[:1] == (batch,)
    about = [f"shape: {_listed(entry.shape[1:] if batched else entry.shape)}"]
    return about + ([] if batched else ["batched: false"]) + ([] if entry.values == "rand" else [f"values: {entry.values}"])


def _values(index: int, entry: Entry, found: dict[tuple[int, str], str]) -> list[tuple[str, str]]:
    """The entry's arguments as the spec writes them: defaults and what follows from another argument are left out."""
    written = []
    for argument in arguments_of(entry):
        source = found.get((index, argument.name))
        if argument.name not in entry.values or _is_implied(index, entry, argument, found):
            continue
        value = spread(entry.values[argument.name], argument)
        if source is None and value == argument.default and argument.name != "init":
            continue
        if value is None and argument.default is REQUIRED:
            continue
        written.append((argument.name, source or _written(value, argument)))
    return written + ([("takes", _listed(entry.values["takes"]))] if "takes" in entry.values else [])


def _written(value: Any, argument: Argument) -> str:
    if value is None:
        return "null"
    if argument.type == "fill":
        return {1.0: "ones", 0.0: "zeros"}.get(value, literal(value)) if isinstance(value, float) else value
    return literal(value) if argument.type in WINDOW_TYPES else _listed(value)


def _listed(value: Any) -> str:
    """A value that is none of a window: lists stay lists."""
    return f"[{', '.join(str(int(v)) for v in value)}]" if isinstance(value, tuple) else literal(value)


def literal(value: Any) -> str:
    """A value as the spec's YAML has it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return str(int(value[0])) if len(set(value)) == 1 else f"[{', '.join(str(int(v)) for v in value)}]"
    return repr(float(value)) if isinstance(value, float) else str(int(value)) if isinstance(value, int) else str(value)
