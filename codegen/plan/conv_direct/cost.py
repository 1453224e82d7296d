"""How long a direct convolution takes, estimated: the instructions of its threads, or y's way to memory."""

from __future__ import annotations

import math

from codegen.ir.fused_form import FusedSpec
from codegen.plan.conv_direct.tile import Geometry, Tile, work
from codegen.plan.shared.cost import costly_operators
from codegen.plan.shared.fitted import DIRECT, Fitted
from codegen.targets import DeviceClass

ISSUE_SHARE = Fitted(0.6, "share", DIRECT)  # of an SM's issue slots, which products and loads fill
STORED_SHARE = Fitted(0.45, "share", DIRECT)  # of the memory's rate, at which results leave
COSTLY = Fitted(16.0, "instructions", DIRECT)  # of an operator with an exponential


def estimated_ms(spec: FusedSpec, device: DeviceClass, geometry: Geometry, tile: Tile) -> float:
    """The one kernel of the route."""
    results = spec.batch * spec.channels * geometry.results
    instructions = tile.blocks * work(spec, geometry, tile) + COSTLY.on(device) * costly_operators(spec) * results
    rate = device.fp32 / 2 * 1e9 * ISSUE_SHARE.on(device)  # a product is two of the card's FLOP
    moved = spec.precision.itemsize * (math.prod(spec.input_shape) + results)
    return max(instructions / rate, moved / (device.hbm * 1e6 * STORED_SHARE.on(device))) + device.launch_us / 1e3
