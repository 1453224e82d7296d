"""Random chains that meet the conditions of the passes of codegen/algebra, and chains that just miss them."""

from __future__ import annotations

from random import Random
from typing import Any

Drawn = tuple[list[int], list[Any]]  # the shape of x, its batch first, and the chain
SCALARS = ({"mul": {"value": 1.5}}, {"div": {"value": -3.0}}, {"add": {"value": 0.25}}, {"sub": {"value": 2.0}}, {"rsub": {"value": 1.0}})
BOUNDS = ("relu", "relu6", {"clamp": {"min": -0.5, "max": None}}, {"clamp": {"min": -0.7, "max": 0.9}}, {"hardtanh": {"min_val": -0.4, "max_val": 1.25}})
TAILS = ([], ["gelu"], ["sigmoid", {"mul": {"value": 2.0}}], [{"add": {"name": "tail", "shape": [1]}}])


def some(random: Random, choices: tuple[Any, ...], most: int) -> list[Any]:
    return [random.choice(choices) for _ in range(random.randint(0, most))]


def identity(random: Random) -> Drawn:
    """A step that gives what it takes, among others."""
    shape = [random.randint(1, 3), random.randint(2, 9), random.randint(2, 9)]
    kind = random.randrange(4)
    if kind == 0:
        fold = random.choice(("sum", "mean", "max", "min", "amax", "amin", "logsumexp"))
        return shape, [{"max": {"dim": 2, "keepdim": True}}, {fold: {"dim": 2, "keepdim": random.random() < 0.5}}, "tanh"]
    if kind == 1:
        pool = random.choice(("max_pool1d", "avg_pool1d"))
        return shape, ["silu", {pool: {"kernel_size": 1}}, "tanh"]
    if kind == 2:
        first = random.choice(("sigmoid", "relu", "hardsigmoid", {"softmax": {"dim": 1}}))
        return shape, [first, random.choice(("relu", {"leaky_relu": {"negative_slope": 0.1}}, "elu", "celu")), {"add": {"value": 1.0}}]
    return shape, ["tanh", "gelu", random.choice(({"hardtanh": {"min_val": -1.0, "max_val": 1.0}}, {"clamp": {"min": -0.5, "max": None}})), {"mul": {"value": 2.0}}]


def merge(random: Random) -> Drawn:
    """Two bounds, or two poolings, that are one."""
    if random.random() < 0.4:
        return [random.randint(1, 3), 40], [random.choice(BOUNDS[2:]), {"clamp": {"min": -0.25, "max": 0.5}}, {"mul": {"value": 3.0}}]
    rank, average = random.randint(1, 3), random.random() < 0.5
    kind = "avg" if average else "max"
    first = [random.randint(2, 3) for _ in range(rank)]
    stride = first if average else [random.randint(1, size) for size in first]
    second = [random.randint(2, 3) for _ in range(rank)]
    size = [a + s * (b - 1) + random.randint(0, 5) for a, s, b in zip(first, stride, second, strict=True)]
    pools = [{f"{kind}_pool{rank}d": {"kernel_size": k, "stride": s}} for k, s in ((first, stride), (second, [random.randint(1, 2) for _ in range(rank)]))]
    return [random.randint(1, 2), random.randint(1, 3), *size], [*pools, "tanh"]


def row_sum(random: Random) -> Drawn:
    """A sum or mean over a linear's features."""
    inner, outer = random.randint(1, 40), random.randint(2, 40)
    shape = [random.randint(3, 5), *some(random, (2, 3), 1), inner]
    shifts = (*SCALARS, {"sub": {"name": "each", "shape": [outer]}}, {"rsub": {"name": "every", "shape": [1]}}, {"mul": {"name": "scale", "shape": []}})
    middle = {str(step): step for step in some(random, shifts, 3)}.values()  # names stand once
    fold = {random.choice(("sum", "mean")): {"dim": random.choice((-1, len(shape) - 1)), "keepdim": random.random() < 0.5}}
    return shape, [{"linear": {"name": "fc", "in_features": inner, "out_features": outer, "bias": random.random() < 0.7}}, *middle, fold, *random.choice(TAILS)]


