"""The backward of the cpu target: one C++ function from the gradient of y to those of the producer's result and of every parameter behind it.

It mirrors the forward's function. A thread takes whole groups, reads the producer's saved result, computes again what the derivatives need, and
goes back through the chain; the producer's own derivatives are torch's. The gradient of a parameter is a sum over samples: slabs of samples are
added up one by one in double precision, then the slabs in their order, so that the result does not depend on the number of threads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from codegen.ir.apply import Apply, Constant, applies
from codegen.ir.operand import c_identifier
from codegen.ir.window import COLUMNS, ROWS, window_of
from codegen.ir.fused_form import FusedSpec
from codegen.plan.backward.runs import BackRun, SummedOperand, back_run
from codegen.plan.backward.stages import back_through_stages
from codegen.plan.cpu.kernel import STACK_VALUES, CpuKernel, Scratch, c_type_of, cpu_kernel, pool_suffix, wrapped
from codegen.plan.floor import floor
from codegen.plan.model import Buffer, Launch, Plan
from codegen.plan.planner import plan
from codegen.plan.stages.route import cut
from codegen.spec import Spec, Step
from codegen.targets import DeviceClass, Target

ITEMS = 64  # independent parts of the work, where the batch allows: enough for the threads of a large machine
SUMS = "slabs:sums"  # the buffer's name; a colon keeps it apart from parameters


@dataclass(frozen=True)
class BackwardPool:
    """One max_pool2d and the operators after it. Its arrays carry `suffix`; `source` is the plane that it reads.

    `keeps`: the pooled value is needed on the way back; `target`: the plane of the next pooling, None for the last one.
    """

    suffix: str
    comment: str
    source: str
    target: str | None
    run: BackRun
    keeps: bool
    height: str
    width: str
    clipped_rows: bool
    clipped_columns: bool
    padded_rows: bool
    padded_columns: bool
    dilated: bool


@dataclass(frozen=True)
class CpuBackwardKernel(CpuKernel):
    """What templates/backward/chain.cpp.j2 reads beyond the forward's numbers.

    `back_before` and `back_after` are the runs around the norm, `back_pools` the poolings with what follows each. `gamma_operand` and
    `beta_operand` name the norm's parameters among the sums; `operands` are all of them in the order of the sums. `incoming` is the type
    of the gradient of y.
    """

    back_before: BackRun | None = None
    back_after: BackRun | None = None
    back_pools: tuple[BackwardPool, ...] = ()
    gamma_operand: SummedOperand | None = None
    beta_operand: SummedOperand | None = None
    operands: tuple[SummedOperand, ...] = ()
    inputs: tuple[str, ...] = ()
    incoming: str = "float32"

    def file(self, target: Target) -> str:
        return f"{target.suffix}_backward.cpp"

    @property
    def functions(self) -> tuple[str, ...]:
        """The C functions that it calls, forwards and backwards."""
        return tuple(name for run in (self.back_before, self.back_after, *(pool.run for pool in self.back_pools)) for name in run.functions)

    @property
    def _given(self) -> list[str]:
        return [f"const {self.incoming_type if name == 'grad_y' else self.storage}* {name}" for name in self.inputs]

    @property
    def incoming_type(self) -> str:
        """The C type of a value of the gradient of y."""
        return c_type_of(self.incoming)

    @property
    def signature(self) -> str:
        """The launcher's tensors."""
        outputs = [f"{self.storage}* grad_t0", *(f"{self.storage}* {operand.pointer}_grad" for operand in self.operands)]
        return wrapped([*self._given, *outputs, *(["double* sums"] if self.operands else [])], "    ")

    @property
    def group_signature(self) -> str:
        items = [*self._given, f"{self.storage}* grad_t0"]
        return wrapped([*items, *(["double* sums"] if self.operands else [])], "    ")

    @property
    def group_call(self) -> str:
        return wrapped([*self.inputs, "grad_t0", *(["slab_sums"] if self.operands else [])], "              ")

    @property
    def read_behind(self) -> tuple[SummedOperand, ...]:
        """The parameters behind the norm whose values are needed."""
        return (*self.back_after.operands, *(operand for pool in self.back_pools for operand in pool.run.operands))

    @property
    def read_operands(self) -> tuple[SummedOperand, ...]:
        """The learnable operands whose values are needed."""
        return (*self.back_before.operands, *self.read_behind)

    @property
    def takes_beta(self) -> bool:
        """Is the normalised value with scale and shift needed, or is the normalised value enough?"""
        return self.back_after.takes_v or bool(self.back_pools)


