"""Families of data that a generated model is verified on: ordinary ones, and those that break careless kernels.

Each family makes x and all parameters. Unless it says otherwise the parameters are random, gamma, beta, scale and bias too, with negative and
zero values among them: at its initial weights (gamma = 1, beta = 0) a layer never tests its affine part.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from codegen.ir.fused_form import departure, fused
from codegen.ops import Kind
from codegen.spec import Spec

Parameters = dict[str, torch.Tensor]

# How far (in powers of two) data may be scaled before eager PyTorch itself overflows in the storage type, or squares overflow in fp32.
_REACH = {"fp32": 50, "tf32": 50, "bf16": 50, "fp16": 6}
# A mean this many times the spread: large enough that E[x^2] - E[x]^2 fails, small enough that the sum before the norm still resolves the spread.
_OFFSET = {"fp32": 1000.0, "tf32": 1000.0, "fp16": 30.0, "bf16": 8.0}
# Powers of two between the largest and the smallest values of one row.
_SPAN = {"fp32": 24, "tf32": 24, "bf16": 24, "fp16": 10}
# An outlier in a group of the norm is this many times the spread of the others.
_OUTLIER = {"fp32": 1e6, "tf32": 1e6, "bf16": 1e6, "fp16": 4096.0}
# A value that meets only zeros in the other operand.
_LOSSY = {"fp32": 1.7e12, "tf32": 1.7e12, "bf16": 1.7e12, "fp16": 6e4}
# How far a weight lies above the others of its row where it meets only zeros.
_FAINT = {"fp32": 2.0**20, "tf32": 2.0**20, "bf16": 2.0**20, "fp16": 2.0**8}
# Magnitudes around the largest fp16 value, where a split into fp16 parts overflows unless it is scaled.
_HIGH = {"fp32": (2.0**15, 2.0**17), "tf32": (2.0**15, 2.0**17), "bf16": (2.0**15, 2.0**17), "fp16": (2.0**5, 2.0**7)}
# Values that fp32 holds without their leading bit; of fp16, for 16 bits of range.
_SUBNORMAL = {"fp32": 1e-39, "tf32": 1e-39, "bf16": 1e-39, "fp16": 2.0**-16}
# Values whose squares, and one value whose products' squares, exceed fp32's range.
_BEYOND_SQUARES, _BEYOND_OUTLIER = 2.0**118, 3e38
# Exponents, from the least to the greatest, that scale the channels of x and of the weight, and the weight's rows.
_SCALES = {"fp32": (-12, 12), "tf32": (-12, 12), "bf16": (-12, 12), "fp16": (-4, 2)}
_ROWS = {"fp32": 8.0, "tf32": 8.0, "bf16": 8.0, "fp16": 2.0}  # decades on both sides of 1


@dataclass(frozen=True)
class Family:
    """`make(draw)` returns x and the parameters, `Draw.finish` adds what else a chain takes; `initial` families keep the weights the constructor drew.
    `beyond`: squares exceed fp32's range, so that eager is a yardstick only with an exact norm in the place of its own."""

    name: str
    summary: str
    make: Callable[[Draw], tuple[torch.Tensor, Parameters]]
    initial: bool = False
    beyond: bool = False
    applies: Callable[[Spec], bool] = lambda spec: True
    any_chain: bool = False  # else only chains of a producer and a norm: the data aim at their places

    def serves(self, spec: Spec) -> bool:
        """Can the family be drawn for the spec?"""
        form = fused(spec)
        return (self.any_chain or form is not None) and self.applies(form or spec)