def pooled_rows(random: Random) -> Drawn:
    """An average pooling over a linear's features."""
    size, stride, count = random.randint(2, 5), random.randint(1, 6), random.randint(1, 6)
    outer = size + stride * (count - 1) + random.randint(0, stride - 1)
    shape = [random.randint(1, 5), random.randint(1, 40)]
    linear = {"linear": {"name": "fc", "in_features": shape[1], "out_features": outer, "bias": random.random() < 0.7}}
    renamed = [{"unsqueeze": {"dim": 1}}, *some(random, SCALARS, 2), {"avg_pool1d": {"kernel_size": size, "stride": stride}}]
    return shape, [linear, *some(random, SCALARS, 1), *renamed, {"squeeze": {"dim": 1}}, *random.choice(TAILS)]


def _affine(random: Random, channels: int, rank: int) -> list[Any]:
    """Scales and shifts of whole channels."""
    each = {"shape": [channels, *[1] * rank]}
    choices = (*SCALARS, {"mul": {"name": "scale", **each}}, {"add": {"name": "shift", **each}}, {"batch_norm": {"name": "bn"}})
    return list({str(step): step for step in some(random, choices, 2)}.values())


def pooled_taps(random: Random) -> Drawn:
    """An average pooling behind a convolution that becomes one of summed taps with fewer products."""
    rank, transposed = random.randint(1, 3), random.random() < 0.5
    channels, outer = random.randint(1, 4), random.randint(1, 4)
    if transposed:
        stride = [random.randint(2, 3) for _ in range(rank)]
        padding = [random.randint(0, 1) for _ in range(rank)]
        taps = [s + p for s, p in zip(stride, padding, strict=True)]  # windows begin and end where x does
        window = apart = [s * random.randint(1, 2) for s in stride]
        size = [random.randint(4, 6) for _ in range(rank)]
    else:
        stride = [random.randint(1, 2) for _ in range(rank)]
        taps = [s + random.randint(1, 2) for s in stride]  # windows that overlap
        padding = [random.randint(0, 1) for _ in range(rank)]
        window = apart = [random.randint(3, 4) for _ in range(rank)]
        size = [k + s * (2 * n + 1) for k, s, n in zip(taps, stride, window, strict=True)]
    name = f"conv{'_transpose' if transposed else ''}{rank}d"
    conv = {name: {"name": "conv", "in_channels": channels, "out_channels": outer, "kernel_size": taps, "stride": stride, "padding": padding, "bias": random.random() < 0.7}}
    pool = {f"avg_pool{rank}d": {"kernel_size": window, "stride": apart}}
    return [random.randint(1, 3), channels, *size], [conv, *_affine(random, outer, rank), pool, *random.choice(TAILS)]


def summed_input(random: Random) -> Drawn:
    """A sum or mean over leading spatial axes behind a convolution."""
    rank, transposed = random.randint(1, 3), random.random() < 0.5
    channels, outer = random.randint(1, 4), random.randint(2, 4)
    stride = [random.randint(1, 2) if transposed else 1 for _ in range(rank)]
    taps = [random.randint(2, 3) for _ in range(rank)]
    extra = {"output_padding": [s - 1 for s in stride]} if transposed else {}
    extra |= {"dilation": [random.randint(1, 2) for _ in range(rank)], "padding": [random.randint(0, 1) for _ in range(rank)]}
    name = f"conv{'_transpose' if transposed else ''}{rank}d"
    conv = {name: {"name": "conv", "in_channels": channels, "out_channels": outer, "kernel_size": taps, "stride": stride, "bias": random.random() < 0.7, **extra}}
    axes = list(range(2, 2 + random.randint(1, rank)))
    fold = {random.choice(("sum", "mean")): {"dim": axes, "keepdim": random.random() < 0.5}}
    if len(axes) == rank and random.random() < 0.3:
        fold = {f"adaptive_avg_pool{rank}d": {"output_size": 1}}
    size = [random.randint(8, 14) for _ in range(rank)]
    return [random.randint(1, 3), channels, *size], [conv, *_affine(random, outer, rank), fold, *random.choice(TAILS)]


