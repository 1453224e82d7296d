"""How long the convolution as a product takes on Hopper, estimated: the passes that prepare x and W, tiles at the pace of the tensor cores or of the L2 cache, y's
way to memory."""

from __future__ import annotations

import math

from codegen.ir.fused_form import FusedSpec
from codegen.plan.conv_product_sm90a.geometry import Geometry
from codegen.plan.conv_product_sm90a.kernel import units_of
from codegen.plan.conv_product_sm90a.layout import WARP_ROWS, Layout
from codegen.plan.shared.cost import costly_operators, pass_ms
from codegen.plan.shared.fitted import CONV_PRODUCTS, Fitted
from codegen.targets import DeviceClass

PACE = Fitted(0.9, "share", CONV_PRODUCTS)  # of the tensor cores' rate, at which a busy SM multiplies
READ_SHARE = Fitted(0.8, "share", CONV_PRODUCTS)  # of the memory's rate, at which x's largest values are found
SPLIT_SHARE = Fitted(0.75, "share", CONV_PRODUCTS)  # of the memory's rate, at which x is split
FOLD_GBS = Fitted(2500.0, "GB/s", CONV_PRODUCTS)  # at which rows of taps are written side by side as two halves a value
STORED_SHARE = Fitted(0.7, "share", CONV_PRODUCTS)  # of the memory's rate, at which results leave at most
# Of a tile's end, in which its warpgroups do not multiply, for 64 results of a thread; by how many leave together.
TILE_US = {4: Fitted(2.6, "us", CONV_PRODUCTS), 2: Fitted(3.2, "us", CONV_PRODUCTS), 1: Fitted(3.4, "us", CONV_PRODUCTS)}
TILE_PIXELS = 128  # of a warpgroup with 64 results of a thread
COSTLY_US = Fitted(1.5, "us", CONV_PRODUCTS)  # more for each operator with an exponential
FETCH_GBS = Fitted(9000.0, "GB/s", CONV_PRODUCTS)  # at which all SMs fetch operands from the L2 cache at least: 64 KB in 0.93 us each
ROW_NS = Fitted(1.9, "ns", CONV_PRODUCTS)  # of each row of a pixel or channel that the copy engine gathers by a map, however short; runs have none
# The same of a tile whose end the other warpgroup's multiplications hide: for 128 results of a thread.
TURN_US = {4: Fitted(4.5, "us", CONV_PRODUCTS), 2: Fitted(4.5, "us", CONV_PRODUCTS), 1: Fitted(6.0, "us", CONV_PRODUCTS)}
TURN_COSTLY_US = Fitted(1.5, "us", CONV_PRODUCTS)
# Of that, what a warp with few channels takes too: sums on their way to other lanes, and where they go.
TURN_LEAST_US = {4: Fitted(1.0, "us", CONV_PRODUCTS), 2: Fitted(1.0, "us", CONV_PRODUCTS), 1: Fitted(3.3, "us", CONV_PRODUCTS)}


def estimated_ms(spec: FusedSpec, device: DeviceClass, geometry: Geometry, layout: Layout) -> float:
    """All kernels of the route."""
    rate, itemsize, form = device.hbm * 1e6, spec.precision.itemsize, layout.form
    read, written = itemsize * math.prod(spec.input_shape), 2 * layout.parts * spec.batch * geometry.gathered * layout.padded_channels
    fold = FOLD_GBS.on(device) * 1e6 * layout.parts / 2
    writing = (read + written) / (rate * SPLIT_SHARE.on(device)) if not geometry.folded else written / fold
    measured = read / (rate * READ_SHARE.on(device)) + device.launch_us / 1e3 if form.scaled else 0.0
    operands = measured + writing + device.launch_us / 1e3
    filters = 0.0 if spec.prepack else pass_ms((itemsize + 2 * layout.parts) * math.prod(spec.producer.parameters[0].shape), device)
    stored = spec.result.itemsize * math.prod(spec.producer.output_shape) / (rate * STORED_SHARE.on(device))
    return operands + filters + max(multiply_ms(spec, device, geometry, layout), stored) + device.launch_us / 1e3


def multiply_ms(spec: FusedSpec, device: DeviceClass, geometry: Geometry, layout: Layout) -> float:
    """Every CTA's tiles, as evenly as whole tiles go."""
    pace = device.fp16 * 1e9 * PACE.on(device) / device.sms
    # Of a row of taps each multiplies the pixels of one column of results.
    stage = 2 * layout.tile_channels * layout.tile_pixels * layout.step_block * layout.steps * layout.form.products / pace
    fetched = max(layout.fetched_bytes * device.sms / (FETCH_GBS.on(device) * 1e6), layout.mapped_rows * ROW_NS.on(device) / 1e6)
    stages = [sum(layout.stages_of(len(taps)) for taps in phase.taps) for phase in geometry.phases]
    tiles = units_of(spec, geometry, layout) // len(stages)
    times = [max(fetched * count, _tile_ms(spec, device, geometry, layout, stage * count)) for count in stages]
    return max(sum(times) * tiles / device.sms, max(times) * math.ceil(tiles / device.sms) if len(times) == 1 else 0.0)


def _tile_ms(spec: FusedSpec, device: DeviceClass, geometry: Geometry, layout: Layout, multiplied: float) -> float:
    """How long a CTA has for a tile: it is multiplied and finished, or, in turn, one is while another is finished."""
    costly, share, pixels = costly_operators(spec), layout.warp_channels / WARP_ROWS, layout.pixels * layout.columns / TILE_PIXELS / 1e3
    if not layout.form.in_turn:
        return multiplied + (TILE_US[geometry.vector].on(device) + COSTLY_US.on(device) * costly) * share * pixels
    least = TURN_LEAST_US[geometry.vector].on(device)
    end = least + (TURN_US[geometry.vector].on(device) - least + TURN_COSTLY_US.on(device) * costly) * share
    return max(multiplied, (multiplied + end * pixels / 2) / 2)
