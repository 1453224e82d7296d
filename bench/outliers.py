"""Data with an outlier in every group of the norm: one value far off, beside a spread that statistics must not lose."""

from __future__ import annotations

import math

import torch

from bench.data import Draw, Parameters
from codegen.spec import Spec

# An outlier in a group of the norm is this many times the spread of the others.
_OUTLIER = {"fp32": 1e6, "tf32": 1e6, "bf16": 1e6, "fp16": 4096.0}


def outlier_first(d: Draw):
    """The first value of every group is the outlier: what a kernel takes as the shift of its statistics says nothing about the others.

    A linear's outliers come from the bias of each group's first channel. A convolution's come from one pixel in every other group (only the
    group's first value is off) and from the bias in the rest (its whole first channel is).
    """
    x, parameters, height = _small_spread(d)
    starts = torch.arange(0, d.spec.channels, d.spec.group_channels, device=d.device)
    signs = 1.0 - 2.0 * (starts // d.spec.group_channels // 2 % 2)
    bias = next((key for key in d.shifts if parameters[key].numel() == d.spec.channels and d.spec.group_channels > 1), None)
    spiked = slice(0, None) if bias is None else slice(0, None, 2) if x.dim() > 2 else slice(0, 0)
    offset = torch.ones(len(starts), dtype=torch.bool, device=d.device)
    offset[spiked] = False
    if bias is not None:
        parameters[bias].view(-1)[starts[offset]] = height * signs[offset]
    if not bool(offset.all()):
        _spike(d, x, parameters, starts[~offset], height * signs[~offset], first=True)
    _magnify(d, parameters, starts, offset)
    return x, parameters


def outlier_anywhere(d: Draw):
    """One outlier in every group, at a random channel; at another channel (linear) or pixel (convolution) from sample to sample."""
    x, parameters, height = _small_spread(d)
    starts = torch.arange(0, d.spec.channels, d.spec.group_channels, device=d.device)
    signs = 1.0 - 2.0 * (starts // d.spec.group_channels % 2)
    _spike(d, x, parameters, starts, height * signs, first=False)
    _magnify(d, parameters, starts, torch.zeros(len(starts), dtype=torch.bool, device=d.device))
    return x, parameters


def _small_spread(d: Draw) -> tuple[torch.Tensor, Parameters, float]:
    """x and parameters with a spread before the norm that is _OUTLIER times smaller than the outlier's height, and that height.

    The height makes the group's variance 1/256 or more, far above eps, and stays near 1 for a linear, where bounds may come before the norm.
    """
    height = max(1.0, math.sqrt(d.spec.group_size) / 16)
    parameters = d.parameters()
    for key in d.shifts:
        parameters[key] *= height / _OUTLIER[d.precision]
    return d.x() * (height / _OUTLIER[d.precision]), parameters, height


def _magnify(d: Draw, parameters: Parameters, starts: torch.Tensor, whole_channel: torch.Tensor) -> None:
    """Scale gamma so that the ordinary values of each group, normalised to about 1/sqrt(values per outlier), come out near 1.

    In groups whose first channel is the outlier (`whole_channel`), that channel's gamma brings it near 1 too.
    """
    if not d.spec.norm.parameters:
        return
    rare = torch.full((len(starts),), float(d.spec.group_size), device=d.device)
    rare[whole_channel] = float(d.spec.group_channels)
    factor = rare.sqrt()
    if d.precision == "fp16":
        factor = torch.minimum(factor, 1e4 / factor)  # the outlier itself must stay finite
    factor = factor.repeat_interleave(d.spec.group_channels)
    firsts = starts[whole_channel]
    factor[firsts] /= float(d.spec.group_channels)
    parameters[d.spec.norm.key(d.spec.norm.parameters[0])] *= factor


def _spike(d: Draw, x: torch.Tensor, parameters: Parameters, starts: torch.Tensor, heights: torch.Tensor, first: bool) -> None:
    """Make one output of each group that begins at channel `starts` come out near `heights`, in place.

    A few inputs (a linear's first features, a convolution's first input channel) are given up for it: all weights on them are zero but the one
    of the outlier's channel.
    """
    weight, batch, width = parameters[d.weight], x.shape[0], d.spec.group_channels
    rows = torch.arange(batch, device=d.device)
    if x.dim() == 2:
        count = 1 if first else max(1, min(8, x.shape[1] // 2))
        x[:, :count] = 0.0
        x[rows, rows % count] = 1.0
        weight[:, :count] = 0.0
        for column in range(count):
            weight[starts if first else starts + d.integers(0, width, len(starts)), column] = heights
        return
    values, each = d.spec.producer.values, weight.shape[1]
    pixel, tap = [], []
    for axis in (0, 1):
        stride, padding, dilation = (_pair(values[name])[axis] for name in ("stride", "padding", "dilation"))
        size, outputs = x.shape[2 + axis], d.spec.producer.output_shape[2 + axis]
        tap.append(first_tap(d.spec, axis))
        begin = tap[axis] * dilation - padding
        reachable = min(outputs, (size - 1 - begin) // stride + 1)
        at = torch.zeros_like(rows) if first else d.integers(0, reachable, batch)
        pixel.append(begin + stride * at)
    x[:, ::each] = 0.0
    x[rows, :, pixel[0], pixel[1]] = x[rows, :, pixel[0], pixel[1]].index_fill(1, torch.arange(0, x.shape[1], each, device=d.device), 1.0)
    weight[:, 0] = 0.0
    weight[starts if first else starts + d.integers(0, width, len(starts)), 0, tap[0], tap[1]] = heights


def first_tap(spec: Spec, axis: int) -> int:
    """The first place of a convolution's kernel along an axis (0: height) that meets x at the first output, or the last place where none does."""
    padding, dilation = (_pair(spec.producer.values[name])[axis] for name in ("padding", "dilation"))
    return min(-(-padding // dilation), spec.producer.parameters[0].shape[2 + axis] - 1)


def _pair(value) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else tuple(value)