def plan_backward(spec: FusedSpec, target: Target, device: DeviceClass) -> Plan:
    """The backward of `spec` for the cpu target.

    Its launches take the producer's result, the values of those parameters that they need, and `grad:y`, and give `grad:t0` and `grad:<key>` of
    every parameter behind the producer. Of a chain with stages the last launch is the head's.
    """
    head, stages = cut(spec, target)
    kernel, sums_bytes = cpu_backward(head)
    launches, buffers = (Launch(kernel),), (Buffer(SUMS, bytes=sums_bytes),) if sums_bytes else ()
    if stages:
        launches, others = back_through_stages(spec, plan(replace(spec, algebra=False), target.name), launches[0], target)
        buffers = (*others, *buffers)
    why = ("what the derivatives need is computed again from the producer's result: that is all that a forward saves",)
    return Plan(spec, target, device, launches, buffers, floor(spec, device), why)


def gradient_keys(spec: Spec) -> tuple[str, ...]:
    """The parameters behind the producer, in the chain's order."""
    return tuple(step.key(parameter) for step in spec.chain[1:] for parameter in step.parameters)


def cpu_backward(spec: FusedSpec) -> tuple[CpuBackwardKernel, int]:
    """The one kernel of the cpu target's backward, and the bytes of its sums."""
    forward = cpu_kernel(spec, "chain_backward")
    keys = gradient_keys(spec)
    shapes = dict(spec.parameters)
    operands = {c_identifier(key): SummedOperand(key, c_identifier(key), math.prod(shapes[key]) > 1, index=i) for i, key in enumerate(keys)}
    runs = [applies(spec, run) for run in spec.runs]
    before = back_run("before_norm", "the operators before the norm", applies(spec, spec.before_norm), operands, True, forward.keeps_product)
    after = back_run("after_norm", "the operators after the norm", runs[0], operands, bool(spec.pools), forward.keeps_norm, forward.keeps_input)
    last = len(spec.pools) - 1
    pools = tuple(_pool(i, step, runs[i + 1], operands, i == last, forward.pools[i].keeps) for i, step in enumerate(spec.pools))
    gamma, beta = (operands[c_identifier(key)] for key in spec.affine) if spec.affine else (None, None)
    needs_beta = beta is not None and (after.takes_v or bool(pools))
    read = {operand.pointer for run in (before, after, *(pool.run for pool in pools)) for operand in run.operands}
    read |= ({gamma.pointer} if gamma else set()) | ({beta.pointer} if needs_beta else set())
    values = [key for key in keys if c_identifier(key) in read]
    buffered = bool(before.exists) or forward.half
    scratch = _scratch(spec, buffered, pools, after.given)
    held = sum(item.size for item in scratch)
    samples = math.ceil(spec.batch / min(spec.batch, math.ceil(ITEMS / spec.num_groups)))
    slabs = math.ceil(spec.batch / samples)
    return CpuBackwardKernel(
        name="chain_backward", template="backward/chain.cpp.j2",
        arguments=("t0", *values, "grad:y", "grad:t0", *(f"grad:{key}" for key in keys), *((SUMS,) if keys else ())),
        constants=_constants(spec, forward, pools, scratch, slabs, samples, len(keys)),
        summary=f"gradients of everything after torch's {spec.producer.operator.name}, one group of one sample at a time",
        notes=_notes(spec, slabs, samples, held), dtype=forward.dtype, result=forward.dtype, before=forward.before, after=forward.after,
        gamma=forward.gamma, beta=forward.beta if needs_beta else None, flat=forward.flat, buffered=buffered, pieces=forward.pieces,
        scratch=scratch, on_heap=held > STACK_VALUES, parallel=forward.parallel, back_before=before, back_after=after, back_pools=pools,
        gamma_operand=gamma, beta_operand=beta, operands=tuple(operands.values()),
        inputs=("t0", *(f"{c_identifier(key)}_data" for key in values), "grad_y"),
        incoming=spec.result.dtype, keeps_product=forward.keeps_product, keeps_norm=forward.keeps_norm, keeps_input=forward.keeps_input,
    ), 8 * slabs * len(keys) * spec.channels  # fmt: skip


