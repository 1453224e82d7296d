"""The operator table: one row per operator that a chain may hold.

A row says which arguments the operator takes and what they may be, what shape it gives, which parameters it owns (in the order in
which PyTorch draws random numbers), the C function that computes it and its derivative, the PyTorch call that defines its meaning,
and the properties the planner uses. A new element-wise operator is one row here, one function in `functions.py` and one test.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from codegen.numerics import ConstantError, Precision, constant
from codegen.ops import rules
from codegen.ops.rules import Parameter, Shape, ShapeError, Values, broadcast


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
    "bound" (finite float or null), "flag" (boolean), "axis" (integer, from the end where it is negative), "shape" (list of sizes), "extents" (a size or a list of them), "tap" (the name of an earlier operator), or a tuple of allowed words.
    `sign` is what a number must be: "positive", "not negative", "not 0", or anything.
    """

    name: str
    type: str | tuple[str, ...]
    default: Any = REQUIRED
    sign: str = ""

    def fault(self, value: float, precision: Precision, bound: bool) -> str | None:
        """Why the number `value` is none for this argument at `precision`, as kernels hold it; the end of a sentence that begins with the number."""
        wrong = {"positive": value <= 0, "not negative": value < 0, "not 0": value == 0}.get(self.sign, False)
        if wrong:
            return f"must {'not be' if self.sign.startswith('not') else 'be'} {self.sign.removeprefix('not ')}"
        try:
            constant(value, precision, bound)
        except ConstantError as error:
            return str(error)
        return None


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
    groups: Callable[[Values, Shape], int] | None = None  # of a sample, for a norm


def _norm(name: str, summary: str, arguments: tuple[Argument, ...], **row: Any) -> Operator:
    return Operator(
        name, Kind.NORM, summary, arguments, takes_name=True, requires_name=True, **row,
    )  # fmt: skip


def _reduction(name: str, summary: str, values_of: str = "") -> Operator:
    """A reduction over channels; `values_of` takes the values out of what PyTorch's function gives."""

    def shape(values: Values, shape: Shape) -> Shape:
        rules.channel_axis(values["dim"], shape)
        return (shape[0], 1, *shape[2:]) if values["keepdim"] else (shape[0], *shape[2:])

    return Operator(
        name, Kind.REDUCTION, summary, (Argument("dim", "axis", 1), Argument("keepdim", "flag", False)), takes_name=True, shape=shape,
        call=lambda values: f"torch.{name}({{v}}, dim=1" + (", keepdim=True" if values["keepdim"] else "") + f"){values_of}",
    )  # fmt: skip


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
        call=call if callable(call) else lambda values: call.format_map({"v": "{v}", **{k: rules.number(x) for k, x in values.items() if isinstance(x, float)}}),
        monotone=monotone if callable(monotone) else lambda values: monotone, bounds=bounds,
    )  # fmt: skip


def _operand(name: str, symbol: str, summary: str, monotone: Callable[[Values], bool], taps: bool = False) -> Operator:
    """Arithmetic with a learnable per-channel vector (name, shape, init), with a number (value), or, where it `taps`, with an earlier operator's
    result (from)."""
    return Operator(
        name, Kind.ELEMENTWISE, summary,
        (
            Argument("shape", "shape", None),
            Argument("init", ("randn", "rand", "ones", "zeros"), "randn"),
            Argument("value", "bound", None, "not 0" if name == "div" else ""),
            *((Argument("from", "tap", None),) if taps else ()),
        ),
        takes_name=True,
        parameters=lambda values, shape: () if values["shape"] is None else (Parameter("", values["shape"], values["init"]),),
        check=_operand_check,
        constants=lambda values: () if values["value"] is None else ("value",),
        expression=f"{{v}} {symbol} {{p}}",
        call=lambda values: f"{{v}} {symbol} " + ("{p}" if values["value"] is None else rules.number(values["value"])),
        monotone=monotone, affine=taps,
    )  # fmt: skip


def _operand_check(values: Values) -> str | None:
    if sum(values.get(key) is not None for key in ("shape", "value", "from")) != 1:
        listed = "shape (a learnable tensor, with a name), value (a number) or from (an earlier operator's name)"
        return "give either " + (listed if "from" in values else "shape (a learnable tensor, with a name) or value (a number)")
    return None


