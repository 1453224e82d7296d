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
from codegen.ops import axes, derivative, rules, windows
from codegen.ops.derivative import Derivative
from codegen.ops.rules import Parameter, Shape, ShapeError, Values, broadcast


class Kind(Enum):
    """The kinds of operators: which core a segment of the chain has, if any. All of them may stand anywhere."""

    PRODUCER = "producer"
    ELEMENTWISE = "element-wise"
    NORM = "norm"
    SOFTMAX = "softmax"
    POOL = "pooling"
    REDUCTION = "reduction"
    SHAPE = "shape"  # renames axes, moves nothing
    DROPOUT = "dropout"


REQUIRED = object()
FILLS = ("randn", "rand", "ones", "zeros")  # how a parameter without a module is filled, beside a number


@dataclass(frozen=True)
class Argument:
    """One argument of an operator.

    `type` is one of: "size" (integer >= 1), "count" (integer >= 0), "single", "pair" and "triple" (a size, or one for each of so many axes),
    "count_single", "count_pair" and "count_triple" (the same for counts), "number" (finite float), "bound" (finite float or null), "flag"
    (boolean), "shape" (list of sizes), "extents" (a size or a list of them), "axis" (an integer, negative from the end), "axes" (one or a list
    of them), "view" (list of sizes, 0 or -1), "tap" (the name of an earlier operator or of an input), "owner" (the name of an earlier operator
    with a parameter of its own), "fill" (one of FILLS, or a finite number), or a tuple of allowed words.
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
    derivative: Derivative | None = None  # of the expression; a function has its own
    module: Callable[[Values, Shape], str] | None = None
    call: Callable[[Values], str] | None = None
    monotone: Callable[[Values], bool] = lambda values: False
    affine: bool = False
    bounds: bool = False  # its constants are bounds, which PyTorch rounds to the storage type
    groups: Callable[[Values, Shape], int] | None = None  # of a sample, for a norm
    buffers: Callable[[Values, Shape], tuple[Parameter, ...]] = lambda values, shape: ()  # state that is not learned
    rank: int = 0  # spatial axes of a convolution or pooling
    transposed: bool = False  # is a convolution a transposed one?
    takes: str = ""  # the argument with the channels that a producer takes
    gives: str = ""  # the argument with the channels that it gives
    fused_axes: int = 0  # axes of what a producer takes at the head of a fused plan; 0: it is a step by torch's library alone
    modes: bool = False  # does training compute something else than evaluation?

    @property
    def product(self) -> str:
        """The common name of what a producer computes."""
        return "convolution" if self.rank else "GEMM"


def _norm(name: str, summary: str, arguments: tuple[Argument, ...], **row: Any) -> Operator:
    return Operator(
        name, Kind.NORM, summary, arguments, takes_name=True, requires_name=True, **row,
    )  # fmt: skip


def _fold(name: str, summary: str, values_of: str = "", one_axis: bool = False, needs_dim: bool = False) -> Operator:
    """A fold over axes; `values_of` takes the values out of what PyTorch's function gives, which with `one_axis` takes one or all of them, and which
    with `needs_dim` takes all only where each is named."""

    def check(values: Values) -> str | None:
        if one_axis and isinstance(values["dim"], tuple):
            return f"dim: {list(values['dim'])}; torch.{name} takes one axis or all; a{name} takes any"
        return None

    return Operator(
        name, Kind.REDUCTION, summary, (Argument("dim", "axes", 1), Argument("keepdim", "flag", False)), takes_name=True, check=check,
        shape=axes.fold_shape(name), call=axes.fold_call(name, values_of, needs_dim),
    )  # fmt: skip


def _softmax(name: str, summary: str) -> Operator:
    return Operator(
        name, Kind.SOFTMAX, summary, (Argument("dim", "axis"),), takes_name=True, shape=axes.single_axis(name), call=axes.softmax_call(name),
    )  # fmt: skip


def _sizes(rank: int, counts: bool = False) -> str:
    """The type of an argument with a size, or a count, for each of `rank` axes."""
    return ("count_" if counts else "") + {1: "single", 2: "pair", 3: "triple"}[rank]


def _convolution(rank: int, transposed: bool = False, fused_axes: int = 0) -> Operator:
    ones, zeros = (1,) * rank, (0,) * rank
    name = f"conv{'_transpose' if transposed else ''}{rank}d"
    layout = "NC" + "DHW"[3 - rank :].replace("W", "L" if rank == 1 else "W")
    extra = (Argument("output_padding", _sizes(rank, True), zeros),) if transposed else ()
    return Operator(
        name, Kind.PRODUCER, f"{rank}-d {'transposed ' if transposed else ''}convolution ({layout})",
        (
            Argument("in_channels", "size"), Argument("out_channels", "size"), Argument("kernel_size", _sizes(rank)), Argument("stride", _sizes(rank), ones),
            Argument("padding", _sizes(rank, True), zeros), *extra, Argument("dilation", _sizes(rank), ones), Argument("groups", "size", 1),
            Argument("bias", "flag", True),
        ),
        takes_name=True, requires_name=True, check=windows.conv_check, rank=rank, transposed=transposed, takes="in_channels", gives="out_channels",
        fused_axes=fused_axes, shape=(windows.conv_transpose_shape if transposed else windows.conv_shape)(name, rank), parameters=windows.conv_parameters(name, transposed),
        module=windows.conv_module(f"Conv{'Transpose' if transposed else ''}{rank}d", rank),
    )  # fmt: skip


def _pool(rank: int, average: bool) -> Operator:
    name = f"{'avg' if average else 'max'}_pool{rank}d"
    first = (Argument("kernel_size", _sizes(rank)), Argument("stride", _sizes(rank), None), Argument("padding", _sizes(rank, True), (0,) * rank))
    if average:
        divisor = (Argument("divisor_override", "size", None),) if rank > 1 else ()
        own = (Argument("ceil_mode", "flag", False), Argument("count_include_pad", "flag", True), *divisor)
    else:
        own = (Argument("dilation", _sizes(rank), (1,) * rank), Argument("ceil_mode", "flag", False))
    return Operator(
        name, Kind.POOL, f"{'mean' if average else 'maximum'} over windows", first + own, takes_name=True, rank=rank,
        shape=windows.pool_shape(name, rank), check=windows.pool_check, call=windows.pool_call(name, rank),
    )  # fmt: skip


def _adaptive_pool(rank: int) -> Operator:
    name = f"adaptive_avg_pool{rank}d"
    return Operator(
        name, Kind.POOL, "mean over as many windows as the result has values", (Argument("output_size", _sizes(rank)),), takes_name=True, rank=rank,
        shape=windows.adaptive_shape(name, rank), call=windows.adaptive_call(name),
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


def _operand(
    name: str, expression: str, summary: str, monotone: Callable[[Values], bool] = lambda values: False, affine: bool = False, sign: str = "",
    function: str | None = None, derivative: Derivative | None = None,
) -> Operator:  # fmt: skip
    """Arithmetic with a learnable tensor that broadcasts (name, shape, init, view), with that of an earlier operator once more (parameter), with a number
    (value), or with an earlier operator's result or another input (from, detach). `function` computes it where C has no sign for it."""
    number = "{v}.new_full((), {p})" if function else "{p}"  # torch's functions take a tensor
    text = f"torch.{name}({{v}}, {{p}})" if function else expression

    def call(values: Values) -> str:
        return text if values["value"] is None else text.replace("{p}", number.replace("{p}", rules.number(values["value"])))

    return Operator(
        name, Kind.ELEMENTWISE, summary,
        (
            Argument("shape", "shape", None),
            Argument("init", "fill", "randn"),
            Argument("view", "view", None),
            Argument("parameter", "owner", None),
            Argument("value", "bound", None, sign),
            Argument("from", "tap", None),
            Argument("detach", "flag", False),
        ),
        takes_name=True,
        parameters=lambda values, shape: () if values["shape"] is None else (Parameter("", values["shape"], values["init"]),),
        check=_operand_check,
        constants=lambda values: () if values["value"] is None else ("value",),
        expression=expression, function=(lambda values: function) if function else None, call=call, monotone=monotone, affine=affine, bounds=function is not None,
        derivative=derivative,
    )  # fmt: skip