def _pool(index: int, step: Step, ops: tuple[Apply, ...], operands: dict[str, SummedOperand], last: bool, kept: str | None) -> BackwardPool:
    suffix, previous = pool_suffix(index), pool_suffix(index - 1)
    window = window_of(step)
    comment = "max_pool2d" + (f" number {suffix}" if suffix else "")
    behind = back_run(f"after_pool{suffix}", f"the operators after {comment}", ops, operands, not last, kept)
    return BackwardPool(
        suffix=suffix, comment=comment, source=f"plane{suffix}", target=None if last else f"plane{pool_suffix(index + 1)}", run=behind,
        keeps=behind.takes_v, height="kHeight" if index == 0 else f"kPooledHeight{previous}", width="kWidth" if index == 0 else f"kPooledWidth{previous}",
        clipped_rows=window.clipped(ROWS), clipped_columns=window.clipped(COLUMNS), padded_rows=window.padding[ROWS] > 0,
        padded_columns=window.padding[COLUMNS] > 0, dilated=any(size > 1 for size in window.dilation),
    )  # fmt: skip


def _scratch(spec: FusedSpec, buffered: bool, pools: tuple[BackwardPool, ...], given: str | None) -> tuple[Scratch, ...]:
    """A thread's arrays, in the order in which they are filled."""
    items = [Scratch("value", "kGroupSize", spec.group_size, "float", "the group's values before the norm")] if buffered else []
    items.append(Scratch("grad", "kGroupSize", spec.group_size, "float", "the gradient of the normalised values"))
    if given:
        items.append(Scratch("second_grad", "kGroupSize", spec.group_size, "float", "gradient of the norm's input by its second use, around the norm"))
    size, size_name = spec.spatial, "kSpatial"
    for pool, step in zip(pools, spec.pools, strict=True):
        what = "behind the norm" if not pool.suffix else "in front of a pooling"
        items.append(Scratch(pool.source, size_name, size, "float", f"one channel {what}"))
        items.append(Scratch(f"{pool.source}_grad", size_name, size, "float", "its gradient"))
        size, size_name = math.prod(step.output_shape[2:]), f"kPooledSize{pool.suffix}"
        if pool.keeps:
            items.append(Scratch(f"pooled{pool.suffix}", size_name, size, "float", "one channel behind a pooling"))
        items.append(Scratch(f"winner{pool.suffix}", size_name, size, "std::int32_t", "place of each pooled value"))
    return tuple(items)


def _constants(
    spec: FusedSpec, forward: CpuKernel, pools: tuple[BackwardPool, ...], scratch: tuple[Scratch, ...], slabs: int, samples: int, parameters: int
) -> tuple[Constant, ...]:
    """The forward's sizes, the channels with them, and what the backward adds. Of the forward's rows of maxima and its scratch it has no use."""
    batch, *rest = forward.constants
    dropped = {"kScratch", *(f"kRow{pool.suffix}" for pool in pools), *(f"kPooled{pool.suffix}" for pool in pools)}
    of_group = Constant("kGroupChannels", str(spec.group_channels), "kChannels / kNumGroups")
    items = [batch, Constant("kChannels", str(spec.channels), "channels at the norm")]
    items += [of_group if constant.name == of_group.name else constant for constant in rest if constant.name not in dropped]
    for pool, step in zip(pools, spec.pools, strict=True):
        count = f"kPooledHeight{pool.suffix} * kPooledWidth{pool.suffix}"
        items.append(Constant(f"kPooledSize{pool.suffix}", str(math.prod(step.output_shape[2:])), count))
    items.append(Constant("kSlabs", str(slabs), "slabs of samples whose sums are formed apart"))
    items.append(Constant("kSlabSamples", str(samples), "batch / kSlabs, rounded up"))
    items.append(Constant("kParameters", str(parameters), "parameters behind the producer"))
    if sum(item.size for item in scratch) > STACK_VALUES:
        size = -(-4 * sum(item.size for item in scratch) // 64) * 64
        why = f"bytes a thread needs: 4 * ({' + '.join(item.size_name for item in scratch)}), in whole cache lines"
        items.append(Constant("kScratch", str(size), why, "std::size_t"))
    return tuple({constant.name: constant for constant in items}.values())


def _notes(spec: FusedSpec, slabs: int, samples: int, held: int) -> tuple[str, ...]:
    return (
        f"a thread takes whole groups of a slab of {samples} samples: {slabs * spec.num_groups} parts",
        "sums over samples are in double precision and in a fixed order, for any number of threads",
        f"{4 * held / 1024:.4g} KB of scratch a thread, on {'the heap' if held > STACK_VALUES else 'its stack'}",
    )


__all__ = ["CpuBackwardKernel", "cpu_backward", "gradient_keys", "plan_backward"]
