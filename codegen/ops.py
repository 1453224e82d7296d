"""The operator table: one row per operator that a chain may hold.

A row says which arguments the operator takes and what they may be, what shape it gives, which parameters it owns (in the order in
which PyTorch draws random numbers), the C function that computes it and its derivative, the PyTorch call that defines its meaning,
and the properties the planner uses. A new element-wise operator is one row here, one function in `functions.py` and one test.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

Shape = tuple[int, ...]
Values = Mapping[str, Any]


class Kind(Enum):
    """Where an operator may stand in a chain, and what the planner does with it."""

    PRODUCER = "producer"  # first: linear, conv2d
    ELEMENTWISE = "element-wise"  # anywhere after the producer
    NORM = "norm"  # exactly one
    POOL = "pooling"  # after the norm
    REDUCTION = "reduction"  # after the norm, at most one; element-wise operators alone follow it


REQUIRED = object()


@dataclass(frozen=True)
class Argument:
    """One argument of an operator.

    `type` is one of: "size" (integer >= 1), "count" (integer >= 0), "pair" (a size or two of them), "count_pair", "number" (finite float),
    "bound" (finite float or null), "flag" (boolean), "shape" (list of sizes), "tap" (the name of an earlier operator), or a tuple of allowed words.
    """

    name: str
    type: str | tuple[str, ...]
    default: Any = REQUIRED


@dataclass(frozen=True)
class Parameter:
    """A learnable tensor: `suffix` of its key ("" for a bare nn.Parameter), its shape and how PyTorch fills it."""

    suffix: str
    shape: Shape
    initialiser: str


@dataclass(frozen=True)
class Operator:
    """One row of the table. Callables receive the operator's checked argument values by name."""

    name: str
    kind: Kind
    summary: str
    arguments: tuple[Argument, ...] = ()
    takes_name: bool = False
    requires_name: bool = False
    shape: Callable[[Values, Shape], Shape] = lambda values, shape: shape
    parameters: Callable[[Values, Shape], tuple[Parameter, ...]] = lambda values, shape: ()
    check: Callable[[Values], str | None] = lambda values: None
    function: Callable[[Values], str] | None = None
    constants: Callable[[Values], tuple[str, ...]] = lambda values: ()
    expression: str | None = None
    module: Callable[[Values, Shape], str] | None = None
    call: Callable[[Values], str] | None = None
    monotone: Callable[[Values], bool] = lambda values: False
    affine: bool = False
    bounds: bool = False  # its constants are bounds, which PyTorch rounds to the storage type


class ShapeError(ValueError):
    """An operator cannot take the shape before it; the message is a sentence for the spec's author."""


def _number(value: float) -> str:
    return repr(float(value))


def _linear_shape(values: Values, shape: Shape) -> Shape:
    if len(shape) != 2 or shape[1] != values["in_features"]:
        raise ShapeError(f"linear takes (batch, {values['in_features']}), the input here is {shape}")
    return (shape[0], values["out_features"])


def _linear_parameters(values: Values, shape: Shape) -> tuple[Parameter, ...]:
    weight = Parameter("weight", (values["out_features"], values["in_features"]), "linear")
    return (weight, Parameter("bias", (values["out_features"],), "linear")) if values["bias"] else (weight,)


def _window(size: int, kernel: int, stride: int, padding: int, dilation: int = 1, ceil_mode: bool = False) -> int:
    """Output length of a sliding window, as torch.nn.Conv2d and torch.nn.MaxPool2d define it."""
    span = size + 2 * padding - dilation * (kernel - 1) - 1
    count = (span + (stride - 1 if ceil_mode else 0)) // stride + 1
    if ceil_mode and (count - 1) * stride >= size + padding:
        count -= 1
    return count


def _conv2d_shape(values: Values, shape: Shape) -> Shape:
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


