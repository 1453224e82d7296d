"""The backward of the CUDA targets: from the gradient of y to those of the producer's result and of every parameter behind it.

One source serves every capability from 8.0 on. A team of threads, a warp or a block, takes one group of the samples of a slab, one sample after
the other. It walks over the producer's result: twice for the statistics, once for the two sums that the norm's derivative takes, once for the
gradient. Nothing is added up in an order that chance decides: a channel's gradients are summed over the slab by the one thread that owns them, and
a second kernel adds the slabs up in their order.

Where poolings follow the norm, the winner and the gradient of each window are noted first; a value then collects those of its windows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from codegen.ir.apply import Apply, Constant
from codegen.ir.operand import c_identifier
from codegen.ir.fused_form import FusedSpec
from codegen.ir.segment import Segment
from codegen.numerics import Precision, float_literal
from codegen.plan.backward.cpu import SUMS, BackwardPool, CpuBackwardKernel, cpu_backward, gradient_keys
from codegen.plan.backward.runs import BackRun, SummedOperand
from codegen.plan.backward.stages import back_through_stages
from codegen.plan.floor import floor
from codegen.plan.model import Buffer, Kernel, Launch, Plan
from codegen.plan.norm.route import plan_norm
from codegen.plan.shared.product import library_product
from codegen.plan.stages.route import cut, plan_stages
from codegen.targets import DeviceClass, Target

WARP = 32
BLOCK = 256
WARP_GROUP = 256  # values of a group up to which a warp does better than a block
BLOCK_CHANNEL = 512  # values of a channel from which a block's threads take them together
WANTED_THREADS = 270_000  # 132 SMs of 2048 threads: as many parts of the work are made where the batch allows
SUM_CHANNELS, SUM_LANES = 32, 8  # threads of a block that adds slabs up: channels, and slabs at a time

WINNERS, WINDOWS = "windows:winners", "windows:gradients"  # names of buffers; the colon keeps them apart from parameters


@dataclass(frozen=True, kw_only=True)
class CudaBackwardKernel(Kernel):
    """What templates/backward/backward.cu.j2 reads beyond the common part.

    Runs, operands and `pool` mean what they mean in CpuBackwardKernel; `values` are the C names of the parameters whose values are read.
    `flat`: one value per channel at the norm. `teams`: groups of a block, each a warp's, or 1 for a group that the block shares.
    `channel_teams`: warps of the block that take channels in turn, or 1 where all threads of a team share a channel. `incoming` is the type of the gradient of y.
    """

    flat: bool
    half: bool
    before: tuple[Apply, ...]
    after: tuple[Apply, ...]
    back_before: BackRun
    back_after: BackRun
    pool: BackwardPool | None
    gamma: SummedOperand | None
    beta: SummedOperand | None
    takes_beta: bool
    operands: tuple[SummedOperand, ...]
    values: tuple[str, ...]
    teams: int
    channel_teams: int
    items: int
    samples: int
    most_numbers: int
    incoming: Precision

    def pointers(self, c_type: str, restrict: str = "") -> list[str]:
        """The launcher's tensors as C parameters; with `restrict`, those of the first kernel, which writes sums and not the parameters' gradients."""
        listed = [f"const {c_type}* {restrict}t0", *(f"const {c_type}* {restrict}{name}_data" for name in self.values)]
        listed += [f"const {self.incoming.c_type}* {restrict}grad_y", f"{c_type}* {restrict}grad_t0"]
        if not restrict:
            listed += [f"{c_type}* {operand.pointer}_grad" for operand in self.operands]
        listed += ["float* sums"] if self.operands else []
        return listed + (["int* winners", "float* windows"] if self.pool else [])

    @property
    def functions(self) -> tuple[str, ...]:
        """The C functions that it calls, forwards and backwards."""
        return tuple(name for run in (self.back_before, self.back_after, *((self.pool.run,) if self.pool else ())) for name in run.functions)

    @property
    def names(self) -> list[str]:
        """What the launcher hands to the first kernel."""
        return [parameter.split()[-1] for parameter in self.pointers("float", "__restrict__ ")]

    @property
    def read_behind(self) -> tuple[SummedOperand, ...]:
        """The parameters behind the norm whose values are needed."""
        return (*self.back_after.operands, *(self.pool.run.operands if self.pool else ()))

    @property
    def reads_channels(self) -> bool:
        """Is some parameter of a channel read?"""
        return self.gamma is not None or any(operand.per_channel for operand in (*self.back_before.operands, *self.read_behind))

    @property
    def channel_numbers(self) -> tuple[str, ...]:
        """What is summed over a channel behind the norm, beside the gradient of the normalised value and its product with that value."""
        runs = [self.back_after, *([self.pool.run] if self.pool else [])]
        return tuple(operand.pointer for run in runs for operand in run.sums)

    def operand(self, pointer: str) -> SummedOperand:
        return next(operand for operand in self.operands if operand.pointer == pointer)


def plan_backward_cuda(spec: FusedSpec, target: Target, device: DeviceClass) -> Plan:
    """The backward of `spec` for CUDA, for a target that can run it.

    Its launches take what those of the cpu target's backward take, and give the same. No forward keeps the producer's result, so the plan starts
    with the step of torch's library that computes it again.
    """
    head, stages = cut(spec, target)
    twin, _ = cpu_backward(head)
    kernel, slabs = _kernel(head, twin)
    sums = 4 * slabs * len(kernel.operands) * spec.channels
    buffers = [Buffer(SUMS, bytes=sums)] if sums else []
    if kernel.pool:
        windows = 4 * slabs * spec.channels * _pooled_size(head)
        buffers += [Buffer(WINNERS, bytes=windows), Buffer(WINDOWS, bytes=windows)]
    launches: tuple[Launch, ...] = (Launch(kernel),)
    if stages:
        launches, others = back_through_stages(spec, _behind_the_producer(spec, head, stages, target, device), launches[0], target)
        buffers = [*others, *buffers]
    return Plan(spec, target, device, (library_product(spec), *launches), tuple(buffers), floor(spec, device), _why(spec))


def _behind_the_producer(spec: FusedSpec, head: FusedSpec, stages: tuple[Segment, ...], target: Target, device: DeviceClass) -> Plan:
    """The forward from the producer's result on: the norm kernel with the whole head, then the stages. Names of its own keep it apart from the forward's."""
    norm = plan_norm(head, target, device, source="t0", apply_before=True, producer_bias=None, statistics=None)
    steps = tuple(step.apart("backward") for step in norm.steps)
    return plan_stages(spec, Plan(head, target, device, steps, norm.buffers, floor(spec, device), ()), stages, apart=True)


def _why(spec: FusedSpec) -> tuple[str, ...]:
    producer = spec.producer
    held = math.prod(producer.output_shape) * spec.precision.itemsize
    gflop = 2e-9 * math.prod(producer.output_shape) * math.prod(producer.parameters[0].shape[1:])
    return (
        f"t0, the {producer.operator.name}'s result, is computed again by torch's library ({gflop:.3g} GFLOP): "
        + f"no forward holds its {held / 1e6:.3g} MB until then",
    )


def _pooled_size(spec: FusedSpec) -> int:
    """Values of a channel behind the pooling."""
    return math.prod(spec.pools[0].output_shape[2:])


def _kernel(spec: FusedSpec, twin: CpuBackwardKernel) -> tuple[CudaBackwardKernel, int]:
    """The kernel, and its number of slabs."""
    keys = gradient_keys(spec)
    flat = spec.spatial == 1 and not twin.back_pools
    small = spec.group_size <= WARP_GROUP
    team = WARP if small else BLOCK
    apart = not flat and not small and spec.spatial < BLOCK_CHANNEL
    samples = math.ceil(spec.batch / min(spec.batch, math.ceil(WANTED_THREADS / team / spec.num_groups)))
    slabs = math.ceil(spec.batch / samples)
    items = slabs * spec.num_groups
    teams = BLOCK // WARP if small else 1
    values = tuple(key for key in twin.arguments if key in keys)
    pool = twin.back_pools[0] if twin.back_pools else None
    runs = [twin.back_after, *([pool.run] if pool else [])]
    behind = 2 + (0 if flat else sum(len(run.sums) for run in runs))
    kernel = CudaBackwardKernel(
        name="backward", template="backward/backward.cu.j2",
        arguments=("t0", *values, "grad:y", "grad:t0", *(f"grad:{key}" for key in keys), *((SUMS,) if keys else ()), *((WINNERS, WINDOWS) if pool else ())),
        constants=_constants(spec, twin, slabs, samples, len(keys)),
        summary=f"gradients of everything after the {spec.producer.operator.name}, one group of one sample at a time",
        threads=BLOCK, blocks=math.ceil(items / teams), notes=_notes(spec, flat, small, apart, slabs, samples, pool is not None),
        flat=flat, half=spec.precision.itemsize == 2, before=twin.before, after=twin.after, back_before=twin.back_before, back_after=twin.back_after,
        pool=pool, gamma=twin.gamma_operand, beta=twin.beta_operand, takes_beta=twin.takes_beta, operands=twin.operands,
        values=tuple(c_identifier(key) for key in values), teams=teams, channel_teams=BLOCK // WARP if apart else 1, items=items,
        samples=samples, most_numbers=max(behind, 0 if flat else len(twin.back_before.sums)), incoming=spec.result,
    )  # fmt: skip
    return kernel, slabs


def _constants(spec: FusedSpec, twin: CpuBackwardKernel, slabs: int, samples: int, parameters: int) -> tuple[Constant, ...]:
    """The cpu kernel's sizes with this kernel's slabs, and what the teams are."""
    dropped = ("kPiece", "kScratch", "kSlabs", "kSlabSamples", "kParameters")
    items = [c for c in twin.constants if c.name not in dropped]
    eps = Constant("kEps", float_literal(spec.norm.values["eps"]), "group_norm's eps, added to the variance", "float")
    items = [eps if c.name == "kEps" else c for c in items]
    return (
        *items,
        Constant("kSlabs", str(slabs), "slabs of samples whose sums are formed apart"),
        Constant("kSlabSamples", str(samples), "batch / kSlabs, rounded up"),
        Constant("kParameters", str(parameters), "parameters behind the producer"),
        Constant("kThreads", str(BLOCK), "threads of a block"),
        Constant("kWarps", str(BLOCK // WARP), "kThreads / 32"),
        Constant("kSumChannels", str(SUM_CHANNELS), "channels of a block that adds slabs up"),
        Constant("kSumLanes", str(SUM_LANES), "threads that share a channel there"),
    )


def _notes(spec: FusedSpec, flat: bool, small: bool, apart: bool, slabs: int, samples: int, pooled: bool) -> tuple[str, ...]:
    team = f"a warp takes a group of {spec.group_size} values" if small else f"a block takes a group of {spec.group_size} values"
    if not flat:
        team += ", its warps a channel each" if apart else ", one channel after the other"
    notes = [
        *_why(spec),
        f"{team}, for {samples} sample{'s' if samples > 1 else ''} in turn: {slabs * spec.num_groups} parts",
        "the producer's result is read again wherever it is needed; a group's values are still in a cache then",
        "sums over samples are added in a fixed order: the same bits on every run",
    ]
    if pooled:
        notes.append("each window's maximum and gradient are stored first; a value then sums those of the windows around it")
    return tuple(notes)


__all__ = ["CudaBackwardKernel", "plan_backward_cuda"]