def _operand_check(values: Values) -> str | None:
    if sum(values[key] is not None for key in ("shape", "parameter", "value", "from")) != 1:
        return (
            "give either shape (a learnable tensor, with a name), parameter (the name of an operator in front, whose tensor it takes once more), value (a number) or "
            "from (the name of an earlier operator or of an input)"
        )
    if values["view"] is not None and values["shape"] is None and values["parameter"] is None:
        return "view: is of a parameter, and there is none"
    return "detach: is of a value that from names, and there is none" if values["detach"] and values["from"] is None else None


OPERATORS: dict[str, Operator] = {
    op.name: op
    for op in (
        Operator(
            "linear", Kind.PRODUCER, "x W^T + b", 
            (Argument("in_features", "size"), Argument("out_features", "size"), Argument("bias", "flag", True), Argument("init", "fill", None)),
            takes_name=True, requires_name=True, shape=rules.linear_shape, parameters=rules.linear_parameters, module=rules.linear_module,
            check=rules.linear_check, call=lambda v: "F.linear({v}, {p})", takes="in_features", gives="out_features", fused_axes=2,
        ),
        _convolution(1),
        _convolution(2, fused_axes=4),
        _convolution(3),
        _convolution(1, transposed=True),
        _convolution(2, transposed=True),
        _convolution(3, transposed=True),
        _norm(
            "group_norm", "(v - mean) / sqrt(var + eps) * gamma + beta over channel groups",
            (Argument("num_groups", "size"), Argument("eps", "number", 1e-5, "positive"), Argument("affine", "flag", True)),
            shape=rules.group_norm_shape, parameters=rules.group_norm_parameters, module=rules.group_norm_module, groups=lambda v, shape: v["num_groups"],
        ),
        _norm(
            "layer_norm", "the same over trailing axes: all that follow the batch, unless normalized_shape names fewer",
            (Argument("normalized_shape", "extents", None), Argument("eps", "number", 1e-5, "positive"), Argument("elementwise_affine", "flag", True)),
            shape=lambda v, shape: axes.trailing(v, shape, "layer_norm") and shape, parameters=lambda v, shape: axes.trailing_parameters(v, shape, "layer_norm"),
            module=axes.trailing_module("LayerNorm", "layer_norm"), groups=lambda v, shape: 1,
        ),
        _norm(
            "instance_norm", "the same over each channel's positions",
            (Argument("num_features", "size", None), Argument("eps", "number", 1e-5, "positive"), Argument("affine", "flag", False)),
            shape=rules.instance_norm_shape, parameters=rules.group_norm_parameters, groups=lambda v, shape: shape[1],
            module=lambda v, shape: f"nn.InstanceNorm{len(shape) - 2}d({shape[1]}{rules.eps(v)}" + (", affine=True" if v["affine"] else "") + ")",
        ),
        _norm(
            "batch_norm", "the same over each channel's values of all samples in training, by running statistics in evaluation",
            (
                Argument("num_features", "size", None), Argument("eps", "number", 1e-5, "positive"), Argument("momentum", "bound", 0.1), Argument("affine", "flag", True),
                Argument("track_running_stats", "flag", True),
            ),
            shape=axes.batch_norm_shape, parameters=rules.group_norm_parameters, buffers=axes.batch_norm_buffers, module=axes.batch_norm_module, modes=True,
        ),
        Operator(
            "rms_norm", Kind.NORM, "v / sqrt(mean of v^2 + eps) * gamma over trailing axes; eps left out is 2^-23, float32's epsilon",
            (Argument("normalized_shape", "extents", None), Argument("eps", "bound", None, "positive"), Argument("elementwise_affine", "flag", True)),
            takes_name=True, requires_name=True, shape=lambda v, shape: axes.trailing(v, shape, "rms_norm") and shape, parameters=lambda v, shape: axes.trailing_parameters(v, shape, "rms_norm"),
            module=axes.trailing_module("RMSNorm", "rms_norm"),
        ),
        _softmax("softmax", "e^v over the sum of e^v along an axis"),
        _softmax("log_softmax", "the logarithm of softmax"),
        *(_pool(rank, average) for average in (False, True) for rank in (1, 2, 3)),
        *(_adaptive_pool(rank) for rank in (1, 2, 3)),
        _fold("min", "minimum over an axis, or all; at ties the gradient goes to one value", "[0]", one_axis=True),
        _fold("max", "maximum over an axis, or all; at ties the gradient goes to one value", "[0]", one_axis=True),
        _fold("amin", "minimum over axes; at ties the gradient is shared"),
        _fold("amax", "maximum over axes; at ties the gradient is shared"),
        _fold("sum", "sum over axes"),
        _fold("mean", "mean over axes"),
        _fold("logsumexp", "log(sum(e^v)) over axes", needs_dim=True),
        Operator(
            "flatten", Kind.SHAPE, "the axes from start_dim to end_dim as one", (Argument("start_dim", "axis", 1), Argument("end_dim", "axis", -1)),
            takes_name=True, shape=axes.flatten_shape, call=lambda v: f"torch.flatten({{v}}, {v['start_dim']}, {v['end_dim']})",
        ),
        Operator(
            "squeeze", Kind.SHAPE, "without axes of one value: those of dim, or all", (Argument("dim", "axes", None),), takes_name=True,
            shape=axes.squeeze_shape, call=axes.squeeze_call,
        ),
        Operator(
            "unsqueeze", Kind.SHAPE, "with an axis of one value in place dim", (Argument("dim", "axis"),), takes_name=True,
            shape=axes.unsqueeze_shape, call=lambda v: f"torch.unsqueeze({{v}}, {v['dim']})",
        ),
        Operator(
            "view", Kind.SHAPE, "the same values under other sizes: 0 keeps the size in its place, -1 is whatever is left", (Argument("sizes", "view"),),
            takes_name=True, shape=axes.view_shape, call=lambda v: axes.view_text(v["sizes"]),
        ),
        Operator(
            "dropout", Kind.DROPOUT, "in training, values set to 0 with probability p and the others divided by 1 - p", (Argument("p", "number", 0.5),),
            takes_name=True, check=lambda v: None if 0 <= v["p"] <= 1 else f"p: {v['p']} is no probability, 0 to 1", modes=True,
            call=lambda v: f"F.dropout({{v}}, {rules.number(v['p'])}, self.training)",
        ),
        _operand("add", "{v} + {p}", "v + p: p a tensor that broadcasts, a number, an earlier result or an input", lambda v: v["from"] is None, affine=True, derivative=derivative.ADD),
        _operand("sub", "{v} - {p}", "v - p", lambda v: v["from"] is None, derivative=derivative.SUB),
        _operand("mul", "{v} * {p}", "v * p", lambda v: v["value"] is not None and v["value"] >= 0, affine=True, derivative=derivative.MUL),
        _operand("div", "{v} / {p}", "v / p", lambda v: v["value"] is not None and v["value"] > 0, sign="not 0", derivative=derivative.DIV),
        _operand("rsub", "{p} - {v}", "p - v", derivative=derivative.RSUB),
        _operand("rdiv", "{p} / {v}", "p / v", derivative=derivative.RDIV),
        _operand("minimum", "minimum({v}, {p})", "the smaller of v and p; at ties half of the gradient goes to each", lambda v: v["from"] is None, function="minimum"),
        _operand("maximum", "maximum({v}, {p})", "the larger of v and p; at ties half of the gradient goes to each", lambda v: v["from"] is None, function="maximum"),
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
            "softshrink", "v less lambd in magnitude, 0 up to there", "F.softshrink({v}, {lambd})", (Argument("lambd", "number", 0.5, "not negative"),), monotone=True, bounds=True,
        ),
    )
}  # fmt: skip

ALIASES = {"swish": "silu"}
PARAMETER = Operator(  # of a spec's `unused`: no operator of a chain
    "parameter", Kind.ELEMENTWISE, "a parameter", (Argument("shape", "shape"), Argument("init", "fill", "randn")), takes_name=True, requires_name=True,
    parameters=lambda values, shape: (Parameter("", values["shape"], values["init"]),),
)  # fmt: skip

__all__ = ["ALIASES", "FILLS", "OPERATORS", "PARAMETER", "REQUIRED", "Argument", "Kind", "Operator", "Parameter", "Shape", "ShapeError", "Values", "broadcast"]
