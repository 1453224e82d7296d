"""The plan of a rewritten chain as a plan of the chain as written: what is derived comes first, and then stands where a parameter or x stood."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from codegen.algebra import Rewriting, rewrite
from codegen.plan.derived.route import plan_derived
from codegen.plan.floor import floor
from codegen.plan.model import Buffer, Launch, LeftToRival, Library, Plan, Refusal
from codegen.plan.route import Request

Step = Launch | Library
Planned = Callable[[Request, bool], Plan]


def plan_rewritten(request: Request, planned: Planned) -> Plan:
    """The plan of a request, its chain rewritten in each of its modes. Raises Refusal.

    `planned` plans a request as it is; its flag says whether a target may be left to its rival. A rewriting that the target has no kernels for is not
    made, and the plan says so.
    """
    spec = request.spec
    evaluation = rewrite(spec)
    if not spec.has_modes:
        return _plan_mode(request, evaluation, planned, True)
    training = rewrite(spec, training=True)
    if not evaluation.applied and not training.applied:
        found = planned(request, True)
        return replace(found, why=(*found.why, *dict.fromkeys((*evaluation.why, *training.why))))
    modes, reasons = [], []
    for mode in (evaluation, training):
        try:
            modes.append(_plan_mode(request, mode, planned, True))
        except LeftToRival as reason:
            reasons.append(reason)
    if not modes:
        raise reasons[0]
    if reasons:  # a target that serves one mode serves both
        modes = [_plan_mode(request, mode, planned, False) for mode in (evaluation, training)]
    return _both(*modes)


def _plan_mode(request: Request, rewriting: Rewriting, planned: Planned, may_leave: bool) -> Plan:
    if not rewriting.applied:
        found = planned(request, may_leave)
        return replace(found, why=(*found.why, *rewriting.why))
    try:
        return _rewritten(request, rewriting, planned, may_leave)
    except LeftToRival:
        raise
    except Refusal as reason:
        found = planned(request, may_leave)
        return replace(found, why=(*found.why, f"algebra, not {' and '.join(rewriting.names)}: no kernel of this target serves the rewritten chain: {reason}"))


def _rewritten(request: Request, rewriting: Rewriting, planned: Planned, may_leave: bool) -> Plan:
    spec, inner = request.spec, rewriting.spec
    found = planned(replace(request, spec=inner), may_leave)
    derived, between = plan_derived(spec, rewriting.derived, request.target, request.device)
    names = {tensor.key: tensor.buffer for tensor in rewriting.derived}
    buffers = (*(Buffer(tensor.buffer, tensor.shape, "float32") for tensor in rewriting.derived), *between, *found.buffers)

    def known(step: Step) -> Step:
        arguments = tuple(names.get(name, name) for name in step.arguments)
        if isinstance(step, Library):
            other = {"precision": inner.precision.name} if inner.precision != spec.precision else {}
            return replace(step, arguments=arguments, options={**step.options, **other})
        return replace(step, names=arguments, part=step.part or inner, prepares=() if any(name in names for name in step.arguments) else step.prepares)

    least = floor(inner, request.device)
    moved = floor(spec, request.device)
    return replace(
        found, spec=spec, steps=(*derived, *map(known, found.steps)), training=tuple(derived) * bool(found.training) + tuple(map(known, found.training)), buffers=buffers,
        floor=replace(least, bytes=moved.bytes, memory_ms=moved.memory_ms), why=(*rewriting.why, *found.why), algebra=rewriting.names,
    )  # fmt: skip


def _both(evaluation: Plan, training: Plan) -> Plan:
    """One plan of two that were made for a mode each. What only evaluation has keeps apart by its names."""
    steps = _apart(evaluation)
    buffers = {buffer.name: buffer for buffer in (*(replace(buffer, name=_own(buffer.name)) for buffer in evaluation.buffers), *training.buffers)}
    used = {name for step in (*steps, *training.training) for name in step.arguments}
    reasons = (*evaluation.why, *(f"in training: {reason}" for reason in training.why if reason not in evaluation.why))
    return replace(
        evaluation, steps=steps, training=training.training, buffers=tuple(buffer for name, buffer in buffers.items() if name in used), why=reasons,
        algebra=tuple(dict.fromkeys((*evaluation.algebra, *training.algebra))),
    )  # fmt: skip


def _own(name: str) -> str:
    """The name of a temporary that only evaluation has."""
    return f"evaluation:{name}"


def _apart(plan: Plan) -> tuple[Step, ...]:
    """The steps of evaluation with kernels and temporaries under names of its own."""
    own = {buffer.name for buffer in plan.buffers} | ({step.out for step in plan.steps if isinstance(step, Library)} - {"y"})

    def name(given: str | None) -> str | None:
        return _own(given) if given in own else given

    made: list[Step] = []
    for step in plan.steps:
        arguments = tuple(map(name, step.arguments))
        if isinstance(step, Library):
            made.append(replace(step, arguments=arguments, out=name(step.out)))
        else:
            kernel = replace(step.kernel, name=f"evaluation_{step.kernel.name}")
            made.append(replace(step, kernel=kernel, names=arguments, part=step.part or plan.spec, prepares=tuple(map(name, step.prepares))))
    return tuple(made)


__all__ = ["plan_rewritten"]
