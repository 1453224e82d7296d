"""Forms of the convolution as a product on Hopper: how each precision's operands lie on the multiplier, and how its warpgroups share the tiles."""

from __future__ import annotations

from dataclasses import dataclass

from codegen.numerics import Precision


@dataclass(frozen=True)
class Form:
    """How operands are multiplied.

    `parts`: values of 16 bits that an operand is split into; sums of several are promoted. `scaled`: operands are fp32, halves of which are scaled by powers of
    two, looked at, and computed again where they lose too much. `in_turn`: a warpgroup has tiles of its own, and finishes one while the other multiplies; else
    both share a tile. `sums` of a thread.
    """

    parts: int
    scaled: bool
    in_turn: bool
    sums: int

    @property
    def products(self) -> int:
        return 3 if self.parts == 2 else 1


FORMS = {
    "fp32": Form(2, True, False, 64),  # 64 sums and as many of two groups in flight: 192 registers
    "tf32": Form(1, True, True, 128),
    "fp16": Form(1, False, True, 128),
    "bf16": Form(1, False, True, 128),
}
MATHS = {"fp32": "fp16x3", "tf32": "fp16"}  # what a spec may ask for, where that has not the precision's own name


def form_of(precision: Precision) -> Form:
    return FORMS[precision.name]


def operand_type(form: Form, precision: Precision) -> str:
    """The C type of what is multiplied."""
    return "__half" if form.scaled else precision.c_type


def operand_dtype(form: Form, precision: Precision) -> str:
    return "float16" if form.scaled else precision.dtype