class Draw:
    """Random tensors for one spec on one device, in float32; `spec.precision`'s storage type comes last, in `finish`."""

    def __init__(self, spec: Spec, device: torch.device, seed: int):
        self.spec, self.device, self.precision = fused(spec) or spec, device, spec.precision.name
        self._generator = torch.Generator(device).manual_seed(seed)

    def rand(self, *shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=self._generator, device=self.device)

    def randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self._generator, device=self.device)

    def integers(self, low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=self._generator, device=self.device)

    def x(self, kind: str = "randn") -> torch.Tensor:
        return getattr(self, kind)(*self.spec.input_shape)

    def parameters(self) -> Parameters:
        """Random values for every parameter; the producer's like PyTorch's initial ones, about a tenth of the factors negative or zero."""
        found: Parameters = {}
        for step in self.spec.chain:
            for parameter in step.parameters:
                key, shape = step.key(parameter), parameter.shape
                if step.operator.kind is Kind.PRODUCER:
                    bound = 1 / math.sqrt(math.prod(step.parameters[0].shape[1:]))
                    found[key] = self.rand(*shape).mul_(2 * bound).sub_(bound)
                elif step.operator.name == "mul" or (step.operator.kind is Kind.NORM and parameter.suffix == "weight"):
                    value = self.randn(*shape)
                    found[key] = value.masked_fill_(self.rand(*shape) < 0.03, 0.0)
                elif step.operator.name == "div":
                    found[key] = torch.where(self.rand(*shape) < 0.5, -1.0, 1.0) * (0.5 + self.rand(*shape))
                else:
                    found[key] = self.randn(*shape)
        return found

    def state(self) -> Parameters:
        """Random running statistics, as some training would leave them."""
        made = {
            "zeros": lambda shape: self.randn(*shape).mul_(0.5), "ones": lambda shape: self.rand(*shape).add_(0.5),
            "count": lambda shape: self.integers(1, 1000, *shape),
        }  # fmt: skip
        return {key: made[fill](shape) for key, shape, fill in self.spec.buffers}

    @property
    def weight(self) -> str:
        """Key of the producer's weight."""
        return self.spec.producer.key(self.spec.producer.parameters[0])

    @property
    def shifts(self) -> list[str]:
        """Keys of what is added before the norm: the producer's bias and `add`'s parameters."""
        keys = [self.spec.producer.key(p) for p in self.spec.producer.parameters[1:]]
        return keys + [step.key(p) for step in self.spec.before_norm if step.operator.name == "add" for p in step.parameters]

    def reference_channels(self) -> torch.Tensor:
        """Indices 0..channels-1, shaped to scale the producer's weight by output channel."""
        return torch.arange(self.spec.channels, device=self.device).view(-1, *[1] * (len(self.spec.producer.parameters[0].shape) - 1))

    def finish(self, x: torch.Tensor, parameters: Parameters) -> tuple[tuple[torch.Tensor, ...], Parameters]:
        """All inputs, x first, and the parameters with random running statistics (neither, for those the constructor drew), in the spec's storage type."""
        dtype = getattr(torch, self.spec.precision.dtype)
        others = [getattr(self, given.values)(*given.shape) for given in self.spec.inputs[1:]]
        state = self.state() if parameters else {}
        return (
            (x.to(dtype), *(other.to(dtype) for other in others)),
            {key: value.to(dtype) if value.is_floating_point() else value for key, value in (parameters | state).items()},
        )  # fmt: skip


def _uniform(d: Draw):
    return d.x("rand"), d.parameters()


def _normal(d: Draw):
    return d.x(), d.parameters()


def _shifted(d: Draw):
    """Each channel of x (each feature, of a matrix) has a mean and a spread of its own."""
    shape = d.spec.input_shape
    own = (1, shape[1], *[1] * (len(shape) - 2)) if len(shape) > 1 else shape
    return d.x().mul_(d.rand(*own).mul_(1.5).add_(0.5)).add_(d.rand(*own).mul_(4.0).sub_(2.0)), d.parameters()


def _benchmark(d: Draw):
    return d.x(d.spec.values), {}


def _offset(d: Draw):
    parameters = d.parameters()
    bias = d.spec.producer.key(d.spec.producer.parameters[1])
    parameters[bias] += _OFFSET[d.precision]
    return d.x(), parameters


def _input_offset(d: Draw):
    return d.x("rand").mul_(0.01).add_(1.0).mul_(_OFFSET[d.precision] / 10), d.parameters()


