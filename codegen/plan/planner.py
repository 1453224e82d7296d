"""The planner: it collects the offers of all routes for a request, takes the least estimate, and lets that route make the plan.

A forced choice (of a spec's `gemm`, of a record in codegen/tuned/, of the tuner) leaves fewer offers; the rest is the same. Operators that no fused kernel
takes follow in small kernels of their own: see stages/.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from codegen.plan import tuned
from codegen.plan.model import Plan, PlanError
from codegen.plan.route import Choice, Offer, Request, Route
from codegen.plan.stages.route import first_stage, head_of, plan_stages
from codegen.plan.table import ROUTES
from codegen.spec import Spec
from codegen.targets import DEVICES, TARGETS, DeviceClass

BEST = 3  # offers of a route and an arithmetic that are worth measuring
RIVALS = {"sm_90a": "sm_80"}  # a target and the one that runs on the same cards: it serves a chain only where the other is not estimated faster


def plan(spec: Spec, target: str, device: str | None = None, debug: bool = False, forced: Choice | None = None) -> Plan:
    """The plan of `spec` for a target and a device class (None: the target's default). Raises PlanError.

    Where a class is named, what codegen/tuned/ holds of it decides between the offers; `forced` (of `choices`) takes one whatever the estimates say.
    `debug` bounds every wait of the kernels that wait for others; it changes nothing elsewhere.
    """
    if target not in TARGETS:
        raise PlanError(f"target {target!r} is unknown; there are {', '.join(TARGETS)}")
    name = device or TARGETS[target].default_device
    if name not in DEVICES or target not in DEVICES[name].targets:
        able = [d.name for d in DEVICES.values() if target in d.targets]
        raise PlanError(f"device class {name!r} does not go with target {target}; for it there are {', '.join(able)}")
    decision = tuned.decide(spec, target, name) if device and forced is None else None
    if decision and decision.choice is None:
        raise PlanError(decision.why)
    found = planned(Request(spec, TARGETS[target], DEVICES[name], debug, decision.choice if decision else forced))
    return replace(found, why=(decision.why, *found.why)) if decision else found


def planned(request: Request) -> Plan:
    """The plan of a request. Raises PlanError."""
    first = first_stage(request.spec, request.target)
    if first is not None:
        return plan_stages(request.spec, planned(replace(request, spec=head_of(request.spec, first))), first)
    ways = ways_of(request)
    route, offer = ways.best
    _refuse_slower(request, route, offer)
    found = route.plan(request, offer)
    return replace(found, why=_reasons(request, ways, found.why))


@dataclass(frozen=True)
class Ways:
    """The routes that serve a request with the first of their offers, and why others do not."""

    leading: tuple[tuple[Route, Offer], ...]
    refusals: tuple[tuple[Route, str], ...]

    @property
    def best(self) -> tuple[Route, Offer]:
        """The least estimate, weighed."""
        return min(self.leading, key=lambda way: way[1].ms * way[1].weight)


def ways_of(request: Request) -> Ways:
    """What the table offers for a request. Raises PlanError where nothing is left."""
    leading, refusals = [], []
    for route in _allowed(request):
        try:
            leading.append((route, _first(request, route)))
        except PlanError as reason:
            refusals.append((route, str(reason)))
    if not leading:
        raise PlanError(_nothing_left(request, refusals))
    return Ways(tuple(leading), tuple(refusals))


def _allowed(request: Request) -> list[Route]:
    """The rows of the table that serve the request and that neither the spec's `gemm` nor a forced choice excludes."""
    serving = [route for route in ROUTES if route.serves(request)]
    if request.forced is not None:
        return [route for route in serving if route.name == request.forced.route]
    own = {"generated": True, "library": False}.get(request.spec.gemm)
    chosen = [route for route in serving if route.own == own]
    return chosen or serving


def _first(request: Request, route: Route) -> Offer:
    """The route's own choice, or its first offer that a forced choice names."""
    offers = route.offers(request)
    if request.forced is None:
        return offers[0]
    found = next((offer for offer in offers if request.forced.covers(offer.choice)), None)
    if found is None:
        spec = request.spec
        raise PlanError(
            f"the planner has no {request.target.name}_{request.forced.label} any more; measure again (make tune SPEC={spec.named or spec.path}) "
            f"or take the record out of tuned/{request.device.name}.yaml"
        )
    return found


def _refuse_slower(request: Request, route: Route, offer: Offer) -> None:
    """Raises PlanError where the offers of a target that runs on the same cards are estimated faster and nobody forced this one."""
    rival = RIVALS.get(request.target.name)
    if rival is None or request.forced is not None or request.spec.gemm == "generated":
        return
    other = min(way.ms * way.across for _, way in ways_of(replace(request, spec=replace(request.spec, gemm=None), target=TARGETS[rival])).leading)
    if other < offer.ms * offer.across:
        library = "convolution" if request.spec.producer.operator.name == "conv2d" else "GEMM"
        raise PlanError(f"{route.title} would take {offer.ms:.3f} ms, estimated, against {other:.3f} ms with {rival}'s kernels or torch's {library}")


def choices(spec: Spec, device: DeviceClass) -> tuple[tuple[str, Choice], ...]:
    """(target, choice) of everything that is worth measuring for `spec` on a card of this class: the best offers of each route and arithmetic."""
    found = []
    for target in spec.targets or device.targets:
        if target not in device.targets:
            continue
        first = first_stage(spec, TARGETS[target])
        request = Request(spec if first is None else head_of(spec, first), TARGETS[target], device)
        for route in _allowed(request):
            try:
                offers = route.offers(request)
            except PlanError:
                continue
            counts: dict[object, int] = {}
            for offer in offers:
                kind = offer.choice.settings.get("math")
                counts[kind] = counts.get(kind, 0) + 1
                if counts[kind] <= BEST:
                    found.append((target, offer.choice))
    return tuple(found)


def _nothing_left(request: Request, refusals: list[tuple[Route, str]]) -> str:
    """Why no route serves a request."""
    reasons = "; ".join(reason for _, reason in refusals)
    if request.spec.producer.operator.name == "conv2d" and request.target.name == "sm_80":
        wanted = OLD_NAMES.get(request.forced.route) if request.forced else request.spec.gemm
        return f"gemm: {wanted} asks for a convolution of our own, which cannot be: {reasons}; gemm: library can"
    return reasons


OLD_NAMES = {"gemm": "generated", "conv_sm80": "one_pass", "conv_gemm": "windows"}


def _reasons(request: Request, ways: Ways, own: tuple[str, ...]) -> tuple[str, ...]:
    """A plan's own reasons with the comparison of routes."""
    route, offer = ways.best
    if request.target.name != "sm_80":
        return own
    conv = request.spec.producer.operator.name == "conv2d"
    title = {one.name: one.title.format("convolution" if conv else "GEMM") for one in ROUTES}
    wanted = request.forced or request.spec.gemm
    if conv:
        others = ", ".join(f"{other.ms:.3f} ms with {title[one.name]}" for one, other in ways.leading if one is not route)
        compared = f"{title[route.name]}: " + (f"{offer.ms:.3f} ms estimated, against {others}" if others else "asked for" if wanted else "the only way")
        refused = tuple(f"not {title[one.name]}: {reason}" for one, reason in ways.refusals)
        return (*own, compared, *refused) if route.own else (compared, *refused, *own)
    if route.own:
        return own
    if request.forced:
        return ("torch's GEMM, then the norm kernel", *own)
    if request.spec.gemm:
        return ("gemm: library asked for", *own)
    ours = next(way.ms for one, way in ways.leading if one.own)
    return (f"torch's GEMM, then the norm kernel: {offer.ms:.3f} ms estimated, against {ours:.3f} ms with mma.sync in our own", *own)
