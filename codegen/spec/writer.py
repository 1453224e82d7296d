"""Spec -> spec.yaml: the resolved spec that is written beside the sources, every default spelt out."""

from __future__ import annotations

from typing import Any

import yaml

from codegen.ops import Kind
from codegen.ops.windows import AXES
from codegen.spec.types import Spec, Step


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _inputs(spec: Spec) -> dict[str, Any]:
    """`input:` where there is one, by the spatial sizes where the first operator gives the rest; else `inputs:`."""
    first, operator = spec.inputs[0], spec.chain[0].operator
    if len(spec.inputs) == 1 and first.name == "x" and first.batched and operator.kind is Kind.PRODUCER and len(first.shape) == operator.rank + 2:
        return {"input": {"values": first.values, **dict(zip(AXES.get(operator.rank, ()), first.shape[2:], strict=True))}}
    given = {
        entry.name: {"shape": list(entry.shape[1:] if entry.batched else entry.shape), "values": entry.values, **({} if entry.batched else {"batched": False})}
        for entry in spec.inputs
    }
    return {"input": given["x"]} if len(given) == 1 and "x" in given else {"inputs": given}


def resolved(spec: Spec) -> dict[str, Any]:
    """The spec as plain data that load_spec reads back to an equal Spec (but for its path)."""
    data: dict[str, Any] = {"name": spec.name, "batch": list(spec.batches) if len(spec.batches) > 1 else spec.batch, "precision": spec.precision.name}
    data |= _inputs(spec)
    for key in ("targets", "math", "gemm", "library"):
        if getattr(spec, key) is not None:
            data[key] = _plain(getattr(spec, key))
    if not spec.algebra:
        data["algebra"] = False
    for key in ("prepack", "pad_batch"):
        if getattr(spec, key):
            data[key] = True
    for key, listed in (("args", False), ("defaults", True)):
        values = {name: _plain(value) for name, value in spec.args if (name in spec.defaults) == listed}
        if values:
            data[key] = values
    data["chain"] = [_entry(step) for step in spec.chain]
    if spec.unused:
        data["unused"] = [_entry(step, step.operator.kind is Kind.NORM) for step in spec.unused]
    for key in ("ignored", "created"):
        if getattr(spec, key):
            data[key] = list(getattr(spec, key))
    return data


def _entry(step: Step, takes: bool = False) -> Any:
    """A step as the spec's list has it."""
    arguments: dict[str, Any] = {"name": step.name} if step.name else {}
    for argument in step.operator.arguments:
        value = step.values[argument.name]
        if not (value is None and argument.default is None) and not (argument.name == "detach" and not value):
            arguments[argument.name] = step.sources.get(argument.name, _plain(value))
    if takes:
        arguments["takes"] = list(step.input_shape[1:])
    return {step.operator.name: arguments} if arguments else step.operator.name


def resolved_yaml(spec: Spec) -> str:
    """`resolved(spec)` as YAML text with a one-line header."""
    return f"# Resolved from {spec.path}.\n" + yaml.safe_dump(resolved(spec), sort_keys=False, default_flow_style=None, width=140)
