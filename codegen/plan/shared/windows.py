"""What the one-pass convolutions of all targets ask of a chain, and the constants, reasons and limits that they share."""

from __future__ import annotations

from collections.abc import Sequence
import math
from dataclasses import dataclass

from codegen.ir.apply import Constant, applies, describe
from codegen.ir.fused_form import FusedSpec
from codegen.numerics import ARITHMETICS, Arithmetic
from codegen.plan.model import Refusal
from codegen.plan.shared.values import LoadedOperand, norm_operands, loaded
from codegen.spec import Step

# Arithmetic by precision: tf32's promise (10 mantissa bits) is kept by one product of fp16 operands, at twice the rate of a TF32 one.
MATH = {"fp32": "fp16x3", "tf32": "fp16", "fp16": "fp16", "bf16": "bf16"}
FEWEST_HALVES = 4  # of K, 8 each, at fp32: a lone tap's result was off by 6e-7 on an H200 where large values cancel, twice what is allowed

FEWEST_PRODUCTS = 64  # of a sum in fp32 in front of operators that the norm follows: 27 in two parts were 1.1 times as far off as PyTorch's, which a sigmoid lets through

ONE_READ = "one read of x: the sign of a channel's factors decides whether a window's largest or smallest value counts, before the statistics are known"


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def ceil_to(a: int, b: int) -> int:
    """`a` rounded up to a multiple of `b`."""
    return ceil_div(a, b) * b


@dataclass(frozen=True)
class Windows:
    """A max_pool2d whose stride is its window, or 1 x 1 for none. `size` is (height, width), `output` the pooled plane."""

    size: tuple[int, int]
    output: tuple[int, int]


def split_at_pool(spec: FusedSpec) -> tuple[tuple[Step, ...], tuple[Step, ...]]:
    """The element-wise steps between the norm and the pool, and those behind the pool (all of them before it where there is no pool)."""
    before, *behind = spec.runs
    return before, behind[0] if behind else ()


def windows_of(spec: FusedSpec, strided: bool = False) -> Windows:
    """The pooling windows of the chain. Raises Refusal where the convolution or its windows are not what a one-pass kernel takes, `strided` whether
    that is any stride and dilation."""
    values = spec.producer.values
    for key, plain in (("groups", 1),) if strided else (("stride", (1, 1)), ("dilation", (1, 1)), ("groups", 1)):
        if values[key] != plain:
            raise Refusal(f"conv2d's {key} is {values[key]}: the one-pass kernel takes {key} {plain} only")
    if len(spec.pools) > 1:
        raise Refusal(f"{len(spec.pools)} max_pool2d operators follow the norm, and the one-pass kernel takes one")
    if not spec.pools:
        return Windows((1, 1), spec.norm.input_shape[2:])
    (pool,) = spec.pools
    size = pool.values["kernel_size"]
    if (pool.values["stride"] or size) != size:
        raise Refusal(f"max_pool2d's stride {pool.values['stride']} differs from its kernel_size {size}: windows overlap or leave gaps")
    if pool.values["padding"] != (0, 0) or pool.values["dilation"] != (1, 1):
        raise Refusal("max_pool2d with padding or dilation is not a plain tiling of the plane")
    output = pool.output_shape[2:]
    if any(count * length > whole for count, length, whole in zip(output, size, pool.input_shape[2:], strict=True)):
        raise Refusal("max_pool2d's ceil_mode gives windows that reach beyond the plane")
    return Windows(size, output)


def arithmetic_of(spec: FusedSpec) -> Arithmetic:
    """How a one-pass kernel multiplies at the spec's precision. Raises Refusal for a forced arithmetic that it does not have, and for fp32 sums
    that are too short for it."""
    wanted = MATH[spec.precision.name]
    served = (None, wanted, "fp16x3") if spec.precision.name == "tf32" else (None, wanted)
    served += ("tf32",) if spec.precision.name == "tf32" else ()
    if spec.math not in served:
        raise Refusal(f"math: {spec.math} is not among the one-pass convolution's arithmetics for {spec.precision.name}")
    arithmetic = ARITHMETICS["fp16x3" if spec.math == "fp16x3" else wanted]
    taps, channels = math.prod(spec.producer.values["kernel_size"]), spec.input_shape[1]
    if arithmetic.parts == 2 and ceil_div(channels, 8) * taps < FEWEST_HALVES:
        raise Refusal(
            f"{taps} tap{'s' if taps > 1 else ''} of {channels} channels are too few for fp32: what the tensor core cuts off does not average out"
        )
    if arithmetic.parts == 2 and spec.before_norm and channels * taps < FEWEST_PRODUCTS:
        raise Refusal(f"sums of {channels * taps} products in two parts are no more accurate than fp32's, and operators before the norm may magnify what they lose")
    return arithmetic


