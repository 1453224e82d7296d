"""What halves can carry of fp32 operands on Hopper: the limits beyond which a row of x or W is computed again in fp32."""

from __future__ import annotations

from codegen.ir.apply import Constant
from codegen.numerics import FAINT, FAINT_SHARE, float_literal
from codegen.plan.gemm_sm90a.layout import Form
from codegen.plan.shared.halves import small_constant

WEIGHT_SHIFT = 12  # W is multiplied by 2^12 before its split in registers: rows whose largest value lies in [2^-12, 16) fit
ROUNDED_SMALLEST = 2.0**-11  # largest value of a row of W below which rounding to half loses more than TF32 would


def row_limits(form: Form, columns: int) -> list[Constant]:
    """What decides whether a row that is scaled by its largest value keeps its bits."""
    return [
        small_constant(form.parts),
        Constant("kSmallLimit", str(max(4, columns // 1024)), "in_features / 1024, at least 4: with more such values a row is refused"),
        Constant("kNearLimit", str(max(256, columns // 16)), "in_features / 16, at least 256: near values that excuse small ones"),
    ]


def window(form: Form, k: int, padding: int, what: str) -> list[Constant]:
    """What decides whether `k` values of a row of W, `what` in the text, survive their conversion in registers, and the scale that they get there; `padding`
    zeros may stand behind them."""
    faint, limit = FAINT[form.parts], k // FAINT_SHARE
    shift = WEIGHT_SHIFT if form.parts == 2 else 0
    scale = [
        Constant("kWeightScale", float_literal(2.0**shift), "scale that brings W's low parts into the range of halves", "float"),
        Constant("kWeightScaleHalves", _twice(shift), "kWeightScale as two halves in a word", "uint32_t"),
        Constant("kSmallestHalf", float_literal(1.0), "least maximum of a scaled row: a loss of 2^-25 is then 2^-25 of it", "float"),
    ]
    rounded = [
        Constant("kSmallestHalf", float_literal(ROUNDED_SMALLEST), "least maximum of a row: a loss of 2^-25 is then 2^-14 of it", "float"),
    ]
    return [
        *(scale if form.parts == 2 else rounded),
        Constant("kFaint", float_literal(2.0 ** (faint - shift)), f"2^{faint}{' / kWeightScale' if shift else ''}: values below lose too many bits", "float"),
        Constant("kFaintHalves", _twice(faint), f"2^{faint} as two halves in a word", "uint32_t"),
        Constant("kFaintLimit", float_literal(float(limit)), f"{what} / {FAINT_SHARE}: with more such values a row is recomputed", "float"),
        # A count in halves is exact up to 2048.
        Constant("kFaintSeen", float_literal(float(min(limit, 2047) + padding)), "with more zeros or faint values a row is examined again", "float"),
    ]


def _twice(exponent: int) -> str:
    """A power of two as two halves in a word."""
    half = (exponent + 15) << 10
    return f"0x{half:04x}{half:04x}"