def _constant_rows(d: Draw):
    batch = d.spec.input_shape[0]
    values = d.randn(batch)
    values[0] = 0.0
    return values.view(-1, *[1] * (len(d.spec.input_shape) - 1)).expand(d.spec.input_shape).clone(), d.parameters()


def _constant_groups(d: Draw):
    """All channels alike, and every position of a sample alike: each group is constant, so the norm must return beta."""
    parameters = d.parameters()
    parameters[d.weight] = parameters[d.weight][:1].expand(parameters[d.weight].shape).clone()
    for key in d.shifts:
        parameters[key] = parameters[key].flatten()[:1].expand(parameters[key].numel()).reshape(parameters[key].shape).clone()
    x = d.x()
    if x.dim() > 2:
        x = x[..., :1, :1].expand(x.shape).clone()
    return x, parameters


def _wide_range(d: Draw):
    x = d.x()
    return torch.ldexp(x, -d.integers(0, _SPAN[d.precision] + 1, *x.shape)), d.parameters()


def _wide_weights(d: Draw):
    parameters = d.parameters()
    half = _SPAN[d.precision] // 2
    parameters[d.weight] = torch.ldexp(parameters[d.weight], d.reference_channels() % (2 * half + 1) - half)
    return d.x(), parameters


def _split_high(d: Draw):
    low, high = _HIGH[d.precision]
    x = d.x("rand").mul_(high - low).add_(low)
    return torch.where(d.x("rand") < 0.5, x, -x), d.parameters()


def _split_low(d: Draw):
    """Rows of ever smaller values, down to where fp16 parts become subnormal and vanish; nothing is added to hide them."""
    x, parameters = d.x(), d.parameters()
    rows = torch.arange(x.shape[0], device=d.device) % (_SPAN[d.precision] + 1)
    for key in d.shifts:
        parameters[key] *= 2.0**-12
    return torch.ldexp(x, -rows.view(-1, *[1] * (x.dim() - 1))), parameters


def _huge(d: Draw):
    return d.x() * 2.0 ** _REACH[d.precision], d.parameters()


def _tiny(d: Draw):
    factor = 2.0 ** -_REACH[d.precision]
    parameters = d.parameters()
    for key in d.shifts:
        parameters[key] *= factor
    if len(d.spec.norm.parameters) == 2:
        parameters[d.spec.norm.key(d.spec.norm.parameters[1])].zero_()
    return d.x() * factor, parameters


def _nonfinite(d: Draw):
    """Samples 0..3 hold NaN, +inf, -inf and both infinities; the others are ordinary and must stay so."""
    x = d.x()
    flat = x.view(x.shape[0], -1)
    nan, inf = float("nan"), float("inf")
    for row, values in enumerate(((nan,), (inf,), (-inf,), (inf, -inf))):
        if row < x.shape[0]:
            for i, value in enumerate(values):
                flat[row, (3 + 5 * i) % flat.shape[1]] = value
    return x, d.parameters()


