"""The specs of KernelBench's second level at sizes that a machine without a GPU computes in a moment."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import yaml

from codegen.ops import Kind
from codegen.ops.windows import AXES
from codegen.spec import Spec, SpecError, load_spec

SAMPLES = 4
FLOP = 1e8
VALUES = 1 << 18
WEIGHTS = 1 << 19
LEAST = 4  # of a spatial axis


def small(path: str, folder: Path) -> Spec:
    """The spec at `path` with the same chain, at a small batch and as small sizes as it needs to cost little; written under `folder`."""
    whole = load_spec(path)
    data = yaml.safe_load((Path(__file__).parents[2] / "codegen" / path).read_text(encoding="utf-8"))
    data["batch"] = min(SAMPLES, data["batch"])
    spec = _loaded(data, folder)
    while _cost(spec) > 1:
        for moved in _moves(data, spec):
            try:
                candidate = _loaded(moved, folder)
            except SpecError:
                continue
            if _alike(whole, candidate) and _cost(candidate) < _cost(spec):
                data, spec = moved, candidate
                break
        else:
            break
    return _loaded(data, folder)


def _loaded(data: dict[str, Any], folder: Path) -> Spec:
    path = folder / "small.yaml"
    path.write_text(yaml.safe_dump(data, sort_keys=False), encoding="utf-8")
    return load_spec(path)


def _cost(spec: Spec) -> float:
    flop = 0.0
    for step in spec.chain:
        if step.operator.kind is Kind.PRODUCER:
            places = step.input_shape if step.operator.transposed else step.output_shape
            flop += 2.0 * math.prod(places) * math.prod(step.parameters[0].shape[1:])
    return max(flop / FLOP, sum(math.prod(step.output_shape) for step in spec.chain) / VALUES, sum(math.prod(shape) for _, shape in spec.parameters) / WEIGHTS)


def _alike(whole: Spec, spec: Spec) -> bool:
    """Have all values axes of one value only where those of the whole layer have them?"""
    return all([a == 1 for a in ours.output_shape] == [b == 1 for b in theirs.output_shape] for ours, theirs in zip(whole.chain, spec.chain, strict=True))


def _moves(data: dict[str, Any], spec: Spec):
    """Each spatial axis halved, the largest first; then each large number, wherever it stands."""
    shape = spec.input_shape
    for axis in sorted(range(2, len(shape)), key=lambda axis: -shape[axis]):
        if shape[axis] // 2 >= LEAST:
            yield _halved(data, spec, axis - len(shape))
    for number in sorted({n for n in _numbers(data.get("args", {})) if n >= 16}, reverse=True):
        if number % 2 == 0:
            yield {**_replaced(data, number), "name": data["name"], "batch": data["batch"]}


def _halved(data: dict[str, Any], spec: Spec, axis: int) -> dict[str, Any]:
    """The spec with an axis of all inputs, counted from the end, and that of views to the same sizes half as large."""
    half = lambda sizes: [size // 2 if place == len(sizes) + axis and size > 1 else size for place, size in enumerate(sizes)]  # noqa: E731
    moved = {**data, "chain": [_halved_view(entry, half) for entry in data["chain"]]}
    if "inputs" in data:
        moved["inputs"] = {name: {**given, "shape": half(given["shape"])} for name, given in data["inputs"].items()}
    elif "shape" in data["input"]:
        moved["input"] = {**data["input"], "shape": half(data["input"]["shape"])}
    else:
        word = AXES[len(spec.input_shape) - 2][axis]
        moved["input"] = {**data["input"], word: data["input"][word] // 2}
    return moved


def _halved_view(entry: Any, half) -> Any:
    sizes = entry["view"]["sizes"] if isinstance(entry, dict) and "view" in entry else ()
    return {"view": {"sizes": half(sizes)}} if len(sizes) > 3 else entry


def _numbers(value: Any):
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from _numbers(item)
    elif type(value) is int:
        yield value


def _replaced(value: Any, number: int) -> Any:
    if isinstance(value, dict):
        return {key: _replaced(item, number) for key, item in value.items()}
    if isinstance(value, list):
        return [_replaced(item, number) for item in value]
    return number // 2 if type(value) is int and value == number else value