DRAWS = {draw.__name__: draw for draw in (identity, merge, row_sum, pooled_rows, pooled_taps, summed_input)}
_FC = {"linear": {"name": "fc", "in_features": 12, "out_features": 10}}
_CONV = {"conv2d": {"name": "conv", "in_channels": 3, "out_channels": 4, "kernel_size": 3}}
_UP = {"conv_transpose2d": {"name": "up", "in_channels": 3, "out_channels": 4, "kernel_size": 3, "stride": 2, "padding": 1}}
_MEAN = {"mean": {"dim": [2, 3]}}
MISSES: dict[str, tuple[Drawn, ...]] = {
    "identity": (
        ([2, 3, 1], [{"sum": {"dim": [1, 2]}}]),
        ([2, 3], [{"softmax": {"dim": 1}}, {"clamp": {"min": 0.0, "max": 0.9}}]),
        ([2, 3, 8], [{"max_pool1d": {"kernel_size": 1, "stride": 2}}]),
        ([2, 3, 8, 8], [{"avg_pool2d": {"kernel_size": 1, "divisor_override": 2}}]),
        ([2, 8], ["tanh", "relu"]),
        ([2, 8], ["sigmoid", "selu"]),
        ([2, 8], ["tanh", {"softshrink": {"lambd": 0.5}}, "relu"]),
        ([2, 1], [{"mul": {"name": "scale", "shape": [4]}}, {"sum": {"dim": 1}}]),
    ),
    "merge": (
        ([2, 8], [{"clamp": {"min": 1.0, "max": None}}, {"clamp": {"min": None, "max": 0.0}}]),
        ([2, 8], [{"clamp": {"min": 0.0, "max": 0.5}}, {"mul": {"value": 2.0}}, {"clamp": {"min": 0.0, "max": 0.75}}]),
        ([2, 8], [{"clamp": {"name": "low", "min": 0.0, "max": 0.5}}, {"clamp": {"min": 0.1, "max": 0.75}}, {"add": {"from": "low"}}]),
        ([2, 3, 12], [{"max_pool1d": {"kernel_size": 2, "padding": 1}}, {"max_pool1d": {"kernel_size": 2}}]),
        ([2, 3, 13], [{"max_pool1d": {"kernel_size": 2, "ceil_mode": True}}, {"max_pool1d": {"kernel_size": 2}}]),
        ([2, 3, 13], [{"max_pool1d": {"kernel_size": 2, "dilation": 2}}, {"max_pool1d": {"kernel_size": 2}}]),
        ([2, 3, 13], [{"max_pool1d": {"kernel_size": 2, "stride": 3}}, {"max_pool1d": {"kernel_size": 2}}]),
        ([2, 3, 13], [{"avg_pool1d": {"kernel_size": 3, "stride": 2}}, {"avg_pool1d": {"kernel_size": 2}}]),
        ([2, 3, 12], [{"avg_pool1d": {"kernel_size": 2}}, {"max_pool1d": {"kernel_size": 2}}]),
        ([2, 3, 8, 8], [{"avg_pool2d": {"kernel_size": 2, "divisor_override": 3}}, {"avg_pool2d": {"kernel_size": 2}}]),
    ),
    "row_sum": (
        ([4, 12], [_FC, "relu", {"sum": {"dim": 1}}]),
        ([4, 12], [_FC, {"max": {"dim": 1}}]),
        ([4, 3, 12], [_FC, {"sum": {"dim": 1}}]),
        ([4, 3, 12], [_FC, {"sum": {"dim": [1, 2]}}]),
        ([4, 12], [_FC, {"mul": {"name": "each", "shape": [10]}}, {"sum": {"dim": 1}}]),
        ([4, 12], [_FC, {"rdiv": {"value": 2.0}}, {"sum": {"dim": 1}}]),
        ([1, 12], [_FC, {"sum": {"dim": 1}}]),
        ([4, 12], [_FC, {"div": {"name": "less", "value": 2.0}}, {"sum": {"dim": 1, "keepdim": True}}, {"add": {"from": "less"}}]),
    ),
    "pooled_rows": (
        ([4, 12], [_FC, {"unsqueeze": {"dim": 1}}, {"avg_pool1d": {"kernel_size": 3, "padding": 1}}]),
        ([4, 12], [_FC, {"unsqueeze": {"dim": 1}}, {"max_pool1d": {"kernel_size": 3}}]),
        ([4, 12], [_FC, {"unsqueeze": {"dim": 1}}, {"avg_pool1d": {"kernel_size": 3, "ceil_mode": True}}]),
        ([4, 12], [_FC, "relu", {"unsqueeze": {"dim": 1}}, {"avg_pool1d": {"kernel_size": 2}}]),
        ([4, 12], [_FC, {"unsqueeze": {"dim": 2}}, {"avg_pool1d": {"kernel_size": 1, "stride": 2}}]),
    ),
    "pooled_taps": (
        ([2, 3, 11, 11], [_CONV, "relu", {"avg_pool2d": {"kernel_size": 3}}]),
        ([2, 3, 11, 11], [_CONV, {"avg_pool2d": {"kernel_size": 2, "stride": 1}}]),
        ([2, 3, 11, 11], [_CONV, {"avg_pool2d": {"kernel_size": 3, "padding": 1}}]),
        ([2, 3, 12, 12], [_CONV, {"avg_pool2d": {"kernel_size": 3, "ceil_mode": True}}]),
        ([2, 3, 11, 11], [_CONV, {"max_pool2d": {"kernel_size": 3}}]),
        ([2, 3, 6, 6], [_UP, {"avg_pool2d": {"kernel_size": 3}}]),
        ([2, 3, 11, 11], [_CONV, {"add": {"name": "plane", "shape": [9, 9]}}, {"avg_pool2d": {"kernel_size": 3}}]),
        ([2, 4, 11, 11], [{"conv2d": {"name": "conv", "in_channels": 4, "out_channels": 4, "kernel_size": 3, "groups": 2}}, {"avg_pool2d": {"kernel_size": 3}}]),
        ([2, 3, 15, 15], [{"conv2d": {"name": "conv", "in_channels": 3, "out_channels": 4, "kernel_size": 1, "stride": 2}}, {"avg_pool2d": {"kernel_size": 3}}]),
    ),
    "summed_input": (
        ([2, 3, 8, 8], [_CONV, "relu", _MEAN]),
        ([2, 3, 8, 8], [_CONV, {"mean": {"dim": 3}}]),
        ([2, 3, 8, 8], [_CONV, {"mean": {"dim": [1, 2, 3]}}]),
        ([2, 3, 8, 8], [_CONV, {"amax": {"dim": [2, 3]}}]),
        ([2, 3, 8, 8], [{"conv2d": {"name": "conv", "in_channels": 3, "out_channels": 4, "kernel_size": 3, "stride": 2}}, _MEAN]),
        ([2, 4, 8, 8], [{"conv2d": {"name": "conv", "in_channels": 4, "out_channels": 4, "kernel_size": 3, "groups": 2}}, _MEAN]),
        ([2, 3, 8, 8], [_CONV, {"mul": {"name": "plane", "shape": [6, 6]}}, _MEAN]),
        ([2, 3, 8, 8], ["relu", _CONV, _MEAN]),
    ),
}  # fmt: skip

