"""sm_80's norm kernels and stages on a CPU: the emitted sources, compiled by g++ against tests/codegen/emulation, beside PyTorch's own tail."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from pathlib import Path

from codegen.plan import Launch, plan
from codegen.spec import Spec
from tests.codegen.cpu_chains import Chain
from tests.codegen.emulated import STRICT, compile_text, emulated_text


def build_emulated(folder: Path, specs: list[Spec]) -> list[Chain]:
    """The chains of `specs` behind torch's own producer, which has no bias; a warning is a failure."""
    chains, texts = [Chain(spec, seed) for seed, spec in enumerate(specs)], ['#include "chains.h"']
    for i, chain in enumerate(chains):
        planned = plan(replace(chain.spec, gemm="library"), "sm_80")
        steps = [replace(step, kernel=replace(step.kernel, name=f"chain{i}_{step.kernel.name}")) for step in planned.steps if isinstance(step, Launch)]
        chain.plan = replace(planned, steps=tuple(steps))
        texts.append(emulated_text(chain.plan))
    library = ctypes.CDLL(str(compile_text(folder, "\n".join(texts), STRICT)))
    for chain in chains:
        chain.library = library
    return chains
