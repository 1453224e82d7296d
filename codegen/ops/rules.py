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
    """A learnable tensor: `suffix` of its key ("" for a bare nn.Parameter), its shape and how PyTorch fills it."""

    suffix: str
    shape: Shape
    initialiser: str


class ShapeError(ValueError):
    """An operator cannot take the shape before it; the message is a sentence for the spec's author."""


def number(value: float) -> str:
    return repr(float(value))


def channel_axis(dim: int, shape: Shape) -> None:
    """Raises ShapeError unless `dim` is the axis of channels, counted from either end."""
    if dim not in (1, 1 - len(shape)):
        raise ShapeError(f"dim: {dim}; channels, dim: 1 (or {1 - len(shape)} of {len(shape)} dimensions), are all that it reduces")


def linear_shape(values: Values, shape: Shape) -> Shape:
    if len(shape) != 2 or shape[1] != values["in_features"]:
        raise ShapeError(f"linear takes (batch, {values['in_features']}), the input here is {shape}")
    return (shape[0], values["out_features"])


def linear_parameters(values: Values, shape: Shape) -> tuple[Parameter, ...]:
    weight = Parameter("weight", (values["out_features"], values["in_features"]), "linear")
    return (weight, Parameter("bias", (values["out_features"],), "linear")) if values["bias"] else (weight,)


def _window(size: int, kernel: int, stride: int, padding: int, dilation: int = 1, ceil_mode: bool = False) -> int:
    """Output length of a sliding window, as torch.nn.Conv2d and torch.nn.MaxPool2d define it."""
    span = size + 2 * padding - dilation * (kernel - 1) - 1
    count = (span + (stride - 1 if ceil_mode else 0)) // stride + 1
    if ceil_mode and (count - 1) * stride >= size + padding:
        count -= 1
    return count


def conv2d_shape(values: Values, shape: Shape) -> Shape:
    if len(shape) != 4 or shape[1] != values["in_channels"]:
        raise ShapeError(f"conv2d takes (batch, {values['in_channels']}, height, width), the input here is {shape}")
    spatial = tuple(
        _window(size, kernel, stride, padding, dilation)
        for size, kernel, stride, padding, dilation in zip(
            shape[2:], values["kernel_size"], values["stride"], values["padding"], values["dilation"], strict=True
        )
    )
    if min(spatial) < 1:
        raise ShapeError(f"conv2d's kernel {values['kernel_size']} does not fit into {shape[2:]} with padding {values['padding']}")
    return (shape[0], values["out_channels"], *spatial)


