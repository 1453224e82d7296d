"""Torch's own operators as steps of a package: one row each, in exactly the arithmetic that the package promises.

A row makes a function of tensors from a step's options. The functions are pure: running statistics and dropout's masks come back
as further results. What torch takes from process-wide switches (TF32) is decided here by the precision, and nothing sets a switch.
What torch lacks in 16 bits on a CPU is computed in float32 there and rounded once.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as functional

from .products import Producer

Options = Mapping[str, Any]
Made = torch.Tensor | tuple[torch.Tensor, ...]


def _unary(function: Callable[..., torch.Tensor], *names: str) -> Callable[[Options], Callable[..., Made]]:
    """A row of an operator on one value, whose options `names` are positional arguments."""

    def row(options: Options):
        values = tuple(options[name] for name in names if name in options)
        return lambda v: function(v, *values)

    return row


def _arithmetic(function: Callable[..., torch.Tensor], tensors: bool = False):
    """A row of arithmetic with a number, or with a second tensor, which may come under another shape (``operand``) or without its gradient
    (``detach``). A function of ``tensors`` takes a number as one of them."""

    def row(options: Options):
        value, sizes, detached = options.get("value"), options.get("operand"), options.get("detach", False)
        if value is not None:
            return lambda v: function(v, v.new_full((), value) if tensors else value)
        if sizes is not None:
            return lambda v, other: function(v, other.reshape(sizes))
        return lambda v, other: function(v, other.detach() if detached else other)

    return row


def _clamp(options: Options):
    return lambda v: torch.clamp(v, options.get("min"), options.get("max"))


def _gelu(options: Options):
    return lambda v: functional.gelu(v, approximate=options["approximate"])


def _fold(function: Callable[..., Any], picks: bool = False, many: bool = True):
    """A row of a fold over `dim`, over all axes where there is none. `picks`: torch gives (values, indices); `many` axes at once are its own."""

    def row(options: Options):
        dim, keepdim = options.get("dim"), options["keepdim"]

        def fold(v):
            if dim is not None:
                made = function(v, dim, keepdim)
                return made[0] if picks else made
            if picks or not many:
                made = function(v)
                return made.reshape((1,) * v.dim()) if keepdim else made
            return function(v, tuple(range(v.dim())), keepdim)

        return fold

    return row


def _softmax(function: Callable[..., torch.Tensor]):
    return lambda options: lambda v: function(v, options["dim"])


def _pool(function: Callable[..., torch.Tensor], *names: str):
    return lambda options: lambda v: function(v, **{name: options[name] for name in names if name in options})


_MAX = ("kernel_size", "stride", "padding", "dilation", "ceil_mode")
_MEAN = ("kernel_size", "stride", "padding", "ceil_mode", "count_include_pad", "divisor_override")


def _group_norm(options: Options):
    return lambda v, weight, bias: functional.group_norm(v, options["num_groups"], weight, bias, options["eps"])


def _layer_norm(options: Options):
    return lambda v, weight, bias: functional.layer_norm(v, options["normalized_shape"], weight, bias, options["eps"])


def _rms_norm(options: Options):
    return lambda v, weight, bias: functional.rms_norm(v, options["normalized_shape"], weight, options.get("eps"))


def _instance_norm(options: Options):
    return lambda v, weight, bias: functional.instance_norm(v, weight=weight, bias=bias, eps=options["eps"])


def _batch_norm(options: Options):
    """In training (y, new running mean, new running variance), as torch updates them; y alone where no statistics run, and in evaluation."""
    eps, momentum = options["eps"], options["momentum"]

    def evaluate(v, weight, bias, mean, variance, count):
        return functional.batch_norm(v, mean, variance, weight, bias, False, 0.0, eps)

    def train(v, weight, bias, mean=None, variance=None, count=None):
        if mean is None:
            return functional.batch_norm(v, None, None, weight, bias, True, 0.0, eps)
        mean, variance = mean.detach(), variance.detach()
        if momentum is not None:
            mean, variance = mean.clone(), variance.clone()
            return functional.batch_norm(v, mean, variance, weight, bias, True, momentum, eps), mean, variance
        of_batch, of_values = torch.zeros_like(mean), torch.zeros_like(variance)
        made = functional.batch_norm(v, of_batch, of_values, weight, bias, True, 1.0, eps)
        share = 1.0 / (count + 1).to(torch.float64)  # the mean over all batches so far, without a look at the device
        return made, torch.lerp(mean, of_batch, share.to(mean.dtype)), torch.lerp(variance, of_values, share.to(variance.dtype))

    return train if options["training"] else evaluate


def _dropout(options: Options):
    """In training (y, mask), by torch's own draw; a mask that is given is used again."""
    p = options["p"]

    def train(v, mask=None):
        if mask is None and v.is_cuda and 0.0 < p < 1.0:
            return torch.native_dropout(v, p, True)  # what functional.dropout calls there: one kernel, which gives the mask too
        if mask is None:
            drawn = functional.dropout(torch.ones_like(v, requires_grad=False), p, True)
            mask = drawn != 0
        scale = 0.0 if p == 1 else 1.0 / (1.0 - p)
        return v * mask * scale, mask

    return train if options["training"] else lambda v: v


