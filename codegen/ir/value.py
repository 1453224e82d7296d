"""Values: the tensors between the segments of a chain, by the names that plans give them."""

from __future__ import annotations

from dataclasses import dataclass

from codegen.numerics import Precision
from codegen.ops import Shape
from codegen.spec import Spec, Step


@dataclass(frozen=True)
class Value:
    """A tensor that one segment gives and others read: its name, its shape and the type that it is stored in."""

    name: str
    shape: Shape
    storage: Precision


def value_name(spec: Spec, index: int) -> str:
    """The name of the result of step `index`; that of what comes in for -1."""
    return "x" if index < 0 else "y" if index == len(spec.chain) - 1 else f"value:{index}"


def input_name(spec: Spec, name: str) -> str:
    """The name of an input in a plan: x for the first."""
    return "x" if name == spec.inputs[0].name else f"input:{name}"


def mask_name(step: Step) -> str:
    """The name of the mask that a dropout drew, in a plan of training."""
    return f"mask:{step.index}"


def result_of(spec: Spec, index: int) -> Value:
    """The result of step `index`; what comes in for -1."""
    return Value(value_name(spec, index), spec.input_shape if index < 0 else spec.chain[index].output_shape, spec.precision)


def input_of(spec: Spec, name: str) -> Value:
    """The input of that name."""
    return Value(input_name(spec, name), next(given.shape for given in spec.inputs if given.name == name), spec.precision)
