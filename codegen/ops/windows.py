"""Rules of the operators that slide over space: convolutions, transposed convolutions and poolings, of rank 1 to 3."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from codegen.ops.rules import Parameter, Shape, ShapeError, Values

AXES = {1: ("length",), 2: ("height", "width"), 3: ("depth", "height", "width")}  # names of the spatial axes by rank


def window_count(size: int, kernel: int, stride: int, padding: int, dilation: int = 1, ceil_mode: bool = False) -> int:
    """The number of windows along an axis of `size` values, as torch.nn.Conv2d and torch.nn.MaxPool2d define it."""
    span = size + 2 * padding - dilation * (kernel - 1) - 1
    count = (span + (stride - 1 if ceil_mode else 0)) // stride + 1
    if ceil_mode and (count - 1) * stride >= size + padding:
        count -= 1
    return count


def sizes_text(value: tuple[int, ...]) -> str:
    """The sizes of an axis each as PyTorch takes them: one number where all are equal."""
    return str(value[0]) if len(set(value)) == 1 else str(tuple(value))


def keyword_text(values: Values, defaults: tuple[tuple[str, Any], ...]) -> Iterator[str]:
    """`, key=value` for each of `defaults` that `values` departs from."""
    for key, default in defaults:
        if values[key] != default:
            yield f", {key}={sizes_text(values[key]) if isinstance(values[key], tuple) else values[key]}"


def _takes(name: str, rank: int, shape: Shape) -> str:
    return f"{name} takes (batch, channels, {', '.join(AXES[rank])}), the input here is {shape}"


def _check_input(name: str, rank: int, channels: int, shape: Shape) -> None:
    if len(shape) != rank + 2:
        raise ShapeError(_takes(name, rank, shape))
    if shape[1] != channels:
        raise ShapeError(f"{name} takes {channels} channels, the input here is {shape}")


def _around(values: Values) -> str:
    """What decides beside a window's size whether it fits: the padding, and the dilation where there is one."""
    dilation = values.get("dilation", (1,))
    return f"padding {values['padding']}" + (f" and dilation {dilation}" if set(dilation) != {1} else "")


def per_axis(values: Values, *keys: str) -> Iterator[tuple[int, ...]]:
    """The values of `keys` axis by axis."""
    return zip(*(values[key] for key in keys), strict=True)


def conv_shape(name: str, rank: int) -> Callable[[Values, Shape], Shape]:
    def shape_of(values: Values, shape: Shape) -> Shape:
        _check_input(name, rank, values["in_channels"], shape)
        spatial = tuple(
            window_count(size, *numbers)
            for size, numbers in zip(shape[2:], per_axis(values, "kernel_size", "stride", "padding", "dilation"), strict=True)
        )
        if min(spatial) < 1:
            raise ShapeError(f"{name}'s kernel {values['kernel_size']} does not fit into {shape[2:]} with {_around(values)}")
        return (shape[0], values["out_channels"], *spatial)

    return shape_of


def conv_transpose_shape(name: str, rank: int) -> Callable[[Values, Shape], Shape]:
    keys = ("kernel_size", "stride", "padding", "output_padding", "dilation")

    def shape_of(values: Values, shape: Shape) -> Shape:
        _check_input(name, rank, values["in_channels"], shape)
        spatial = tuple(
            (size - 1) * stride - 2 * padding + dilation * (kernel - 1) + extra + 1
            for size, (kernel, stride, padding, extra, dilation) in zip(shape[2:], per_axis(values, *keys), strict=True)
        )
        if min(spatial) < 1:
            raise ShapeError(f"{name}'s kernel {values['kernel_size']} gives {spatial} from {shape[2:]}: {_around(values)} takes all of it away")
        return (shape[0], values["out_channels"], *spatial)

    return shape_of


