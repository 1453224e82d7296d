"""Which tile a spec's sm_80 GEMM gets: every way to tile it, with its estimate."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from codegen.ir.fused_form import FusedSpec
from codegen.numerics import Arithmetic
from codegen.plan.gemm.cost import COPIED_SHARE, EPILOGUE_SLOWDOWN, SLICE_MARGIN, block_rounds, product_ms
from codegen.plan.gemm.epilogue import epilogue_cycles, epilogue_of
from codegen.plan.gemm.tiles import Tile, aligned_k, slice_counts, tiles_for
from codegen.targets import DeviceClass

ALIGNED_VALUES = 1 << 32  # of x and W together, fewer than that kernel counts


@dataclass(frozen=True)
class Tiling:
    """A tile for a spec, and how it is used: whole groups of the norm fit into `columns` of its n columns, or `columns` is n and a norm kernel follows. `slices` blocks
    share a tile, each with its own part of K; a kernel then adds what they leave. `aligned`: a kernel copies x and W to rows of aligned_k first."""

    tile: Tile
    columns: int
    finished: bool
    ms: float
    slices: int = 1
    aligned: bool = False


def choose_tile(spec: FusedSpec, device: DeviceClass, arithmetic: Arithmetic) -> Tiling:
    """The tile with the least estimated time, the norm kernel's included where the tile cannot hold whole groups."""
    return tile_choices(spec, device, arithmetic)[0]


def tile_choices(spec: FusedSpec, device: DeviceClass, arithmetic: Arithmetic) -> list[Tiling]:
    """All tiles, with and without the norm in the epilogue, the least estimated time first."""
    k = spec.input_shape[1]
    choices = _choices(spec, device, arithmetic, k)
    if spec.precision.itemsize == 2 and k % 2 and (spec.batch + spec.channels) * aligned_k(k) < ALIGNED_VALUES:
        copied = 2 * (spec.batch + spec.channels) * k * 2 / (device.hbm * COPIED_SHARE.on(device) * 1e6) + device.launch_us / 1e3
        choices += [replace(choice, ms=choice.ms + copied, aligned=True) for choice in _choices(spec, device, arithmetic, aligned_k(k))]
    return sorted(choices, key=lambda choice: (round(choice.ms, 5), choice.tile.m * choice.tile.n))  # the smaller of equals


def _choices(spec: FusedSpec, device: DeviceClass, arithmetic: Arithmetic, k: int) -> list[Tiling]:
    """The tiles for rows of `k` values."""
    width = spec.group_channels
    tail_bytes = 2 * spec.batch * spec.channels * spec.result.itemsize
    tail = tail_bytes / (device.hbm * 1e6) + device.launch_us / 1e3 if spec.has_norm else 0.0
    choices = []
    for tile in tiles_for(arithmetic):
        fits = width <= tile.n and spec.has_norm
        columns = min(tile.n // width * width, spec.channels) if fits else tile.n  # columns that do not exist cost the epilogue as much as others
        choices.append(Tiling(tile, columns, fits, tile_ms(spec, device, arithmetic, tile, columns, fits, k=k) + (0.0 if fits else tail)))
        if fits and columns < tile.n:  # the unused columns may cost more than a second kernel
            choices.append(Tiling(tile, tile.n, False, tile_ms(spec, device, arithmetic, tile, tile.n, False, k=k) + tail))
    least = min(choice.ms for choice in choices)
    return choices + [choice for choice in _sliced(spec, device, arithmetic, tail, k) if choice.ms < SLICE_MARGIN * least]


def _sliced(spec: FusedSpec, device: DeviceClass, arithmetic: Arithmetic, tail: float, k: int) -> list[Tiling]:
    """Tiles that several blocks share, each with its own part of K. Their sums meet in a kernel of their own, in front of the norm's. Arithmetic that
    looks through x and W beforehand would read them twice; tiles that split once a block know nothing of slices."""
    if arithmetic.operand != "tf32" and (arithmetic.parts == 2 or arithmetic.name == "ffma"):
        return []
    itemsize = spec.precision.itemsize
    found = []
    for tile in tiles_for(arithmetic):
        for slices in slice_counts(arithmetic, tile, k, itemsize):
            add = (slices * 4 + itemsize) * spec.batch * spec.channels / (device.hbm * 1e6) + device.launch_us / 1e3
            found.append(Tiling(tile, tile.n, False, tile_ms(spec, device, arithmetic, tile, tile.n, False, slices, k) + add + tail, slices))
    return found


def tile_ms(
    spec: FusedSpec, device: DeviceClass, arithmetic: Arithmetic, tile: Tile, columns: int, finished: bool, slices: int = 1, k: int | None = None
) -> float:  # fmt: skip
    """Estimated milliseconds of the GEMM alone: the slowest of multiplier, L2, memory and the pipeline's own latency, and the epilogues behind it."""
    m, n, k = spec.batch, spec.channels, k or spec.input_shape[1]
    itemsize = spec.precision.itemsize
    written = m * n * (4 * slices if slices > 1 else spec.result.itemsize)
    product = product_ms(device, arithmetic, tile, m, n, k, columns, slices, itemsize, (m * k + n * k) * itemsize + written)
    rounds = block_rounds(device, tile, math.ceil(m / tile.m) * math.ceil(n / columns) * slices)
    epilogue = rounds * EPILOGUE_SLOWDOWN.on(device) * epilogue_cycles(epilogue_of(spec, tile, columns, finished, arithmetic), tile, finished) / (device.clock * 1e6)
    return product + epilogue


def scale_ms(spec: FusedSpec, device: DeviceClass, arithmetic: Arithmetic) -> float:
    """The kernel that finds fp16x3's scales reads x and W once."""
    if arithmetic.name != "fp16x3":
        return 0.0
    return (spec.batch + spec.channels) * spec.input_shape[1] * 4 / (device.hbm * 0.9e6) + device.launch_us / 1e3