OPERATORS: dict[str, Operator] = {
    op.name: op
    for op in (
        Operator(
            "linear", Kind.PRODUCER, "x W^T + b", (Argument("in_features", "size"), Argument("out_features", "size"), Argument("bias", "flag", True)),
            takes_name=True, requires_name=True, shape=rules.linear_shape, parameters=rules.linear_parameters,
            module=lambda v, shape: f"nn.Linear({v['in_features']}, {v['out_features']}" + ("" if v["bias"] else ", bias=False") + ")",
        ),
        Operator(
            "conv2d", Kind.PRODUCER, "2-d convolution (NCHW)",
            (
                Argument("in_channels", "size"), Argument("out_channels", "size"), Argument("kernel_size", "pair"), Argument("stride", "pair", (1, 1)),
                Argument("padding", "count_pair", (0, 0)), Argument("dilation", "pair", (1, 1)), Argument("groups", "size", 1), Argument("bias", "flag", True),
            ),
            takes_name=True, requires_name=True, shape=rules.conv2d_shape, parameters=rules.conv2d_parameters, check=rules.conv2d_check, module=rules.conv2d_module,
        ),
        _norm(
            "group_norm", "(v - mean) / sqrt(var + eps) * gamma + beta over channel groups",
            (Argument("num_groups", "size"), Argument("eps", "number", 1e-5, "positive"), Argument("affine", "flag", True)),
            shape=rules.group_norm_shape, parameters=rules.group_norm_parameters, module=rules.group_norm_module, groups=lambda v, shape: v["num_groups"],
        ),
        _norm(
            "layer_norm", "the same over all that follows the batch; behind conv2d with elementwise_affine: false",
            (Argument("normalized_shape", "extents", None), Argument("eps", "number", 1e-5, "positive"), Argument("elementwise_affine", "flag", True)),
            shape=rules.layer_norm_shape, parameters=rules.layer_norm_parameters, module=rules.layer_norm_module, groups=lambda v, shape: 1,
        ),
        _norm(
            "instance_norm", "the same over each channel's positions, behind conv2d",
            (Argument("num_features", "size", None), Argument("eps", "number", 1e-5, "positive"), Argument("affine", "flag", False)),
            shape=rules.instance_norm_shape, parameters=rules.group_norm_parameters, groups=lambda v, shape: shape[1],
            module=lambda v, shape: f"nn.InstanceNorm2d({shape[1]}{rules.eps(v)}" + (", affine=True" if v["affine"] else "") + ")",
        ),
        Operator(
            "max_pool2d", Kind.POOL, "maximum over windows",
            (
                Argument("kernel_size", "pair"), Argument("stride", "pair", None), Argument("padding", "count_pair", (0, 0)),
                Argument("dilation", "pair", (1, 1)), Argument("ceil_mode", "flag", False),
            ),
            takes_name=True, shape=rules.max_pool2d_shape, check=rules.max_pool2d_check, call=rules.max_pool2d_call,
        ),
        Operator(
            "avg_pool2d", Kind.POOL, "mean over windows",
            (
                Argument("kernel_size", "pair"), Argument("stride", "pair", None), Argument("padding", "count_pair", (0, 0)),
                Argument("ceil_mode", "flag", False), Argument("count_include_pad", "flag", True), Argument("divisor_override", "size", None),
            ),
            takes_name=True, shape=rules.avg_pool2d_shape, check=rules.max_pool2d_check, call=rules.avg_pool2d_call,
        ),
        _reduction("min", "minimum over channels", "[0]"),
        _reduction("max", "maximum over channels", "[0]"),
        _reduction("sum", "sum over channels"),
        _reduction("mean", "mean over channels"),
        _reduction("logsumexp", "log(sum(e^v)) over channels"),
        _operand("add", "+", "v + p: a vector per channel, a number, or an earlier operator's result", lambda v: v["from"] is None, taps=True),
        _operand("sub", "-", "v - p: a vector per channel, or a number", lambda v: True),
        _operand(
            "mul", "*", "v * p: a vector per channel, a number, or an earlier operator's result", lambda v: v["value"] is not None and v["value"] >= 0, taps=True,
        ),
        _operand("div", "/", "v / p: a vector per channel, or a number", lambda v: v["value"] is not None and v["value"] > 0),
        _elementwise(
            "hardtanh", "min(max(v, min_val), max_val)", "F.hardtanh({v}, {min_val}, {max_val})",
            (Argument("min_val", "number", -1.0), Argument("max_val", "number", 1.0)), monotone=True, check=rules.bounds_check("min_val", "max_val"), bounds=True,
        ),
        _elementwise(
            "clamp", "min(max(v, min), max), one bound may be null", rules.clamp_call, (Argument("min", "bound", None), Argument("max", "bound", None)),
            function=rules.clamp_function, monotone=True, check=rules.bounds_check("min", "max"), bounds=True,
        ),
        _elementwise("relu", "max(v, 0)", "F.relu({v})", monotone=True),
        _elementwise("relu6", "min(max(v, 0), 6)", "F.relu6({v})", monotone=True),
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
            (Argument("beta", "number", 1.0, "positive"), Argument("threshold", "number", 20.0)), monotone=True,
        ),
        _elementwise(
            "elu", "v above 0, alpha (e^v - 1) below", "F.elu({v}, {alpha})", (Argument("alpha", "number", 1.0),), monotone=lambda v: v["alpha"] >= 0,
        ),
        _elementwise(
            "celu", "v above 0, alpha (e^(v / alpha) - 1) below", "F.celu({v}, {alpha})", (Argument("alpha", "number", 1.0, "positive"),), monotone=True,
        ),
        _elementwise("selu", "elu with PyTorch's scale and alpha", "F.selu({v})", monotone=True),
        _elementwise("softsign", "v / (1 + |v|)", "F.softsign({v})", monotone=True),
        _elementwise("logsigmoid", "log(1 / (1 + e^-v))", "F.logsigmoid({v})", monotone=True),
        _elementwise(
            "softshrink", "v less lambd in magnitude, 0 up to there", "F.softshrink({v}, {lambd})", (Argument("lambd", "number", 0.5, "not negative"),), monotone=True,
            bounds=True,
        ),
    )
}  # fmt: skip

ALIASES = {"swish": "silu"}

__all__ = ["ALIASES", "OPERATORS", "REQUIRED", "Argument", "Kind", "Operator", "Parameter", "Shape", "ShapeError", "Values", "broadcast"]
