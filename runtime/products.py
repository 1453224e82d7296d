"""The producer's products in a CUDA backward: its result again, and its derivatives, by torch's libraries.

What torch takes from process-wide switches is an argument here wherever that is possible, and nothing sets a switch, so threads do
not meet. ``exact`` (precision fp32) rules TF32 out: cuDNN's calls take that as an argument, and where the switch for matrix products
is on, a product goes through cuDNN as a convolution of 1x1. Results are the same bits on every run.
"""

import torch
import torch.nn.functional as functional

from .manifest import LibraryStep

COLUMNS = 1 << 26  # values of the largest temporary of a convolution's weight gradient: 256 MB in fp32

_convolution = torch.ops.aten.cudnn_convolution.default
_transposed_convolution = torch.ops.aten.cudnn_convolution_transpose.default


def produce(step: LibraryStep, exact: bool, x, weight, bias):
    """The producer's result, (samples, channels, ...)."""
    if step.call == "linear":
        if not _meets_tf32(exact):
            return functional.linear(x, weight, bias)
        y = matmul(x, weight.t(), exact)
        return y if bias is None else y.add_(bias)
    stride, padding, dilation, groups = _geometry(step)
    y = _convolution(x, weight, padding, stride, dilation, groups, False, True, not exact).contiguous()
    return y if bias is None else y.add_(bias.view(1, -1, 1, 1))


def derive(step: LibraryStep, exact: bool, grad, x, weight, wanted: list[bool]) -> tuple:
    """The gradients of (x, weight, bias) for that of the result; None for each that is not ``wanted``."""
    bias = grad.sum([axis for axis in range(grad.dim()) if axis != 1]) if wanted[2] else None
    if step.call == "linear":
        return matmul(grad, weight, exact) if wanted[0] else None, matmul(grad.t(), x, exact) if wanted[1] else None, bias
    return (
        _input_gradient(step, exact, grad, x.shape, weight) if wanted[0] else None,
        _weight_gradient(step, exact, grad, x, weight.shape).to(grad.dtype) if wanted[1] else None,
        bias,
    )


def matmul(a, b, exact: bool):
    """``a @ b`` for two matrices; ``exact``: float32 is not rounded to TF32."""
    if not _meets_tf32(exact):
        return a @ b
    rows, inner = a.shape
    weight = b.t().contiguous().view(-1, inner, 1, 1)
    return _convolution(a.contiguous().view(rows, inner, 1, 1), weight, [0, 0], [1, 1], [1, 1], 1, False, True, False).reshape(rows, -1)


def _meets_tf32(exact: bool) -> bool:
    """Would torch's own product of matrices round what has to stay ``exact``?"""
    return exact and torch.backends.cuda.matmul.fp32_precision == "tf32"


def _input_gradient(step: LibraryStep, exact: bool, grad, shape, weight):
    stride, padding, dilation, groups = _geometry(step)
    reached = [
        (grad.shape[2 + i] - 1) * stride[i] - 2 * padding[i] + dilation[i] * (weight.shape[2 + i] - 1) + 1 for i in range(2)
    ]
    rest = [shape[2 + i] - reached[i] for i in range(2)]  # rows and columns that no window's last step reached
    return _transposed_convolution(grad, weight, padding, rest, stride, dilation, groups, False, True, not exact).contiguous()


def _weight_gradient(step: LibraryStep, exact: bool, grad, x, shape):
    """One product per sample of the gradient and the windows that met the weight, summed over samples in order, in float32."""
    stride, padding, dilation, groups = _geometry(step)
    x = functional.pad(x, (padding[1], padding[1], padding[0], padding[0])) if any(padding) else x
    samples, channels = x.shape[:2]
    of_sample, of_channel, of_row, of_column = x.stride()
    inner, (rows, columns) = channels // groups, grad.shape[2:]
    windows = x.as_strided(
        (samples, groups, inner, *shape[2:], rows, columns),
        (of_sample, inner * of_channel, of_channel, dilation[0] * of_row, dilation[1] * of_column, stride[0] * of_row, stride[1] * of_column),
    )
    taps, places = shape[1] * shape[2] * shape[3], rows * columns
    at_once = max(1, COLUMNS // (groups * taps * places))
    total = torch.zeros(groups, shape[0] // groups, taps, dtype=torch.float32, device=x.device)
    for begin in range(0, samples, at_once):
        met = windows[begin : begin + at_once].reshape(-1, taps, places)
        part = _batched(grad[begin : begin + at_once].reshape(-1, shape[0] // groups, places), met, exact)
        total += part.view(-1, *total.shape).sum(0)
    return total.view(shape)


def _batched(a, b, exact: bool):
    """``a @ b^T`` for batches of matrices, in float32 whatever the type of the factors."""
    if a.dtype is not torch.float32:
        return torch.bmm(a, b.transpose(1, 2), out_dtype=torch.float32)
    if not _meets_tf32(exact):
        return torch.bmm(a, b.transpose(1, 2))
    return torch.stack([matmul(left, right.t(), exact) for left, right in zip(a, b)])


def _geometry(step: LibraryStep) -> tuple:
    options = step.options
    return list(options["stride"]), list(options["padding"]), list(options["dilation"]), options["groups"]