def _nan_channel(d: Draw):
    """One output channel's weights hold a NaN: its own group is lost in every sample, and no other.

    A convolution's NaN is at a tap that meets x: what becomes of one that meets only padding is each library's own affair.
    """
    parameters = d.parameters()
    weight = parameters[d.weight]
    weight[(weight.shape[0] // 2, 0, *(_first_tap(d.spec, axis) for axis in range(weight.dim() - 2)))] = float("nan")
    return d.x(), parameters


def _outlier_first(d: Draw):
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


def _outlier_anywhere(d: Draw):
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
        tap.append(_first_tap(d.spec, axis))
        begin = tap[axis] * dilation - padding
        reachable = min(outputs, (size - 1 - begin) // stride + 1)
        at = torch.zeros_like(rows) if first else d.integers(0, reachable, batch)
        pixel.append(begin + stride * at)
    x[:, ::each] = 0.0
    x[rows, :, pixel[0], pixel[1]] = x[rows, :, pixel[0], pixel[1]].index_fill(1, torch.arange(0, x.shape[1], each, device=d.device), 1.0)
    weight[:, 0] = 0.0
    weight[starts if first else starts + d.integers(0, width, len(starts)), 0, tap[0], tap[1]] = heights


def _first_tap(spec: Spec, axis: int) -> int:
    """The first place of a convolution's kernel along an axis (0: height) that meets x at the first output, or the last place where none does."""
    padding, dilation = (_pair(spec.producer.values[name])[axis] for name in ("padding", "dilation"))
    return min(-(-padding // dilation), spec.producer.parameters[0].shape[2 + axis] - 1)


def _pair(value) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else tuple(value)


def _lossy_split(d: Draw):
    """Each row of x holds a huge value whose weights are zero, every other row of the weight one that meets zeros in x: what carries the result
    is lost in a split that scales a row by its maximum alone. Even rows of a linear's x are [huge, four values, 0, ...]."""
    x, parameters = d.x(), d.parameters()
    weight, huge = parameters[d.weight], _LOSSY[d.precision]
    each = weight.shape[1]
    signs = torch.where(d.x("rand") < 0.5, -huge, huge)
    if x.dim() == 2 and each > 5:
        x[::2, 5:] = 0.0
        x[0, 1:5] = torch.tensor([1.3, 2.7, -0.9, 0.4], device=d.device)
    x[:, ::each] = signs[:, ::each]
    weight[:, 0] = 0.0
    if each > 2:
        x[:, each - 1 :: each] = 0.0
        weight[::2, -1] = huge
    return x, parameters


def _faint_weights(d: Draw):
    """Each row of the weight is faint but for one value of ordinary size, which meets zeros in x: a split that goes by the largest value of a row,
    or by none, loses what carries the result."""
    x, parameters = d.x(), d.parameters()
    weight, scale = parameters[d.weight], _FAINT[d.precision]
    x *= scale
    x[:, weight.shape[1] - 1 :: weight.shape[1]] = 0.0
    weight /= scale
    weight[:, -1] = 4.0
    for key in d.shifts:
        parameters[key].zero_()
    return x, parameters


def _random_scales(d: Draw):
    """Input channels of x and of the weight are scaled by powers of two of their own, and a third of them is zero in the one, in the other or in both: what
    an operand's largest values are says nothing of those that meet something. The weight's rows have scales of their own, too."""
    x, parameters = d.x(), d.parameters()
    weight, (low, high) = parameters[d.weight], _SCALES[d.precision]
    inputs = weight.shape[1]
    dead = d.integers(0, 9, inputs)  # 0: in x, 1: in the weight, 2: in both
    dead[d.integers(0, inputs, 1)] = 3  # one lives
    channels = torch.arange(x.shape[1], device=d.device) % inputs
    spread = [1] * (x.dim() - 2)
    x = torch.ldexp(x, d.integers(low, high + 1, inputs)[channels].view(1, -1, *spread)).masked_fill(((dead == 0) | (dead == 2))[channels].view(1, -1, *spread), 0.0)
    weight = torch.ldexp(weight, d.integers(low, high + 1, inputs).view(1, -1, *spread)).masked_fill(((dead == 1) | (dead == 2)).view(1, -1, *spread), 0.0)
    parameters[d.weight] = torch.ldexp(weight, d.integers(low // 2, high // 2 + 1, weight.shape[0]).view(-1, 1, *spread))
    return x, parameters


def _subnormal(d: Draw):
    parameters = d.parameters()
    for key in d.shifts:
        parameters[key].zero_()
    if len(d.spec.norm.parameters) == 2:
        parameters[d.spec.norm.key(d.spec.norm.parameters[1])].zero_()
    return d.x() * _SUBNORMAL[d.precision], parameters


def _beyond_squares(d: Draw):
    return d.x() * _BEYOND_SQUARES, d.parameters()


def _beyond_outlier(d: Draw):
    """Every other sample holds one value near the largest of fp32, at a random place."""
    x = d.x()
    flat = x.view(x.shape[0], -1)
    rows = torch.arange(0, len(flat), 2, device=d.device)
    flat[rows, d.integers(0, flat.shape[1], len(rows))] = _BEYOND_OUTLIER
    return x, d.parameters()


def _beyond_sums(d: Draw):
    """All values of a group are large and of one sign, so that their sum exceeds fp32's range; those of neighbouring channels differ by a quarter, about.

    Equal ones, far above what is added to them, would be constant in float64 too, whose mean is then off by more than their spread.
    """
    parameters = d.parameters()
    bias = d.spec.producer.key(d.spec.producer.parameters[1])
    size = torch.finfo(torch.float32).max / 64
    odd = torch.arange(d.spec.channels, device=d.device) % 2
    parameters[bias] = d.rand(d.spec.channels).mul_(0.2).add_(0.8).add_(odd, alpha=0.25).mul_(size)
    return d.x(), parameters


def _wide_rows(d: Draw):
    """Rows of the weight lie anywhere within decades."""
    parameters, decades = d.parameters(), _ROWS[d.precision]
    scales = 10.0 ** (d.rand(d.spec.channels).mul_(2 * decades).sub_(decades))
    parameters[d.weight] *= scales.view(-1, *[1] * (parameters[d.weight].dim() - 1))
    return d.x(), parameters


def _reaches_beyond(spec: Spec) -> bool:
    """Whether the storage type holds values whose squares fp32 does not."""
    return spec.precision.name != "fp16"


def _has_spare_input(spec: Spec) -> bool:
    return spec.producer.parameters[0].shape[1] > 1


FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Family("benchmark", "the spec's own inputs, initial weights", _benchmark, initial=True, any_chain=True),
        Family("uniform", "uniform in [0, 1)", _uniform, any_chain=True),
        Family("normal", "standard normal", _normal, any_chain=True),
        Family("shifted", "a mean and a spread for each channel of x", _shifted, applies=lambda spec: departure(spec.chain) is not None, any_chain=True),
        Family("offset", "large mean, small spread before the norm", _offset, applies=lambda spec: len(spec.producer.parameters) > 1),
        Family("input offset", "large mean, tiny spread in x", _input_offset),
        Family("constant rows", "each sample one value, the first zero", _constant_rows),
        Family("constant groups", "every group of the norm constant", _constant_groups),
        Family("wide range", "magnitudes far apart within a row of x", _wide_range),
        Family("wide weights", "magnitudes far apart between rows of the weight", _wide_weights),
        Family("split high", "around the largest fp16 value", _split_high),
        Family("split low", "towards the smallest fp16 values", _split_low),
        Family("lossy split", "huge values that only meet zeros", _lossy_split, applies=_has_spare_input),
        Family("faint weights", "small weights beside one that only meets zeros", _faint_weights, applies=_has_spare_input),
        Family("outlier first", "the first value of each group far off", _outlier_first, applies=_has_spare_input),
        Family("outlier anywhere", "one value of each group far off", _outlier_anywhere, applies=_has_spare_input),
        Family("huge", "scaled up by a large power of two", _huge),
        Family("tiny", "scaled down by a large power of two, beta = 0", _tiny),
        Family("random scales", "x's and the weight's channels scaled and masked at random", _random_scales, applies=_has_spare_input),
        Family("wide rows", "rows of the weight anywhere within decades", _wide_rows),
        Family("subnormal", "x without its leading bit, beta = 0", _subnormal),
        Family("squares overflow", "squares of the norm's input beyond fp32", _beyond_squares, beyond=True, applies=_reaches_beyond),
        Family("one square overflows", "one value near fp32's largest in every other sample", _beyond_outlier, beyond=True, applies=_reaches_beyond),
        Family(
            "sums overflow", "sums of the norm's input beyond fp32", _beyond_sums, beyond=True,
            applies=lambda spec: _reaches_beyond(spec) and len(spec.producer.parameters) > 1 and spec.group_channels > 1,
        ),
        Family("nonfinite", "NaN and infinities in four samples", _nonfinite),
        Family("nan channel", "NaN in one output channel's weights", _nan_channel),
    )
}
