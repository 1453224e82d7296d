"""The producer alone: by torch's library, as a step of fused plans and of backwards, and what kernels of ours refuse of it."""

from __future__ import annotations

import math

from codegen.ir.fused_form import FusedSpec
from codegen.plan.model import Library, Refusal

TRUNCATED_K = 512  # see refuse_truncated
INDICES = 1 << 30  # fewer values of a sample: loops over them stay within an int
_OPTIONS = ("stride", "padding", "dilation", "groups")  # of a convolution


def library_product(spec: FusedSpec, bias: bool = True) -> Library:
    """The producer into "t0"; without its `bias` where another kernel adds that."""
    producer = spec.producer
    options = {key: producer.values[key] for key in _OPTIONS} if producer.operator.rank else {}
    return Library(producer.operator.name, ("x", spec.weight, spec.bias if bias else None), "t0", options)


def refuse_convolution(spec: FusedSpec, what: str) -> None:
    """Raises Refusal for what no kernel of ours for any convolution serves; `what` is its name in a sentence."""
    groups = spec.producer.values["groups"]
    if spec.gemm == "library":
        raise Refusal(f"gemm: library asked for, which {what} does not call")
    if groups != 1:
        raise Refusal(f"groups: {groups}: {what} serves one group")
    if max(math.prod(spec.input_shape[1:]), math.prod(spec.producer.output_shape[1:])) >= INDICES:
        raise Refusal("a sample has more values than kernels count")


def refuse_truncated(spec: FusedSpec) -> None:
    """Raises Refusal for a long product at tf32 that no norm scales.

    Tensor cores cut off what a sum cannot hold, 4.6e-9 of it for each k. Rounded operands err by about 2e-4 / sqrt(K) of a sum of one sign, which is less from
    TRUNCATED_K on. The promise of tf32 leaves room for that error, and for truncation as far as PyTorch's own result shows it: the vendor's TF32 adds 8 products at a
    time, but cuts K into parts where results are few.
    """
    k = spec.input_shape[1]
    if not spec.has_norm and spec.precision.name == "tf32" and k > TRUNCATED_K:
        raise Refusal(f"in_features: {k}: at tf32 a sum of more than {TRUNCATED_K} products, which no norm scales, loses more to truncation than tf32 allows")
