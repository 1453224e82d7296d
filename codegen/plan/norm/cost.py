"""How long the norm's kernels take, estimated, and the numbers by which they are chosen."""

from __future__ import annotations

import math

from codegen.ir.fused_form import FusedSpec
from codegen.plan.shared.cost import pass_ms
from codegen.plan.shared.fitted import NORM_SHAPES, Fitted
from codegen.targets import DeviceClass

# Latency model for few groups, of a thread that holds its part of one.
VALUE_CYCLES = Fitted(20, "cycles", NORM_SHAPES)  # of a value's access
SPARING_CYCLES = Fitted(10, "cycles", NORM_SHAPES)  # of an operator of comparisons and products, for each value
COSTLY_CYCLES = Fitted(250, "cycles", NORM_SHAPES)  # of one of exponentials or divisions
LEVEL_CYCLES = Fitted(90, "cycles", NORM_SHAPES)  # of a level of shuffles, for each of three sums
BARRIER_CYCLES = Fitted(1000, "cycles", NORM_SHAPES)  # of a block's barriers
SHARED_CYCLES = Fitted(16000, "cycles", NORM_SHAPES)  # of a group in registers, from which on many blocks share it although it would fit: two kernels of less than half

# Throughput model for many groups: shares of the time that lanes without work cost.
SHORT_SEGMENT = Fitted(0.15, "ratio", NORM_SHAPES)  # for each halving of a warp's segment below a line of 128 bytes
FLIGHT = Fitted(0.10, "ratio", NORM_SHAPES)  # for each factor of two away from CHUNK_VALUES in flight
BARRIERS = Fitted(0.30, "ratio", NORM_SHAPES)  # where a block needs barriers


def norm_ms(spec: FusedSpec, device: DeviceClass, split: bool) -> float:
    """The norm kernel behind a convolution that left its result in memory; where groups are few and long, statistics first, in a kernel of its own."""
    result, itemsize = math.prod(spec.producer.output_shape), spec.precision.itemsize
    norm = pass_ms((2 if split else 1) * result * itemsize + math.prod(spec.output_shape) * spec.result.itemsize, device)
    return norm + (pass_ms(0, device) if split else 0.0)
