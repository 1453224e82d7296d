"""The planner: it collects the offers of all routes for a request, takes the least estimate, and lets that route make the plan.

A forced choice (of a spec's `gemm`, of a record in codegen/tuned/, of the tuner) leaves fewer offers; the rest is the same. Operators that no fused kernel
takes follow in small kernels of their own: see stages/.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from codegen.ir.fused_form import departure, fused
from codegen.ops import OPERATORS, Kind
from codegen.plan import tuned
from codegen.plan.floor import floor
from codegen.plan.model import LeftToRival, Library, Plan, Refusal
from codegen.plan.parts import parts_of, plan_parts
from codegen.plan.rewritten import plan_rewritten
from codegen.plan.route import Choice, Offer, Request, Route
from codegen.plan.stages.route import cut, plan_stages
from codegen.plan.table import ROUTES
from codegen.spec import Spec
from codegen.targets import DEVICES, TARGETS, DeviceClass

BEST = 3  # offers of a route and an arithmetic that are worth measuring


def plan(spec: Spec, target: str, device: str | None = None, debug: bool = False, forced: Choice | None = None) -> Plan:
    """The plan of `spec` for a target and a device class (None: the target's default). Raises Refusal.

    Where a class is named, what codegen/tuned/ holds of it decides between the offers; `forced` (of `choices`) takes one whatever the estimates say.
    `debug` bounds every wait of the kernels that wait for others; it changes nothing elsewhere.
    """
    if target not in TARGETS:
        raise Refusal(f"target {target!r} is unknown; there are {', '.join(TARGETS)}")
    name = device or TARGETS[target].default_device
    if name not in DEVICES or target not in DEVICES[name].targets:
        able = [d.name for d in DEVICES.values() if target in d.targets]
        raise Refusal(f"device class {name!r} does not go with target {target}; for it there are {', '.join(able)}")
    decision = tuned.decide(spec, target, name) if device and forced is None else None
    if decision and decision.choice is None:
        raise Refusal(decision.why)
    found = plan_rewritten(Request(spec, TARGETS[target], DEVICES[name], debug, decision.choice if decision else forced), _allowed_plan)
    return replace(found, why=(decision.why, *found.why)) if decision else found


def _allowed_plan(request: Request, may_leave: bool, training: bool | None) -> Plan:
    """`planned`, within what the spec's `library` allows. Raises Refusal."""
    found = planned(request, may_leave, training)
    if refused := _library_beyond(request.spec, found):
        raise Refusal(f"library: {request.spec.library} leaves {', '.join(refused)} to no one: {request.target.name} has no kernel for it here")
    return found


def _library_beyond(spec: Spec, found: Plan) -> tuple[str, ...]:
    """The operators that a plan leaves to torch's library against the spec's `library`, those of training included."""
    operations = dict.fromkeys(step.operation for step in (*found.steps, *found.training) if isinstance(step, Library) and step.operation != "view")
    allowed = {None: lambda name: True, "producers": lambda name: OPERATORS[name].kind is Kind.PRODUCER, "forbid": lambda name: False}[spec.library]
    return tuple(name for name in operations if not allowed(name))


def planned(request: Request, may_leave: bool = True, training: bool | None = None) -> Plan:
    """The plan of a request, its chain as it is; of one mode alone where `training` says which.

    Raises Refusal; LeftToRival, unless it may not, where all kernels would be those of a rival target.
    """
    return _fused(request) if departure(request.spec.chain) is None else _in_parts(request, may_leave, training)


def _fused(request: Request) -> Plan:
    """The plan of a chain of the fused form, or of a product without a norm. Raises Refusal."""
    head, stages = cut(request.form, request.target)
    if stages:
        return plan_stages(request.form, _fused(replace(request, spec=head)), stages)
    ways = ways_of(request)
    route, offer = ways.best
    rival = _rival(request, route, offer)
    found = route.plan(request, offer)
    return replace(found, why=(*found.why, *_reasons(request, ways, rival)))


def _in_parts(request: Request, may_leave: bool, training: bool | None) -> Plan:
    """The plan of a chain that no one fused plan computes. Raises Refusal."""
    spec, target, device = request.spec, request.target, request.device
    parts = parts_of(spec, lambda part: _part(replace(request, spec=part)))
    found = plan_parts(spec, target, device, parts, functools.partial(Plan, spec, target, device, floor=floor(spec, device)), training)
    rival = target.rival
    if rival is not None and may_leave and all(kernel.portable for part in parts if part.plan for kernel in part.plan.kernels):
        reasons = "".join(f"; {reason}" for part in parts for reason in part.why)
        raise LeftToRival(f"none of this target's kernels serves a part of the chain, and {rival} has the same steps{reasons}")
    return found


def _part(request: Request) -> Plan | str | None:
    """The plan of a part. Raises Refusal.

    A product without a norm is left to the library where that is estimated faster, or refused by our kernels: the reason is given instead. None where no
    route serves it.
    """
    spec = request.form
    if spec.has_norm:
        return _fused(request)
    if not any(route.own and route.serves(request) for route in ROUTES):
        return None
    try:
        ways = ways_of(request)
        return _fused(request) if ways.best[0].own else _reasons(request, ways, None)[0]
    except Refusal as reason:
        if request.forced is not None or spec.gemm == "generated":
            raise
        return f"{spec.producer.operator.name} by torch's library: {reason}"


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
    """What the table offers for a request. Raises Refusal where nothing is left."""
    leading, refusals = [], []
    for route in _allowed(request):
        try:
            leading.append((route, _first(request, route)))
        except Refusal as reason:
            refusals.append((route, str(reason)))
    if not leading:
        raise Refusal(_nothing_left(request, refusals))
    return Ways(tuple(leading), tuple(refusals))


def _allowed(request: Request) -> list[Route]:
    """The rows of the table that serve the request and that neither the spec's `gemm` nor a forced choice excludes."""
    serving = [route for route in ROUTES if route.serves(request)]
    if request.forced is not None:
        return [route for route in serving if route.name == request.forced.route]
    own = True if request.spec.library == "forbid" else {"generated": True, "library": False}.get(request.spec.gemm)
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
        raise Refusal(
            f"the planner has no {request.target.name}_{request.forced.label} any more; measure again (make tune SPEC={spec.named or spec.path}) "
            f"or take the record out of tuned/{request.device.name}.yaml"
        )
    return found


def _rival(request: Request, route: Route, offer: Offer) -> tuple[str, float] | None:
    """What would serve the request by another target on the same cards, and its estimate; None where there is none or the route is asked for.

    Raises Refusal where it is estimated faster than the offer.
    """
    rival = request.target.rival
    if rival is None or request.forced is not None or request.spec.gemm == "generated":
        return None
    found = ways_of(replace(request, spec=replace(request.spec, gemm=None), target=TARGETS[rival]))
    other, name = min(way.ms * way.across for _, way in found.leading), f"{rival}'s kernels or torch's {_product(request)}"
    if other < offer.ms * offer.across:
        raise LeftToRival(f"{_title(request, route)} would take {offer.ms:.3f} ms, estimated, against {other:.3f} ms with {name}")
    return name, other


def choices(spec: Spec, device: DeviceClass) -> tuple[tuple[str, Choice], ...]:
    """(target, choice) of everything that is worth measuring for `spec` on a card of this class: the best offers of each route and arithmetic. None where the
    chain is planned in parts."""
    form, found = fused(spec), []
    if form is None:
        return ()
    for target in spec.targets or device.targets:
        if target not in device.targets:
            continue
        request = Request(cut(form, TARGETS[target])[0], TARGETS[target], device)
        for route in _allowed(request):
            try:
                offers = route.offers(request)
            except Refusal:
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
    reasons, gemm = "; ".join(reason for _, reason in refusals), request.spec.gemm
    if request.forced is not None or gemm is None or len({route.own for route in ROUTES if route.serves(request)}) == 1:
        return reasons
    wanted, other = (f"torch's {_product(request)}", "generated") if gemm == "library" else (f"a {_product(request)} of our own", "library")
    return f"gemm: {gemm} asks for {wanted}, which cannot be: {reasons}; gemm: {other} can"


def _product(request: Request) -> str:
    return request.form.producer.operator.product


def _title(request: Request, route: Route) -> str:
    return route.title.format(_product(request))


def _reasons(request: Request, ways: Ways, rival: tuple[str, float] | None) -> tuple[str, ...]:
    """How the route compares with others, one sentence for the winner and one for each refusal."""
    route, offer = ways.best
    others = [(_title(request, one), way.ms) for one, way in ways.leading if one is not route] + ([rival] if rival else [])
    if others:
        reason = f"{offer.ms:.3f} ms estimated, against {', '.join(f'{ms:.3f} ms with {title}' for title, ms in others)}"
    elif request.forced or request.spec.gemm:
        reason = "asked for"
    elif ways.refusals:
        reason = "the only way"
    else:
        return ()
    return (f"{_title(request, route)}: {reason}", *(f"not {_title(request, one)}: {refusal}" for one, refusal in ways.refusals))
