"""How long the norm's kernels take behind a convolution, estimated."""

from __future__ import annotations

import math

from codegen.plan.norm.flat import split_groups
from codegen.plan.shared.cost import pass_ms
from codegen.spec import Spec
from codegen.targets import DeviceClass


def norm_ms(spec: Spec, device: DeviceClass) -> float:
    """The norm kernel behind a convolution that left its result in memory; where groups are few and long, statistics first, in a kernel of its own."""
    result, itemsize = math.prod(spec.producer.output_shape), spec.precision.itemsize
    split = split_groups(spec, device.sms)
    norm = pass_ms((2 if split else 1) * result * itemsize + math.prod(spec.output_shape) * spec.result.itemsize, device)
    return norm + (pass_ms(0, device) if split else 0.0)
