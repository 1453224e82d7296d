"""Parts of a chain: runs of steps that a fused plan computes, segments that kernels of ours compute, and single steps by torch's library.

A chain that departs from the fused form is cut in front of every step that no fused plan takes. A product without a norm, with the element-wise operators
behind it, is a fused part too where kernels of ours are estimated faster than the library, up to costly operators that another kernel hides. What lies
between fused parts is cut into segments, as the mode needs them (codegen/ir/chain.py); other producers and dropout in training are left to the library. Each
fused part is planned as a chain of its own, whose input and result are named values of the whole. A part ends early where a later step reuses a value inside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from codegen.ir.apply import costly_step
from codegen.ir.chain import segments_of
from codegen.ir.fused_form import departure, is_product
from codegen.ir.segment import Segment
from codegen.ir.value import input_name, mask_name, value_name
from codegen.ops import Kind
from codegen.plan.model import Buffer, Launch, Library, Plan
from codegen.plan.segments.route import plan_segment
from codegen.spec import Input, Spec, Step
from codegen.targets import DeviceClass, Target


@dataclass(frozen=True)
class Part:
    """The steps from place `first` to place `last`, not included; `plan`: the fused plan that computes them, else segments and single steps do.

    `why` tells why no kernels of ours multiply here.
    """

    first: int
    last: int
    plan: Plan | None
    why: tuple[str, ...] = ()


Planned = Callable[[Spec], Plan | str | None]


def parts_of(spec: Spec, planned: Planned) -> tuple[Part, ...]:
    """The longest fused parts, from the front, and between them whatever there is.

    `planned` plans a part. Of a product without a norm it may also give a sentence, why the library computes it, or None, where no kernel of ours could.
    """
    found: list[Part] = []
    at = 0
    while at < len(spec.chain):
        part = _fused(spec, at, planned)
        before = found[-1] if found else None
        if part.plan is None and before is not None and before.plan is None:
            found[-1] = part = replace(before, last=part.last, why=(*before.why, *part.why))
        else:
            found.append(part)
        at = part.last
    return tuple(found)


def _fused(spec: Spec, first: int, planned: Planned) -> Part:
    """The longest fused part that begins in place `first`; one step without a plan where there is none."""
    last = _longest(spec, first, lambda steps: departure(steps) is None)
    if last:
        return Part(first, last, planned(part_spec(spec, first, last)))
    last = _longest(spec, first, is_product)
    last = last and _before_costly(spec, first, last)
    found = planned(part_spec(spec, first, last)) if last else None
    if isinstance(found, Plan):
        return Part(first, last, found)
    return Part(first, first + 1, None, (found,) if found else ())


def _before_costly(spec: Spec, first: int, last: int) -> int:
    """The end of a product's part from place `first` to `last` that leaves costly operators to the next kernel where that hides them.

    In a GEMM's epilogue nothing else runs while an exponential is waited for, longer than a pass over results of 16 bits takes (docs/kernels.md); in that of a
    convolution the next tile is multiplied. A kernel that reads the result anyway, as the one of a softmax does, applies it for nothing.
    """
    heavy = next((place for place in range(first + 1, last) if costly_step(spec.chain[place])), last)
    read_anyway = last < len(spec.chain) and spec.chain[last].operator.kind not in (Kind.PRODUCER, Kind.DROPOUT)
    if heavy == last or not (read_anyway or (spec.precision.itemsize == 2 and not spec.chain[first].operator.rank)):
        return last
    return _longest(spec, first, lambda steps: len(steps) <= heavy - first and is_product(steps)) or last


def _longest(spec: Spec, first: int, form: Callable[[Sequence[Step]], bool]) -> int | None:
    """The end of the longest run from place `first` that has the form and that no later step looks into."""
    return next((last for last in range(len(spec.chain), first, -1) if _apart(spec, first, last) and form(spec.chain[first:last])), None)


def _apart(spec: Spec, first: int, last: int) -> bool:
    """Whether a run takes no earlier value but its input, and only its result is taken later."""
    inside = all(step.tap is None or step.tap >= first for step in spec.chain[first:last])
    return inside and not any(step.tap is not None and first <= step.tap < last - 1 for step in spec.chain[last:])


def part_spec(spec: Spec, first: int, last: int) -> Spec:
    """The run of steps as a spec of its own."""
    steps = tuple(replace(step, index=step.index - first, tap=None if step.tap is None else step.tap - first) for step in spec.chain[first:last])
    shape = steps[0].input_shape
    return replace(spec, inputs=(Input("x", shape, spec.values),), chain=steps, batch=shape[0], unused=())


def library_step(spec: Spec, step: Step, training: bool) -> Library:
    """One step by torch's own operator. In training, what the mode changes is asked for, and state comes back as further results."""
    operator, values = step.operator, step.values
    arguments: list[str | None] = [value_name(spec, step.index - 1)]
    keys = {parameter.suffix: step.key(parameter) for parameter in step.parameters}
    if operator.kind in (Kind.PRODUCER, Kind.NORM):
        arguments += [keys.get("weight", keys.get("")), keys.get("bias")]
    elif step.operand is not None:
        arguments.append(step.operand[0])
    if step.tap is not None:
        arguments.append(value_name(spec, step.tap))
    elif step.reads is not None:
        arguments.append(input_name(spec, step.reads))
    arguments += [step.key(buffer) for buffer in step.buffers]
    hidden = ("from", "shape", "init", "view", "parameter", "bias", "affine", "elementwise_affine")
    options = {key: value for key, value in values.items() if key not in hidden and value is not None}
    also: tuple[str, ...] = ()
    if not values.get("detach"):
        options.pop("detach", None)
    if values.get("view") is not None:
        options["operand"] = step.operand[1]
    if operator.name == "batch_norm":
        options |= {"training": training or not step.buffers, "momentum": values["momentum"]}
        also = tuple(f"state:{step.key(buffer)}" for buffer in step.buffers[:2]) if training else ()
    elif operator.kind is Kind.DROPOUT:
        options |= {"training": training, "sizes": step.input_shape}
        also = (mask_name(step),) if training else ()
    elif operator.kind is Kind.SHAPE:
        options = {"sizes": step.output_shape}
    elif operator.name in ("layer_norm", "rms_norm"):
        options["normalized_shape"] = step.parameters[0].shape if step.parameters else values["normalized_shape"] or step.input_shape[1:]
    for hidden in (operator.takes, operator.gives, "num_features", "track_running_stats"):
        options.pop(hidden, None)
    name = "view" if operator.kind is Kind.SHAPE else operator.name
    return Library(name, tuple(arguments), value_name(spec, step.index), options, also, step)