def conv2d_parameters(values: Values, shape: Shape) -> tuple[Parameter, ...]:
    weight = Parameter("weight", (values["out_channels"], values["in_channels"] // values["groups"], *values["kernel_size"]), "conv2d")
    return (weight, Parameter("bias", (values["out_channels"],), "conv2d")) if values["bias"] else (weight,)


def conv2d_check(values: Values) -> str | None:
    for channels in ("in_channels", "out_channels"):
        if values[channels] % values["groups"]:
            return f"groups: {values['groups']} does not divide {channels}: {values[channels]}"
    return None


def conv2d_module(values: Values, shape: Shape) -> str:
    text = f"nn.Conv2d({values['in_channels']}, {values['out_channels']}, {_pair(values['kernel_size'])}"
    for key, default in (("stride", (1, 1)), ("padding", (0, 0)), ("dilation", (1, 1))):
        if values[key] != default:
            text += f", {key}={_pair(values[key])}"
    if values["groups"] != 1:
        text += f", groups={values['groups']}"
    return text + ("" if values["bias"] else ", bias=False") + ")"


def _pair(value: tuple[int, int]) -> str:
    return str(value[0]) if value[0] == value[1] else str(tuple(value))


def group_norm_shape(values: Values, shape: Shape) -> Shape:
    if shape[1] % values["num_groups"]:
        raise ShapeError(f"num_groups: {values['num_groups']} does not divide the {shape[1]} channels before it")
    if math.prod(shape[1:]) // values["num_groups"] == 1 and shape[0] >= 1:
        raise ShapeError(f"num_groups: {values['num_groups']} leaves one value in each group; its variance is always 0 and PyTorch refuses it in training")
    return shape


def group_norm_parameters(values: Values, shape: Shape) -> tuple[Parameter, ...]:
    return (Parameter("weight", shape[1:2], "ones"), Parameter("bias", shape[1:2], "zeros")) if values["affine"] else ()


def group_norm_module(values: Values, shape: Shape) -> str:
    return f"nn.GroupNorm({values['num_groups']}, {shape[1]}{eps(values)}" + ("" if values["affine"] else ", affine=False") + ")"


def _one_value(name: str) -> ShapeError:
    return ShapeError(f"{name} over one value; its variance is always 0 and PyTorch refuses it in training")


def layer_norm_shape(values: Values, shape: Shape) -> Shape:
    given = values["normalized_shape"]
    if given is not None and given != shape[1:]:
        raise ShapeError(f"normalized_shape: {given}; layer_norm takes all that follows the batch, which is {shape[1:]} here")
    if math.prod(shape[1:]) == 1:
        raise _one_value("layer_norm")
    if len(shape) > 2 and values["elementwise_affine"]:
        raise ShapeError("layer_norm behind a convolution has a scale for each element, which no kernel has; elementwise_affine: false only")
    return shape


def layer_norm_parameters(values: Values, shape: Shape) -> tuple[Parameter, ...]:
    return (Parameter("weight", shape[1:], "ones"), Parameter("bias", shape[1:], "zeros")) if values["elementwise_affine"] else ()


def layer_norm_module(values: Values, shape: Shape) -> str:
    sizes = str(shape[1]) if len(shape) == 2 else str(shape[1:])
    return f"nn.LayerNorm({sizes}{eps(values)}" + ("" if values["elementwise_affine"] else ", elementwise_affine=False") + ")"


def instance_norm_shape(values: Values, shape: Shape) -> Shape:
    if len(shape) != 4:
        raise ShapeError(f"instance_norm takes (batch, channels, height, width), the input here is {shape}")
    if values["num_features"] not in (None, shape[1]):
        raise ShapeError(f"num_features: {values['num_features']}, and {shape[1]} channels come before it")
    if math.prod(shape[2:]) == 1:
        raise _one_value("instance_norm")
    return shape


def eps(values: Values) -> str:
    return "" if values["eps"] == 1e-5 else f", eps={number(values['eps'])}"


def max_pool2d_shape(values: Values, shape: Shape) -> Shape:
    return _pooled_shape("max_pool2d", values, shape)


def _pooled_shape(name: str, values: Values, shape: Shape) -> Shape:
    if len(shape) != 4:
        raise ShapeError(f"{name} takes (batch, channels, height, width), the input here is {shape}")
    spatial = tuple(
        _window(size, kernel, stride, padding, dilation, values["ceil_mode"])
        for size, kernel, stride, padding, dilation in zip(
            shape[2:], values["kernel_size"], values["stride"], values["padding"], values["dilation"], strict=True
        )
    )
    if min(spatial) < 1:
        raise ShapeError(f"{name}'s window {values['kernel_size']} does not fit into {shape[2:]}")
    return (*shape[:2], *spatial)


def max_pool2d_check(values: Values) -> str | None:
    for kernel, padding in zip(values["kernel_size"], values["padding"], strict=True):
        if 2 * padding > kernel:
            return f"padding: {padding} is more than half of the kernel size {kernel}"
    return None


def max_pool2d_call(values: Values) -> str:
    text = f"F.max_pool2d({{v}}, {_pair(values['kernel_size'])}"
    for key, default in (("stride", values["kernel_size"]), ("padding", (0, 0)), ("dilation", (1, 1))):
        if values[key] != default:
            text += f", {key}={_pair(values[key])}"
    return text + (", ceil_mode=True" if values["ceil_mode"] else "") + ")"


def avg_pool2d_shape(values: Values, shape: Shape) -> Shape:
    return _pooled_shape("avg_pool2d", values | {"dilation": (1, 1)}, shape)


def avg_pool2d_call(values: Values) -> str:
    text = f"F.avg_pool2d({{v}}, {_pair(values['kernel_size'])}"
    for key, default in (("stride", values["kernel_size"]), ("padding", (0, 0))):
        if values[key] != default:
            text += f", {key}={_pair(values[key])}"
    for key, default in (("ceil_mode", False), ("count_include_pad", True), ("divisor_override", None)):
        if values[key] != default:
            text += f", {key}={values[key]}"
    return text + ")"


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
