"""Chains in segments for tests: a spec from a few words, all its kernels compiled as one source, run step by step beside PyTorch's own operators."""

from __future__ import annotations

import ctypes
import json
import subprocess
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from bench.subject import SingleOnCpu
from codegen.ir.chain import chain_of
from codegen.ir.segment import Segment
from codegen.plan import Launch, Plan, plan
from codegen.plan.model import Kernel
from codegen.render import render_kernel
from codegen.spec import Spec, load_spec
from codegen.targets import TARGETS
from codegen.torch_text import module_lines, reference_lines
from runtime.library import call_of
from tests.codegen.emulated import STRICT, compile_text, emulated_text

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def segment_spec(folder: Path, shape: Sequence[int], chain: list[Any], precision: str = "fp32", inputs: dict[str, Sequence[int]] | None = None) -> Spec:
    """The spec of `chain` for an input u of `shape`, its batch first; `inputs` are further ones, of whole shapes."""
    listed = {"u": {"shape": list(shape[1:])}} | {name: {"shape": list(other), "batched": False} for name, other in (inputs or {}).items()}
    data = {"name": "segments_under_test", "batch": shape[0], "precision": precision, "inputs": listed, "chain": chain}
    path = folder / "spec.yaml"
    path.write_text(json.dumps(data))
    return load_spec(path)