def plan_parts(spec: Spec, target: Target, device: DeviceClass, parts: tuple[Part, ...], whole: Callable[..., Plan], training: bool | None = None) -> Plan:
    """The plan of a chain in parts, of one mode alone where `training` says which; `whole` makes the Plan from steps and buffers."""
    fused = [buffer for number, part in enumerate(parts) if part.plan for buffer in _buffers(spec, number, part)]
    wanted = ((False, True) if spec.has_modes else (False,)) if training is None else (training,)
    modes = [_Mode(spec, target, device, mode) for mode in wanted]
    steps = [tuple(mode.steps(parts)) for mode in modes]
    buffers = {buffer.name: buffer for buffer in (*fused, *(buffer for mode in modes for buffer in mode.buffers))}
    return whole(steps=steps[0], training=steps[1] if len(steps) > 1 else (), buffers=tuple(buffers.values()), why=tuple(_why(spec, parts, modes)))


class _Mode:
    """The steps of evaluation or of training, and what they leave: buffers, segments, operators of torch's library."""

    def __init__(self, spec: Spec, target: Target, device: DeviceClass, training: bool) -> None:
        self.spec, self.target, self.device, self.training = spec, target, device, training
        self.buffers: list[Buffer] = []
        self.segments: list[Segment] = []
        self.library: list[str] = []

    def steps(self, parts: tuple[Part, ...]) -> Iterator[Launch | Library]:
        for number, part in enumerate(parts):
            if part.plan:
                yield from (_renamed(self.spec, step, number, part) for step in part.plan.steps)
                continue
            for segment in segments_of(self.spec, part.first, part.last, self.training):
                if not segment.alone:
                    yield from self._segment(segment)
                    continue
                if segment.core is not None:
                    self.library.append(segment.core.operator.name)
                yield library_step(self.spec, segment.steps[0], self.training)

    def _segment(self, segment: Segment) -> Iterator[Launch]:
        spec = self.spec
        self.segments.append(segment)
        differs = self.training and any(step.operator.modes for step in segment.steps)
        name = f"part{segment.first}to{segment.last - 1}" + ("_training" if differs else "")
        kernels, between = plan_segment(spec, segment, name, self.target, self.device)
        self.buffers += between
        given = segment.gives
        if segment.last < len(spec.chain):
            self.buffers.append(Buffer(given.name, given.shape, given.storage.dtype))
        for key, shape, _ in spec.buffers:
            if any(f"state:{key}" in kernel.arguments for kernel in kernels):
                self.buffers.append(Buffer(f"state:{key}", shape, spec.precision.dtype))
        known = replace(spec, inputs=(Input("x", segment.steps[0].input_shape, spec.values),), chain=segment.steps)
        yield from (Launch(kernel, part=known) for kernel in kernels)


def _names(spec: Spec, number: int, part: Part) -> Callable[[str | None], str | None]:
    own = {key for key, _ in part.plan.spec.parameters}

    def name(inner: str | None) -> str | None:
        if inner is None or inner in own:
            return inner
        if inner == "x":
            return value_name(spec, part.first - 1)
        return value_name(spec, part.last - 1) if inner == "y" else f"part{number}:{inner}"

    return name


def _renamed(spec: Spec, step: Launch | Library, number: int, part: Part) -> Launch | Library:
    name = _names(spec, number, part)
    if isinstance(step, Library):
        return replace(step, arguments=tuple(map(name, step.arguments)), out=name(step.out))
    names = tuple(map(name, step.arguments))
    return replace(step.apart(f"part{number}"), prepares=tuple(map(name, step.prepares)), part=part.plan.spec, names=names)


def _buffers(spec: Spec, number: int, part: Part) -> Iterator[Buffer]:
    name = _names(spec, number, part)
    for buffer in part.plan.buffers:
        yield replace(buffer, name=name(buffer.name))
    if part.last < len(spec.chain):  # the result goes on to the next part
        yield Buffer(value_name(spec, part.last - 1), part.plan.spec.output_shape, part.plan.spec.result.dtype)


def _why(spec: Spec, parts: tuple[Part, ...], modes: list[_Mode]) -> Iterator[str]:
    yield f"parts, for the chain as a whole has not the form of one fused plan: {departure(spec.chain)}"
    for part in parts:
        yield from part.plan.why if part.plan else part.why
    for mode in modes:
        when = " in training" if mode.training else ""
        if mode.segments:
            yield f"segments{when}: {'; '.join(' -> '.join(step.operator.name for step in segment.steps) for segment in mode.segments)}"
        if mode.library:
            yield f"library steps{when}: {', '.join(mode.library)}"


__all__ = ["Part", "library_step", "part_spec", "parts_of", "plan_parts"]
