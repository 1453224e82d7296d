"""The precision of what a pass derives: products with derived tensors are float32's, as sums of rounded values have no error that a rounded sum may add to."""

from __future__ import annotations

from dataclasses import replace

from codegen.algebra.rewriting import Declined
from codegen.numerics import FP32
from codegen.ops import Kind
from codegen.spec import Spec, Step


def needs_single(spec: Spec, producer: Step, what: str) -> None:
    """Raises Declined where the chain's precision has no float32 product for `producer` alone: at 16 bits, and at tf32 beside another producer."""
    if spec.precision.itemsize == 2:
        raise Declined(f"{what}: folded weights rounded to {spec.precision.dtype} would break the promise of {spec.precision.name}")
    others = [str(step.name) for step in spec.chain if step.operator.kind is Kind.PRODUCER and step.name != producer.name]
    if spec.precision.name == "tf32" and others:
        raise Declined(f"{what}: folded weights rounded to TF32 would break the promise of tf32, and {', '.join(others)} is multiplied in TF32")


def single(spec: Spec) -> Spec:
    """The chain with products of float32; of tf32, whose tensors are float32's."""
    return spec if spec.precision.name == "fp32" else replace(spec, precision=FP32, math=None)
