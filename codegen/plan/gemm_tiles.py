"""Tiles of the sm_80 GEMM as data, and the cost model that chooses among them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from codegen.numerics import Arithmetic
from codegen.plan.gemm_epilogue import WARP, epilogue_cycles, epilogue_of
from codegen.spec import Spec
from codegen.targets import DeviceClass

STEP_CYCLES = 600  # one turn of the pipeline with an idle multiplier: a barrier, shared memory, dependent multiplies
FILL_CYCLES = 2500  # launch to first multiply, and the epilogue behind the last
CLOCK_GHZ = 1.4  # under load
PROMOTE_STEPS = 4  # multiplies in a chain before a rounded addition: every one of them cuts off, TF32's after 8 of K, the others' after 16
SLICES = (2, 4, 8, 16, 32)  # parts of K that blocks of one tile share
SLICE_STAGES = 4  # of the pipeline, at least, in a slice
SLICE_MARGIN = 0.85  # K is sliced where the estimate is below this share of the other
EPILOGUE_SHARE = 2.0  # of an epilogue's cycles: two blocks of an SM are in theirs at the same time
NARROW = {2: 3.3, 4: 1.4, 8: 1.2}  # times that copies of so many bytes take longer than those of 16
COPIED = 0.6  # of the memory's rate, at which rows are copied to where they are aligned
ALIGNED_VALUES = 1 << 32  # of x and W together, fewer than that kernel counts
L2_BYTES_PER_CLOCK = 40  # L2 to one SM; arXiv 2501.12084 measures 30 to 47 with every SM reading


@dataclass(frozen=True)
class Tile:
    """One block's share of the product: m rows of x times n rows of W.

    The block's warps form a grid of `warps_m` x `warps_n`, `warps_k` deep: each layer takes its own part of every stage's K, and the
    layers' sums are added in the epilogue. A stage holds `warps_k` panels of `row_bytes` of K per row. `share` is the part of the
    multiplier's rate that the main loop reaches when the device is full of such blocks. `presplit`: fp32 operands are split into
    16-bit parts once a block, on their way into shared memory, instead of once a warp on their way out.
    """

    m: int
    n: int
    warps_m: int
    warps_n: int
    warps_k: int
    row_bytes: int
    stages: int
    blocks_per_sm: int
    share: float
    presplit: bool = False

    @property
    def threads(self) -> int:
        return WARP * self.warps_m * self.warps_n * self.warps_k

    @property
    def warp_m(self) -> int:
        return self.m // self.warps_m

    @property
    def warp_n(self) -> int:
        return self.n // self.warps_n

    @property
    def stage_bytes(self) -> int:
        return (self.m + self.n) * self.row_bytes * self.warps_k * (2 if self.presplit else 1)

    @property
    def smem_bytes(self) -> int:
        return self.stage_bytes * self.stages

    @property
    def max_registers(self) -> int:
        return min(255, 65536 // (self.threads * self.blocks_per_sm) // 8 * 8)

    def panel_k(self, itemsize: int) -> int:
        """Values of K in one row of a panel."""
        return self.row_bytes // (2 if self.presplit else itemsize)

    def stage_k(self, itemsize: int) -> int:
        return self.panel_k(itemsize) * self.warps_k


# The shares were measured on an H200 with 1024 x 8192 x 8192, where the smallest tiles meet L2's limit first: theirs are estimates.
# One product: sums live in the accumulators alone, so a warp can own 64x64.
SINGLE = (
    Tile(128, 256, 2, 4, 1, 64, 4, 1, 0.78),
    Tile(256, 128, 4, 2, 1, 64, 4, 1, 0.78),
    Tile(128, 128, 2, 2, 1, 64, 3, 2, 0.71),
    Tile(128, 64, 2, 2, 1, 64, 4, 2, 0.52),
    Tile(64, 128, 2, 2, 1, 64, 4, 2, 0.50),
    Tile(64, 64, 2, 2, 1, 128, 3, 2, 0.46),
    Tile(32, 128, 1, 4, 1, 128, 4, 1, 0.43),
    Tile(32, 64, 1, 2, 2, 128, 4, 1, 0.37),
    Tile(32, 32, 1, 1, 4, 128, 3, 1, 0.28),
    Tile(16, 256, 1, 4, 1, 64, 4, 1, 0.22),
    Tile(16, 128, 1, 2, 2, 128, 2, 1, 0.28),
    Tile(16, 64, 1, 2, 4, 128, 2, 1, 0.23),
    Tile(16, 32, 1, 1, 4, 128, 4, 1, 0.20),
)

# Three products: a second set of sums for the promotion leaves a warp 64x32. Operands are split by every warp that multiplies them.
SPLIT = (
    Tile(128, 128, 2, 4, 1, 128, 3, 1, 0.47),
    Tile(256, 64, 4, 2, 1, 64, 4, 1, 0.57),
    Tile(64, 256, 1, 8, 1, 64, 4, 1, 0.57),
    Tile(128, 64, 2, 2, 1, 64, 4, 2, 0.55),
    Tile(64, 128, 1, 4, 1, 64, 4, 2, 0.55),
    Tile(64, 64, 2, 2, 1, 128, 3, 2, 0.51),
    Tile(32, 128, 1, 4, 1, 128, 4, 1, 0.49),
    Tile(32, 64, 1, 2, 2, 128, 4, 1, 0.46),
    Tile(32, 32, 1, 1, 4, 128, 3, 1, 0.46),
    Tile(16, 256, 1, 8, 1, 64, 4, 1, 0.45),
    Tile(16, 128, 1, 4, 2, 128, 2, 1, 0.45),
    Tile(16, 64, 1, 2, 4, 128, 2, 1, 0.45),
    Tile(16, 32, 1, 1, 4, 128, 4, 1, 0.40),
)

# Three products of 16-bit parts: the multiplies are short enough for the splitting to count, so large tiles split once a block.
SPLIT_16_BIT = (
    Tile(128, 128, 2, 4, 1, 64, 2, 1, 0.53, presplit=True),
    Tile(256, 64, 4, 2, 1, 64, 2, 1, 0.47, presplit=True),
    Tile(64, 256, 1, 8, 1, 64, 2, 1, 0.47, presplit=True),
    Tile(64, 64, 2, 2, 1, 64, 2, 2, 0.37, presplit=True),
    Tile(32, 128, 1, 4, 1, 128, 4, 1, 0.37),
    Tile(32, 64, 1, 2, 2, 128, 4, 1, 0.31),
    Tile(32, 32, 1, 1, 4, 128, 3, 1, 0.29),
    Tile(16, 256, 1, 8, 1, 64, 4, 1, 0.20),
    Tile(16, 128, 1, 4, 2, 128, 2, 1, 0.20),
    Tile(16, 64, 1, 2, 4, 128, 2, 1, 0.20),
    Tile(16, 32, 1, 1, 4, 128, 4, 1, 0.24),
)

# Fused multiply-adds: 8x8 sums a thread, and as many again for the partial sums.
FFMA = (
    Tile(128, 128, 2, 4, 1, 64, 4, 1, 0.61),
    Tile(64, 256, 1, 8, 1, 64, 4, 1, 0.58),
    Tile(128, 64, 2, 2, 1, 64, 4, 2, 0.58),
    Tile(64, 64, 1, 2, 1, 64, 4, 4, 0.62),
    Tile(32, 128, 1, 4, 1, 128, 4, 1, 0.56),
    Tile(32, 64, 1, 2, 2, 128, 4, 1, 0.55),
    Tile(32, 32, 1, 1, 4, 128, 3, 1, 0.53),
    Tile(16, 256, 1, 8, 1, 64, 4, 1, 0.35),
    Tile(16, 128, 1, 4, 2, 128, 2, 1, 0.35),
    Tile(16, 64, 1, 2, 4, 128, 2, 1, 0.35),
    Tile(16, 32, 1, 1, 4, 128, 4, 1, 0.36),
)


def tiles_for(arithmetic: Arithmetic) -> tuple[Tile, ...]:
    if arithmetic.name == "ffma":
        return FFMA
    if arithmetic.parts == 1:
        return SINGLE
    return SPLIT if arithmetic.operand == "tf32" else SPLIT_16_BIT


@dataclass(frozen=True)
class Choice:
    """A tile for a spec: whole groups of the norm fit into `columns` of its n columns, or `columns` is n and a norm kernel follows. `slices` blocks
    share a tile, each with its own part of K; a kernel then adds what they leave. `aligned`: a kernel copies x and W to rows of aligned_k first."""

    tile: Tile
    columns: int
    finished: bool
    ms: float
    slices: int = 1
    aligned: bool = False


def multiplier_rate(arithmetic: Arithmetic, device: DeviceClass) -> float:
    """TFLOP/s that the arithmetic's instruction reaches on the device."""
    if arithmetic.operand == "fp32":
        return device.fp32
    return (device.tf32 if arithmetic.operand == "tf32" else device.fp16) * device.mma_share


