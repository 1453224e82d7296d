"""How long the convolution as a product takes on Hopper, estimated: the passes that split x and W, tiles at the pace of the tensor cores, y's way to memory."""

from __future__ import annotations

import math

from codegen.ir.fused_form import FusedSpec
from codegen.plan.conv_product_sm90a.geometry import Geometry
from codegen.plan.conv_product_sm90a.kernel import units_of
from codegen.plan.conv_product_sm90a.layout import Layout
from codegen.plan.shared.cost import pass_ms
from codegen.plan.shared.fitted import CONV_PRODUCTS, Fitted
from codegen.targets import DeviceClass

PACE = Fitted(0.62, "share", CONV_PRODUCTS)  # of the tensor cores' rate, at which a busy SM multiplies: power takes most of the rest
READ_SHARE = Fitted(0.8, "share", CONV_PRODUCTS)  # of the memory's rate, at which x's largest values are found
SPLIT_SHARE = Fitted(0.7, "share", CONV_PRODUCTS)  # of the memory's rate, at which x is split
STORED_SHARE = Fitted(0.5, "share", CONV_PRODUCTS)  # of the memory's rate, at which results leave
TILE_US = Fitted(1.0, "us", CONV_PRODUCTS)  # of a tile's end, in which its warpgroups do not multiply


def estimated_ms(spec: FusedSpec, device: DeviceClass, geometry: Geometry, layout: Layout) -> float:
    """All kernels of the route."""
    rate = device.hbm * 1e6
    read, written = 4 * math.prod(spec.input_shape), 2 * layout.parts * spec.batch * geometry.gathered * layout.padded_channels
    split = read / (rate * READ_SHARE.on(device)) + (read + written) / (rate * SPLIT_SHARE.on(device)) + 2 * device.launch_us / 1e3
    filters = 0.0 if spec.prepack else pass_ms(4 * 2 * math.prod(spec.producer.parameters[0].shape), device)
    stored = 4 * math.prod(spec.producer.output_shape) / (rate * STORED_SHARE.on(device))
    return split + filters + max(multiply_ms(spec, device, geometry, layout), stored) + device.launch_us / 1e3


def multiply_ms(spec: FusedSpec, device: DeviceClass, geometry: Geometry, layout: Layout) -> float:
    """Every CTA's tiles, as evenly as whole tiles go."""
    products = 3 if layout.parts == 2 else 1
    pace = device.fp16 * 1e9 * PACE.on(device) / device.sms
    stage = 2 * layout.tile_channels * layout.tile_pixels * layout.block * layout.taps * products / pace
    stages = [sum(layout.stages_of(len(taps)) for taps in phase.taps) for phase in geometry.phases]
    tiles = units_of(spec, geometry, layout) // len(stages)
    times = [stage * count + TILE_US.on(device) / 1e3 for count in stages]
    return max(sum(times) * tiles / device.sms, max(times) * math.ceil(tiles / device.sms) if len(times) == 1 else 0.0)
