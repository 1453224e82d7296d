"""How long the convolution as a product takes on Hopper, estimated: the passes that split x and W, tiles at the pace of the tensor cores, y's way to memory."""

from __future__ import annotations

import math

from codegen.ir.fused_form import FusedSpec
from codegen.plan.conv_product_sm90a.geometry import Geometry
from codegen.plan.conv_product_sm90a.kernel import units_of
from codegen.plan.conv_product_sm90a.layout import WARPGROUP_PIXELS, Layout
from codegen.plan.shared.cost import costly_operators, pass_ms
from codegen.plan.shared.fitted import CONV_PRODUCTS, Fitted
from codegen.targets import DeviceClass

PACE = Fitted(0.9, "share", CONV_PRODUCTS)  # of the tensor cores' rate, at which a busy SM multiplies
READ_SHARE = Fitted(0.8, "share", CONV_PRODUCTS)  # of the memory's rate, at which x's largest values are found
SPLIT_SHARE = Fitted(0.75, "share", CONV_PRODUCTS)  # of the memory's rate, at which x is split
FOLD_GBS = Fitted(2500.0, "GB/s", CONV_PRODUCTS)  # at which rows of taps are written side by side
STORED_SHARE = Fitted(0.7, "share", CONV_PRODUCTS)  # of the memory's rate, at which results leave at most
TILE_US = Fitted(3.4, "us", CONV_PRODUCTS)  # of a tile's end, in which its warpgroups do not multiply, for 64 results of a thread
COSTLY_US = Fitted(4.0, "us", CONV_PRODUCTS)  # more for each operator with an exponential


def estimated_ms(spec: FusedSpec, device: DeviceClass, geometry: Geometry, layout: Layout) -> float:
    """All kernels of the route."""
    rate = device.hbm * 1e6
    read, written = 4 * math.prod(spec.input_shape), 2 * layout.parts * spec.batch * geometry.gathered * layout.padded_channels
    writing = (read + written) / (rate * SPLIT_SHARE.on(device)) if not geometry.folded else written / (FOLD_GBS.on(device) * 1e6)
    split = read / (rate * READ_SHARE.on(device)) + writing + 2 * device.launch_us / 1e3
    filters = 0.0 if spec.prepack else pass_ms(4 * 2 * math.prod(spec.producer.parameters[0].shape), device)
    stored = 4 * math.prod(spec.producer.output_shape) / (rate * STORED_SHARE.on(device))
    return split + filters + max(multiply_ms(spec, device, geometry, layout), stored) + device.launch_us / 1e3


def multiply_ms(spec: FusedSpec, device: DeviceClass, geometry: Geometry, layout: Layout) -> float:
    """Every CTA's tiles, as evenly as whole tiles go."""
    products = 3 if layout.parts == 2 else 1
    pace = device.fp16 * 1e9 * PACE.on(device) / device.sms
    stage = 2 * layout.tile_channels * layout.tile_pixels * layout.block * layout.taps * products / pace
    end = (TILE_US.on(device) + COSTLY_US.on(device) * costly_operators(spec)) / 1e3 * layout.pixels * geometry.wide_phases / WARPGROUP_PIXELS
    stages = [sum(layout.stages_of(len(taps)) for taps in phase.taps) for phase in geometry.phases]
    tiles = units_of(spec, geometry, layout) // len(stages)
    times = [stage * count + end for count in stages]
    return max(sum(times) * tiles / device.sms, max(times) * math.ceil(tiles / device.sms) if len(times) == 1 else 0.0)
