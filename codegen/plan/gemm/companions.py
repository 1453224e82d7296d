"""The kernels beside the sm_80 GEMM as data: aligned rows or the scales of rows in front of it, the sum of parts of K behind it.

Templates: gemm/align_rows.cu.j2, gemm/row_scale.cu.j2, gemm/add_slices.cu.j2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from codegen.ir.apply import Constant
from codegen.ir.fused_form import FusedSpec
from codegen.plan.gemm.tiles import aligned_k
from codegen.plan.model import Kernel
from codegen.plan.shared.pointers import Pointer, PointerKernel
from codegen.plan.shared.values import named_operand

SCALES = "row_scales"
X_ROWS, WEIGHT_ROWS = "x_rows", "weight_rows"
ALIGN_THREADS, ALIGN_WORDS = 256, 4  # of a block; of a thread, so that the latency of their reads counts once


@dataclass(frozen=True)
class AlignRowsKernel(Kernel):
    """A copy of the rows of x and W, whose pitch is odd, to rows that begin at multiples of 16 bytes; `weight` is W's C name."""

    weight: str = ""


@dataclass(frozen=True)
class RowScaleKernel(PointerKernel):
    """Power-of-two scales of the rows of x and W. `held`: each thread keeps its part of the row in registers between the two readings."""

    vector: int = 4
    held: bool = True
    ragged: bool = False
    weight: str = ""


def row_scale_kernel(spec: FusedSpec) -> RowScaleKernel:
    """The kernel that finds the scales of every row of x, then of W."""
    k = spec.input_shape[1]
    rows = spec.batch + spec.channels
    vector = math.gcd(4, k)
    vectors = k // vector
    threads = next((t for t in (64, 128, 256, 512) if math.ceil(vectors / t) * vector <= 32), 1024)
    per_thread = math.ceil(vectors / threads)
    weight = spec.weight
    pointer = named_operand(weight).pointer
    pointers = (Pointer("float", "x"), Pointer("float", pointer), Pointer("float", SCALES, True))
    constants = (
        Constant("kBatch", str(spec.batch), "rows of x"),
        Constant("kInFeatures", str(k), "values in a row of x or W"),
        Constant("kBlocks", str(rows), "batch + out_features: one block a row of x, then of W"),
        Constant("kThreads", str(threads), "threads of a block"),
        Constant("kVector", str(vector), "values of one load: the most that in_features allows"),
        Constant("kVectors", str(vectors), "in_features / vector"),
        Constant("kSmallLimit", str(max(4, k // 1024)), "in_features / 1024, at least 4: with more small values a row is refused"),
        Constant("kNearLimit", str(max(256, k // 16)), "in_features / 16, at least 256: near values that excuse small ones"),
    )
    held = per_thread * vector <= 32
    if held:
        constants += (Constant("kVectorsPerThread", "(kVectors + kThreads - 1) / kThreads", str(per_thread)),)
    return RowScaleKernel(
        name="row_scale", template="gemm/row_scale.cu.j2", arguments=("x", weight, SCALES), constants=constants,
        summary="a power of two for each row of x and W that brings its largest value to [2^14, 2^15); NaN where fp16 parts cannot hold the row",
        max_registers=min(255, 65536 // threads), threads=threads, blocks=rows, pointers=pointers, vector=vector, held=held,
        ragged=vectors % threads != 0, weight=pointer,
    )  # fmt: skip


def align_rows_kernel(spec: FusedSpec) -> AlignRowsKernel:
    """The kernel that copies x and W to rows of aligned_k values, zeros behind the last."""
    k = spec.input_shape[1]
    rows, words = spec.batch + spec.channels, aligned_k(k) // 2
    blocks = math.ceil(rows * words / (ALIGN_THREADS * ALIGN_WORDS))
    weight = spec.weight
    constants = (
        Constant("kBatch", str(spec.batch), "rows of x"),
        Constant("kInFeatures", str(k), "values in a row of x or W: odd"),
        Constant("kRowWords", str(words), "words of two values in an aligned row"),
        Constant("kWords", f"{rows}u * kRowWords", f"words of all {rows} rows, x's then W's", "uint32_t"),
        Constant("kThreads", str(ALIGN_THREADS), "threads of a block"),
        Constant("kThreadWords", str(ALIGN_WORDS), "words of a thread"),
        Constant("kBlocks", str(blocks), "kWords / (kThreads * kThreadWords), rounded up"),
    )
    return AlignRowsKernel(
        name="align_rows", template="gemm/align_rows.cu.j2", arguments=("x", weight, X_ROWS, WEIGHT_ROWS), constants=constants,
        summary=f"copies the rows of x and W, {k} values each, to where they begin at multiples of 16 bytes", threads=ALIGN_THREADS, blocks=blocks,
        max_registers=64, weight=named_operand(weight).pointer,
    )  # fmt: skip
