"""Chains for the cpu target's tests: spec from a few words, the emitted kernel compiled with g++, PyTorch's own tail beside it."""

from __future__ import annotations

import ctypes
import json
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F

from codegen.plan import Launch, Plan, plan
from codegen.render import render_kernel
from codegen.ir.fused_form import fused
from codegen.spec import Spec, load_spec
from codegen.targets import TARGETS
from codegen.torch_text import module_lines, reference_lines
from tests.compiler import gxx

DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def make_spec(folder: Path, chain: list[Any], batch: int, precision: str = "fp32", spatial: tuple[int, int] | None = None) -> Spec:
    """The spec of `chain`; `spatial` is the (height, width) in front of a conv2d."""
    data: dict[str, Any] = {"name": "chain_under_test", "batch": batch, "precision": precision, "chain": chain}
    if spatial:
        data["input"] = {"height": spatial[0], "width": spatial[1]}
    path = folder / "spec.yaml"
    path.write_text(json.dumps(data))  # JSON is YAML, and repeats a value where PyYAML would write an alias
    spec = load_spec(path)
    return fused(spec) or spec


def linear_chain(before: list[Any], after: list[Any], channels: int, groups: int, **norm: Any) -> list[Any]:
    """linear -> before -> group_norm -> after. The product itself is torch's: one input feature keeps it out of the way."""
    linear = {"linear": {"name": "gemm", "in_features": 1, "out_features": channels}}
    return [linear, *before, {"group_norm": {"name": "norm", "num_groups": groups, **norm}}, *after]


def conv_chain(before: list[Any], after: list[Any], channels: int, groups: int, **norm: Any) -> list[Any]:
    """conv2d (1x1, so that sizes stay) -> before -> group_norm -> after."""
    conv = {"conv2d": {"name": "conv", "in_channels": 1, "out_channels": channels, "kernel_size": 1}}
    return [conv, *before, {"group_norm": {"name": "norm", "num_groups": groups, **norm}}, *after]


class Chain:
    """What follows the producer of a spec, computed by PyTorch and by the emitted kernel.

    Parameters are random (no ones and zeros that would hide a mistake) and of the spec's type; `kernel` is set by `build`.
    """

    def __init__(self, spec: Spec, seed: int = 0) -> None:
        self.spec, self.dtype = spec, DTYPES[spec.precision.name]
        self.generator = torch.Generator().manual_seed(seed)
        self.module = nn.Module()
        exec("\n".join(module_lines(spec)), {"nn": nn, "torch": torch, "self": self.module})  # noqa: S102
        for name, parameter in self.module.named_parameters():
            offset = 1.0 if name.endswith("weight") else 0.0
            parameter.data = (torch.randn(parameter.shape, generator=self.generator) + offset).to(self.dtype)
        self.plan: Plan | None = None
        self.library: ctypes.CDLL | None = None

    def source(self, scale: float = 1.0, offset: float = 0.0) -> torch.Tensor:
        """A random result of the producer."""
        shape = self.spec.producer.output_shape
        return (torch.randn(shape, generator=self.generator) * scale + offset).to(self.dtype)

    def pytorch(self, source: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """PyTorch's tail at `dtype` (default: the spec's own)."""
        module = self.module.to(dtype or self.dtype)
        names = {"torch": torch, "F": F, "self": module, "v": source.to(dtype or self.dtype)}
        with torch.no_grad():
            exec("\n".join(reference_lines(self.spec)[1:]), names)  # noqa: S102
        module.to(self.dtype)
        return names["v"]

    def kernel(self, source: torch.Tensor, threads: int = 1) -> torch.Tensor:
        """The emitted kernels' result; fails where a launcher returns an error."""
        tensors = {
            buffer.name: torch.full((buffer.bytes,), 255, dtype=torch.uint8) if buffer.bytes else torch.full(buffer.shape, torch.nan, dtype=getattr(torch, buffer.dtype))
            for buffer in self.plan.buffers
        }
        tensors |= {"t0": source.contiguous(), "y": torch.full(self.spec.output_shape, torch.nan, dtype=self.dtype)}
        tensors |= {k: p.detach().contiguous() for k, p in self.module.named_parameters()}
        for step in self.plan.steps:
            if isinstance(step, Launch):
                pointers = [ctypes.c_void_p(tensors[name].data_ptr()) for name in step.arguments]
                assert getattr(self.library, step.kernel.function(self.plan.target))(*pointers, threads, None) == 0
        return tensors["y"]


def compiled(folder: Path, name: str, texts: Sequence[str]) -> ctypes.CDLL:
    """The library of these sources, compiled as one with the cpu target's flags; a warning is a failure."""
    (folder / f"{name}.cpp").write_text("\n".join(texts))
    command = [gxx(), *TARGETS["cpu"].flags, "-shared", "-fPIC", "-o", f"{name}.so", f"{name}.cpp"]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0 and not result.stderr, result.stderr
    return ctypes.CDLL(str(folder / f"{name}.so"))


def build(folder: Path, specs: Sequence[Spec]) -> list[Chain]:
    """The chains of `specs`, their kernels compiled together."""
    chains, texts = [Chain(spec, seed) for seed, spec in enumerate(specs)], []
    for i, chain in enumerate(chains):
        planned = plan(chain.spec, "cpu")
        steps = [replace(step, kernel=replace(step.kernel, name=f"chain{i}_{step.kernel.name}")) if isinstance(step, Launch) else step for step in planned.steps]
        chain.plan = replace(planned, steps=tuple(steps))
        texts += [render_kernel(chain.plan, kernel) for kernel in chain.plan.kernels]
    library = compiled(folder, "chains", texts)
    for chain in chains:
        chain.library = library
    return chains


def relative_error(got: torch.Tensor, exact: torch.Tensor) -> float:
    """Frobenius norm of the difference over the exact result's, over the elements that are finite in the exact result."""
    finite = exact.isfinite()
    scale = exact[finite].norm()
    return float((got.double()[finite] - exact[finite]).norm() / scale) if scale > 0 else float(got.double()[finite].norm())
