"""Spec -> spec.yaml: the resolved spec that is written beside the sources, every default spelt out."""

from __future__ import annotations

from typing import Any

import yaml

from codegen.spec.types import Spec


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def resolved(spec: Spec) -> dict[str, Any]:
    """The spec as plain data that load_spec reads back to an equal Spec (but for its path)."""
    data: dict[str, Any] = {"name": spec.name, "batch": list(spec.batches) if len(spec.batches) > 1 else spec.batch, "precision": spec.precision.name}
    data["input"] = {"values": spec.values}
    if len(spec.input_shape) == 4:
        data["input"] |= {"height": spec.input_shape[2], "width": spec.input_shape[3]}
    for key in ("targets", "math", "gemm"):
        if getattr(spec, key) is not None:
            data[key] = _plain(getattr(spec, key))
    for key in ("prepack", "pad_batch"):
        if getattr(spec, key):
            data[key] = True
    for key, listed in (("args", False), ("defaults", True)):
        values = {name: _plain(value) for name, value in spec.args if (name in spec.defaults) == listed}
        if values:
            data[key] = values
    chain = []
    for step in spec.chain:
        arguments: dict[str, Any] = {"name": step.name} if step.name else {}
        for argument in step.operator.arguments:
            value = step.values[argument.name]
            if value is not None:
                arguments[argument.name] = step.sources.get(argument.name, _plain(value))
        chain.append({step.operator.name: arguments} if arguments else step.operator.name)
    data["chain"] = chain
    return data


def resolved_yaml(spec: Spec) -> str:
    """`resolved(spec)` as YAML text with a one-line header."""
    return f"# Resolved from {spec.path}.\n" + yaml.safe_dump(resolved(spec), sort_keys=False, default_flow_style=None, width=140)
