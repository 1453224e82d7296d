"""The floor of a chain: the least time that a device can need for it."""

from __future__ import annotations

import math

from codegen.ir.flop import producer_flop
from codegen.ops import Kind
from codegen.plan.model import Floor
from codegen.spec import Spec
from codegen.targets import DeviceClass


def floor(spec: Spec, device: DeviceClass, products: int = 1, rate: float | None = None) -> Floor:
    """What the chain costs at least: multiply-adds times `products` at `rate` TFLOP/s, and every tensor moved once.

    Without a rate it is the device's best at the spec's precision: three fp16 products for fp32, one for the others.
    """
    flop = sum(producer_flop(step) for step in spec.chain if step.operator.kind is Kind.PRODUCER)
    itemsize = spec.precision.itemsize
    tensors = sum(math.prod(given.shape) for given in spec.inputs) + math.prod(spec.output_shape) + sum(math.prod(shape) for _, shape in spec.parameters)
    moved = float(tensors * itemsize)
    if rate is None:
        products, rate = (3, device.fp16) if spec.precision.name == "fp32" else (1, device.fp16)
    compute = flop * products / (rate * 1e9) if rate else 0.0
    memory = moved / (device.hbm * 1e6) if device.hbm else 0.0
    return Floor(flop, moved, compute, memory)
