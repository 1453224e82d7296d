"""The kernel that turns fp32 rows of x or W into the halves that the Hopper GEMM multiplies, as data: what templates/gemm_sm90a/split.cu.j2 reads."""

from __future__ import annotations

import math
from dataclasses import dataclass

from codegen.ir.apply import Constant
from codegen.ir.fused_form import FusedSpec
from codegen.plan.gemm_sm90a.layout import Form
from codegen.plan.gemm_sm90a.window import row_limits
from codegen.plan.model import Kernel
from codegen.plan.shared.halves import scale_constants

X_SPLIT, X_UNSCALE, WEIGHT_SPLIT, WEIGHT_UNSCALE = "x_split", "x_unscale", "weight_split", "weight_unscale"


@dataclass(frozen=True)
class SplitKernel(Kernel):
    """Rows of fp32 scaled by powers of two and split into (or rounded to) halves."""

    parts: int = 2
    permuted: bool = False
    dependent: bool = False
    ragged: bool = False
    padded_rows: bool = False
    weight_shift: int = 0
    columns: int = 0

    @property
    def row_pitch(self) -> str:
        """C name of the halves from one row to the next."""
        return "kPitch" if self.columns % 8 else "kColumns"

    @property
    def in_fours(self) -> bool:
        """Do all rows start at multiples of 16 bytes?"""
        return self.columns % 4 == 0


def padded_columns(columns: int) -> int:
    """Values from one row of a split operand to the next, which the copy engine wants at multiples of 16 bytes."""
    return math.ceil(columns / 8) * 8


def fits_a_block(columns: int) -> bool:
    """Does a row fit into the registers of the splitting kernel's block?"""
    return math.ceil(columns / 4) <= 8 * 1024


def split_kernel(spec: FusedSpec, operand: str, form: Form, rows: int, padded_rows: int, weight_shift: int) -> SplitKernel | None:
    """The kernel that splits x or W; None where a row does not fit into a block's registers."""
    columns = spec.input_shape[1]
    row_pieces = math.ceil(columns / 4)
    pitch = padded_columns(columns)
    threads = next((t for t in (128, 256, 512, 1024) if row_pieces <= 8 * t), None)
    if threads is None:
        return None
    pieces = math.ceil(row_pieces / threads)
    weight = operand == "weight"
    key = spec.weight
    outputs = (WEIGHT_SPLIT, WEIGHT_UNSCALE) if weight else (X_SPLIT, X_UNSCALE)
    rows_constant = Constant("kRows", str(rows), "out_features" if weight else "batch")
    constants = [
        Constant("kColumns", str(columns), "in_features"),
        *([Constant("kPitch", str(pitch), "values from one row of halves to the next: a multiple of 16 bytes")] if pitch != columns else []),
        Constant("kBlocks", str(padded_rows), "blocks, one a row" + (", padding rows of the last tile included" if padded_rows > rows else "")),
        Constant("kThreads", str(threads), "threads of a block"),
        *([Constant("kRowPieces", str(row_pieces), "pieces of 4 values in a row")] if row_pieces % threads else []),
        Constant("kPieces", str(pieces), "pieces of 4 values in a thread's registers"),
        *scale_constants("row"),
        *row_limits(form, columns),
    ]
    if padded_rows > rows:
        constants.insert(0, rows_constant)
    if form.parts == 2:
        constants.append(Constant("kLowPart", f"{rows}ull * {pitch // 2}", "words from the high parts to the low parts", "size_t"))
    if weight_shift:
        constants.append(Constant("kWeightShift", str(weight_shift), "exponent of the scale 2^12 by which the multiplication multiplies W"))
    return SplitKernel(
        f"split_{operand}", "gemm_sm90a/split.cu.j2", (key if weight else "x", *outputs), tuple(constants),
        f"{'W' if weight else 'x'} {'split into two halves a value' if form.parts == 2 else 'rounded to halves'}, rows scaled by powers of two",
        0, 65536 // (threads * max(1, 768 // threads)), threads, padded_rows,  # 68 registers where a thread holds 8 pieces
        ("one block a row: largest value, scale, split",),
        form.parts, form.registers, not weight, row_pieces % threads != 0, padded_rows > rows, weight_shift, columns,
    )  # fmt: skip
