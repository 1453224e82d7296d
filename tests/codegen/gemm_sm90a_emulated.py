"""The Hopper GEMM on a CPU: the emitted sources, compiled by g++ against tests/codegen/emulation/hopper_gemm.h, with the wrappers of single instructions
replaced by functions of the same meaning, and the norm's kernel behind them where the plan has one."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from codegen.plan.gemm_sm90a.kernel import GemmSm90aKernel
from codegen.plan.model import Kernel, Plan
from codegen.render import render_kernel
from tests.codegen.emulated import DTYPES, SOON, compile_text, run_apart, without_wrappers

WRAPPERS = (
    "barrier_init", "barrier_init_done", "expect_bytes", "arrive", "cluster_rank", "cluster_sync", "try_wait", "try_wait_cluster", "wait", "wait_cluster",
    "remote_address", "store_remote", "copy_box", "copy_box_to_all", "prefetch_map", "store_box", "wait_stores_read", "fence_async", "store_transposed", "load_words",
    "store_words", "load_shared", "give_registers", "take_registers", "named_barrier", "wait_for_previous_kernel", "wgmma_fence", "wgmma_commit", "wgmma_wait",
    "pin", "wgmma",
)  # fmt: skip
LOOK = r"""  asm("{\n.reg .b32 magnitude, below;\n"
      "abs.f16x2 magnitude, %2;\nmax.NaN.f16x2 %0, %0, magnitude;\n"
      "set.lt.f16x2.f16x2 below, magnitude, %3;\nadd.f16x2 %1, %1, below;\n}"
      : "+r"(seen.largest[h]), "+r"(seen.faint[h]) : "r"(halves), "r"(kFaintHalves));
"""
REPLACED = {
    LOOK: "  look_at_halves(seen.largest[h], seen.faint[h], halves, kFaintHalves);\n",
    'asm volatile("add.f32 %0, %0, %1;" : "+f"(total[block][i]) : "f"(sums[block][i]));': "total[block][i] += sums[block][i];",
    'asm volatile("fma.rn.f32 %0, %1, %2, %0;" : "+f"(total[block][i]) : "f"(sums[block][i]), "f"(kRestored));': "total[block][i] = fmaf(sums[block][i], kRestored, total[block][i]);",
    'asm volatile("" : "+r"(self.warpgroup), "+r"(self.warp), "+r"(self.lane));': "",
    'asm volatile("griddepcontrol.launch_dependents;" ::: "memory");': "",
    "extern __shared__ __align__(1024) unsigned char memory[];": "unsigned char* const memory = emulation::shared_memory();",
}


def emulated_text(plan: Plan, kernel: Kernel) -> str:
    """A kernel of this target as C++."""
    text = without_wrappers(render_kernel(plan, kernel), WRAPPERS)
    for instructions, same in REPLACED.items():
        text = text.replace(instructions, same)
    text = re.sub(r"(?<!config\.)\bgridDim\.x\b", "emulation::grid_size", text)
    assert "asm" not in text
    return text


class Emulated:
    """A plan whose kernels run on the CPU. `edit` changes their text, to see that a test notices."""

    def __init__(self, plan: Plan, folder: Path, edit=lambda text: text) -> None:
        self.plan, self.folder, self.calls = plan, folder, []
        sources = {"emulated": "", "norm": ""}
        for step in plan.steps:
            kernel = step.kernel
            ours = kernel.template.startswith("gemm_sm90a/")
            stem = "emulated" if ours else "norm"
            sources[stem] += emulated_text(plan, kernel) if ours else render_kernel(plan, kernel)
            self.calls.append((f"{stem}.so", kernel.function(plan.target), step.arguments))
        gemm = next(kernel for kernel in plan.kernels if isinstance(kernel, GemmSm90aKernel))
        bf16 = str(gemm.operand_type == "__nv_bfloat16").lower()
        compile_text(folder, f"const bool emulation::bf16_operands = {bf16};\n{edit(sources['emulated'])}", SOON, header="hopper_gemm.h")
        if sources["norm"]:
            compile_text(folder, sources["norm"], SOON, "norm", "chains.h")

    def __call__(self, x: torch.Tensor, values: dict[str, torch.Tensor], seed: int = 0) -> torch.Tensor:
        """y, from x and the parameters by key; `seed` chooses the order of the threads. Raises AssertionError where a kernel stops or its launcher
        reports an error."""
        spec = self.plan.spec
        y = torch.full(spec.output_shape, float("nan"), dtype=DTYPES[spec.result.dtype])
        buffers = {b.name: torch.full((b.size,), 0xFF, dtype=torch.uint8) for b in self.plan.buffers}
        run_apart(self.folder, self.calls, {"x": x, "y": y, **values, **buffers}, seed)
        return y
