"""New memory for the results and temporaries of a call, from torch's allocator on the current stream, at the least cost.

``torch.empty`` takes 2 microseconds, most of them for finding out what is asked for. The code that torch.compile emits has a shorter way, taken
here as well where this torch has it. It sees no mode and no subclass, so nothing above the kernels may use it.
"""

import functools
from typing import Callable

import torch


def allocator(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Callable[[], torch.Tensor]:
    """A function that returns a new contiguous tensor, its values undefined, each time it is called."""
    general = functools.partial(torch.empty, shape, dtype=dtype, device=device)
    short = _short_ways().get(device.type)
    stride = _contiguous(shape)
    if short is None:
        return general
    if device.type == "cpu":
        return lambda: short(shape, stride, dtype)
    index, current = device.index, getattr(torch._C, "_cuda_getDevice", None)
    if current is None:
        return general
    return lambda: short(shape, stride, dtype) if current() == index else general()  # the short way allocates on the current device


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * max(size, 1))
    return tuple(reversed(strides)) if shape else ()


@functools.lru_cache(maxsize=None)
def _short_ways() -> dict[str, Callable]:
    """By device type; tried out on the CPU first, as they are no public part of torch."""
    try:
        from torch._C._dynamo import guards

        ways = {"cpu": guards._empty_strided_cpu, "cuda": guards._empty_strided_cuda}
        made = ways["cpu"]((2, 3), (3, 1), torch.float16)
        found = (tuple(made.shape), made.is_contiguous(), made.dtype, made.device.type)
    except (ImportError, AttributeError, TypeError, RuntimeError):
        return {}
    return ways if found == ((2, 3), True, torch.float16, "cpu") else {}
