"""The sm_80 GEMM and the norm kernels behind it on a CPU: the emitted sources, compiled by g++ against tests/codegen/emulation, where every PTX instruction
is a function of its name, beside the chain in PyTorch."""

from __future__ import annotations

import copy
import ctypes
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F

from codegen.plan.gemm.kernel import GemmKernel
from codegen.plan.model import Plan
from codegen.torch_text import module_lines, reference_lines
from tests.codegen.emulated import DTYPES, SOON, compile_text, emulated_text

GUARD = 4096  # bytes on both sides of every tensor, which nobody may write


class Guarded:
    """A tensor between bytes of 255, which a kernel must leave alone. Without `values` it holds them too: NaN."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, values: torch.Tensor | None = None) -> None:
        size = torch.Size(shape).numel() * dtype.itemsize
        self.bytes = torch.full((size + 2 * GUARD,), 255, dtype=torch.uint8)
        self.guards = self.bytes[:GUARD], self.bytes[GUARD + size :]
        self.tensor = self.bytes[GUARD : GUARD + size].view(dtype).view(shape)
        if values is not None:
            self.tensor.copy_(values)

    @property
    def intact(self) -> bool:
        return all(bool((guard == 255).all()) for guard in self.guards)


class Layer:
    """A plan whose kernels run on the CPU, and the chain as a module with the producer's initial parameters and normal random ones else.

    `in_fp32`: blocks of the last run that multiplied in fp32 because their operands' parts could not hold them.
    """

    def __init__(self, plan: Plan, library: ctypes.CDLL) -> None:
        self.plan, self.library, self.spec, self.in_fp32 = plan, library, plan.spec, 0
        self.dtype = DTYPES[plan.spec.precision.dtype]
        self.module = nn.Module()
        torch.manual_seed(0)
        exec("\n".join(module_lines(self.spec)), {"nn": nn, "torch": torch, "self": self.module})  # noqa: S102
        for key, parameter in self.module.named_parameters():
            if not key.startswith(f"{self.spec.chain[0].name}."):
                nn.init.normal_(parameter)
        self.module.requires_grad_(False).to(self.dtype)

    @property
    def name(self) -> str:
        """Which one it is, for messages."""
        return f"{self.spec.name}, {self.gemm.name} {self.gemm.tile.m}x{self.gemm.tile.n}"

    @property
    def gemm(self) -> GemmKernel:
        return next(kernel for kernel in self.plan.kernels if isinstance(kernel, GemmKernel))

    @property
    def weight(self) -> torch.Tensor:
        """The producer's."""
        return getattr(self.module, self.spec.chain[0].name).weight

    def __call__(self, x: torch.Tensor, seed: int = 0) -> torch.Tensor:
        """The kernels' result; `seed` chooses the order of blocks and threads. Fails where one does what it must not."""
        spec = self.spec
        read = {"x": Guarded(spec.input_shape, self.dtype, x), **{key: Guarded(p.shape, self.dtype, p) for key, p in self.module.named_parameters()}}
        made = {b.name: Guarded((b.bytes,), torch.uint8) if b.bytes else Guarded(b.shape, DTYPES[b.dtype]) for b in self.plan.buffers}
        made["y"] = Guarded(spec.output_shape, self.dtype)
        tensors = read | made
        self.library.emulate_in_order(seed)
        self.library.emulated_readable(None, ctypes.c_size_t(0))
        for guarded in tensors.values():
            self.library.emulated_readable(ctypes.c_void_p(guarded.tensor.data_ptr()), ctypes.c_size_t(guarded.tensor.nbytes))
        try:
            for step in self.plan.steps:
                pointers = [ctypes.c_void_p(tensors[name].tensor.data_ptr()) for name in step.arguments]
                assert getattr(self.library, step.kernel.function(self.plan.target))(*pointers, ctypes.c_int(0), None) == 0, step.kernel.name
        finally:
            self.library.emulate_in_order(0)
            self.library.emulated_readable(None, ctypes.c_size_t(0))
            self.in_fp32 = self.library.emulated_blocks_in_fp32()
        assert all(guarded.intact for guarded in tensors.values())
        self.buffers = {name: guarded.tensor for name, guarded in made.items()}
        return self.buffers["y"]

    def pytorch(self, x: torch.Tensor, dtype: torch.dtype | None = None, weight: torch.Tensor | None = None) -> torch.Tensor:
        """The chain in PyTorch at `dtype`, else the spec's own; with another `weight` of the producer on request."""
        module = copy.deepcopy(self.module).to(dtype or self.dtype)
        if weight is not None:
            getattr(module, self.spec.chain[0].name).weight.copy_(weight)
        names = {"torch": torch, "F": F, "self": module, "x": x.to(dtype or self.dtype)}
        exec("\n".join(reference_lines(self.spec)), names)  # noqa: S102
        return names["v"]


def build(folder: Path, plans: list[Plan]) -> list[Layer]:
    """The layers of `plans`, compiled together."""
    named = []
    for i, plan in enumerate(plans):
        steps = tuple(replace(step, kernel=replace(step.kernel, name=f"layer{i}_{step.kernel.name}")) for step in plan.steps)
        named.append(replace(plan, steps=steps))
    library = ctypes.CDLL(str(compile_text(folder, "\n".join(map(emulated_text, named)), SOON, header="ptx.h")))
    return [Layer(plan, library) for plan in named]