def partial_sum_stages(arithmetic: Arithmetic, tile: Tile, itemsize: int) -> int:
    """Stages of the pipeline after which the tensor cores' sum is added to the others, rounded; 1 where they keep it."""
    if not arithmetic.promote:
        return 1
    promote = min(arithmetic.promote, PROMOTE_STEPS * (8 if arithmetic.operand == "tf32" else 16))
    return max(1, promote // tile.panel_k(itemsize))


def slice_stages(arithmetic: Arithmetic, tile: Tile, k: int, itemsize: int, slices: int) -> int:
    """Stages of the pipeline in a slice: whole partial sums."""
    stages = math.ceil(math.ceil(k / tile.stage_k(itemsize)) / slices)
    partial = min(stages, partial_sum_stages(arithmetic, tile, itemsize))
    return math.ceil(stages / partial) * partial if slices > 1 else stages


def slice_counts(arithmetic: Arithmetic, tile: Tile, k: int, itemsize: int) -> list[int]:
    """Into how many slices K may be cut, more than one: none is empty, and each has enough stages."""
    found = []
    for slices in SLICES:
        stages = slice_stages(arithmetic, tile, k, itemsize, slices)
        if stages < SLICE_STAGES:
            break
        found.append(math.ceil(math.ceil(k / tile.stage_k(itemsize)) / stages))
    return [count for count in found if count > 1]


def tile_ms(
    spec: Spec, device: DeviceClass, arithmetic: Arithmetic, tile: Tile, columns: int, finished: bool, slices: int = 1, k: int | None = None
) -> float:  # fmt: skip
    """Estimated milliseconds of the GEMM alone: the slowest of multiplier, L2, memory and the pipeline's own latency, and the epilogues behind it."""
    m, n, k = spec.batch, spec.channels, k or spec.input_shape[1]
    itemsize = spec.precision.itemsize
    written = m * n * (4 * slices if slices > 1 else spec.result.itemsize)
    product = product_ms(device, arithmetic, tile, m, n, k, columns, slices, itemsize, (m * k + n * k) * itemsize + written)
    rounds = block_rounds(device, tile, math.ceil(m / tile.m) * math.ceil(n / columns) * slices)
    epilogue = rounds * EPILOGUE_SHARE * epilogue_cycles(epilogue_of(spec, tile, columns, finished, arithmetic), tile, finished) / (CLOCK_GHZ * 1e6)
    return product + epilogue


def block_rounds(device: DeviceClass, tile: Tile, blocks: int) -> int:
    """How many blocks an SM takes one after the other where as many as fit run at the same time."""
    resident = max(1, min(tile.blocks_per_sm, device.smem_per_sm // (tile.smem_bytes + 1024)))
    return math.ceil(blocks / (device.sms * resident))


def product_ms(
    device: DeviceClass, arithmetic: Arithmetic, tile: Tile, m: int, n: int, k: int, columns: int, slices: int, itemsize: int, moved: float, products: int = 1,
    rows: int | None = None,
) -> float:  # fmt: skip
    """Estimated milliseconds of `products` products of m x k and k x n values without their epilogues; `moved` bytes lie in memory, and a block reads
    `rows` rows of both operands, unless said otherwise all that its tile has."""
    blocks = math.ceil(m / tile.m) * math.ceil(n / columns) * slices * products
    per_sm = math.ceil(blocks / device.sms)
    stages = slice_stages(arithmetic, tile, k, itemsize, slices)
    flop = 2.0 * tile.m * tile.n * stages * tile.stage_k(itemsize) * len(arithmetic.products)
    multiply = per_sm * flop / (multiplier_rate(arithmetic, device) / device.sms * tile.share * 1e9)
    narrow = NARROW.get(math.gcd(16, k * itemsize), 1.0)
    level2 = narrow * per_sm * (rows or tile.m + tile.n) * min(k, stages * tile.stage_k(itemsize)) * itemsize / (L2_BYTES_PER_CLOCK * CLOCK_GHZ * 1e6)
    latency = block_rounds(device, tile, blocks) * (narrow * stages * STEP_CYCLES + FILL_CYCLES) / (CLOCK_GHZ * 1e6)
    return max(multiply, level2, moved / (device.hbm * 1e6), latency)


def choose_tile(spec: Spec, device: DeviceClass, arithmetic: Arithmetic) -> Choice:
    """The tile with the least estimated time, the norm kernel's included where the tile cannot hold whole groups."""
    return tile_choices(spec, device, arithmetic)[0]


def tile_choices(spec: Spec, device: DeviceClass, arithmetic: Arithmetic) -> list[Choice]:
    """All tiles, with and without the norm in the epilogue, the least estimated time first."""
    k = spec.input_shape[1]
    choices = _choices(spec, device, arithmetic, k)
    if spec.precision.itemsize == 2 and k % 2 and (spec.batch + spec.channels) * aligned_k(k) < ALIGNED_VALUES:
        copied = 2 * (spec.batch + spec.channels) * k * 2 / (device.hbm * COPIED * 1e6) + device.launch_us / 1e3
        choices += [replace(choice, ms=choice.ms + copied, aligned=True) for choice in _choices(spec, device, arithmetic, aligned_k(k))]
    return sorted(choices, key=lambda choice: (round(choice.ms, 5), choice.tile.m * choice.tile.n))  # the smaller of equals


def aligned_k(k: int) -> int:
    """K with the zeros behind it that bring every row of 16-bit values to a multiple of 16 bytes."""
    return math.ceil(k / 8) * 8


def _choices(spec: Spec, device: DeviceClass, arithmetic: Arithmetic, k: int) -> list[Choice]:
    """The tiles for rows of `k` values."""
    width = spec.group_channels
    tail_bytes = 2 * spec.batch * spec.channels * spec.result.itemsize
    tail = tail_bytes / (device.hbm * 1e6) + device.launch_us / 1e3
    choices = []
    for tile in tiles_for(arithmetic):
        fits = width <= tile.n
        columns = min(tile.n // width * width, spec.channels) if fits else tile.n  # columns that do not exist cost the epilogue as much as others
        choices.append(Choice(tile, columns, fits, tile_ms(spec, device, arithmetic, tile, columns, fits, k=k) + (0.0 if fits else tail)))
        if fits and columns < tile.n:  # the unused columns may cost more than a second kernel
            choices.append(Choice(tile, tile.n, False, tile_ms(spec, device, arithmetic, tile, tile.n, False, k=k) + tail))
    least = min(choice.ms for choice in choices)
    return choices + [choice for choice in _sliced(spec, device, arithmetic, tail, k) if choice.ms < SLICE_MARGIN * least]


def _sliced(spec: Spec, device: DeviceClass, arithmetic: Arithmetic, tail: float, k: int) -> list[Choice]:
    """Tiles that several blocks share, each with its own part of K. Their sums meet in a kernel of their own, in front of the norm's. Arithmetic that
    looks through x and W beforehand would read them twice; tiles that split once a block know nothing of slices."""
    if arithmetic.operand != "tf32" and (arithmetic.parts == 2 or arithmetic.name == "ffma"):
        return []
    itemsize = spec.precision.itemsize
    found = []
    for tile in tiles_for(arithmetic):
        for slices in slice_counts(arithmetic, tile, k, itemsize):
            add = (slices * 4 + itemsize) * spec.batch * spec.channels / (device.hbm * 1e6) + device.launch_us / 1e3
            found.append(Choice(tile, tile.n, False, tile_ms(spec, device, arithmetic, tile, tile.n, False, slices, k) + add + tail, slices))
    return found