def _view(options: Options):
    return lambda v: v.reshape(options["sizes"])


CALLS: dict[str, Callable[[Options], Callable[..., Made]]] = {
    "group_norm": _group_norm,
    "layer_norm": _layer_norm,
    "instance_norm": _instance_norm,
    "batch_norm": _batch_norm,
    "rms_norm": _rms_norm,
    "softmax": _softmax(torch.softmax),
    "log_softmax": _softmax(torch.log_softmax),
    **{f"max_pool{rank}d": _pool(getattr(functional, f"max_pool{rank}d"), *_MAX) for rank in (1, 2, 3)},
    **{f"avg_pool{rank}d": _pool(getattr(functional, f"avg_pool{rank}d"), *_MEAN) for rank in (1, 2, 3)},
    **{f"adaptive_avg_pool{rank}d": _pool(getattr(functional, f"adaptive_avg_pool{rank}d"), "output_size") for rank in (1, 2, 3)},
    "min": _fold(torch.min, picks=True),
    "max": _fold(torch.max, picks=True),
    "amin": _fold(torch.amin),
    "amax": _fold(torch.amax),
    "sum": _fold(torch.sum),
    "mean": _fold(torch.mean),
    "logsumexp": _fold(torch.logsumexp),
    "view": _view,
    "dropout": _dropout,
    "add": _arithmetic(torch.add),
    "sub": _arithmetic(torch.sub),
    "mul": _arithmetic(torch.mul),
    "div": _arithmetic(torch.div),
    "rsub": _arithmetic(torch.rsub),
    "rdiv": _arithmetic(lambda v, other: other / v),
    "minimum": _arithmetic(torch.minimum, tensors=True),
    "maximum": _arithmetic(torch.maximum, tensors=True),
    "hardtanh": _unary(functional.hardtanh, "min_val", "max_val"),
    "clamp": _clamp,
    "relu": _unary(torch.relu),
    "relu6": _unary(functional.relu6),
    "leaky_relu": _unary(functional.leaky_relu, "negative_slope"),
    "sigmoid": _unary(torch.sigmoid),
    "tanh": _unary(torch.tanh),
    "silu": _unary(functional.silu),
    "mish": _unary(functional.mish),
    "gelu": _gelu,
    "hardswish": _unary(functional.hardswish),
    "hardsigmoid": _unary(functional.hardsigmoid),
    "softplus": _unary(functional.softplus, "beta", "threshold"),
    "elu": _unary(functional.elu, "alpha"),
    "celu": _unary(functional.celu, "alpha"),
    "selu": _unary(functional.selu),
    "softsign": _unary(functional.softsign),
    "logsigmoid": _unary(functional.logsigmoid),
    "softshrink": _unary(functional.softshrink, "lambd"),
}


def _producer(name: str) -> Callable[[Options, str], Callable[..., Made]]:
    return lambda options, precision: Producer(name, options, precision)


# Rows that get the precision, too, whose arithmetic they keep: (options, precision) -> (value, weight, bias) -> y.
PRODUCERS: dict[str, Callable[[Options, str], Callable[..., Made]]] = {
    "linear": _producer("linear"),
    **{name: _producer(name) for name in (f"conv{kind}{rank}d" for kind in ("", "_transpose") for rank in (1, 2, 3))},
}
NAMES = frozenset((*CALLS, *PRODUCERS))
# Operators that torch has in float32 and lacks in 16 bits on a CPU.
SINGLE_ON_CPU = frozenset({"avg_pool3d"})


def lacks_16_bits(v: torch.Tensor) -> bool:
    """Does torch lack the operators of SINGLE_ON_CPU for this tensor's type and device?"""
    return v.device.type == "cpu" and v.dtype in (torch.float16, torch.bfloat16)


def in_single(function: Callable[..., torch.Tensor], *operands: Any, **further: Any) -> torch.Tensor:
    """``function`` of tensors and whatever else it takes, in float32, and its result rounded once to the first operand's type."""
    kind = operands[0].dtype
    return function(*(v.float() if isinstance(v, torch.Tensor) and v.dtype == kind else v for v in operands), **further).to(kind)


def _single_on_cpu(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda *operands: in_single(function, *operands) if lacks_16_bits(operands[0]) else function(*operands)


def call_of(name: str, options: Options, precision: str) -> Callable[..., Made]:
    """The function of the operator `name` with these options: (value, parameters..., second value...) -> y, or a tuple that y starts."""
    if name in PRODUCERS:
        return PRODUCERS[name](options, options.get("precision", precision))
    call = CALLS[name](options)
    return _single_on_cpu(call) if name in SINGLE_ON_CPU else call
