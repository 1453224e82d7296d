"""Scaled halves: what decides how fp32 operands of the Hopper kernels are scaled before they are split, and which of them keep their bits."""

from __future__ import annotations

from codegen.ir.apply import Constant
from codegen.numerics import float_literal
from codegen.plan.shared.fitted import TRUNCATION, Fitted

TOP_EXPONENT = 14  # what is scaled ends up with its largest value in [2^14, 2^15)
LARGEST_SHIFT = 114  # the reciprocal of the scale times 2^-12 must stay a normal float
RESTORED = Fitted(2**-23 / 64, "share", TRUNCATION)  # of a sum that the tensor core cuts off on average, for each k
SMALL = {2: -2, 1: -14}  # by the halves of a value, the exponent below which scaled values lose some of their 22 bits or 11


def scale_constants(what: str) -> list[Constant]:
    """What decides the scale of a `what`, row or sample, by its largest value."""
    return [
        Constant("kTopExponent", str(TOP_EXPONENT), f"exponent of a scaled {what}'s largest value, which lies in [2^14, 2^15)"),
        Constant("kLargestShift", str(LARGEST_SHIFT), "largest exponent of a scale: its inverse must be a normal float"),
        Constant("kSmallestExponent", str(TOP_EXPONENT - LARGEST_SHIFT - 1), f"kTopExponent - kLargestShift - 1: {what}s below cannot be scaled up"),
    ]


def small_constant(parts: int) -> Constant:
    return Constant("kSmall", float_literal(2.0 ** SMALL[parts]), f"2^{SMALL[parts]}: scaled values below lose bits", "float")
