"""GroupNorm and what follows it, as kernels behind a GEMM or a convolution."""

from __future__ import annotations

from dataclasses import dataclass

from codegen.plan.model import Buffer, Launch


@dataclass(frozen=True)
class TileStatistics:
    """Statistics that a GEMM left behind: one float2 (mean, M2) per row and tile of `tile_n` columns, row-major [batch, tiles] in `buffer`.

    M2 is the sum of squared differences from the tile's mean, both of the values as stored (rounded to the storage type). `tile_n` divides
    the group width, so `tiles` * `tile_n` = channels.
    """

    tile_n: int
    tiles: int
    buffer: str


@dataclass(frozen=True)
class NormPlan:
    """The launches that follow the producer, the buffers they need and the reasons, one sentence each."""

    steps: tuple[Launch, ...]
    buffers: tuple[Buffer, ...]
    why: tuple[str, ...]
