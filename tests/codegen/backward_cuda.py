"""The CUDA backward for tests: compiled by nvcc for the GPU, or by g++ against tests/codegen/emulation, where each thread of a block is a fiber."""

from __future__ import annotations

import ctypes
import subprocess
from dataclasses import replace
from pathlib import Path

import torch

from codegen.ir.fused_form import FusedSpec
from codegen.plan.backward.cuda import plan_backward_cuda
from codegen.plan.model import Launch, Plan
from codegen.render import render_kernel
from codegen.spec import Spec
from codegen.targets import DEVICES, TARGETS
from tests import tiers
from tests.codegen import emulated
from tests.codegen.backward_chains import Backward
from tests.codegen.cpu_chains import Chain
from tests.codegen.norm_harness import find_nvcc


def planned(spec: Spec) -> Plan:
    return plan_backward_cuda(FusedSpec.of(spec), TARGETS["sm_80"], DEVICES["a100"])


def build_emulated(folder: Path, specs: list[Spec]) -> list[Backward]:
    """The backwards of `specs` on the CPU, compiled together; a warning is a failure."""
    tiers.claim("emulated")
    return _build(folder, specs, "backward.cpp", emulated.command("backward.cpp", "backward.so", emulated.STRICT), "cpu")


def build_on_gpu(folder: Path, specs: list[Spec]) -> list[Backward]:
    """The backwards of `specs` on the current GPU, compiled together."""
    major, minor = torch.cuda.get_device_capability()
    command = [find_nvcc(), "-std=c++17", "-O3", f"-arch=sm_{major}{minor}", "-shared", "-Xcompiler=-fPIC", "-o", "backward.so", "backward.cu"]
    return _build(folder, specs, "backward.cu", command, "cuda")


def _build(folder: Path, specs: list[Spec], source: str, command: list[str], device: str) -> list[Backward]:
    made, texts = [], ['#include "chains.h"'] if device == "cpu" else []
    for i, spec in enumerate(specs):
        plan = planned(spec)
        steps = [replace(step, kernel=replace(step.kernel, name=f"backward{i}_{step.kernel.name}")) for step in plan.steps if isinstance(step, Launch)]
        plan = replace(plan, steps=tuple(steps))
        made.append(Backward(Chain(spec, seed=i), plan, device))
        texts += [emulated.emulated_text(plan)] if device == "cpu" else [render_kernel(plan, kernel) for kernel in plan.kernels]
    (folder / source).write_text("\n".join(texts))
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    for backward in made:
        backward.library = ctypes.CDLL(str(folder / "backward.so"))
    return made
