"""The floor of a chain: the least time that a device can need for it."""

from __future__ import annotations

import math

from codegen.plan.model import Floor
from codegen.spec import Spec
from codegen.targets import DeviceClass


def floor(spec: Spec, device: DeviceClass, products: int = 1, rate: float | None = None) -> Floor:
    """What the chain costs at least: multiply-adds times `products` at `rate` TFLOP/s, and every tensor moved once.

    Without a rate it is the device's best at the spec's precision: three fp16 products for fp32, one for the others.
    """
    producer = spec.producer
    weight = producer.parameters[0].shape
    outputs = math.prod(producer.output_shape)
    flop = 2.0 * outputs * math.prod(weight[1:])
    itemsize = spec.precision.itemsize
    tensors = math.prod(spec.input_shape) + math.prod(spec.output_shape) + sum(math.prod(shape) for _, shape in spec.parameters)
    moved = float(tensors * itemsize)
    if rate is None:
        products, rate = (3, device.fp16) if spec.precision.name == "fp32" else (1, device.fp16)
    compute = flop * products / (rate * 1e9) if rate else 0.0
    memory = moved / (device.hbm * 1e6) if device.hbm else 0.0
    return Floor(flop, moved, compute, memory)