class SegmentChain:
    """A chain by the emitted kernels and by PyTorch. Parameters and running statistics are random and of the spec's type."""

    def __init__(self, spec: Spec, target: str, seed: int = 0, device: str = "cpu") -> None:
        self.spec, self.target, self.dtype, self.device = spec, target, DTYPES[spec.precision.dtype], device
        self.generator = torch.Generator(device).manual_seed(seed)
        self.module = nn.Module()
        exec("\n".join(module_lines(spec)), {"nn": nn, "torch": torch, "self": self.module})  # noqa: S102
        self.module.to(device)
        for name, tensor in (*self.module.named_parameters(), *self.module.named_buffers()):
            if tensor.is_floating_point():
                drawn = torch.randn(tensor.shape, generator=self.generator, device=device)
                drawn = drawn.abs() + 0.5 if name.endswith("running_var") else drawn + (1.0 if name.endswith("weight") else 0.0)
                tensor.data = drawn.to(self.dtype)
            else:
                tensor.fill_(3)
        self.plan: Plan | None = None
        self.library: ctypes.CDLL | SimpleNamespace | None = None
        self.pending: list[tuple[Kernel, Future[ctypes.CDLL]]] = []

    def sources(self, scale: float = 1.0, offset: float = 0.0) -> list[torch.Tensor]:
        """Random inputs."""
        return [(torch.randn(given.shape, generator=self.generator, device=self.device) * scale + offset).to(self.dtype) for given in self.spec.inputs]

    def pytorch(self, sources: Sequence[torch.Tensor], dtype: torch.dtype | None = None, training: bool = False) -> dict[str, torch.Tensor]:
        """PyTorch's result "y" at `dtype` (default: the spec's own), and in training the new running statistics by their keys.

        In float64 it is computed on the CPU, which adds up a mean. On a GPU the mean moves by each value's share, so that one infinity gives NaN or itself
        as the order of threads has it.
        """
        dtype = dtype or self.dtype
        device = "cpu" if dtype is torch.float64 else self.device
        before = {key: tensor.clone() for key, tensor in self.module.state_dict().items()}
        module = self.module.to(device, dtype).train(training)
        names = {"torch": torch, "F": F, "self": module}
        names |= {given.name: source.to(device, dtype) for given, source in zip(self.spec.inputs, sources, strict=True)}
        with torch.no_grad(), SingleOnCpu():
            exec("\n".join(reference_lines(self.spec)), names)  # noqa: S102
            made = {
                "y": names["v"].to(self.device),
                **{f"state:{key}": buffer.to(self.device, copy=True) for key, buffer in module.named_buffers() if training},
            }
        self.module.to(self.device, self.dtype).load_state_dict(before)
        return made

    def kernels(self, sources: Sequence[torch.Tensor], training: bool = False, threads: int = 2) -> dict[str, torch.Tensor]:
        """The same by the plan's steps; fails where a launcher returns an error."""
        tensors = self.tensors(sources)
        for step in self.steps(training):
            if isinstance(step, Launch):
                self.launch(step, tensors, threads)
            else:
                made = call_of(step.operation, step.options, self.spec.precision.name)(*(name if name is None else tensors[name] for name in step.arguments))
                made = made if isinstance(made, tuple) else (made,)
                tensors |= {name: tensor.contiguous() for name, tensor in zip((step.out, *step.also), made, strict=True)}
        return {"y": tensors["y"], **{name: tensor for name, tensor in tensors.items() if name.startswith("state:")}}

    def steps(self, training: bool) -> tuple:
        return self.plan.training if training and self.plan.training else self.plan.steps

    def tensors(self, sources: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """All tensors of a call by their names, results full of NaN."""
        spec = self.spec
        tensors = {buffer.name: torch.full(buffer.shape, torch.nan, dtype=DTYPES[buffer.dtype], device=self.device) for buffer in self.plan.buffers}
        tensors["y"] = torch.full(spec.output_shape, torch.nan, dtype=self.dtype, device=self.device)
        for number, (given, source) in enumerate(zip(spec.inputs, sources, strict=True)):
            tensors["x" if number == 0 else f"input:{given.name}"] = source.contiguous()
        return tensors | {key: tensor.detach().contiguous() for key, tensor in self.module.state_dict().items()}

    def launch(self, step: Launch, tensors: dict[str, torch.Tensor], threads: int = 2) -> None:
        pointers = [ctypes.c_void_p(tensors[name].data_ptr()) for name in step.arguments]
        function = getattr(self.library, step.kernel.function(self.plan.target))
        assert function(*pointers, threads if self.target == "cpu" else 0, None) == 0

    @property
    def segments(self) -> list[Segment]:
        return [segment for segment in chain_of(self.spec).segments if not segment.alone]


def planned_chains(specs: Sequence[Spec], target: str, device: str = "cpu") -> list[SegmentChain]:
    """The chains of `specs` with plans whose kernels have names of their own."""
    chains = [SegmentChain(spec, target, seed, device) for seed, spec in enumerate(specs)]
    for i, chain in enumerate(chains):
        planned = plan(chain.spec, target, None if target == "cpu" else "h200")

        def named(steps, number=i):
            return tuple(replace(s, kernel=replace(s.kernel, name=f"chain{number}_{s.kernel.name}")) if isinstance(s, Launch) else s for s in steps)

        chain.plan = replace(planned, steps=named(planned.steps), training=named(planned.training))
    return chains


def build_on_gpu(folder: Path, specs: Sequence[Spec], workers: int = 16) -> list[SegmentChain]:
    """The chains of `specs` on the current GPU, a library a kernel."""
    chains = planned_chains(specs, "sm_80", "cuda")
    major, minor = torch.cuda.get_device_capability()

    def compiled(kernel: Kernel, text: str) -> ctypes.CDLL:
        (folder / f"{kernel.name}.cu").write_text(text)
        flags = [*TARGETS["sm_80"].flags, f"-arch=sm_{major}{minor}", "-shared", "-Xcompiler=-fPIC"]
        result = subprocess.run(["nvcc", *flags, "-o", f"{kernel.name}.so", f"{kernel.name}.cu"], cwd=folder, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr
        return ctypes.CDLL(str(folder / f"{kernel.name}.so"))

    with ThreadPoolExecutor(workers) as pool:
        for chain in chains:
            listed = [(kernel, render_kernel(chain.plan, kernel)) for kernel in chain.plan.kernels]
            chain.library = SimpleNamespace()
            chain.pending = [(kernel, pool.submit(compiled, kernel, text)) for kernel, text in listed]
        for chain in chains:
            for kernel, made in chain.pending:
                function = kernel.function(chain.plan.target)
                setattr(chain.library, function, getattr(made.result(), function))
    return chains


def build_segments(folder: Path, specs: Sequence[Spec], target: str = "cpu") -> list[SegmentChain]:
    """The chains of `specs`, their kernels compiled together; a warning is a failure. For sm_80 they are emulated."""
    chains, texts = planned_chains(specs, target), ['#include "chains.h"'] if target != "cpu" else []
    for chain in chains:
        texts += [render_kernel(chain.plan, kernel) for kernel in chain.plan.kernels] if target == "cpu" else [emulated_text(chain.plan)]
    if target == "cpu":
        (folder / "chains.cpp").write_text("\n".join(texts))
        command = ["g++", *chains[0].plan.target.flags, "-shared", "-fPIC", "-o", "chains.so", "chains.cpp"]
        result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600, check=False)
        assert result.returncode == 0 and not result.stderr, result.stderr
        library = ctypes.CDLL(str(folder / "chains.so"))
    else:
        library = ctypes.CDLL(str(compile_text(folder, "\n".join(texts), STRICT)))
    for chain in chains:
        chain.library = library
    return chains


def same_places(got: torch.Tensor, exact: torch.Tensor) -> bool:
    """Are NaN and the infinities of both signs where they are in `exact`?"""
    infinite = exact.isinf()
    return (
        torch.equal(got.isnan(), exact.isnan())
        and torch.equal(got.isinf(), infinite)
        and torch.equal(got[infinite].sign().double(), exact[infinite].sign().double())
    )


def error_of(got: torch.Tensor, exact: torch.Tensor) -> float:
    """Frobenius norm of the difference over the exact result's, over elements that are finite in the exact result."""
    finite = exact.isfinite()
    scale = exact[finite].norm()
    difference = (got.double()[finite] - exact.double()[finite]).norm()
    return float(difference / scale) if scale > 0 else float(difference)
