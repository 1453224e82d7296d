"""How long the sm_80 GEMM takes, estimated: the cost model that chooses among its tiles."""

from __future__ import annotations

import math

from codegen.numerics import Arithmetic
from codegen.plan.gemm.tiles import Tile, slice_stages
from codegen.plan.shared.fitted import GEMM_SHAPES, Fitted
from codegen.targets import DeviceClass

STEP_CYCLES = Fitted(600, "cycles", GEMM_SHAPES)  # of one turn of the pipeline with an idle multiplier: a barrier, shared memory, dependent multiplies
FILL_CYCLES = Fitted(2500, "cycles", GEMM_SHAPES)  # from launch to first multiply, and of the epilogue behind the last
EPILOGUE_SLOWDOWN = Fitted(2.0, "ratio", GEMM_SHAPES)  # of an epilogue that both resident blocks of an SM reach together
NARROW = {width: Fitted(ratio, "ratio", GEMM_SHAPES) for width, ratio in ((2, 3.3), (4, 1.4), (8, 1.2))}  # by bytes of a copy: its time over that of 16
COPIED_SHARE = Fitted(0.6, "share", GEMM_SHAPES)  # of the memory's rate, at which rows are copied to where they are aligned
SLICE_MARGIN = 0.85  # K is sliced where the estimate is below this share of the other
L2_BYTES_PER_CLOCK = 40  # from L2 to one SM; arXiv 2501.12084 measures 30 to 47 with every SM reading

# The epilogue waits for itself: an item's loads, three sums over its lanes, the norm, stores; two items of a team hardly overlap.
ITEM_CYCLES = Fitted(150, "cycles", GEMM_SHAPES)
LEVEL_CYCLES = Fitted(75, "cycles", GEMM_SHAPES)  # of a level of shuffles
VALUE_CYCLES = Fitted(20, "cycles", GEMM_SHAPES)


def multiplier_rate(arithmetic: Arithmetic, device: DeviceClass) -> float:
    """TFLOP/s that the arithmetic's instruction reaches on the device."""
    if arithmetic.operand == "fp32":
        return device.fp32
    return (device.tf32 if arithmetic.operand == "tf32" else device.fp16) * device.mma_share


def block_rounds(device: DeviceClass, tile: Tile, blocks: int) -> int:
    """How many blocks an SM takes one after the other where as many as fit run at the same time."""
    resident = max(1, min(tile.blocks_per_sm, device.smem_per_sm // (tile.smem_bytes + 1024)))
    return math.ceil(blocks / (device.sms * resident))


def narrow_ratio(width: int, device: DeviceClass) -> float:
    """How much longer copies of `width` bytes take than those of 16."""
    return NARROW[width].on(device) if width in NARROW else 1.0


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
    narrow = narrow_ratio(math.gcd(16, k * itemsize), device)
    level2 = narrow * per_sm * (rows or tile.m + tile.n) * min(k, stages * tile.stage_k(itemsize)) * itemsize / (L2_BYTES_PER_CLOCK * device.clock * 1e6)
    latency = block_rounds(device, tile, blocks) * (narrow * stages * STEP_CYCLES.on(device) + FILL_CYCLES.on(device)) / (device.clock * 1e6)
    return max(multiply, level2, moved / (device.hbm * 1e6), latency)


def item_cycles(items: int, teams: int, levels: int, values: int) -> float:
    """Estimated cycles of `items` of an epilogue by `teams`: each lane has `values`, and sums meet over `levels` of shuffles."""
    return math.ceil(items / teams) * (ITEM_CYCLES.value + LEVEL_CYCLES.value * levels + VALUE_CYCLES.value * values)
