"""Statistics that one kernel leaves for another."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TileStatistics:
    """Statistics that a GEMM left behind: one float4 (count, mean, mean_rest, M2) per row and tile of `tile_n` columns, row-major
    [batch, tiles] in `buffer`.

    The tile's mean is mean + mean_rest, two floats; M2 is the sum of squared differences from it; all of the values as stored (rounded to
    the storage type). `tile_n` divides the group width, so `tiles` * `tile_n` = channels.
    """

    tile_n: int
    tiles: int
    buffer: str
