"""A reduction over channels as the end of the kernel in front of it, where a group of the norm is a row and one team of threads has all of it.

What would be a kernel of its own behind the norm (stages.py: "rows") is then done by the threads that have normalised the row, in registers: one launch less, and
the normalised values are never written. The norm kernels that hold a group do it, and the sm_80 GEMM whose tile holds one.
"""

from __future__ import annotations

from dataclasses import replace

from codegen.ir.apply import Constant, unique_constants
from codegen.plan.gemm.kernel import GemmKernel
from codegen.plan.model import Kernel, Launch, Plan
from codegen.plan.norm.flat import FlatKernel
from codegen.plan.shared.pointers import Pointer
from codegen.plan.stages.kernel import StageKernel


def fold_first(head: Plan, stage: Launch) -> Launch | None:
    """The last launch of `head` with `stage`, which follows it, as its end; None where that kernel cannot fold what it has."""
    last = head.steps[-1]
    if not isinstance(last, Launch) or stage.kernel.stage != "rows" or head.spec.num_groups != 1:
        return None
    kernel = last.kernel
    if isinstance(kernel, FlatKernel) and kernel.held:
        return Launch(_norm(kernel, stage.kernel, stage.arguments[0]), result=stage.result)
    if isinstance(kernel, GemmKernel) and kernel.finished and kernel.epilogue.spans == 1:
        return Launch(_gemm(kernel, stage.kernel), result=stage.result)
    return None


def _norm(kernel: FlatKernel, stage: StageKernel, between: str) -> FlatKernel:
    """What it changed in place, `between`, it only reads now."""
    source = between if kernel.in_place else kernel.arguments[0]
    parts = kernel.threads // 32 * (8 if stage.folds_wide else 4) if kernel.smem_bytes else 0
    return replace(
        kernel, input="input", output="output", fold=stage, result=stage.result, constants=_constants(kernel, stage, "kGroupSize"),
        arguments=(source, *(o.key for o in kernel.operands), *(o.key for o in stage.operands), "y"),
        summary=f"{kernel.summary}; {stage.summary}", smem_bytes=kernel.smem_bytes + parts,
    )  # fmt: skip


def _gemm(kernel: GemmKernel, stage: StageKernel) -> GemmKernel:
    pointers = (*kernel.pointers[:-1], *(Pointer(kernel.storage, o.pointer) for o in stage.operands), Pointer(stage.result.c_type, "y", True))
    return replace(
        kernel, fold=stage, result=stage.result, constants=_constants(kernel, stage, "kOutFeatures"), pointers=pointers,
        arguments=(*kernel.arguments[:-1], *(o.key for o in stage.operands), "y"), summary=f"{kernel.summary}; {stage.summary}",
    )  # fmt: skip


def _constants(kernel: Kernel, stage: StageKernel, row: str) -> tuple[Constant, ...]:
    """The kernel's and the stage's, each once; `row` is the kernel's name for the values of a row."""
    known = {constant.name for constant in kernel.constants}
    mean = (Constant("kChannels", row, "values of a row"),) if stage.reduction == "mean" else ()
    return (*kernel.constants, *(constant for constant in (*mean, *unique_constants(stage.applied)) if constant.name not in known))
