"""PyTorch's spellings of the operators in the table: nn modules, functions and tensor methods."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import fx, nn

from codegen.from_module.faults import Unfit
from codegen.ops import OPERATORS

Values = dict[str, Any]

RANKS = (1, 2, 3)
# Modules whose attributes have the names of the operator's arguments.
MODULES: dict[type, str] = {
    nn.Linear: "linear", nn.GroupNorm: "group_norm", nn.LayerNorm: "layer_norm", nn.RMSNorm: "rms_norm", nn.Softmax: "softmax", nn.LogSoftmax: "log_softmax",
    nn.Flatten: "flatten", nn.Dropout: "dropout", nn.ReLU: "relu", nn.ReLU6: "relu6",
    nn.LeakyReLU: "leaky_relu", nn.Sigmoid: "sigmoid", nn.Tanh: "tanh", nn.SiLU: "silu", nn.Mish: "mish", nn.GELU: "gelu", nn.Hardswish: "hardswish",
    nn.Hardsigmoid: "hardsigmoid", nn.Softplus: "softplus", nn.ELU: "elu", nn.Hardtanh: "hardtanh",
    nn.SELU: "selu", nn.CELU: "celu", nn.Softsign: "softsign", nn.LogSigmoid: "logsigmoid", nn.Softshrink: "softshrink",
    **{getattr(nn, f"{word}{rank}d"): f"{name}{rank}d" for rank in RANKS for word, name in (
        ("Conv", "conv"), ("ConvTranspose", "conv_transpose"), ("MaxPool", "max_pool"), ("AvgPool", "avg_pool"), ("AdaptiveAvgPool", "adaptive_avg_pool"))},
    **{getattr(nn, f"{word}{rank}d"): name for rank in RANKS for word, name in (("InstanceNorm", "instance_norm"), ("BatchNorm", "batch_norm"))},
}  # fmt: skip
RANDOM_MODULES = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)

_MAX_POOL = ("kernel_size", "stride", "padding", "dilation", "ceil_mode", "return_indices")
_AVG_POOL = ("kernel_size", "stride", "padding", "ceil_mode", "count_include_pad", "divisor_override")
_FOLD = ("dim", "keepdim")
# Functions and methods by name: the operator and the arguments behind the input, in PyTorch's order. A trailing _ (in place) makes no difference
# to a chain, where nobody else reads the old value.
FUNCTIONS: dict[str, tuple[str, tuple[str, ...]]] = {
    **{name: (name, ("inplace",)) for name in ("relu", "relu6", "silu", "mish", "hardswish", "hardsigmoid", "selu")},
    **{name: (name, ()) for name in ("sigmoid", "tanh", "softsign", "logsigmoid")},
    "leaky_relu": ("leaky_relu", ("negative_slope", "inplace")),
    "expit": ("sigmoid", ()),
    "special_expit": ("sigmoid", ()),
    "gelu": ("gelu", ("approximate",)),
    "softplus": ("softplus", ("beta", "threshold")),
    "elu": ("elu", ("alpha", "inplace")),
    "celu": ("celu", ("alpha", "inplace")),
    "log_sigmoid": ("logsigmoid", ()),
    "softshrink": ("softshrink", ("lambd",)),
    "hardtanh": ("hardtanh", ("min_val", "max_val", "inplace")),
    "clamp": ("clamp", ("min", "max")),
    "clip": ("clamp", ("min", "max")),
    "clamp_min": ("clamp", ("min",)),
    "clamp_max": ("clamp", ("max",)),
    **{f"max_pool{rank}d": (f"max_pool{rank}d", _MAX_POOL) for rank in RANKS},
    **{f"avg_pool{rank}d": (f"avg_pool{rank}d", _AVG_POOL if rank > 1 else _AVG_POOL[:-1]) for rank in RANKS},
    **{f"adaptive_avg_pool{rank}d": (f"adaptive_avg_pool{rank}d", ("output_size",)) for rank in RANKS},
    "group_norm": ("group_norm", ("num_groups", "weight", "bias", "eps")),
    "layer_norm": ("layer_norm", ("normalized_shape", "weight", "bias", "eps")),
    "rms_norm": ("rms_norm", ("normalized_shape", "weight", "eps")),
    "instance_norm": ("instance_norm", ("running_mean", "running_var", "weight", "bias", "use_input_stats", "momentum", "eps")),
    **{name: (name, _FOLD) for name in ("min", "max", "amin", "amax", "sum", "mean", "logsumexp")},
    "softmax": ("softmax", ("dim", "_stacklevel", "dtype")),
    "log_softmax": ("log_softmax", ("dim", "_stacklevel", "dtype")),
    "flatten": ("flatten", ("start_dim", "end_dim")),
    "squeeze": ("squeeze", ("dim",)),
    "unsqueeze": ("unsqueeze", ("dim",)),
    "dropout": ("dropout", ("p", "training", "inplace")),
}
PAIRS = ("min", "max")  # give values and indices, over an axis
VIEWS = ("view", "reshape", "view_as", "reshape_as", "unflatten")  # of which the result's shape says all
SAME = ("clone", "contiguous", "detach", "alias")  # give the same values
ARITHMETIC = {"add": "add", "iadd": "add", "mul": "mul", "imul": "mul", "multiply": "mul", "sub": "sub", "isub": "sub", "subtract": "sub",
              "div": "div", "divide": "div", "truediv": "div", "true_divide": "div", "itruediv": "div", "rsub": "rsub", "minimum": "minimum", "maximum": "maximum",
              "neg": "neg", "negative": "neg"}  # fmt: skip
REVERSED = {"sub": "rsub", "div": "rdiv", "rsub": "sub"}  # the rest gives the same with its operands exchanged
PRODUCTS = {"linear": "linear", "matmul": "linear", "mm": "linear",
            **{f"conv{kind}{rank}d": f"conv{kind}{rank}d" for kind in ("", "_transpose") for rank in RANKS}}  # fmt: skip
CONVOLUTION = ("weight", "bias", "stride", "padding", "dilation", "groups")
TRANSPOSED = ("weight", "bias", "stride", "padding", "output_padding", "groups", "dilation")
RANDOM_FUNCTIONS = ("dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout", "feature_dropout")
NUMPY = {"axis": "dim", "keepdims": "keepdim"}  # torch takes NumPy's words, too
NORMS = {"group_norm": "nn.GroupNorm", "layer_norm": "nn.LayerNorm", "rms_norm": "nn.RMSNorm", "instance_norm": "nn.InstanceNorm2d"}


def function_name(node: fx.Node) -> str:
    """The name under which FUNCTIONS and ARITHMETIC know what a call_function or call_method node calls."""
    if node.op == "call_method":
        name = node.target
    else:
        name = _DISPATCHERS.get(node.target) or getattr(node.target, "__name__", str(node.target))
    return name if name.startswith("__") else name.rstrip("_")


# Functions that choose between two by `return_indices` have no name of their own.
_DISPATCHERS = {
    function: f"max_pool{rank}d" for rank in RANKS for function in (getattr(F, f"max_pool{rank}d"), getattr(F, f"_max_pool{rank}d", None)) if function is not None
}


IN_PLACE = frozenset({"iadd", "isub", "imul", "itruediv", "setitem"})  # Python's, beside those whose names end in _


def is_in_place(node: fx.Node, module_of: Callable[[str], nn.Module]) -> bool:
    """Does a node write its result over its input? `module_of` gives the module that a call names."""
    if node.op == "call_module":
        return getattr(module_of(node.target), "inplace", False) is True
    if node.op not in ("call_function", "call_method"):
        return False
    name = node.target if node.op == "call_method" else getattr(node.target, "__name__", "")
    if name in IN_PLACE or (name.endswith("_") and not name.endswith("__")) or getattr(getattr(node.target, "_schema", None), "is_mutable", False):
        return True
    names = FUNCTIONS.get(name, ("", ()))[1]
    place = names.index("inplace") + 1 if "inplace" in names else len(node.args)
    return node.kwargs.get("inplace", node.args[place] if place < len(node.args) else False) is True


def module_values(module: nn.Module) -> tuple[str, Values] | None:
    """(operator, argument values) of a leaf module; None where the table has no such operator. Raises Unfit."""
    operator = MODULES.get(type(module))
    if operator is None:
        return None
    if "forward" in vars(module):
        raise Unfit("the module has a forward of its own, which the kernels do not run")
    values: Values = {}
    for argument in OPERATORS[operator].arguments:
        if argument.name == "init":
            continue
        value = getattr(module, argument.name)
        if argument.type == "flag" and not isinstance(value, bool):
            value = value is not None  # bias: the parameter itself, or None
        values[argument.name] = value
    if isinstance(module, nn.modules.conv._ConvNd):
        _convolution(operator, module, values)
    if isinstance(module, nn.LayerNorm) and module.elementwise_affine and module.bias is None:
        raise Unfit("layer_norm with a scale and no shift, which the grammar has no word for")
    if operator == "instance_norm":
        if module.track_running_stats:
            raise Unfit("instance_norm with running statistics, which it would use and change; the grammar has the input's own")
        if not module.affine:
            del values["num_features"]  # torch takes any number of channels then
    if operator.startswith("max_pool") and module.return_indices:
        raise Unfit(f"{operator} with return_indices has two results; a chain has one")
    if operator.startswith("adaptive") and None in (values["output_size"] if isinstance(values["output_size"], tuple) else (values["output_size"],)):
        raise Unfit(f"{operator} that keeps the size of an axis, which the grammar has no word for; give the number")
    if operator in ("softmax", "log_softmax") and module.dim is None:
        raise Unfit(f"{operator} without dim, which PyTorch chooses by the number of axes; say which")
    return operator, values


def _convolution(operator: str, module: nn.Module, values: Values) -> None:
    if module.padding_mode != "zeros":
        raise Unfit(f"{operator} with padding_mode {module.padding_mode!r}; the grammar pads with zeros only")
    values["padding"] = padding(operator, module.padding, module.kernel_size, module.dilation)


def padding(operator: str, given: Any, kernel: tuple[int, ...], dilation: tuple[int, ...]) -> Any:
    """A convolution's padding in numbers. Raises Unfit."""
    if given == "valid":
        return (0,) * len(kernel)
    if given != "same":
        return given
    spans = [step * (size - 1) for step, size in zip(dilation, kernel, strict=True)]
    if any(span % 2 for span in spans):
        raise Unfit(f"{operator} with padding 'same' and an even kernel pads one side more than the other, which the grammar has no word for")
    return tuple(span // 2 for span in spans)


def function_values(name: str, node: fx.Node, constant: Callable[[Any, str], Any], of_module: bool = False) -> tuple[str, Values] | None:
    """(operator, argument values) of a call whose first argument is the chain's value; None where the table has no such operator.

    `constant(value, argument)` gives the Python value or raises Unfit for a traced one. `of_module`: a norm's parameters are those of a module.
    """
    if name not in FUNCTIONS:
        return None
    operator, names = FUNCTIONS[name]
    given = bind(name, node, names)
    if of_module:
        given = {key: value for key, value in given.items() if key not in ("weight", "bias")}
    values = {key: constant(value, f"{name}'s {key}") for key, value in given.items() if key != "inplace"}
    if operator in NORMS:
        tensors = [values.pop(key, None) for key in ("weight", "bias", "running_mean", "running_var")]
        if any(tensor is not None for tensor in tensors):
            raise Unfit(f"{operator} with tensors of its own: its parameters must be those of an {NORMS[operator]}, which the spec's chain stands for")
        if not values.pop("use_input_stats", True):
            raise Unfit("instance_norm without the input's own statistics, which are all that the grammar has")
        values.pop("momentum", None)
        values |= {"elementwise_affine" if operator in ("layer_norm", "rms_norm") else "affine": of_module}
    if values.pop("return_indices", False):
        raise Unfit(f"{operator} with return_indices has two results; a chain has one")
    if values.pop("dtype", None) is not None:
        raise Unfit(f"{name} with a type of its own; a chain has one type")
    values.pop("_stacklevel", None)
    if operator in ("softmax", "log_softmax") and values.get("dim") is None:
        raise Unfit(f"{operator} without dim, which PyTorch chooses by the number of axes; say which")
    if names == _FOLD:
        dim = values.get("dim")
        values["dim"] = (dim[0] if len(dim) == 1 else dim or None) if isinstance(dim, tuple) else dim
    if operator == "flatten":
        values = {"start_dim": 0, "end_dim": -1} | values
    if operator == "dropout" and not values.pop("training", True):
        values["p"] = 0.0
    return operator, values


def bind(name: str, node: fx.Node, names: tuple[str, ...]) -> dict[str, Any]:
    """The arguments of a call behind its input, by name. Raises Unfit for one that is not known."""
    given = dict(zip(names, node.args[1:], strict=False))
    extra = {NUMPY.get(key, key): value for key, value in node.kwargs.items() if key != "input"}
    unknown = [key for key in extra if key not in names] + [repr(value) for value in node.args[1 + len(names) :]]
    if unknown:
        raise Unfit(f"{name} with {', '.join(unknown)}, which the grammar has no word for")
    return given | extra
