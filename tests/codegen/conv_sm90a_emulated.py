"""The one-pass convolution for Hopper on a CPU: the emitted source, compiled by g++ against tests/codegen/emulation/hopper_conv.h, with the wrappers of
single instructions replaced by functions of the same meaning."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from codegen.plan.model import Plan
from codegen.render import render_kernel
from tests.codegen.emulated import DTYPES, EXACT, compile_text, run_apart, without_wrappers

WRAPPERS = (
    "barrier_init", "barrier_init_done", "arrive", "try_wait", "wait", "cluster_rank", "cluster_sync", "remote_address", "store_remote", "max_remote", "fence_async",
    "give_registers", "take_registers", "named_barrier", "expect_bytes", "copy_run", "prefetch", "wgmma_fence", "wgmma_commit", "wgmma_wait", "pin", "wgmma",
)  # fmt: skip


def emulated_text(plan: Plan) -> str:
    """The plan's kernel as C++."""
    text = without_wrappers(render_kernel(plan, plan.kernels[0]), WRAPPERS)
    text = re.sub(r'asm volatile\("bar\.arrive %0, 256;" ::"r"\((.*?)\) : "memory"\);', r"named_arrive(\1, 256);", text)
    text = re.sub(r"extern __shared__[^;]*;\n", "", text)
    assert "asm" not in text
    bf16 = str(plan.kernels[0].operand_type == "__nv_bfloat16").lower()
    return f"const bool emulation::bf16_operands = {bf16};\n{text}"


class Emulated:
    """A plan whose kernel runs on the CPU."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        self.plan, self.folder = plan, folder
        compile_text(folder, emulated_text(plan), EXACT, header="hopper_conv.h")

    def __call__(self, x: torch.Tensor, values: dict[str, torch.Tensor]) -> torch.Tensor:
        """y, from x and the parameters by key. Raises AssertionError where the kernel stops or its launcher reports an error."""
        spec, kernel = self.plan.spec, self.plan.kernels[0]
        y = torch.full(spec.output_shape, float("nan"), dtype=DTYPES[spec.precision.dtype])
        run_apart(self.folder, [("emulated.so", kernel.function(self.plan.target), kernel.arguments)], {"x": x, "y": y, **values})
        return y
