"""The route of the cpu target: torch's own GEMM or convolution, then one C++ function."""

from __future__ import annotations

from codegen.ir.fused_form import PRODUCERS
from codegen.plan.cpu.kernel import cpu_kernel
from codegen.plan.floor import floor
from codegen.plan.model import Buffer, Launch, Plan
from codegen.plan.route import Choice, Offer, Request, Route
from codegen.plan.shared.product import library_product


def offers(request: Request) -> tuple[Offer, ...]:
    """The one way there is. Nothing is known of the machine's processor, so that there is no estimate."""
    return (Offer(Choice("cpu"), 0.0),)


def plan(request: Request, offer: Offer) -> Plan:
    """The plan: a library step into "t0" and one launch."""
    spec, target, device = request.form, request.target, request.device
    producer, kernel = spec.producer, cpu_kernel(spec)
    why = (f"torch's own {producer.operator.name}, then one C++ function that reads its result from memory once and writes y",)
    buffer = Buffer("t0", producer.output_shape, spec.precision.dtype)
    return Plan(spec, target, device, (library_product(spec), Launch(kernel)), (buffer,), floor(spec, device), why)


CPU = Route("cpu", "torch's {}, then one C++ function", frozenset({"cpu"}), frozenset(PRODUCERS), offers, plan, own=False)
