"""The CUDA backward on a CPU: the emitted source compiled by g++ against tests/codegen/emulation, where each thread of a block is a fiber."""

from __future__ import annotations

import ctypes
import subprocess
from dataclasses import replace
from pathlib import Path

from codegen.plan.backward_cuda import plan_backward_cuda
from codegen.plan.model import Launch, Plan
from codegen.render import render_kernel
from codegen.spec import Spec
from codegen.targets import DEVICES, TARGETS
from tests.codegen.backward_chains import Backward
from tests.codegen.cpu_chains import Chain

HEADERS = Path(__file__).parent / "emulation"
FLAGS = ("-std=c++17", "-O1", "-mf16c", "-mfma", "-ffp-contract=fast", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", "-Wno-unused-function")


def planned(spec: Spec) -> Plan:
    return plan_backward_cuda(spec, TARGETS["sm_80"], DEVICES["a100"])


def build_emulated(folder: Path, specs: list[Spec]) -> list[Backward]:
    """The backwards of `specs`, compiled together; a warning is a failure."""
    made, texts = [], []
    for i, spec in enumerate(specs):
        plan = planned(spec)
        plan = replace(plan, steps=(Launch(replace(plan.kernels[0], name=f"backward{i}")),))
        made.append(Backward(Chain(spec, seed=i), plan))
        texts.append(render_kernel(plan, plan.kernels[0]))
    (folder / "backward.cpp").write_text("\n".join(texts))
    command = ["g++", *FLAGS, f"-I{HEADERS}", "-shared", "-fPIC", "-o", "emulated.so", "backward.cpp"]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    for backward in made:
        backward.library = ctypes.CDLL(str(folder / "emulated.so"))
    return made



