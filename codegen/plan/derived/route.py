"""From derived tensors to the steps that make them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from codegen.algebra import ByChain, ByTaps, Derived
from codegen.ir.chain import segments_of
from codegen.ir.operand import c_identifier
from codegen.ir.value import value_name
from codegen.numerics import FP32
from codegen.plan.derived.kernel import ranges_kernel, taps_kernel
from codegen.plan.model import Buffer, Launch
from codegen.plan.segments.route import plan_segment
from codegen.spec import Input, Spec
from codegen.targets import DeviceClass, Target


def plan_derived(spec: Spec, derived: Sequence[Derived], target: Target, device: DeviceClass) -> tuple[tuple[Launch, ...], tuple[Buffer, ...]]:
    """The launches that make the tensors at each call, and the buffers between them; `spec` is the chain as written."""
    steps: list[Launch] = []
    buffers: list[Buffer] = []
    for tensor in derived:
        for step, between in _made(spec, tensor, target, device):
            steps.append(step)
            buffers += between
    return tuple(steps), tuple(buffers)


def _made(spec: Spec, tensor: Derived, target: Target, device: DeviceClass) -> Iterator[tuple[Launch, list[Buffer]]]:
    if isinstance(tensor.how, ByChain):
        yield from _by_chain(spec, tensor, target, device)
        return
    if isinstance(tensor.how, ByTaps):
        kernel = taps_kernel(tensor, spec.precision, target)
    else:
        kernel = ranges_kernel(tensor, spec.precision, target, device)
    yield Launch(kernel, part=spec, names=(tensor.source, tensor.buffer)), []


def _by_chain(spec: Spec, tensor: Derived, target: Target, device: DeviceClass) -> Iterator[tuple[Launch, list[Buffer]]]:
    """The segments of a chain whose x is the source."""
    part = _part(spec, tensor)
    for segment in segments_of(part, 0, len(part.chain), False):
        name = f"derive_{c_identifier(tensor.key)}" + (f"_{segment.first}" if segment.first else "")
        if segment.last == len(part.chain):
            segment = replace(segment, gives=replace(segment.gives, storage=FP32))
        kernels, between = plan_segment(part, segment, name, target, device)
        if segment.last < len(part.chain):
            between = [*between, Buffer(f"{tensor.buffer}:{segment.gives.name}", segment.gives.shape, segment.gives.storage.dtype)]
        inner = (value_name(part, place) for place in range(len(part.chain) - 1))
        names = {"x": tensor.source, "y": tensor.buffer} | {value: f"{tensor.buffer}:{value}" for value in inner}
        for kernel in kernels:
            yield Launch(kernel, part=part, names=tuple(names.get(argument, argument) for argument in kernel.arguments)), between
            between = []


def _part(spec: Spec, tensor: Derived) -> Spec:
    """A derivation by operators as a chain of its own."""
    return replace(
        spec, inputs=(Input("x", tensor.source_shape),), chain=tensor.how.steps, batch=tensor.source_shape[0], unused=(), created=(), batches=(), math=None,
    )  # fmt: skip