def conv_parameters(kind: str, transposed: bool) -> Callable[[Values, Shape], tuple[Parameter, ...]]:
    """Weight (out, in / groups, ...) of a convolution or (in, out / groups, ...) of a transposed one, then the bias."""

    def parameters_of(values: Values, shape: Shape) -> tuple[Parameter, ...]:
        outer, inner = ("in_channels", "out_channels") if transposed else ("out_channels", "in_channels")
        weight = Parameter("weight", (values[outer], values[inner] // values["groups"], *values["kernel_size"]), kind)
        return (weight, Parameter("bias", (values["out_channels"],), kind)) if values["bias"] else (weight,)

    return parameters_of


def conv_check(values: Values) -> str | None:
    for channels in ("in_channels", "out_channels"):
        if values[channels] % values["groups"]:
            return f"groups: {values['groups']} does not divide {channels}: {values[channels]}"
    for extra, stride, dilation in per_axis(values, "output_padding", "stride", "dilation") if "output_padding" in values else ():
        if extra >= max(stride, dilation):
            return f"output_padding: {extra} must be less than stride or dilation, which are {stride} and {dilation}"
    return None


def conv_module(module: str, rank: int) -> Callable[[Values, Shape], str]:
    """The constructor's call, with the arguments that depart from PyTorch's defaults."""
    zeros, ones = (0,) * rank, (1,) * rank
    defaults = (("stride", ones), ("padding", zeros), ("output_padding", zeros), ("dilation", ones), ("groups", 1), ("bias", True))

    def text(values: Values, shape: Shape) -> str:
        head = f"nn.{module}({values['in_channels']}, {values['out_channels']}, {sizes_text(values['kernel_size'])}"
        return head + "".join(keyword_text(values, tuple(item for item in defaults if item[0] in values))) + ")"

    return text


def pool_shape(name: str, rank: int) -> Callable[[Values, Shape], Shape]:
    def shape_of(values: Values, shape: Shape) -> Shape:
        if len(shape) != rank + 2:
            raise ShapeError(_takes(name, rank, shape))
        dilation = values.get("dilation", (1,) * rank)
        spatial = tuple(
            window_count(size, kernel, stride, padding, step, values["ceil_mode"])
            for size, (kernel, stride, padding), step in zip(shape[2:], per_axis(values, "kernel_size", "stride", "padding"), dilation, strict=True)
        )
        if min(spatial) < 1:
            raise ShapeError(f"{name}'s window {values['kernel_size']} does not fit into {shape[2:]} with {_around(values)}")
        if name == "avg_pool3d" and any(size < kernel for size, (kernel,) in zip(shape[2:], per_axis(values, "kernel_size"), strict=True)):
            raise ShapeError(f"{name}'s window {values['kernel_size']} is larger than {shape[2:]}, which PyTorch refuses whatever the padding")
        return (*shape[:2], *spatial)

    return shape_of


def pool_check(values: Values) -> str | None:
    for kernel, padding in per_axis(values, "kernel_size", "padding"):
        if 2 * padding > kernel:
            return f"padding: {padding} is more than half of the kernel size {kernel}"
    return None


def pool_call(name: str, rank: int) -> Callable[[Values], str]:
    def call(values: Values) -> str:
        zeros, ones = (0,) * rank, (1,) * rank
        defaults = (
            ("stride", values["kernel_size"]), ("padding", zeros), ("dilation", ones), ("ceil_mode", False), ("count_include_pad", True), ("divisor_override", None),
        )  # fmt: skip
        listed = keyword_text(values, tuple(item for item in defaults if item[0] in values))
        return f"F.{name}({{v}}, {sizes_text(values['kernel_size'])}{''.join(listed)})"

    return call


def adaptive_shape(name: str, rank: int) -> Callable[[Values, Shape], Shape]:
    def shape_of(values: Values, shape: Shape) -> Shape:
        if len(shape) != rank + 2:
            raise ShapeError(_takes(name, rank, shape))
        return (*shape[:2], *values["output_size"])

    return shape_of


def adaptive_call(name: str) -> Callable[[Values], str]:
    return lambda values: f"F.{name}({{v}}, {sizes_text(values['output_size'])})"
