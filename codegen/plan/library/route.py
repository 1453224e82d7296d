"""The route of torch's own GEMM or convolution into a temporary, then the norm kernel with everything after it."""

from __future__ import annotations

from dataclasses import replace

from codegen.ir.fused_form import PRODUCERS
from codegen.ops import OPERATORS, Kind
from codegen.plan.floor import floor
from codegen.plan.library.cost import conv_ms, linear_ms, product_ms
from codegen.plan.model import Buffer, Plan, Refusal
from codegen.plan.norm.route import plan_norm
from codegen.plan.route import Choice, Offer, Request, Route
from codegen.plan.shared.product import library_product

LINEAR_WEIGHT = 0.95  # by which the estimate of the vendor's GEMM is multiplied to be compared with ours


def offers(request: Request) -> tuple[Offer, ...]:
    """The one way to call the library. Raises Refusal where its result would depend on a switch of torch's."""
    spec, device = request.form, request.device
    if not spec.has_norm:
        return (Offer(Choice("library"), product_ms(spec, device), 1.0 if spec.producer.operator.rank else LINEAR_WEIGHT),)
    if spec.producer.operator.rank:
        return (Offer(Choice("library"), conv_ms(spec, device)),)
    if spec.precision.dtype == "float32":
        raise Refusal(f"at {spec.precision.name} its result would depend on torch's global TF32 switch; at fp16 and bf16 it would not")
    return (Offer(Choice("library"), linear_ms(spec, device), LINEAR_WEIGHT),)


def plan(request: Request, offer: Offer) -> Plan:
    """The plan: a library step into "t0", and the norm's kernels."""
    spec, target, device = request.form, request.target, request.device
    conv = spec.producer.operator.rank > 0
    # cuDNN's convolution is called without its bias: the call that names its TF32 mode takes none, and the norm kernel adds it for nothing.
    library = library_product(spec, bias=not conv)
    if conv:
        library = replace(library, options={**library.options, "allow_tf32": spec.precision.name == "tf32"})
    tail = plan_norm(spec, target, device, source="t0", apply_before=True, producer_bias=spec.bias if conv else None, statistics=None)
    temporary = Buffer("t0", spec.producer.output_shape, spec.precision.dtype)
    rate = {"fp32": device.fp32, "tf32": device.tf32}.get(spec.precision.name, device.fp16)
    return Plan(spec, target, device, (library, *tail.steps), (temporary, *tail.buffers), floor(spec, device, 1, rate), tail.why)


LIBRARY = Route("library", "torch's {}", frozenset({"sm_80"}), frozenset(PRODUCERS), offers, plan, own=False, products=frozenset(name for name, row in OPERATORS.items() if row.kind is Kind.PRODUCER))
