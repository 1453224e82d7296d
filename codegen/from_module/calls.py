"""PyTorch's spellings of the operators in the table: nn modules, functions and tensor methods."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import fx, nn

from codegen.from_module.faults import Unfit
from codegen.ops import OPERATORS

Values = dict[str, Any]

# Modules whose attributes have the names of the operator's arguments; those of other names are in _ADJUST.
MODULES: dict[type, str] = {
    nn.Linear: "linear", nn.Conv2d: "conv2d", nn.GroupNorm: "group_norm", nn.LayerNorm: "layer_norm", nn.InstanceNorm2d: "instance_norm",
    nn.MaxPool2d: "max_pool2d", nn.AvgPool2d: "avg_pool2d", nn.ReLU: "relu", nn.ReLU6: "relu6",
    nn.LeakyReLU: "leaky_relu", nn.Sigmoid: "sigmoid", nn.Tanh: "tanh", nn.SiLU: "silu", nn.Mish: "mish", nn.GELU: "gelu", nn.Hardswish: "hardswish",
    nn.Hardsigmoid: "hardsigmoid", nn.Softplus: "softplus", nn.ELU: "elu", nn.Hardtanh: "hardtanh",
    nn.SELU: "selu", nn.CELU: "celu", nn.Softsign: "softsign", nn.LogSigmoid: "logsigmoid", nn.Softshrink: "softshrink",
}  # fmt: skip
RANDOM_MODULES = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)

# Functions and methods by name: the operator and the arguments behind the input, in PyTorch's order. A trailing _ (in place) makes no difference
# to a chain, where nobody else reads the old value.
FUNCTIONS: dict[str, tuple[str, tuple[str, ...]]] = {
    "relu": ("relu", ("inplace",)),
    "relu6": ("relu6", ("inplace",)),
    "leaky_relu": ("leaky_relu", ("negative_slope", "inplace")),
    "sigmoid": ("sigmoid", ()),
    "expit": ("sigmoid", ()),
    "special_expit": ("sigmoid", ()),
    "tanh": ("tanh", ()),
    "silu": ("silu", ("inplace",)),
    "mish": ("mish", ("inplace",)),
    "gelu": ("gelu", ("approximate",)),
    "hardswish": ("hardswish", ("inplace",)),
    "hardsigmoid": ("hardsigmoid", ("inplace",)),
    "softplus": ("softplus", ("beta", "threshold")),
    "elu": ("elu", ("alpha", "inplace")),
    "selu": ("selu", ("inplace",)),
    "celu": ("celu", ("alpha", "inplace")),
    "softsign": ("softsign", ()),
    "logsigmoid": ("logsigmoid", ()),
    "log_sigmoid": ("logsigmoid", ()),
    "softshrink": ("softshrink", ("lambd",)),
    "hardtanh": ("hardtanh", ("min_val", "max_val", "inplace")),
    "clamp": ("clamp", ("min", "max")),
    "clip": ("clamp", ("min", "max")),
    "clamp_min": ("clamp", ("min",)),
    "clamp_max": ("clamp", ("max",)),
    "max_pool2d": ("max_pool2d", ("kernel_size", "stride", "padding", "dilation", "ceil_mode", "return_indices")),
    "avg_pool2d": ("avg_pool2d", ("kernel_size", "stride", "padding", "ceil_mode", "count_include_pad", "divisor_override")),
    "group_norm": ("group_norm", ("num_groups", "weight", "bias", "eps")),
    "layer_norm": ("layer_norm", ("normalized_shape", "weight", "bias", "eps")),
    "instance_norm": ("instance_norm", ("running_mean", "running_var", "weight", "bias", "use_input_stats", "momentum", "eps")),
    "min": ("min", ("dim", "keepdim")),
    "max": ("max", ("dim", "keepdim")),
    "sum": ("sum", ("dim", "keepdim")),
    "mean": ("mean", ("dim", "keepdim")),
    "logsumexp": ("logsumexp", ("dim", "keepdim")),
}
OTHER_GRADIENTS = {  # equal values, and another gradient than the grammar's operator
    name: f"{name} shares its gradient among equal values, which the grammar has no word for; torch.{kind}(x, dim=1)[0] gives it to one of them"
    for name, kind in (("amin", "min"), ("amax", "max"))
}
PAIRS = ("min", "max")  # give values and indices
ARITHMETIC = {"add": "add", "iadd": "add", "mul": "mul", "imul": "mul", "multiply": "mul", "sub": "sub", "isub": "sub", "subtract": "sub",
              "div": "div", "divide": "div", "truediv": "div", "true_divide": "div", "itruediv": "div", "neg": "neg", "negative": "neg"}  # fmt: skip
RANDOM_FUNCTIONS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout", "feature_dropout")
NUMPY = {"axis": "dim", "keepdims": "keepdim"}  # torch takes NumPy's words, too
NORMS = {"group_norm": "nn.GroupNorm", "layer_norm": "nn.LayerNorm", "instance_norm": "nn.InstanceNorm2d"}
NEEDS_MODULE = {"linear": "nn.Linear", "conv2d": "nn.Conv2d"}


def function_name(node: fx.Node) -> str:
    """The name under which FUNCTIONS and ARITHMETIC know what a call_function or call_method node calls."""
    if node.op == "call_method":
        name = node.target
    elif node.target in (F.max_pool2d, getattr(F, "_max_pool2d", None)):
        name = "max_pool2d"  # a dispatcher without a name of its own
    else:
        name = getattr(node.target, "__name__", str(node.target))
    return name if name.startswith("__") else name.rstrip("_")


def module_values(module: nn.Module) -> tuple[str, Values] | None:
    """(operator, argument values) of a leaf module; None where the table has no such operator. Raises Unfit."""
    operator = MODULES.get(type(module))
    if operator is None:
        return None
    if "forward" in vars(module):
        raise Unfit("the module has a forward of its own, which the kernels do not run")
    values: Values = {}
    for argument in OPERATORS[operator].arguments:
        value = getattr(module, argument.name)
        if argument.type == "flag" and not isinstance(value, bool):
            value = value is not None  # bias: the parameter itself, or None
        values[argument.name] = value
    if isinstance(module, nn.Conv2d):
        _conv2d(module, values)
    if isinstance(module, nn.LayerNorm) and module.elementwise_affine and module.bias is None:
        raise Unfit("layer_norm with a scale and no shift, which the grammar has no word for")
    if isinstance(module, nn.InstanceNorm2d) and module.track_running_stats:
        raise Unfit("instance_norm with running statistics, which it would use and change; the grammar has the input's own")
    if isinstance(module, nn.MaxPool2d) and module.return_indices:
        raise Unfit("max_pool2d with return_indices has two results; a chain has one")
    return operator, values


def _conv2d(module: nn.Conv2d, values: Values) -> None:
    if module.padding_mode != "zeros":
        raise Unfit(f"conv2d with padding_mode {module.padding_mode!r}; the grammar pads with zeros only")
    if module.padding == "valid":
        values["padding"] = (0, 0)
    elif module.padding == "same":
        spans = [dilation * (kernel - 1) for dilation, kernel in zip(module.dilation, module.kernel_size, strict=True)]
        if any(span % 2 for span in spans):
            raise Unfit("conv2d with padding 'same' and an even kernel pads one side more than the other, which the grammar has no word for")
        values["padding"] = tuple(span // 2 for span in spans)


def function_values(name: str, node: fx.Node, constant: Callable[[Any, str], Any]) -> tuple[str, Values] | None:
    """(operator, argument values) of a call whose first argument is the chain's value; None where the table has no such operator.

    `constant(value, argument)` gives the Python value or raises Unfit for a traced one.
    """
    if name in NEEDS_MODULE:
        raise Unfit(f"{name} with tensors of its own: its parameters must be those of an {NEEDS_MODULE[name]}, which the spec's chain stands for")
    if name not in FUNCTIONS:
        return None
    operator, names = FUNCTIONS[name]
    given = bind(name, node, names)
    values = {key: constant(value, f"{name}'s {key}") for key, value in given.items() if key != "inplace"}
    if operator in NORMS:
        tensors = [values.pop(key, None) for key in ("weight", "bias", "running_mean", "running_var")]
        if any(tensor is not None for tensor in tensors):
            raise Unfit(f"{operator} with tensors of its own: its parameters must be those of an {NORMS[operator]}, which the spec's chain stands for")
        if not values.pop("use_input_stats", True):
            raise Unfit("instance_norm without the input's own statistics, which are all that the grammar has")
        values.pop("momentum", None)
        values |= {"elementwise_affine" if operator == "layer_norm" else "affine": False}
    if values.pop("return_indices", False):
        raise Unfit("max_pool2d with return_indices has two results; a chain has one")
    if "dim" in names:
        values |= {"dim": _one(name, values.get("dim"))}
    return operator, values


def _one(name: str, dim: Any) -> int:
    """The one dimension of a reduction. Raises Unfit."""
    if isinstance(dim, tuple) and len(dim) == 1:
        dim = dim[0]
    if not isinstance(dim, int) or isinstance(dim, bool):
        raise Unfit(f"{name} over {'everything' if dim is None else f'dim {dim}'}; the grammar has reductions over channels, dim=1")
    return dim


def bind(name: str, node: fx.Node, names: tuple[str, ...]) -> dict[str, Any]:
    """The arguments of a call behind its input, by name. Raises Unfit for one that is not known."""
    given = dict(zip(names, node.args[1:], strict=False))
    extra = {NUMPY.get(key, key): value for key, value in node.kwargs.items() if key != "input"}
    unknown = [key for key in extra if key not in names] + [repr(value) for value in node.args[1 + len(names) :]]
    if unknown:
        raise Unfit(f"{name} with {', '.join(unknown)}, which the grammar has no word for")
    return given | extra


def scalar(kind: str, value: int | float, reversed_: bool) -> tuple[str, float | int]:
    """(operator, value) for arithmetic with a Python number. Raises Unfit."""
    if reversed_ and kind in ("sub", "div"):
        raise Unfit(f"a number {'minus' if kind == 'sub' else 'divided by'} the chain's value; the grammar has v {'-' if kind == 'sub' else '/'} c")
    return kind, value
