"""Routes and the planner: offers are plain and named, the least weighed estimate wins, a forced choice wins over it, and refusals are told."""

from dataclasses import replace

import pytest

from bench.sweep.draw import SMALL
from codegen.plan import Refusal, plan, planner
from codegen.plan.planner import choices, planned, ways_of
from codegen.plan.route import Choice, Offer, Request, Route
from codegen.plan.shared.fitted import Fitted, Source
from codegen.plan.stages.route import cut
from codegen.plan.table import ROUTES
from codegen.render import TEMPLATES, render_kernel
from codegen.spec import shipped
from codegen.targets import DEVICES, TARGETS
from tests.fused import load_fused
from tests.fused_draw import draw

LINEAR = "specs/gemm_groupnorm_hardtanh_small.yaml"


def requests():
    """Every shipped spec whose chain has no stages, at two precisions, for each CUDA target on an H200."""
    for path in shipped():
        for precision in ("fp32", "bf16"):
            spec = load_fused(path, precision)
            for target in ("sm_80", "sm_90a"):
                if not cut(spec, TARGETS[target])[1]:
                    yield Request(spec, TARGETS[target], DEVICES["h200"])


def offers(request):
    """(route, offer) of every route that serves a request."""
    for route in ROUTES:
        if route.serves(request):
            try:
                yield from ((route, offer) for offer in route.offers(request))
            except Refusal:
                continue


def test_every_row_has_a_name_of_its_own_and_serves_targets_that_there_are():
    assert len({route.name for route in ROUTES}) == len(ROUTES)
    assert {target for route in ROUTES for target in route.targets} == set(TARGETS)
    for route in ROUTES:
        assert not route.own or (TEMPLATES / route.name.removesuffix("_norm")).is_dir(), "planners carry the names of their folders of templates"


def test_offers_are_named_once_and_estimated():
    for request in requests():
        found = [offer for _, offer in offers(request)]
        assert len({offer.choice.label for offer in found}) == len(found)
        assert all(offer.ms > 0 and offer.weight > 0 and offer.across > 0 for offer in found)
        assert all(offer.choice.label.replace("_", "").isalnum() for offer in found), "labels name folders"


def test_a_choice_that_names_less_stands_for_the_first_offer_that_has_it():
    whole = Choice("gemm", (("math", "fp16"), ("tile", "64x64"), ("slices", 1)))
    assert Choice("gemm").covers(whole) and Choice("gemm", (("slices", 1), ("math", "fp16"))).covers(whole)
    assert not Choice("gemm", (("slices", 2),)).covers(whole) and not Choice("library").covers(whole) and not whole.covers(Choice("gemm"))
    spec = load_fused(LINEAR, "bf16")
    first = next(offer for route, offer in offers(Request(spec, TARGETS["sm_80"], DEVICES["h200"])) if route.name == "gemm")
    forced, full = (planned(Request(spec, TARGETS["sm_80"], DEVICES["h200"], forced=choice)) for choice in (Choice("gemm"), first.choice))
    assert [render_kernel(forced, kernel) for kernel in forced.kernels] == [render_kernel(full, kernel) for kernel in full.kernels]


def toy(name: str, ms: float, weight: float = 1.0, own: bool = True, targets=("sm_80",)) -> Route:
    """A route with one offer, which plans what the library's does; a negative estimate refuses."""
    library = next(route for route in ROUTES if route.name == "library")

    def listed(request):
        if ms < 0:
            raise Refusal(f"{name} cannot")
        return (Offer(Choice(name), ms, weight),)

    return Route(name, f"the {name}", frozenset(targets), frozenset({"linear"}), listed, library.plan, own)


@pytest.mark.parametrize(("second", "weight", "winner"), [(2.0, 1.0, "first"), (2.0, 0.4, "second"), (1.0, 1.0, "first"), (-1.0, 1.0, "first")])
def test_the_least_weighed_estimate_wins_and_the_earlier_of_equals(monkeypatch, second, weight, winner):
    monkeypatch.setattr(planner, "ROUTES", (toy("first", 1.0), toy("second", second, weight)))
    request = Request(load_fused(LINEAR, "bf16"), TARGETS["sm_80"], DEVICES["h200"])
    assert ways_of(request).best[0].name == winner
    why, other = planned(request).why, {"first": "second", "second": "first"}[winner]
    told = f"not the {other}: {other} cannot" if second < 0 else f"ms with the {other}"
    assert any(reason.startswith(f"the {winner}: ") for reason in why) and any(told in reason for reason in why)
    if second > 0:
        assert f"the {other}: asked for" in planned(replace(request, forced=Choice(other))).why


def test_a_spec_that_asks_for_our_own_or_the_librarys_gets_it_or_the_reason(monkeypatch):
    monkeypatch.setattr(planner, "ROUTES", (toy("vendor", 1.0, own=False), toy("ours", 2.0), toy("other", -1.0)))
    spec = load_fused(LINEAR, "bf16")
    for gemm, name in (("generated", "ours"), ("library", "vendor")):
        assert ways_of(Request(replace(spec, gemm=gemm), TARGETS["sm_80"], DEVICES["h200"])).best[0].name == name
    monkeypatch.setattr(planner, "ROUTES", (toy("vendor", 1.0, own=False), toy("ours", -1.0)))
    with pytest.raises(Refusal, match="gemm: generated asks for a GEMM of our own, which cannot be: ours cannot; gemm: library can"):
        plan(replace(spec, gemm="generated"), "sm_80")


def test_a_target_is_left_to_a_faster_one_unless_it_is_asked_for(monkeypatch):
    monkeypatch.setattr(planner, "ROUTES", (toy("slow", 2.0, targets=("sm_90a",)), toy("fast", 1.0)))
    spec = load_fused(LINEAR, "bf16")
    with pytest.raises(Refusal, match="the slow would take 2.000 ms, estimated, against 1.000 ms with sm_80's kernels"):
        plan(spec, "sm_90a")
    assert plan(replace(spec, gemm="generated"), "sm_90a") and plan(spec, "sm_90a", forced=Choice("slow"))


def test_what_is_measured_is_what_is_weighed(tmp_path):
    """Of random specs: the planner's own choice of every route is among the tuner's, at most three of a route and an arithmetic."""
    for index in range(40):
        spec = draw(11, index, SMALL, tmp_path)
        listed = choices(spec, DEVICES["h200"])
        kinds = [(target, choice.route, choice.settings.get("math")) for target, choice in listed]
        assert max(map(kinds.count, kinds)) <= planner.BEST and len(set(listed)) == len(listed)
        for target in ("sm_80", "sm_90a"):
            if cut(spec, TARGETS[target])[1]:
                continue
            for route in ROUTES:
                request = Request(spec, TARGETS[target], DEVICES["h200"])
                if not route.serves(request):
                    continue
                try:
                    own = route.offers(request)[0].choice
                except Refusal:
                    continue
                assert (target, own) in listed


def test_fitted_times_follow_the_clock_and_shares_do_not():
    source = Source("h200", "2026-11", "a test")
    slow = replace(DEVICES["a100"], clock=DEVICES["h200"].clock / 2)
    assert Fitted(3.0, "us", source).on(slow) == 6.0 and Fitted(0.5, "share", source).on(slow) == 0.5
    assert Fitted(0.1, "us", source).on(DEVICES["h200"]) == 0.1
