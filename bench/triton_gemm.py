"""A peer: an autotuned Triton GEMM with Triton's own multi-product input precisions (tf32x3, bf16x3), y = x W^T + b in fp32."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_CONFIGS = [
    triton.Config({"TILE_M": m, "TILE_N": n, "TILE_K": k, "GROUP": 8}, num_warps=warps, num_stages=stages)
    for m, n, k, warps, stages in (
        (128, 128, 32, 8, 3), (128, 128, 32, 4, 3), (128, 256, 32, 8, 3), (128, 64, 32, 4, 4), (128, 128, 64, 8, 2), (64, 128, 32, 4, 4), (64, 64, 32, 4, 4),
    )
]  # fmt: skip


@triton.autotune(_CONFIGS, key=["rows", "columns", "depth", "PRECISION"])
@triton.jit
def _linear(
    x, weight, bias, y, rows, columns, depth,
    PRECISION: tl.constexpr, HAS_BIAS: tl.constexpr, EVEN: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    tiles_m, tiles_n = tl.cdiv(rows, TILE_M), tl.cdiv(columns, TILE_N)
    # Blocks of GROUP tiles of rows share the same columns of the weight while they are in L2.
    block = GROUP * tiles_n
    first = program // block * GROUP
    height = min(tiles_m - first, GROUP)
    tile_m = first + program % block % height
    tile_n = program % block // height
    m = tile_m * TILE_M + tl.arange(0, TILE_M)
    n = tile_n * TILE_N + tl.arange(0, TILE_N)
    k = tl.arange(0, TILE_K)
    x_at = x + m[:, None] * depth + k[None, :]
    weight_at = weight + n[None, :] * depth + k[:, None]
    sum = tl.zeros((TILE_M, TILE_N), tl.float32)
    for start in range(0, depth, TILE_K):
        if EVEN:
            a, b = tl.load(x_at), tl.load(weight_at)
        else:
            a = tl.load(x_at, (m[:, None] < rows) & (k[None, :] < depth - start), 0.0)
            b = tl.load(weight_at, (n[None, :] < columns) & (k[:, None] < depth - start), 0.0)
        sum = tl.dot(a, b, sum, input_precision=PRECISION)
        x_at += TILE_K
        weight_at += TILE_K
    if HAS_BIAS:
        sum += tl.load(bias + n, n < columns, 0.0)[None, :]
    tl.store(y + m[:, None] * columns + n[None, :], sum, (m[:, None] < rows) & (n[None, :] < columns))


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, precision: str) -> torch.Tensor:
    """x (rows, depth), weight (columns, depth), both float32 and contiguous -> (rows, columns)."""
    rows, depth = x.shape
    columns = weight.shape[0]
    y = torch.empty((rows, columns), device=x.device)
    grid = lambda meta: (triton.cdiv(rows, meta["TILE_M"]) * triton.cdiv(columns, meta["TILE_N"]),)  # noqa: E731
    even = rows % 128 == 0 and columns % 256 == 0 and depth % 64 == 0
    _linear[grid](x, weight, bias if bias is not None else weight, y, rows, columns, depth, precision, bias is not None, even)
    return y


def best_config(precision: str) -> str | None:
    """The configuration that autotuning chose at this precision."""
    found = [config for key, config in _linear.cache.items() if precision in key]
    return str(found[-1]) if found else None