def _conv2d_parameters(values: Values, shape: Shape) -> tuple[Parameter, ...]:
    weight = Parameter("weight", (values["out_channels"], values["in_channels"] // values["groups"], *values["kernel_size"]), "conv2d")
    return (weight, Parameter("bias", (values["out_channels"],), "conv2d")) if values["bias"] else (weight,)


def _conv2d_check(values: Values) -> str | None:
    for channels in ("in_channels", "out_channels"):
        if values[channels] % values["groups"]:
            return f"groups: {values['groups']} does not divide {channels}: {values[channels]}"
    return None


def _conv2d_module(values: Values, shape: Shape) -> str:
    text = f"nn.Conv2d({values['in_channels']}, {values['out_channels']}, {_pair(values['kernel_size'])}"
    for key, default in (("stride", (1, 1)), ("padding", (0, 0)), ("dilation", (1, 1))):
        if values[key] != default:
            text += f", {key}={_pair(values[key])}"
    if values["groups"] != 1:
        text += f", groups={values['groups']}"
    return text + ("" if values["bias"] else ", bias=False") + ")"


def _pair(value: tuple[int, int]) -> str:
    return str(value[0]) if value[0] == value[1] else str(tuple(value))


def _group_norm_shape(values: Values, shape: Shape) -> Shape:
    if shape[1] % values["num_groups"]:
        raise ShapeError(f"num_groups: {values['num_groups']} does not divide the {shape[1]} channels before it")
    if math.prod(shape[1:]) // values["num_groups"] == 1 and shape[0] >= 1:
        raise ShapeError(f"num_groups: {values['num_groups']} leaves one value in each group; its variance is always 0 and PyTorch refuses it in training")
    return shape


def _group_norm_parameters(values: Values, shape: Shape) -> tuple[Parameter, ...]:
    return (Parameter("weight", shape[1:2], "ones"), Parameter("bias", shape[1:2], "zeros")) if values["affine"] else ()


def _group_norm_module(values: Values, shape: Shape) -> str:
    eps = "" if values["eps"] == 1e-5 else f", eps={_number(values['eps'])}"
    return f"nn.GroupNorm({values['num_groups']}, {shape[1]}{eps}" + ("" if values["affine"] else ", affine=False") + ")"


def _max_pool2d_shape(values: Values, shape: Shape) -> Shape:
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


def _max_pool2d_check(values: Values) -> str | None:
    for kernel, padding in zip(values["kernel_size"], values["padding"], strict=True):
        if 2 * padding > kernel:
            return f"padding: {padding} is more than half of the kernel size {kernel}"
    return None


def _max_pool2d_call(values: Values) -> str:
    text = f"F.max_pool2d({{v}}, {_pair(values['kernel_size'])}"
    for key, default in (("stride", values["kernel_size"]), ("padding", (0, 0)), ("dilation", (1, 1))):
        if values[key] != default:
            text += f", {key}={_pair(values[key])}"
    return text + (", ceil_mode=True" if values["ceil_mode"] else "") + ")"


def _avg_pool2d_shape(values: Values, shape: Shape) -> Shape:
    return _pooled_shape("avg_pool2d", values | {"dilation": (1, 1)}, shape)


def _avg_pool2d_call(values: Values) -> str:
    text = f"F.avg_pool2d({{v}}, {_pair(values['kernel_size'])}"
    for key, default in (("stride", values["kernel_size"]), ("padding", (0, 0))):
        if values[key] != default:
            text += f", {key}={_pair(values[key])}"
    for key, default in (("ceil_mode", False), ("count_include_pad", True), ("divisor_override", None)):
        if values[key] != default:
            text += f", {key}={values[key]}"
    return text + ")"


def _reduction(name: str, summary: str, values_of: str = "") -> Operator:
    """A reduction over channels; `values_of` takes the values out of what PyTorch's function gives."""

    def shape(values: Values, shape: Shape) -> Shape:
        return (shape[0], 1, *shape[2:]) if values["keepdim"] else (shape[0], *shape[2:])

    return Operator(
        name, Kind.REDUCTION, summary, (Argument("dim", "size", 1), Argument("keepdim", "flag", False)), takes_name=True, shape=shape,
        check=lambda values: None if values["dim"] == 1 else f"dim: {values['dim']}; channels, dim: 1, are all that it reduces",
        call=lambda values: f"torch.{name}({{v}}, dim=1" + (", keepdim=True" if values["keepdim"] else "") + f"){values_of}",
    )  # fmt: skip


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


def _bounds_check(low: str, high: str) -> Callable[[Values], str | None]:
    def check(values: Values) -> str | None:
        lo, hi = values[low], values[high]
        if lo is None and hi is None:
            return f"at least one of {low} and {high} is needed"
        if lo is not None and hi is not None and lo >= hi:
            return f"{low}: {lo} must be less than {high}: {hi}"
        return None

    return check


def _clamp_function(values: Values) -> str:
    return "clamp_max" if values["min"] is None else "clamp_min" if values["max"] is None else "clamp"


def _clamp_call(values: Values) -> str:
    bounds = ", ".join(f"{key}={_number(values[key])}" for key in ("min", "max") if values[key] is not None)
    return f"torch.clamp({{v}}, {bounds})"


def _elementwise(
    name: str,
    summary: str,
    call: str | Callable[[Values], str],
    arguments: tuple[Argument, ...] = (),
    function: str | Callable[[Values], str] | None = None,
    constants: Callable[[Values], tuple[str, ...]] | None = None,
    monotone: bool | Callable[[Values], bool] = False,
    check: Callable[[Values], str | None] = lambda values: None,
    bounds: bool = False,
) -> Operator:
    fixed = function or name
    return Operator(
        name, Kind.ELEMENTWISE, summary, arguments, takes_name=True, check=check,
        function=fixed if callable(fixed) else lambda values: fixed,
        constants=constants or (lambda values: tuple(a.name for a in arguments if values[a.name] is not None)),
        call=call if callable(call) else lambda values: call.format_map({"v": "{v}", **{k: _number(x) for k, x in values.items() if isinstance(x, float)}}),
        monotone=monotone if callable(monotone) else lambda values: monotone, bounds=bounds,
    )  # fmt: skip


def _operand(name: str, symbol: str, summary: str) -> Operator:
    """`add` or `mul`: with a learnable per-channel vector (name, shape, init), with a number (value), or with an earlier operator's result (from)."""
    return Operator(
        name, Kind.ELEMENTWISE, summary,
        (
            Argument("shape", "shape", None),
            Argument("init", ("randn", "rand", "ones", "zeros"), "randn"),
            Argument("value", "bound", None),
            Argument("from", "tap", None),
        ),
        takes_name=True,
        parameters=lambda values, shape: () if values["shape"] is None else (Parameter("", values["shape"], values["init"]),),
        check=lambda values: _operand_check(values),
        constants=lambda values: () if values["value"] is None else ("value",),
        expression=f"{{v}} {symbol} {{p}}",
        call=lambda values: f"{{v}} {symbol} " + ("{p}" if values["value"] is None else _number(values["value"])),
        monotone=lambda values: (name == "add" and values["from"] is None) or (values["value"] is not None and values["value"] >= 0),
        affine=True,
    )  # fmt: skip


def _operand_check(values: Values) -> str | None:
    if sum(values[key] is not None for key in ("shape", "value", "from")) != 1:
        return "give either shape (a learnable tensor, with a name), value (a number) or from (an earlier operator's name)"
    return None


OPERATORS: dict[str, Operator] = {
    op.name: op
    for op in (
        Operator(
            "linear", Kind.PRODUCER, "x W^T + b", (Argument("in_features", "size"), Argument("out_features", "size"), Argument("bias", "flag", True)),
            takes_name=True, requires_name=True, shape=_linear_shape, parameters=_linear_parameters,
            module=lambda v, shape: f"nn.Linear({v['in_features']}, {v['out_features']}" + ("" if v["bias"] else ", bias=False") + ")",
        ),
        Operator(
            "conv2d", Kind.PRODUCER, "2-d convolution (NCHW)",
            (
                Argument("in_channels", "size"), Argument("out_channels", "size"), Argument("kernel_size", "pair"), Argument("stride", "pair", (1, 1)),
                Argument("padding", "count_pair", (0, 0)), Argument("dilation", "pair", (1, 1)), Argument("groups", "size", 1), Argument("bias", "flag", True),
            ),
            takes_name=True, requires_name=True, shape=_conv2d_shape, parameters=_conv2d_parameters, check=_conv2d_check, module=_conv2d_module,
        ),
        Operator(
            "group_norm", Kind.NORM, "(v - mean) / sqrt(var + eps) * gamma + beta over channel groups",
            (Argument("num_groups", "size"), Argument("eps", "number", 1e-5), Argument("affine", "flag", True)),
            takes_name=True, requires_name=True, shape=_group_norm_shape, parameters=_group_norm_parameters, module=_group_norm_module,
            check=lambda v: None if v["eps"] > 0 else f"eps: {v['eps']} must be positive",
        ),
        Operator(
            "max_pool2d", Kind.POOL, "maximum over windows",
            (
                Argument("kernel_size", "pair"), Argument("stride", "pair", None), Argument("padding", "count_pair", (0, 0)),
                Argument("dilation", "pair", (1, 1)), Argument("ceil_mode", "flag", False),
            ),
            takes_name=True, shape=_max_pool2d_shape, check=_max_pool2d_check, call=_max_pool2d_call,
        ),
        Operator(
            "avg_pool2d", Kind.POOL, "mean over windows",
            (
                Argument("kernel_size", "pair"), Argument("stride", "pair", None), Argument("padding", "count_pair", (0, 0)),
                Argument("ceil_mode", "flag", False), Argument("count_include_pad", "flag", True), Argument("divisor_override", "size", None),
            ),
            takes_name=True, shape=_avg_pool2d_shape, check=_max_pool2d_check, call=_avg_pool2d_call,
        ),
        _reduction("min", "minimum over channels", "[0]"),
        _reduction("max", "maximum over channels", "[0]"),
        _reduction("sum", "sum over channels"),
        _reduction("mean", "mean over channels"),
        _reduction("logsumexp", "log(sum(e^v)) over channels"),
        _operand("add", "+", "v + p: a vector per channel, a number, or an earlier operator's result"),
        _operand("mul", "*", "v * p: a vector per channel, a number, or an earlier operator's result"),
        _elementwise(
            "hardtanh", "min(max(v, min_val), max_val)", "F.hardtanh({v}, {min_val}, {max_val})",
            (Argument("min_val", "number", -1.0), Argument("max_val", "number", 1.0)), monotone=True, check=_bounds_check("min_val", "max_val"), bounds=True,
        ),
        _elementwise(
            "clamp", "min(max(v, min), max), one bound may be null", _clamp_call, (Argument("min", "bound", None), Argument("max", "bound", None)),
            function=_clamp_function, monotone=True, check=_bounds_check("min", "max"), bounds=True,
        ),
        _elementwise("relu", "max(v, 0)", "F.relu({v})", monotone=True),
        _elementwise(
            "leaky_relu", "v above 0, negative_slope * v below", "F.leaky_relu({v}, {negative_slope})",
            (Argument("negative_slope", "number", 0.01),), monotone=lambda v: v["negative_slope"] >= 0,
        ),
        _elementwise("sigmoid", "1 / (1 + e^-v)", "torch.sigmoid({v})", monotone=True),
        _elementwise("tanh", "hyperbolic tangent", "torch.tanh({v})", function="hyperbolic_tangent", monotone=True),
        _elementwise("silu", "v * sigmoid(v)", "F.silu({v})"),
        _elementwise("mish", "v * tanh(softplus(v))", "F.mish({v})"),
        _elementwise(
            "gelu", "v * Phi(v), exact or by tanh", lambda v: "F.gelu({v})" if v["approximate"] == "none" else 'F.gelu({v}, approximate="tanh")',
            (Argument("approximate", ("none", "tanh"), "none"),), function=lambda v: "gelu" if v["approximate"] == "none" else "gelu_tanh",
            constants=lambda v: (),
        ),
        _elementwise("hardswish", "v * relu6(v + 3) / 6", "F.hardswish({v})"),
        _elementwise("hardsigmoid", "relu6(v + 3) / 6", "F.hardsigmoid({v})", monotone=True),
        _elementwise(
            "softplus", "log(1 + e^(beta v)) / beta", "F.softplus({v}, {beta}, {threshold})",
            (Argument("beta", "number", 1.0), Argument("threshold", "number", 20.0)), monotone=True,
            check=lambda v: None if v["beta"] > 0 else f"beta: {v['beta']} must be positive",
        ),
        _elementwise(
            "elu", "v above 0, alpha (e^v - 1) below", "F.elu({v}, {alpha})", (Argument("alpha", "number", 1.0),), monotone=lambda v: v["alpha"] >= 0,
        ),
    )
}  # fmt: skip

ALIASES = {"swish": "silu"}
