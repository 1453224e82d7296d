"""Plans of one route, whatever the planner would take: its own choice, or the first offer with the settings that a test names."""

from __future__ import annotations

from codegen.plan.gemm_sm90a.choice import choose_layout
from codegen.plan.gemm_sm90a.forms import forms_of
from codegen.plan.gemm_sm90a.layout import Form, Layout
from codegen.plan.gemm_sm90a.route import GEMM_SM90A, Detail, offer_of
from codegen.plan.model import Plan
from codegen.plan.route import Choice, Request, Route
from codegen.spec import Spec
from codegen.targets import TARGETS, DeviceClass


def request_for(route: Route, spec: Spec, device: DeviceClass, debug: bool = False) -> Request:
    """A request that the route alone is asked, for the first of its targets."""
    target = min(route.targets)
    return Request(spec, TARGETS[target], device, debug)


def planned_by(route: Route, spec: Spec, device: DeviceClass, debug: bool = False, **knobs) -> Plan:
    """The plan of the route's first offer with these settings. Raises Refusal; StopIteration where no offer has them."""
    request, wanted = request_for(route, spec, device, debug), Choice(route.name, tuple(knobs.items()))
    return route.plan(request, next(offer for offer in route.offers(request) if wanted.covers(offer.choice)))


def hopper_gemm(spec: Spec, device: DeviceClass, form: Form | None = None, layout: Layout | None = None, debug: bool = False) -> Plan:
    """The plan of the Hopper GEMM: its own choice, or a form and a layout, also such as it never offers."""
    if form is None and layout is None:
        return planned_by(GEMM_SM90A, spec, device, debug)
    request = request_for(GEMM_SM90A, spec, device, debug)
    form = form or forms_of(spec)[0]
    way = (form, layout or choose_layout(spec, request.target, device, form))
    return GEMM_SM90A.plan(request, offer_of(request, Detail(*way, (way,))))
