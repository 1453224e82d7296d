"""The producer by torch's library, as a step of fused plans and of backwards."""

from __future__ import annotations

from codegen.ir.fused_form import FusedSpec
from codegen.plan.model import Library

_OPTIONS = ("stride", "padding", "dilation", "groups")  # of a convolution


def library_product(spec: FusedSpec, bias: bool = True) -> Library:
    """The producer into "t0"; without its `bias` where another kernel adds that."""
    producer = spec.producer
    options = {key: producer.values[key] for key in _OPTIONS} if producer.operator.rank else {}
    return Library(producer.operator.name, ("x", spec.weight, spec.bias if bias else None), "t0", options)