@dataclass(frozen=True)
class Direction:
    """Whether the norm and the operators up to the pool rise or fall with their input: the signs of a channel's `factors`, and a fixed one."""

    factors: tuple[LoadedOperand, ...]
    negative: bool

    @property
    def expression(self) -> str:
        """C: 1 where they rise, -1 where they fall."""
        signs = (["-1.0f"] if self.negative else []) + [f"copysignf(1.0f, {factor.value})" for factor in self.factors]
        return " * ".join(signs) or "1.0f"


def direction(spec: FusedSpec, steps: Sequence[Step]) -> Direction | None:
    """The direction of the norm followed by `steps`; None if one of them neither rises nor falls everywhere."""
    factors, negative = list(norm_operands(spec)[:1]), False
    for step, item in zip(steps, applies(spec, steps), strict=True):
        if item.multiplies:
            factors.append(loaded(item.operand))
        elif step.operator.name == "mul" and step.values["value"] is not None:
            negative ^= step.values["value"] < 0
        elif not item.monotone:
            return None
    return Direction(tuple(factors), negative)


def direction_of(spec: FusedSpec) -> Direction:
    """Whether a window's largest or smallest value counts, by channel. Raises Refusal where no single value decides."""
    found = direction(spec, split_at_pool(spec)[0])
    if found is None:
        raise Refusal("an operator between the norm and the pool neither rises nor falls everywhere, so no single value of a window decides")
    return found


def constant(name: str, value: object, why: str, kind: str = "int") -> Constant:
    return Constant(name, str(value), why, kind)


def shape_constants(spec: FusedSpec, windows: Windows, window_width: bool = True) -> list[Constant]:
    """Sizes of x, the filter, the convolution's result and y. `window_width`: does the kernel name a window's columns?"""
    c, values = constant, spec.producer.values
    _, in_channels, height, width = spec.input_shape
    out_height, out_width = spec.norm.input_shape[2:]
    kernel, padding = values["kernel_size"], values["padding"]
    window = "max_pool2d's kernel_size and stride" if windows.size != (1, 1) else "no pooling"
    return [
        c("kBatch", spec.batch, "samples"),
        c("kInChannels", in_channels, "in_channels"),
        c("kHeight", height, "rows of x"),
        c("kWidth", width, "values of a row of x"),
        c("kInPlane", "kHeight * kWidth", "values of a channel of x"),
        c("kKernelHeight", kernel[0], "conv2d's kernel_size"),
        c("kKernelWidth", kernel[1], "conv2d's kernel_size"),
        c("kTaps", "kKernelHeight * kKernelWidth", "filter taps"),
        *(c(f"k{key.capitalize()}{axis}", size, f"conv2d's {key}") for key in ("stride", "dilation") for axis, size in zip(("Height", "Width"), values[key], strict=True) if size > 1),
        *([c("kPaddingHeight", padding[0], "conv2d's padding")] if padding[0] else []),
        *([c("kPaddingWidth", padding[1], "conv2d's padding")] if padding[1] else []),
        c("kOutChannels", spec.channels, "out_channels"),
        c("kOutHeight", out_height, "rows of the convolution's result"),
        c("kOutWidth", out_width, "columns of the convolution's result"),
        c("kWindowHeight", windows.size[0], window),
        *([c("kWindowWidth", windows.size[1], window)] if window_width else []),
        c("kPooledHeight", windows.output[0], "rows of a channel of y"),
        c("kPooledWidth", windows.output[1], "values of a row of y"),
        c("kPooledPlane", "kPooledHeight * kPooledWidth", "values of a channel of y"),
    ]  # fmt: skip


def reasons(spec: FusedSpec, arithmetic: Arithmetic, exact: str) -> list[str]:
    """What is said of the chain's route behind ONE_READ; `exact` names what is computed in fp32 where fp16's range does not suffice."""
    found = []
    if spec.before_norm:
        found.append(f"{', '.join(describe(step) for step in spec.before_norm)} before the norm: statistics see their results")
    if spec.precision.name == "tf32" and arithmetic.parts == 1:
        found.append(f"one product of fp16 operands has TF32's 10 mantissa bits at twice its rate; {exact} is computed in fp32")
    return found
