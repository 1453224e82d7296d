"""How long the one-pass convolution for Hopper takes, estimated: the busiest CTA's samples and tiles."""

from __future__ import annotations

import math

from codegen.ir.fused_form import FusedSpec
from codegen.plan.conv_sm90a.geometry import Geometry
from codegen.plan.shared.cost import costly_operators
from codegen.plan.shared.fitted import SWEEP, Fitted
from codegen.targets import DeviceClass

SAMPLE_US = Fitted(6.1, "us", SWEEP)  # of a sample of a CTA
TILE_US = Fitted(0.0244, "us", SWEEP)  # of 100 pixels of a tile, for each instruction of K
COSTLY_US = Fitted(0.016, "us", SWEEP)  # of a thread's result, for each operator of exponentials before the norm
KEPT_US = Fitted(0.67, "us", SWEEP)  # of a thousand values that a CTA keeps
WEIGHTS_US = Fitted(0.43, "us", SWEEP)  # of a thousand weights
DOUBTED = Fitted(1.16, "ratio", SWEEP)  # of the measured time: twice where channels are few and rows long, three times where many come through registers


def one_kernel_ms(spec: FusedSpec, device: DeviceClass, g: Geometry, steps: int) -> float:
    """Milliseconds of the kernel, which multiplies in `steps` instructions along K: the busiest CTA's samples and tiles."""
    tiles = g.items * g.units * spec.producer.output_shape[2] / g.strips / g.tile_rows * g.column_tiles
    us = SAMPLE_US.on(device) * g.items + TILE_US.on(device) * tiles * g.tile * steps / 100
    us = us + COSTLY_US.on(device) * tiles * g.tile_values * costly_operators(spec)
    us += KEPT_US.on(device) * g.items * g.units * g.channels * g.entries / g.folds / 1000
    us += WEIGHTS_US.on(device) * g.channels * math.prod(spec.producer.parameters[0].shape[1:]) / 1000
    return DOUBTED.on(device) * us / 1e3
