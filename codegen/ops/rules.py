"""What the operator table's rows say in more than a line: shapes, parameters, checks, and the text of PyTorch's modules and calls."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Shape = tuple[int, ...]
Values = Mapping[str, Any]


@dataclass(frozen=True)
class Parameter:
    """A learnable tensor: `suffix` of its key ("" for a bare nn.Parameter), its shape and how PyTorch fills it: a word, or the number that it holds."""

    suffix: str
    shape: Shape
    initialiser: str | float


class ShapeError(ValueError):
    """An operator cannot take the shape before it; the message is a sentence for the spec's author."""


def number(value: float) -> str:
    return repr(float(value))


def linear_shape(values: Values, shape: Shape) -> Shape:
    if len(shape) < 2 or shape[-1] != values["in_features"]:
        raise ShapeError(f"linear takes (batch, ..., {values['in_features']}), the input here is {shape}")
    return (*shape[:-1], values["out_features"])


def linear_check(values: Values) -> str | None:
    if values["init"] is not None and values["bias"]:
        return "init: makes the weight a parameter without a module, which has no bias; set bias: false"
    return None


def linear_module(values: Values, shape: Shape) -> str | None:
    """The module's call; None of a weight that is a bare nn.Parameter."""
    if values["init"] is not None:
        return None
    return f"nn.Linear({values['in_features']}, {values['out_features']}" + ("" if values["bias"] else ", bias=False") + ")"


def linear_parameters(values: Values, shape: Shape) -> tuple[Parameter, ...]:
    if values["init"] is not None:
        return (Parameter("", (values["out_features"], values["in_features"]), values["init"]),)
    weight = Parameter("weight", (values["out_features"], values["in_features"]), "linear")
    return (weight, Parameter("bias", (values["out_features"],), "linear")) if values["bias"] else (weight,)


def group_norm_shape(values: Values, shape: Shape) -> Shape:
    if len(shape) < 2:
        raise ShapeError(f"group_norm takes (batch, channels, ...), the input here is {shape}")
    if shape[1] % values["num_groups"]:
        raise ShapeError(f"num_groups: {values['num_groups']} does not divide the {shape[1]} channels before it")
    if math.prod(shape[1:]) == values["num_groups"]:
        refused = "PyTorch refuses it for a batch of one" if shape[0] == 1 else "the result does not depend on the values"
        raise ShapeError(f"num_groups: {values['num_groups']} leaves one value in each group; its variance is always 0, and {refused}")
    return shape


def group_norm_parameters(values: Values, shape: Shape) -> tuple[Parameter, ...]:
    return (Parameter("weight", shape[1:2], "ones"), Parameter("bias", shape[1:2], "zeros")) if values["affine"] else ()


def group_norm_module(values: Values, shape: Shape) -> str:
    return f"nn.GroupNorm({values['num_groups']}, {shape[1]}{eps(values)}" + ("" if values["affine"] else ", affine=False") + ")"


def _one_value(name: str) -> ShapeError:
    return ShapeError(f"{name} over one value; its variance is always 0 and PyTorch refuses it in training")


def instance_norm_shape(values: Values, shape: Shape) -> Shape:
    if not 3 <= len(shape) <= 5:
        raise ShapeError(f"instance_norm takes (batch, channels) and one to three spatial axes, the input here is {shape}")
    if values["num_features"] not in (None, shape[1]):
        raise ShapeError(f"num_features: {values['num_features']}, and {shape[1]} channels come before it")
    if math.prod(shape[2:]) == 1:
        raise _one_value("instance_norm")
    return shape


def eps(values: Values) -> str:
    return "" if values["eps"] == 1e-5 else f", eps={number(values['eps'])}"


def broadcast(parameter: Shape, shape: Shape) -> Shape:
    """The shape of a sum of a parameter and a value, by PyTorch's rules. Raises ShapeError."""
    rank = max(len(parameter), len(shape))
    pairs = zip((1,) * (rank - len(parameter)) + parameter, (1,) * (rank - len(shape)) + shape, strict=True)
    result = []
    for own, other in pairs:
        if own != other and 1 not in (own, other):
            raise ShapeError(f"a parameter of shape {parameter} does not broadcast with the value's {shape}")
        result.append(max(own, other))
    return tuple(result)


def bounds_check(low: str, high: str) -> Callable[[Values], str | None]:
    def check(values: Values) -> str | None:
        lo, hi = values[low], values[high]
        if lo is None and hi is None:
            return f"at least one of {low} and {high} is needed"
        if lo is not None and hi is not None and lo >= hi:
            return f"{low}: {lo} must be less than {high}: {hi}"
        return None

    return check


def clamp_function(values: Values) -> str:
    return "clamp_max" if values["min"] is None else "clamp_min" if values["max"] is None else "clamp"


def clamp_call(values: Values) -> str:
    bounds = ", ".join(f"{key}={number(values[key])}" for key in ("min", "max") if values[key] is not None)
    return f"torch.clamp({{v}}, {bounds})"
