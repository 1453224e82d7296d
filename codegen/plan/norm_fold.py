"""A reduction over channels in the kernel that normalises them: where a group is a row and its values are in registers, they are folded there.

What would be a kernel of its own behind the norm (stages.py: "rows") becomes the end of the norm's: one launch less, and the normalised values are never written.
"""

from __future__ import annotations

from dataclasses import replace

from codegen.chain import Constant, unique_constants
from codegen.plan.model import Launch, Plan
from codegen.plan.norm_flat import FlatKernel
from codegen.plan.stages import StageKernel


def fold_first(head: Plan, stage: Launch) -> Launch | None:
    """The last launch of `head` with `stage`, which follows it, as its end; None where the norm's kernel cannot fold what it holds."""
    last = head.steps[-1]
    holds_rows = isinstance(last, Launch) and isinstance(last.kernel, FlatKernel) and last.kernel.held and head.spec.num_groups == 1
    if not holds_rows or stage.kernel.stage != "rows":
        return None
    return Launch(_folding(last.kernel, stage.kernel, stage.arguments[0]), result=stage.result)


def _folding(kernel: FlatKernel, stage: StageKernel, between: str) -> FlatKernel:
    """`kernel` with `stage` as its end. What it changed in place, `between`, it only reads now."""
    source = between if kernel.in_place else kernel.arguments[0]
    known = {constant.name for constant in kernel.constants}
    row = (Constant("kChannels", "kGroupSize", "values of a row"),) if stage.reduction == "mean" else ()
    parts = kernel.threads // 32 * (8 if stage.folds_wide else 4) if kernel.smem_bytes else 0
    return replace(
        kernel, input="input", output="output", fold=stage, result=stage.result,
        arguments=(source, *(o.key for o in kernel.operands), *(o.key for o in stage.operands), "y"),
        constants=(*kernel.constants, *(c for c in (*row, *unique_constants(stage.applied)) if c.name not in known)),
        applied=(*kernel.applied, *stage.functions), summary=f"{kernel.summary}; {stage.summary}", smem_bytes=kernel.smem_bytes + parts,
    )  # fmt: skip
