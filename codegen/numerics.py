"""Precisions, arithmetics and the rounding of literals: what a result promises and how a kernel computes it.

The promises are those of docs/numerics.md. `Precision` is about the result; `Arithmetic` is how a GEMM reaches it.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass


@dataclass(frozen=True)
class Precision:
    """A promise about the result: the storage type of x, y and the parameters, and the error allowed.

    `atol` = `rtol` is the element-wise tolerance of the benchmark's harness at this precision.
    """

    name: str
    dtype: str
    c_type: str
    itemsize: int
    mantissa_bits: int
    tolerance: float
    suffix: str


PRECISIONS: dict[str, Precision] = {
    p.name: p
    for p in (
        Precision("fp32", "float32", "float", 4, 23, 1e-4, ""),
        Precision("tf32", "float32", "float", 4, 23, 1e-2, "_tf32"),
        Precision("fp16", "float16", "__half", 2, 10, 1e-2, "_fp16"),
        Precision("bf16", "bfloat16", "__nv_bfloat16", 2, 7, 1e-2, "_bf16"),
    )
}

FP32 = PRECISIONS["fp32"]


@dataclass(frozen=True)
class Arithmetic:
    """How a GEMM multiplies: operand type on the multiplier, parts an operand is split into, products kept, promotion interval.

    `products` lists (part of x, part of W), the corrections before the leading product: they are summed while the accumulator is
    still small, which loses less. `promote` is the number of k steps' worth of K after which the tensor core's truncating
    accumulator is added to an fp32 register with a rounded addition (0: never). `error` is the measured relative error of a GEMM with
    K = 8192 on uniform data.
    """

    name: str
    operand: str
    parts: int
    products: tuple[tuple[int, int], ...]
    promote: int
    error: float
    summary: str


ARITHMETICS: dict[str, Arithmetic] = {
    a.name: a
    for a in (
        Arithmetic("ffma", "fp32", 1, ((0, 0),), 0, 1.7e-6, "fused multiply-add on the CUDA cores"),
        Arithmetic("tf32x3", "tf32", 2, ((1, 0), (0, 1), (0, 0)), 32, 3.7e-7, "three TF32 products of operands split in two, promoted"),
        Arithmetic("fp16x3", "fp16", 2, ((1, 0), (0, 1), (0, 0)), 64, 3.2e-7, "three fp16 products of scaled operands split in two, promoted"),
        Arithmetic("bf16x3", "bf16", 2, ((1, 0), (0, 1), (0, 0)), 64, 4.3e-6, "three bf16 products of operands split in two, promoted"),
        Arithmetic("tf32", "tf32", 1, ((0, 0),), 0, 2.7e-4, "one TF32 product of operands rounded to nearest"),
        Arithmetic("fp16", "fp16", 1, ((0, 0),), 0, 2.7e-4, "one fp16 product"),
        Arithmetic("bf16", "bf16", 1, ((0, 0),), 0, 2.6e-3, "one bf16 product"),
    )
}

MATH_CHOICES: dict[str, tuple[str, ...]] = {
    "fp32": ("ffma", "fp16x3", "tf32x3", "bf16x3"),
    "tf32": ("tf32", "ffma", "fp16x3", "tf32x3"),
    "fp16": ("fp16",),
    "bf16": ("bf16",),
}


# By parts of an operand in halves: exponent below which a value loses more than the precision allows, 2^-19 or 2^-11 of it. Where a FAINT_SHARE-th of
# the values is fainter, they may carry the result: the others' factors may be zeros.
FAINT = {2: -6, 1: -14}
FAINT_SHARE = 8

_LARGEST = {"float16": 65504.0, "bfloat16": 255 * 2.0**120}
# The least magnitude that a constant keeps: in float32 that of a normal number, below which digits are lost. A bound in float16 is compared with values
# as coarse as itself, so it may be any number but what becomes 0.
SMALLEST = {"float32": 2.0**-126, "bfloat16": 2.0**-126, "float16": 2.0**-24}


class ConstantError(ValueError):
    """A number that is none in the type which kernels hold it in; the message is the end of a sentence that begins with the number."""


def to_float32(value: float) -> float:
    """`value` rounded to the nearest float32. Raises OverflowError beyond its range."""
    return struct.unpack("<f", struct.pack("<f", value))[0]


def round_to(precision: Precision, value: float) -> float:
    """`value` as a number of the precision's storage type (nearest, ties to even): the bound that PyTorch compares with.

    Raises OverflowError when it lies beyond the type's range, also where rounding would bring it back, as PyTorch does.
    """
    if abs(value) > _LARGEST.get(precision.dtype, math.inf):
        raise OverflowError(f"{value} is beyond the range of {precision.dtype}")
    if precision.dtype == "float16":
        return struct.unpack("<e", struct.pack("<e", value))[0]
    single = to_float32(value)
    if precision.dtype == "bfloat16":
        bits = struct.unpack("<I", struct.pack("<f", single))[0]
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        return struct.unpack("<f", struct.pack("<I", bits))[0]
    return single


def constant(value: float, precision: Precision, bound: bool) -> float:
    """`value` as kernels hold it: a bound in the storage type, as PyTorch compares with it, any other number in float32.

    Raises ConstantError where the type has no such number: where it would become infinite, 0, or one of the last few before 0, which differ from it by
    more than rounding and of which the reciprocal may be infinite.
    """
    dtype = precision.dtype if bound else "float32"
    try:
        rounded = round_to(precision, value) if bound else to_float32(value)
    except OverflowError:
        raise ConstantError(f"is beyond the range of {dtype}") from None
    if value and abs(rounded) < SMALLEST[dtype]:
        raise ConstantError(f"is too small for {dtype}, whose numbers begin at {SMALLEST[dtype]:.3g}")
    return rounded


def float_literal(value: float) -> str:
    """The shortest C literal with an `f` suffix that reads back as float32(value)."""
    single = to_float32(value)
    text = next(t for digits in range(1, 10) if to_float32(float(t := f"{single:.{digits}g}")) == single)
    mantissa, _, exponent = text.partition("e")
    if "." not in mantissa:
        mantissa += ".0"
    return f"{mantissa}e{int(exponent)}f" if exponent else f"{mantissa}f"
