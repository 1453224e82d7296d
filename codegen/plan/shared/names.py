"""The names of a chain's values in plans that cut it into parts."""

from __future__ import annotations

from codegen.spec import Spec


def value_name(spec: Spec, index: int) -> str:
    """The name of the result of step `index`; that of what comes in for -1."""
    return "x" if index < 0 else "y" if index == len(spec.chain) - 1 else f"value:{index}"


def input_name(spec: Spec, name: str) -> str:
    """The name of an input in a plan: x for the first."""
    return "x" if name == spec.inputs[0].name else f"input:{name}"
