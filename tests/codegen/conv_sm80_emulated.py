"""The one-pass convolution for mma.sync on a CPU: the emitted sources, compiled by g++ against tests/codegen/emulation."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

from codegen.plan.model import Plan
from tests.codegen.emulated import DTYPES, EXACT, compile_text, emulated_text


class Emulated:
    """A plan whose kernels run on the CPU. `values` are the parameters by key."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        self.plan = plan
        self.library = ctypes.CDLL(str(compile_text(folder, emulated_text(plan), EXACT, header="ptx.h")))

    def __call__(self, x: torch.Tensor, values: dict[str, torch.Tensor]) -> torch.Tensor:
        spec = self.plan.spec
        tensors = {"x": x.contiguous(), "y": torch.full(spec.output_shape, float("nan"), dtype=DTYPES[spec.precision.dtype]), **values}
        tensors |= {buffer.name: torch.full(buffer.shape, float("nan")) for buffer in self.plan.buffers}
        for kernel in self.plan.kernels:
            pointers = [ctypes.c_void_p(tensors[name].data_ptr()) for name in kernel.arguments]
            assert getattr(self.library, kernel.function(self.plan.target))(*pointers, ctypes.c_int(0), None) == 0
        return tensors["y"]
