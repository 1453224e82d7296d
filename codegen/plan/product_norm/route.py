"""The routes of a product and a norm apart: a kernel that serves convolutions without a norm up to the norm, whose own kernels then read its result.

One pass more than kernels that normalise where they multiply; but those hold whole groups, and tile as those allow.
"""

from __future__ import annotations

from dataclasses import replace

from codegen.ir.fused_form import PRODUCERS, FusedSpec
from codegen.plan.conv_direct.route import CONV_DIRECT
from codegen.plan.conv_product_sm90a.route import CONV_PRODUCT_SM90A
from codegen.plan.floor import floor
from codegen.plan.model import Buffer, Launch, Plan
from codegen.plan.norm.cost import norm_ms
from codegen.plan.norm.flat import split_groups
from codegen.plan.norm.route import plan_norm
from codegen.plan.route import Choice, Offer, Request, Route

APART = 1.1  # by which the estimate is multiplied to be compared with others': it is the sum of two, and a kernel that normalises where it multiplies has one


def behind(product: Route, target: str) -> Route:
    """The route of a `product` and the norm's kernels behind it, for one target: that of the product's instructions."""

    def offers(request: Request) -> tuple[Offer, ...]:
        spec, device = request.form, request.device
        norm = norm_ms(spec, device, split_groups(spec, device.sms))
        return tuple(
            replace(offer, choice=Choice(name, offer.choice.knobs), ms=offer.ms + norm, weight=offer.weight * APART, across=offer.across * APART, detail=offer)
            for offer in product.offers(_head(request))
        )

    def plan(request: Request, offer: Offer) -> Plan:
        spec, target, device = request.form, request.target, request.device
        head = _head(request)
        found = product.plan(head, offer.detail)
        *first, last = (replace(step, part=head.form) for step in found.steps)
        tail = plan_norm(spec, target, device, source="t0", apply_before=False, producer_bias=None, statistics=None)
        steps: tuple[Launch, ...] = (*first, replace(last, result="t0"), *tail.steps)
        temporary = Buffer("t0", spec.producer.output_shape, spec.precision.dtype)
        return Plan(spec, target, device, steps, (*found.buffers, temporary, *tail.buffers), floor(spec, device), (*found.why, *tail.why))

    name = f"{product.name}_norm"
    return Route(name, f"{product.title} and a norm apart", frozenset({target}), frozenset(PRODUCERS) & product.products, offers, plan)


def _head(request: Request) -> Request:
    """What is asked of the product: the chain up to the norm, and its result in the storage type, whatever the norm's is."""
    spec = request.form
    return replace(request, spec=FusedSpec.of(replace(spec, chain=spec.chain[: spec.norm.index], unused=(), gives=None)), forced=None)


CONV_PRODUCT_NORM = behind(CONV_PRODUCT_SM90A, "sm_90a")
CONV_DIRECT_NORM = behind(CONV_DIRECT, "sm_80")
