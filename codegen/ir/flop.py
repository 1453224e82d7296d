"""The work of producers."""

from __future__ import annotations

import math

from codegen.spec import Step


def producer_flop(step: Step) -> float:
    """Multiply-adds of a producer times two: each result's products, or of a transposed convolution each input value's."""
    weight = math.prod(step.parameters[0].shape[1:])
    return 2.0 * weight * math.prod(step.input_shape if step.operator.transposed else step.output_shape)
