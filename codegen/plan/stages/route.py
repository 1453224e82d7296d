"""What no fused kernel takes of a chain: average pooling, windows that overlap much, a pooling behind another, reductions over channels, and
broadcasts behind those.

The chain is cut in front of the first of them. Its head is planned as if it were the whole; its result goes to a buffer. Each stage after it is one
small kernel: an operator that gives the values another shape, and the element-wise operators behind it. Buffers in front of stages are float32 whatever
the precision: a result of 16 bits is rounded once, at the end, and so is no further from the exact one than eager's.

    rows      a reduction behind a linear: lanes share a row of channels
    columns   a reduction behind a convolution: lanes take neighbouring positions, slices of a block share their channels
    windows   a pooling: a thread, or a warp where the window is large, takes a window
    spread    a parameter of another shape: a thread takes neighbouring results
"""

from __future__ import annotations

import math
from dataclasses import replace

from codegen.ir.apply import applies, costly
from codegen.ir.chain import chain_of
from codegen.ir.fused_form import FusedSpec
from codegen.ir.segment import Segment
from codegen.numerics import FP32
from codegen.ops import Kind
from codegen.plan.floor import floor
from codegen.plan.model import Buffer, Launch, Plan
from codegen.plan.stages.fold import fold_first
from codegen.plan.stages.kernel import stage_kernel
from codegen.spec import Step
from codegen.targets import Target

REPEATED_WINDOWS = 4  # that a value belongs to, from which on it is computed once and written in between


def cut(spec: FusedSpec, target: Target) -> tuple[FusedSpec, tuple[Segment, ...]]:
    """The chain's head, which fused kernels of `target` take, and the segments behind it; the whole chain where they take all."""
    segments = chain_of(spec).segments
    fused = _fused(spec, segments, target)
    return (spec if fused == len(segments) else head_of(spec, segments[fused].first)), segments[fused:]


def _fused(spec: FusedSpec, segments: tuple[Segment, ...], target: Target) -> int:
    """How many segments fused kernels take, from the first one on."""
    pools = 0
    for number, segment in enumerate(segments):
        pools += segment.kind is Kind.POOL
        if segment.kind is Kind.REDUCTION or (segment.core and segment.core.operator.name == "avg_pool2d"):
            return number
        if target.language == "cuda" and segment.kind is Kind.POOL and (pools > 1 or _repeats_much(spec, segment.core)):
            return number
    return len(segments)


def _repeats_much(spec: FusedSpec, pool: Step) -> bool:
    """Whether a value belongs to many windows and costs much: a fused kernel would compute it anew for each."""
    windows = math.prod(size / stride for size, stride in zip(pool.values["kernel_size"], pool.values["stride"], strict=True))
    return windows >= REPEATED_WINDOWS and costly(applies(spec, (*spec.before_norm, *(step for step in spec.after_norm if step.index < pool.index))))


def head_of(spec: FusedSpec, first: int) -> FusedSpec:
    """The chain up to place `first`, which gives float32."""
    return replace(spec, chain=spec.chain[:first], gives=FP32 if spec.precision.itemsize == 2 else None)


def plan_stages(spec: FusedSpec, head: Plan, stages: tuple[Segment, ...], *, apart: bool = False) -> Plan:
    """The plan of `spec` from that of its head and the segments behind it; `apart`: each stage in a kernel of its own, as a backward needs their inputs."""
    target, device = head.target, head.device
    names = [_name(segment) for segment in stages]
    buffers, launches = [Buffer("stage:0", head.spec.output_shape, FP32.dtype)], []
    for number, segment in enumerate(stages):
        last = number == len(stages) - 1
        result = spec.precision if last else FP32
        name = names[number] + (str(names[: number + 1].count(names[number])) if names.count(names[number]) > 1 else "")
        kernel = stage_kernel(spec, segment, name, f"stage:{number}", result, target, device)
        launches.append(Launch(kernel, result="y" if last else f"stage:{number + 1}"))
        if not last:
            buffers.append(Buffer(f"stage:{number + 1}", segment.gives.shape, "float32"))
    steps = tuple(replace(step, result="stage:0") if isinstance(step, Launch) and step.result == "y" else step for step in head.steps)
    whole = floor(spec, device)
    bound = replace(head.floor, bytes=whole.bytes, memory_ms=whole.memory_ms)
    folding = None if apart else fold_first(head, launches[0])
    why = head.why
    if folding is not None:
        steps, launches[0] = steps[:-1], folding
        why += (f"{stages[0].steps[0].operator.name}: in the kernel that normalises, whose groups are whole rows in registers",)
    behind = stages[1 if folding else 0 :]
    if behind:
        listed = ", ".join(dict.fromkeys(segment.steps[0].operator.name for segment in behind))
        why += (f"{listed}: behind the fused kernels, in {len(behind)} kernel{'s' if len(behind) > 1 else ''} of {'their' if len(behind) > 1 else 'its'} own",)
    if not any("stage:0" in step.arguments for step in (*steps, *launches)):
        buffers = buffers[1:]
    elif spec.precision.itemsize == 2:
        size = buffers[0].size
        why += (f"the head's result stays float32 until then, {size / 1e6:.3g} MB where {spec.precision.dtype} were {size / 2e6:.3g}: what stages give is rounded once",)
    return Plan(spec, target, device, (*steps, *launches), (*head.buffers, *buffers), bound, why)


def _name(segment: Segment) -> str:
    """The stem of the stage's kernel."""
    if segment.core is None:
        return "broadcast"
    return segment.core.operator.name if segment.kind is Kind.POOL else f"channel_{segment.core.operator.name}"
