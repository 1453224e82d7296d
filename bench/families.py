"""Families of data that a generated model is verified on: ordinary ones, and those that break careless kernels.

Each family makes x and all parameters. Unless it says otherwise the parameters are random, gamma, beta, scale and bias too, with negative and
zero values among them: at its initial weights (gamma = 1, beta = 0) a layer never tests its affine part.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from bench.data import Draw, Parameters
from bench.outliers import first_tap, outlier_anywhere, outlier_first
from codegen.ir.fused_form import departure, fused
from codegen.spec import Spec

# How far (in powers of two) data may be scaled before eager PyTorch itself overflows in the storage type, or squares overflow in fp32.
_REACH = {"fp32": 50, "tf32": 50, "bf16": 50, "fp16": 6}
# A mean this many times the spread: large enough that E[x^2] - E[x]^2 fails, small enough that the sum before the norm still resolves the spread.
_OFFSET = {"fp32": 1000.0, "tf32": 1000.0, "fp16": 30.0, "bf16": 8.0}
# Powers of two between the largest and the smallest values of one row.
_SPAN = {"fp32": 24, "tf32": 24, "bf16": 24, "fp16": 10}
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
    weight[(weight.shape[0] // 2, 0, *(first_tap(d.spec, axis) for axis in range(weight.dim() - 2)))] = float("nan")
    return d.x(), parameters


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
        Family("outlier first", "the first value of each group far off", outlier_first, applies=_has_spare_input),
        Family("outlier anywhere", "one value of each group far off", outlier_anywhere, applies=_has_spare_input),
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
