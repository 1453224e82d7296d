"""The one-pass convolution for mma.sync on a CPU: the emitted sources, compiled by g++ against tests/codegen/emulation, with the tensor core's instructions
replaced by functions of the same meaning."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import torch

from codegen.plan.model import Plan
from codegen.render import render_kernel
from tests.codegen.emulated import DTYPES, EXACT, compile_text

_LOAD = re.compile(r"\{\n  asm volatile\(\"ldmatrix.*?\);\n\}", re.DOTALL)
_MULTIPLY = re.compile(r"\{\n  asm volatile\(\"mma\.sync.*?\);\n\}", re.DOTALL)
_DECLARED = "extern __shared__ __align__(128) unsigned char memory[];"


def emulated_text(plan: Plan) -> str:
    """The plan's kernels as one C++ source."""
    texts = []
    for kernel in plan.kernels:
        text = render_kernel(plan, kernel)
        bf16 = "true" if ".bf16" in text else "false"
        text = _LOAD.sub("{ emulation::load_matrices(values, row, memory); }", text)
        text = _MULTIPLY.sub(f"{{ emulation::multiply(sums, a, b, {bf16}); }}", text)
        # Shared memory starts as NaN: whoever reads what nobody wrote shows it.
        text = text.replace(_DECLARED, "").replace(
            "// --- instructions and numbers ---",
            "alignas(128) unsigned char memory[kSharedBytes];\nconst bool filled = (std::memset(memory, 0xFF, kSharedBytes), true);",
        )
        text = re.sub(r"(?<!config\.)\bgridDim\b", "emulation::grid_size", text)
        text = text.replace("__cvta_generic_to_shared(memory)", "0").replace(
            "  return cudaLaunchKernelEx(", "  emulation::grid_size = config.gridDim;\n  return cudaLaunchKernelEx("
        )
        texts.append(text)
    return '#include "tensor_cores.h"\n' + "\n".join(texts)


class Emulated:
    """A plan whose kernels run on the CPU. `values` are the parameters by key."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        self.plan = plan
        self.library = ctypes.CDLL(str(compile_text(folder, emulated_text(plan), EXACT)))

    def __call__(self, x: torch.Tensor, values: dict[str, torch.Tensor]) -> torch.Tensor:
        spec = self.plan.spec
        tensors = {"x": x.contiguous(), "y": torch.full(spec.output_shape, float("nan"), dtype=DTYPES[spec.precision.dtype]), **values}
        tensors |= {buffer.name: torch.full(buffer.shape, float("nan")) for buffer in self.plan.buffers}
        for kernel in self.plan.kernels:
            pointers = [ctypes.c_void_p(tensors[name].data_ptr()) for name in kernel.arguments]
            assert getattr(self.library, kernel.function(self.plan.target))(*pointers, ctypes.c_int(0), None) == 0
        return tensors["y"]
