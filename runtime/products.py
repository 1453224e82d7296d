"""Producers by torch's libraries: the product, again where a backward needs it, and its derivatives.

What torch takes from process-wide switches is an argument here wherever that is possible, and nothing sets a switch, so threads do
not meet. Precision fp32 rules TF32 out and tf32 asks for it: cuDNN's calls take that as an argument, and where the switch for matrix
products says something else, a product goes through cuDNN as a convolution of 1x1. Results are the same bits on every run.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as functional

COLUMNS = 1 << 26  # values of the largest temporary of a convolution's weight gradient: 256 MB in fp32

_convolution = torch.ops.aten.cudnn_convolution.default
_transposed_convolution = torch.ops.aten.cudnn_convolution_transpose.default
_on_cpu = {
    **{f"conv{rank}d": getattr(functional, f"conv{rank}d") for rank in (1, 2, 3)},
    **{f"conv_transpose{rank}d": getattr(functional, f"conv_transpose{rank}d") for rank in (1, 2, 3)},
}


def on_cuda(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cuda"


def within_stride(x, stride, extra):
    """The input and ``output_padding`` of a transposed convolution for cuDNN, which refuses an ``extra`` of a stride or more: that is a step of zeros at x's end."""
    steps = [size // step for size, step in zip(extra, stride)]
    if not any(steps):
        return x, list(extra)
    return functional.pad(x, [size for step in reversed(steps) for size in (0, step)]), [size % step for size, step in zip(extra, stride)]


class Producer:
    """A linear or a convolution: ``(x, weight, bias) -> y``, and ``derive`` for the gradients of the three.

    ``options`` are those of the step. Under autograd a call is one node whose backward is ``derive``.
    """

    def __init__(self, name: str, options: Mapping[str, Any], precision: str):
        self.name = name
        self.tf32 = precision == "tf32"
        self.single = precision in ("fp32", "tf32")
        self.transposed = "transpose" in name
        if name != "linear":
            self.stride, self.padding, self.dilation = (list(options[key]) for key in ("stride", "padding", "dilation"))
            self.extra = list(options.get("output_padding", (0,) * len(self.stride)))
            self.groups = options["groups"]

    def __call__(self, x, weight, bias):
        if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in (x, weight, bias)):
            return _Produced.apply(self, x, weight, bias)
        return self.produce(x, weight, bias)

    # ---- the product -------------------------------------------------------------------------------------------------

    def produce(self, x, weight, bias, deterministic: bool | None = None):
        """The result, (samples, channels, ...) of a convolution."""
        if self.name == "linear":
            return self._linear(x, weight, bias)
        if not on_cuda(x):
            if self.transposed:
                return _on_cpu[self.name](x, weight, bias, self.stride, self.padding, self.extra, self.groups, self.dilation)
            return _on_cpu[self.name](x, weight, bias, self.stride, self.padding, self.dilation, self.groups)
        cudnn = torch.backends.cudnn
        benchmark, fixed = (cudnn.benchmark, cudnn.deterministic) if deterministic is None else (False, deterministic)
        made = self._convolve(x, weight, self.extra, benchmark, fixed)
        return made if bias is None else made.add_(bias.view(1, -1, *(1,) * len(self.stride)))

    def _convolve(self, x, weight, extra, benchmark: bool, deterministic: bool, transposed: bool | None = None):
        """cuDNN's convolution with this geometry, transposed or not; one spatial axis goes as a plane one row high."""
        transposed = self.transposed if transposed is None else transposed
        flat = len(self.stride) == 1
        if transposed:
            x, extra = within_stride(x, self.stride, extra)
        x, weight = (x.unsqueeze(2), weight.unsqueeze(2)) if flat else (x, weight)
        padding, stride, dilation, extra = self._axes(extra, flat)
        if transposed:
            made = _transposed_convolution(x, weight, padding, extra, stride, dilation, self.groups, benchmark, deterministic, self.tf32)
        else:
            made = _convolution(x, weight, padding, stride, dilation, self.groups, benchmark, deterministic, self.tf32)
        return (made.squeeze(2) if flat else made).contiguous()

    def _axes(self, extra, flat: bool) -> tuple[list[int], ...]:
        front = [0] if flat else []
        ones = [1] if flat else []
        return front + self.padding, ones + self.stride, ones + self.dilation, front + list(extra)

    def _linear(self, x, weight, bias):
        if not self._switch_differs(x):
            return functional.linear(x, weight, bias)
        y = self.matmul(x.reshape(-1, x.shape[-1]), weight.t()).view(*x.shape[:-1], -1)
        return y if bias is None else y.add_(bias)

    def matmul(self, a, b):
        """``a @ b`` for two matrices, with TF32 or without as the precision says."""
        if not self._switch_differs(a):
            return a @ b
        rows, inner = a.shape
        weight = b.t().contiguous().view(-1, inner, 1, 1)
        return _convolution(a.contiguous().view(rows, inner, 1, 1), weight, [0, 0], [1, 1], [1, 1], 1, False, True, self.tf32).reshape(rows, -1)

    def _switch_differs(self, tensor) -> bool:
        """Would torch's own product of matrices round, or not, against the precision?"""
        return self.single and on_cuda(tensor) and (torch.backends.cuda.matmul.fp32_precision == "tf32") != self.tf32

    # ---- its derivatives ---------------------------------------------------------------------------------------------

    def derive(self, grad, x, weight, wanted) -> tuple:
        """The gradients of (x, weight, bias) for that of the result; None for each that is not ``wanted``."""
        if self.name == "linear":
            rows = grad.reshape(-1, grad.shape[-1])
            return (
                self.matmul(rows, weight).view(*grad.shape[:-1], -1) if wanted[0] else None,
                self.matmul(rows.t(), x.reshape(-1, x.shape[-1])) if wanted[1] else None,
                rows.sum(0) if wanted[2] else None,
            )
        bias = grad.sum([axis for axis in range(grad.dim()) if axis != 1]) if wanted[2] else None
        if not on_cuda(grad):
            extra = self.extra if self.transposed else [0] * len(self.stride)
            made = torch.ops.aten.convolution_backward(
                grad, x, weight, None, self.stride, self.padding, self.dilation, self.transposed, extra, self.groups, [wanted[0], wanted[1], False]
            )  # fmt: skip
            return made[0], made[1], bias
        return self._input_gradient(grad, x, weight) if wanted[0] else None, self._weight_gradient(grad, x, weight) if wanted[1] else None, bias

    def _input_gradient(self, grad, x, weight):
        if self.transposed:
            made = self._convolve(grad, weight, [], False, True, transposed=False)
            return made[(..., *(slice(size) for size in x.shape[2:]))].contiguous()  # an output_padding of a stride or more holds windows of no input
        reached = [
            (out - 1) * stride - 2 * padding + dilation * (kernel - 1) + 1
            for out, stride, padding, dilation, kernel in zip(grad.shape[2:], self.stride, self.padding, self.dilation, weight.shape[2:])
        ]
        rest = [size - own for size, own in zip(x.shape[2:], reached)]  # values that no window's last step reached
        return self._convolve(grad, weight, rest, False, True, transposed=True)

    def _weight_gradient(self, grad, x, weight):
        """One product per sample of the gradient and the windows that met the weight, summed over samples in order, in float32.

        A transposed convolution is another one's input gradient, so its weight meets the windows of the gradient.
        """
        slid, met = (grad, x) if self.transposed else (x, grad)
        padding = [size for axis in reversed(self.padding) for size in (axis, axis)]
        slid = functional.pad(slid, padding) if any(padding) else slid
        samples, channels = slid.shape[:2]
        of_sample, of_channel, *of_axes = slid.stride()
        inner, kernel, places = channels // self.groups, weight.shape[2:], met.shape[2:]
        windows = slid.as_strided(
            (samples, self.groups, inner, *kernel, *places),
            (of_sample, inner * of_channel, of_channel, *(d * s for d, s in zip(self.dilation, of_axes)), *(d * s for d, s in zip(self.stride, of_axes))),
        )
        taps, outer = inner * kernel.numel(), met.shape[1] // self.groups
        total = torch.zeros(self.groups, outer, taps, dtype=torch.float32, device=x.device)
        first_place = (slice(None),) * (2 + len(kernel))  # the axes of `windows` between the samples and the places
        for of_samples, of_rows in _pieces(samples, places, self.groups * taps):
            count = (of_rows.stop - of_rows.start) * places[1:].numel()
            left = met[of_samples, :, of_rows].reshape(-1, outer, count)
            part = self._batched(left, windows[(of_samples, *first_place, of_rows)].reshape(-1, taps, count))
            total += part.view(-1, *total.shape).sum(0)
        return total.view(weight.shape).to(grad.dtype)

    def _batched(self, a, b):
        """``a @ b^T`` for batches of matrices, in float32 whatever the type of the factors."""
        if a.dtype is not torch.float32:
            return torch.bmm(a, b.transpose(1, 2), out_dtype=torch.float32)
        if not self._switch_differs(a):
            return torch.bmm(a, b.transpose(1, 2))
        return torch.stack([self.matmul(left, right.t()) for left, right in zip(a, b)])


def _pieces(samples: int, places: torch.Size, height: int) -> Iterator[tuple[slice, slice]]:
    """Samples and rows of places, so many at a time that ``height`` values for each place are at most COLUMNS."""
    rows, row = places[0], places[1:].numel()
    if height * rows * row <= COLUMNS:
        at_once = max(1, COLUMNS // (height * rows * row))
        yield from ((slice(begin, min(begin + at_once, samples)), slice(0, rows)) for begin in range(0, samples, at_once))
        return
    at_once = max(1, COLUMNS // (height * row))
    for sample in range(samples):
        yield from ((slice(sample, sample + 1), slice(begin, min(begin + at_once, rows))) for begin in range(0, rows, at_once))


class _Produced(torch.autograd.Function):
    """``apply(producer, x, weight, bias)``: the product as one node of autograd."""

    @staticmethod
    def forward(ctx, producer: Producer, x, weight, bias):
        ctx.producer = producer
        ctx.save_for_backward(x, weight)
        return producer.produce(x, weight, bias, deterministic=True)

    @staticmethod
    def backward(ctx, grad):
        return (None, *ctx.producer.derive(grad.contiguous(), *ctx.saved_tensors, ctx.needs_input_grad[1:]))
