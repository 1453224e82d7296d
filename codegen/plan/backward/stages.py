"""The backward of stages: one source for each, from the gradient of its result to those of its input and of its own parameters.

What a stage's derivatives need of its input is computed again: the head and the stages in front run forward once more, from the producer's result, as
far as any of them needs it. Then the stages go back, the last one first, and what the first one gives is the head's gradient of y.

A parameter of a stage, or its input where a parameter gives it another shape, meets several results. Its gradient is a sum over those, whose terms are
formed part by part and added up in their order: the same bits on every run, for any number of threads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from codegen.ir.apply import Constant, applies, kept_name
from codegen.ir.operand import c_identifier
from codegen.ir.fused_form import FusedSpec
from codegen.ir.segment import Segment
from codegen.numerics import FP32, Precision
from codegen.ops import Shape
from codegen.plan.backward.runs import BackRun, SummedOperand, back_run
from codegen.plan.model import Buffer, Kernel, Launch, Plan
from codegen.plan.stages.kernel import THREADS, StageKernel, element_offset
from codegen.plan.stages.route import cut
from codegen.spec import Spec, Step
from codegen.targets import Target

PART = 1024  # terms of a sum that are added up in one go, at least
PARTS = 64  # of a sum, at most


@dataclass(frozen=True)
class Reduced:
    """A tensor that meets the results of a stage: element `element` meets those in the places `place`, C of `element` and of `repeat` < `repeats`.

    `pointer` is the C name of its gradient, `term` that of its share of one result, `name` the function's; `whole`: the gradient is float32 whatever the storage type. `across`:
    neighbouring elements meet neighbouring results. The terms are formed in `parts` of `part` each.
    """

    name: str
    pointer: str
    term: str
    whole: bool
    count: int
    repeats: int
    place: str
    across: bool
    parts: int

    @property
    def lanes(self) -> int:
        """Elements that a block of a GPU takes."""
        return 32 if self.across and self.count > 1 else 1

    @property
    def part(self) -> int:
        return -(-self.repeats // self.parts)


@dataclass(frozen=True, kw_only=True)
class StageBackwardKernel(Kernel):
    """What templates/backward/stage.* read.

    `stage` is the forward's kernel; `back` goes back through the operators behind its lead; `incoming` is the type of the gradient that comes in.
    `folds`: the lead's result, or what it was made of, is needed. `values` and `through` name buffers: the lead's results and their gradients, `winners`
    that of the places which max_pool2d's results come from. `apart`: a function of its own collects what windows give.
    """

    stage: StageKernel
    back: BackRun
    incoming: Precision
    dtype: str
    operands: tuple[tuple[str, str], ...]  # C name and place of each parameter whose values are needed
    reduced: tuple[Reduced, ...]
    folds: bool
    reads_input: bool
    values: str | None
    through: str | None
    winners: str | None
    sums: str | None
    apart: bool = False
    ragged: bool = False

    def file(self, target: Target) -> str:
        return f"{self.name}_{target.suffix}.{'cu' if target.language == 'cuda' else 'cpp'}"

    @property
    def functions(self) -> tuple[str, ...]:
        """The C functions that it calls, forwards and backwards."""
        return (*self.back.functions, *(("exponential",) if self.stage.reduction == "logsumexp" else ()))

    @property
    def half(self) -> bool:
        return self.dtype != "float32"

    def pointers(self, storage: str, incoming: str, sums: str) -> list[str]:
        """The launcher's tensors as C parameters, with the types given."""
        outputs = ["float* grad_input", *(f"{storage}* {item.pointer}" for item in self.reduced if not item.whole)]
        buffers = ((self.values, "float* values"), (self.through, "float* through"), (self.winners, "int* winners"), (self.sums, f"{sums}* sums"))
        return [*self._read(storage, incoming, self.reads_input), *outputs, *(text for name, text in buffers if name)]

    def _read(self, storage: str, incoming: str, reads_input: bool) -> list[str]:
        listed = ["const float* input"] if reads_input else []
        return [*listed, *(f"const {storage}* {name}_data" for name, _ in self.operands), f"const {incoming}* grad_result"]

    def run_pointers(self, storage: str, incoming: str) -> list[str]:
        """Those of the function that goes back through the operators behind the lead, and through the lead."""
        buffers = ((self.values, "float* values"), (self.through, "float* through"), (self.winners, "int* winners"))
        target = [] if self.through and self.apart else ["float* grad_input"]
        return [*self._read(storage, incoming, self.reads_input), *target, *(text for name, text in buffers if name)]

    def sum_pointers(self, storage: str, incoming: str) -> list[str]:
        """Those of a function that forms the terms of a sum."""
        spreads = self.stage.stage == "spread"
        return [*self._read(storage, incoming, spreads and self.back.takes_v), *(["const float* values"] if self.values else [])]


