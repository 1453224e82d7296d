"""The one-pass convolution for Hopper on a CPU: the emitted source, compiled by g++ against tests/codegen/emulation/hopper.h, with the wrappers of single
instructions replaced by functions of the same meaning. A process of its own runs it: a wait that cannot end stops that process."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import torch

from codegen.plan.model import Plan
from codegen.render import render_kernel
from tests.codegen.emulated import DTYPES, EXACT, compile_text

WRAPPERS = (
    "barrier_init", "arrive", "wait", "cluster_rank", "cluster_sync", "remote_address", "store_remote", "max_remote", "fence_operands", "give_registers",
    "take_registers", "named_barrier", "expect_bytes", "copy_run", "prefetch", "wgmma_fence", "wgmma_commit", "wgmma_wait", "wgmma",
)  # fmt: skip
RUNNER = """
import ctypes, sys, torch
library, tensors, function, names = sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4].split(",")
values = torch.load(tensors)
code = getattr(ctypes.CDLL(library), function)(*(ctypes.c_void_p(values[name].data_ptr()) for name in names), ctypes.c_int(0), None)
torch.save(values["y"], tensors)
sys.exit(code)
"""


def emulated_text(plan: Plan) -> str:
    """The plan's kernel as C++."""
    text = render_kernel(plan, plan.kernels[0])
    for name in WRAPPERS:
        one_line_or_more = r"\([^{]*\) \{(?:[^\n]*\}\n|.*?\n\}\n)"
        text = re.sub(rf"(template <int kRegisters>\n)?__device__ __forceinline__ \w+ {name}{one_line_or_more}", "", text, flags=re.DOTALL)
    text = re.sub(r'asm volatile\("bar\.arrive %0, 256;" ::"r"\((.*?)\) : "memory"\);', r"named_arrive(\1, 256);", text)
    text = re.sub(r'asm volatile\("fence\.mbarrier_init[^;]*;" ::: "memory"\);', "", text)
    text = re.sub(r"#include <cuda_\w+\.h>\n|extern __shared__[^;]*;\n", "", text)
    assert "asm" not in text
    bf16 = str(plan.kernels[0].operand_type == "__nv_bfloat16").lower()
    return f'constexpr bool kBf16Operands = {bf16};\n#include "hopper.h"\n{text}'


class Emulated:
    """A plan whose kernel runs on the CPU."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        self.plan, self.folder = plan, folder
        compile_text(folder, emulated_text(plan), EXACT)

    def __call__(self, x: torch.Tensor, values: dict[str, torch.Tensor]) -> torch.Tensor:
        """y, from x and the parameters by key. Raises AssertionError where the kernel stops or its launcher reports an error."""
        spec, kernel = self.plan.spec, self.plan.kernels[0]
        tensors = {"x": x.contiguous(), "y": torch.full(spec.output_shape, float("nan"), dtype=DTYPES[spec.precision.dtype]), **values}
        torch.save(tensors, self.folder / "tensors.pt")
        command = [sys.executable, "-c", RUNNER, "./emulated.so", "tensors.pt", kernel.function(self.plan.target), ",".join(kernel.arguments)]
        done = subprocess.run(command, cwd=self.folder, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr or f"the launcher returned {done.returncode}"
        return torch.load(self.folder / "tensors.pt")
