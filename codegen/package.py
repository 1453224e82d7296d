"""The package of a spec: a plan for each target that is asked for or can serve it, of a range of batches for each size."""

from __future__ import annotations

from dataclasses import replace

from codegen.manifest import Package
from codegen.plan import Refusal, plan
from codegen.spec import Spec
from codegen.targets import DEFAULT_TARGETS, DEVICES, TARGETS


def make_package(spec: Spec, targets: tuple[str, ...] = (), device: str | None = None, debug: bool = False, optional: bool = False) -> Package:
    """Plan `spec` for the given targets (else the spec's own, else those of DEFAULT_TARGETS that can serve it).

    Of a range of batches every size has plans of its own. Raises Refusal when a target that was asked for cannot serve the spec, or none can; a size
    of a range may do without a target where another one for the same machines serves it. With `optional` any target that cannot serve it is left out.
    """
    asked = targets or spec.targets
    places = () if targets else spec.targets_at
    if device and not any(name in DEVICES[device].targets for name in asked or DEFAULT_TARGETS):
        raise Refusal(f"device class {device} goes with {', '.join(DEVICES[device].targets)}, not with {', '.join(asked or DEFAULT_TARGETS)}")
    if not spec.batches:
        return _one_size(spec, asked, device, debug, optional=optional or not asked, places=places)
    made = [_of_range(size, asked, device, debug) for size in spec.sizes]
    for name in asked or ():
        if not any(one.plan_for(name) for one in made):
            raise Refusal(_unserved(spec, asked.index(name), name, f"serves no batch of the range: {dict(made[-1].skipped)[name]}", places))
    skipped = tuple((f"{name} at batch {one.spec.batch}", reason) for one in made for name, reason in one.skipped)
    return Package(spec, tuple(plan for one in made for plan in one.plans), skipped, tuple(made))


def _unserved(spec: Spec, at: int, name: str, reason: str, places: tuple[tuple[int, int], ...]) -> str:
    """What to say of the target that was asked for in place `at`: at `places`, (line, column) of the file, or on the command line."""
    where = ":".join(map(str, (spec.named or spec.path, *places[at]))) if places else spec.named or spec.path
    return f"{where}: targets: {name} {reason}" + ("; leave it out, or leave out targets, which is each that serves the spec" if places else "")


def _one_size(spec: Spec, asked: tuple[str, ...] | None, device: str | None, debug: bool, optional: bool, places: tuple[tuple[int, int], ...] = ()) -> Package:
    """The package of a spec with one batch; `optional`: a target that cannot serve it is left out."""
    plans, skipped = [], []
    for at, name in enumerate(asked or DEFAULT_TARGETS):
        try:
            plans.append(plan(spec, name, device if device and name in DEVICES[device].targets else None, debug))
        except Refusal as error:
            if not optional:
                raise Refusal(_unserved(spec, at, name, f"cannot serve this spec: {error}", places)) from None
            skipped.append((name, str(error)))
    if not plans:
        raise Refusal("no target can serve this spec: " + "; ".join(f"{name}: {reason}" for name, reason in skipped))
    return Package(spec, tuple(plans), tuple(skipped))


def _of_range(spec: Spec, asked: tuple[str, ...] | None, device: str | None, debug: bool) -> Package:
    """The package of one size of a range: its files and functions are named by the batch, so that all sizes fit into one library."""
    try:
        made = _one_size(spec, asked, device, debug, optional=True)
        served = {plan.target.language for plan in made.plans}
        for name, reason in made.skipped if asked else ():
            if TARGETS[name].language not in served:
                raise Refusal(reason)
    except Refusal as error:
        raise Refusal(f"batch {spec.batch}: {error}") from None
    plans = tuple(replace(plan, target=replace(plan.target, suffix=f"{plan.target.suffix}_b{spec.batch}")) for plan in made.plans)
    return replace(made, plans=plans)