def place(shape: Shape, whole: Shape) -> str:
    """C: where in `whole` the result number `repeat` lies that element `element` of a tensor of `shape`, broadcast to it, meets."""
    own = (1,) * (len(whole) - len(shape)) + tuple(shape)
    terms, at = [], 0
    while at < len(whole):
        if whole[at] == 1:
            at += 1
            continue
        kept, end = own[at] != 1, at
        while end < len(whole) and (whole[end] == 1 or (own[end] != 1) == kept):
            end += 1
        index = "element" if kept else "repeat"
        alike = [w if (o != 1) == kept else 1 for o, w in zip(own, whole, strict=True)]
        inner, outer, count, stride = math.prod(alike[end:]), math.prod(alike[:at]), math.prod(whole[at:end]), math.prod(whole[end:])
        text = index + (f" / {inner}" if inner > 1 else "") + (f" % {count}" if outer > 1 else "")
        terms.append(text + (f" * {stride}" if stride > 1 else ""))
        at = end
    return " + ".join(terms) or "0"


def _reduced(name: str, pointer: str, term: str, whole: bool, shape: Shape, output: Shape) -> Reduced:
    own = (1,) * (len(output) - len(shape)) + tuple(shape)
    repeats = math.prod(w for o, w in zip(own, output, strict=True) if o == 1)
    innermost = next((o != 1 for o, w in reversed(list(zip(own, output, strict=True))) if w != 1), False)
    parts = max(1, min(PARTS, repeats // PART))
    parts = -(-repeats // -(-repeats // parts))
    return Reduced(name, pointer, term, whole, math.prod(shape), repeats, place(shape, output), innermost, parts)


def stage_backward(spec: Spec, segment: Segment, number: int, last: bool, forward: StageKernel, target: Target) -> tuple[StageBackwardKernel, tuple[Buffer, ...]]:
    """The kernel that goes back through stage `number`, and the buffers of its own."""
    steps, lead, output = segment.steps, segment.steps[0], segment.gives.shape
    items = applies(spec, steps)
    taken = [item.operand for item in items if item.operand]
    operands = {operand.pointer: SummedOperand(operand.key, operand.pointer, index=index) for index, operand in enumerate(taken)}
    spreads = forward.stage == "spread"
    kept = None if spreads or lead.index not in spec.kept(steps) else kept_name(lead)
    back = back_run("follow", "the operators after the reduction", items, operands, False, kept)
    shapes = dict(spec.parameters)
    keys = [operand.key for operand in taken]
    read = {operand.pointer for operand in back.operands}
    chooses = forward.reduction in ("min", "max", "logsumexp")
    folds = not spreads and (chooses or back.takes_v)
    reduced = [_reduced(f"{c_identifier(key)}_sum", f"{c_identifier(key)}_grad", f"{c_identifier(key)}_g", False, shapes[key], output) for key in keys]
    if spreads:
        reduced.insert(0, _reduced("sum_input", "grad_input", "g", True, lead.input_shape, output))
    outputs = math.prod(output)
    own: list[Buffer] = []

    def buffer(name: str, wanted: bool, size: int) -> str | None:
        if wanted:
            own.append(Buffer(f"stage:{number}:{name}", bytes=size))
        return own[-1].name if wanted else None

    pooled = forward.stage == "windows"
    values = buffer("values", back.takes_v and bool(keys) and not spreads, 4 * outputs)
    through = buffer("through", pooled, 4 * outputs)
    winners = buffer("winners", pooled and forward.reduction == "max", 4 * outputs)
    sums = buffer("sums", any(item.parts > 1 for item in reduced), 8 * max((item.parts * item.count for item in reduced if item.parts > 1), default=0))
    reads_input = folds or (spreads and back.takes_v)
    values_read = [key for key in keys if c_identifier(key) in read]
    incoming = spec.precision if last else FP32
    made = StageBackwardKernel(
        name=f"{forward.name}_backward", template=f"backward/stage.{'cu' if target.language == 'cuda' else 'cpp'}.j2",
        arguments=(
            *((f"stage:{number}",) if reads_input else ()), *values_read, "grad:y" if last else f"grad:stage:{number + 1}", f"grad:stage:{number}",
            *(f"grad:{key}" for key in keys), *(name for name in (values, through, winners, sums) if name),
        ),
        constants=forward.constants, summary=f"backward of: {forward.summary}", notes=_notes(folds, pooled, tuple(reduced)), stage=forward, back=back, incoming=incoming, dtype=spec.precision.dtype,
        operands=tuple((c_identifier(key), element_offset(shapes[key], output)) for key in values_read), reduced=tuple(reduced), folds=folds, reads_input=reads_input,
        values=values, through=through, winners=winners, sums=sums,
    )  # fmt: skip
    return _for_cuda(made, lead) if target.language == "cuda" else made, tuple(own)


def _notes(folds: bool, pooled: bool, reduced: tuple[Reduced, ...]) -> tuple[str, ...]:
    notes = ["the reduced values are recomputed"] if folds else []
    notes += ["each window's gradient is stored first; a value then sums those of the windows around it"] if pooled else []
    if reduced:
        notes.append("sums over results are added in a fixed order: the same bits on every run")
    return tuple(notes) or ("a value's gradient depends on that of one result",)


def _for_cuda(kernel: StageBackwardKernel, lead: Step) -> StageBackwardKernel:
    """The kernel with its threads: those of a row, or one for each position or window."""
    stage = kernel.stage.stage
    dropped = ("kRows", "kBlocks", "kThreads", "kWidth", "kVectors", "kLanes", "kSlices", "kRowsPerBlock", "kPlaneVectors", "kItems", "kWindowsPerBlock", "kWindow")
    items = [constant for constant in kernel.constants if constant.name not in dropped]
    threads = kernel.stage.lanes if stage == "rows" else THREADS
    places = {"rows": lead.input_shape[0] * threads, "columns": lead.input_shape[0] * math.prod(lead.input_shape[2:]), "windows": math.prod(lead.output_shape)}.get(stage, 0)
    blocks = -(-places // threads)
    if places:
        items.append(Constant("kThreads", str(threads), "threads of a block" + (", which share a row" if stage == "rows" else "")))
        items.append(Constant("kBlocks", str(blocks), "rows" if stage == "rows" else f"{places} {'positions' if stage == 'columns' else 'windows'}, kThreads to a block"))
    if stage == "columns":
        items.append(Constant("kPositions", str(places), "positions of all samples"))
    if stage == "windows":
        inputs = math.prod(lead.input_shape)
        items.append(Constant("kInputs", str(inputs), "values of the input", "int64_t"))
        items.append(Constant("kInputBlocks", str(-(-inputs // threads)), "kInputs / kThreads, rounded up"))
    items.append(Constant("kSumThreads", str(THREADS), "threads of a block that forms sums"))
    first = kernel.reduced[0] if kernel.reduced else None
    return replace(
        kernel, constants=tuple(items), threads=threads if places else THREADS, ragged=stage == "columns" and places % threads != 0, apart=stage == "windows",
        blocks=blocks if places or first is None else -(-first.count // first.lanes) * first.parts,
    )  # fmt: skip


def back_through_stages(spec: FusedSpec, forward: Plan, head: Launch, target: Target) -> tuple[tuple[Launch, ...], tuple[Buffer, ...]]:
    """The launches of a backward with stages, and their buffers.

    `forward` is a plan of the whole chain behind the producer, whose launches give stage:0, stage:1 and so on, `head` the backward of the part in front
    of the stages, which takes grad:y.
    """
    _, stages = cut(spec, target)
    kernels = [step.kernel for step in forward.steps if isinstance(step, Launch) and isinstance(step.kernel, StageKernel)]
    launches, buffers, needed = [], [], -1
    for number in reversed(range(len(stages))):
        made, own = stage_backward(spec, stages[number], number, number == len(stages) - 1, kernels[number], target)
        launches.append(Launch(made))
        buffers += [Buffer(f"grad:stage:{number}", stages[number].reads[0].shape, "float32"), *own]
        needed = max(needed, number) if made.reads_input else needed
    given = [step for step in forward.steps if isinstance(step, Launch)]
    wanted = [step for step in given if needed >= 0 and not (isinstance(step.kernel, StageKernel) and kernels.index(step.kernel) >= needed)]
    read = {name for step in wanted for name in step.arguments}
    buffers += [entry for entry in forward.buffers if entry.name in read and entry.name != "t0"]
    last = replace(head, kernel=replace(head.kernel, arguments=tuple("grad:stage:0" if name == "grad:y" else name for name in head.kernel.arguments)))
    return (*wanted, *launches, last), tuple(buffers)


__all__ = ["Reduced", "StageBackwardKernel", "back_through_stages", "place", "stage_backward"]
