"""sm_80's norm kernels and stages on a CPU: the emitted sources, compiled by g++ against tests/codegen/emulation, beside PyTorch's own tail."""

from __future__ import annotations

import ctypes
import subprocess
from dataclasses import replace
from pathlib import Path

from codegen.plan import Launch, plan
from codegen.render import render_kernel
from codegen.spec import Spec
from tests.codegen.cpu_chains import Chain

HEADERS = Path(__file__).parent / "emulation"
FLAGS = ("-std=c++17", "-O1", "-mf16c", "-mfma", "-ffp-contract=fast", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", "-Wno-unused-function", "-Wno-sign-compare", "-Wno-maybe-uninitialized")


def build_emulated(folder: Path, specs: list[Spec]) -> list[Chain]:
    """The chains of `specs` behind torch's own producer, which has no bias; a warning is a failure."""
    chains, texts = [Chain(spec, seed) for seed, spec in enumerate(specs)], ['#include "chains.h"']
    for i, chain in enumerate(chains):
        planned = plan(replace(chain.spec, gemm="library"), "sm_80")
        steps = [replace(step, kernel=replace(step.kernel, name=f"chain{i}_{step.kernel.name}")) for step in planned.steps if isinstance(step, Launch)]
        chain.plan = replace(planned, steps=tuple(steps))
        texts += [render_kernel(chain.plan, kernel).replace("extern __shared__ float extremes[];", "static float extremes[kPooledSize];") for kernel in chain.plan.kernels]
    (folder / "chains.cpp").write_text("\n".join(texts))
    command = ["g++", *FLAGS, f"-I{HEADERS}", "-shared", "-fPIC", "-o", "chains.so", "chains.cpp"]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr
    for chain in chains:
        chain.library = ctypes.CDLL(str(folder / "chains.so"))
    return chains
