"""How long the convolution as a product takes, estimated: product, copies and sums of slices in front of the norm."""

from __future__ import annotations

import math

from codegen.ir.fused_form import FusedSpec
from codegen.numerics import Arithmetic
from codegen.plan.conv_gemm.shape import PIECE_BYTES, Tiling, planes_of, shape_of
from codegen.plan.gemm.cost import VALUE_CYCLES, EPILOGUE_SLOWDOWN, SLICE_MARGIN, block_rounds, product_ms
from codegen.plan.gemm.tiles import Tile, slice_counts, tiles_for
from codegen.plan.shared.fitted import SWEEP, Fitted
from codegen.targets import DeviceClass

COPY_SHARE = Fitted(0.5, "share", SWEEP)  # of the memory's rate, at which x is turned around
COPY_US = Fitted(2.0, "us", SWEEP)  # of the kernel that copies, at least
ADD_US = Fitted(1.5, "us", SWEEP)  # of the kernel that adds slices, at least


def tilings(spec: FusedSpec, device: DeviceClass, arithmetic: Arithmetic) -> list[Tiling]:
    """All tiles, the least estimated time first, the smaller of equals; K is cut into slices where that is faster by enough."""
    whole = [tiling(spec, device, arithmetic, tile, 1) for tile in tiles_for(arithmetic)]
    least = min(choice.ms for choice in whole)
    itemsize, k = spec.precision.itemsize, shape_of(spec).k
    sliced = [tiling(spec, device, arithmetic, tile, slices) for tile in tiles_for(arithmetic) for slices in slice_counts(arithmetic, tile, k, itemsize)]
    found = whole + [choice for choice in sliced if choice.ms < SLICE_MARGIN * least]
    return sorted(found, key=lambda choice: (round(choice.ms, 5), choice.tile.m * choice.tile.n))


def tiling(spec: FusedSpec, device: DeviceClass, arithmetic: Arithmetic, tile: Tile, slices: int) -> Tiling:
    """A tile shared by `slices` blocks, with its estimate."""
    shape, itemsize = shape_of(spec), spec.precision.itemsize
    results = math.prod(spec.producer.output_shape)
    pixels = math.prod(spec.input_shape) // spec.input_shape[1] * shape.groups * shape.pieces * PIECE_BYTES
    weights = spec.channels * shape.k * itemsize
    written = results * (4 * slices if slices > 1 else itemsize)
    product = product_ms(device, arithmetic, tile, shape.m, shape.n, shape.k, tile.n, slices, itemsize, pixels + weights + written, shape.groups, tile.m + min(tile.n, shape.n))
    planes = planes_of(spec, tile, slices)
    rounds = block_rounds(device, tile, math.ceil(shape.m / tile.m) * math.ceil(shape.n / tile.n) * slices * shape.groups)
    cycles = tile.m // planes.round_rows * math.ceil(min(tile.n, shape.n) * planes.round_rows / tile.threads) * VALUE_CYCLES.on(device)
    copied = 2 * (pixels + weights) / (device.hbm * COPY_SHARE.on(device) * 1e6) + COPY_US.on(device) / 1e3
    added = results * (4 * slices + itemsize) / (device.hbm * COPY_SHARE.on(device) * 1e6) + ADD_US.on(device) / 1e3 if slices > 1 else 0.0
    return Tiling(tile, slices, product + rounds * EPILOGUE_SLOWDOWN.on(device) * cycles / (device.clock * 1e6) + copied + added)
