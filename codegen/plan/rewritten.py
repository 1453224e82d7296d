"""The plan of a rewritten chain as a plan of the chain as written: what is derived comes first, and then stands where a parameter or x stood."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from codegen.algebra import Rewriting, rewrite
from codegen.ir.fused_form import departure
from codegen.ir.value import mask_name
from codegen.ops import Kind
from codegen.plan.derived.route import plan_derived
from codegen.plan.floor import floor
from codegen.plan.model import Buffer, Launch, LeftToRival, Library, Plan, Refusal
from codegen.plan.route import Request
from codegen.spec import Spec

Step = Launch | Library
Planned = Callable[[Request, bool, bool | None], Plan]


def plan_rewritten(request: Request, planned: Planned) -> Plan:
    """The plan of a request, its chain rewritten in each of its modes. Raises Refusal.

    `planned` plans a request as it is: its flags say whether a target may be left to its rival, and which mode alone is wanted. A rewriting that the target
    has no kernels for is not made, and the plan says so.
    """
    spec = request.spec
    modes = [rewrite(spec, training) for training in ((False, True) if spec.has_modes else (False,))]
    if not any(mode.applied for mode in modes):
        found = planned(request, True, None)
        return replace(found, why=(*found.why, *dict.fromkeys(reason for mode in modes for reason in mode.why)))
    if len(modes) == 1 or (modes[0].spec, modes[0].derived) == (modes[1].spec, modes[1].derived):
        return _plan_mode(request, modes[0], planned, True, None)
    found, reasons = [], []
    for mode in modes:
        try:
            found.append(_plan_mode(request, mode, planned, True, mode.training))
        except LeftToRival as reason:
            reasons.append(reason)
    if not found:
        raise reasons[0]
    if reasons:  # a target that serves one mode serves both
        found = [_plan_mode(request, mode, planned, False, mode.training) for mode in modes]
    return _both(*found)


def _plan_mode(request: Request, rewriting: Rewriting, planned: Planned, may_leave: bool, training: bool | None) -> Plan:
    if not rewriting.applied:
        return _as_written(request, planned, may_leave, training, rewriting.why)
    passes = " and ".join(rewriting.names)
    if departure(request.spec.chain) is None and (reason := departure(rewriting.spec.chain)):
        text = f"algebra, not {passes}: the chain as written is one fused plan, and what is left is none: {reason}"
        return _as_written(request, planned, may_leave, training, (text,))
    try:
        return _rewritten(request, rewriting, planned, may_leave, training)
    except LeftToRival:
        raise
    except Refusal as reason:
        text = f"algebra, not {passes}: no kernel of this target serves the rewritten chain: {reason}"
        return _as_written(request, planned, may_leave, training, (text,))


def _as_written(request: Request, planned: Planned, may_leave: bool, training: bool | None, why: tuple[str, ...]) -> Plan:
    found = planned(request, may_leave, training)
    return replace(found, why=(*found.why, *why))


def _rewritten(request: Request, rewriting: Rewriting, planned: Planned, may_leave: bool, training: bool | None) -> Plan:
    spec, inner = request.spec, replace(rewriting.spec, singles=tuple(tensor.key for tensor in rewriting.derived) if request.spec.precision.itemsize == 2 else ())
    found = planned(replace(request, spec=inner), may_leave, training)
    derived, between = plan_derived(spec, rewriting.derived, request.target, request.device)
    names = {tensor.key: tensor.buffer for tensor in rewriting.derived}
    buffers = (*(Buffer(tensor.buffer, tensor.shape, "float32") for tensor in rewriting.derived), *between, *found.buffers)

    # The backward is that of the chain as written, and knows masks by their places there; no pass drops a dropout.
    masks = dict(zip(_masks(inner), _masks(spec), strict=True))
    fresh = set(names)  # of every call: what is made of it cannot be prepared

    def known(step: Step) -> Step:
        arguments = tuple(names.get(name, name) for name in step.arguments)
        if isinstance(step, Library):
            other = {"precision": inner.precision.name} if inner.precision != spec.precision else {}
            return replace(step, arguments=arguments, options={**step.options, **other}, also=tuple(masks.get(name, name) for name in step.also))
        if step.prepares and fresh.intersection(step.arguments):
            fresh.update(step.prepares)
            step = replace(step, prepares=())
        return replace(step, names=arguments, part=step.part or found.spec)

    least, moved = floor(inner, request.device), floor(spec, request.device)
    training_steps = (*derived, *map(known, found.training)) if found.training else ()
    return replace(
        found, spec=spec, steps=(*derived, *map(known, found.steps)), training=training_steps, buffers=buffers, floor=replace(least, bytes=moved.bytes, memory_ms=moved.memory_ms),
        why=(*rewriting.why, *found.why), algebra=rewriting.names,
    )  # fmt: skip


def _masks(spec: Spec) -> list[str]:
    """The names under which the masks of a chain's dropouts are kept, in order."""
    return [mask_name(step) for step in spec.chain if step.operator.kind is Kind.DROPOUT]


def _both(evaluation: Plan, training: Plan) -> Plan:
    """One plan of two that were made for a mode each. What evaluation has is kept apart by its names."""
    steps = _apart(evaluation)
    buffers = (*(replace(buffer, name=_own(buffer.name)) for buffer in evaluation.buffers), *training.buffers)
    reasons = (*evaluation.why, *(f"in training: {reason}" for reason in training.why if reason not in evaluation.why))
    return replace(
        evaluation, steps=steps, training=training.steps, buffers=buffers, why=reasons, algebra=tuple(dict.fromkeys((*evaluation.algebra, *training.algebra))),
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
            made.append(replace(step.apart("evaluation"), names=arguments, part=step.part or plan.spec, prepares=tuple(map(name, step.prepares))))
    return tuple(made)

