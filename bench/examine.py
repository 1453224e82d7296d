"""A package's part of `make evidence` that needs no quiet card: building, verifying and compiling the peers, several packages at once.

Each job runs in a child process (bench.children). What it leaves for the timing that follows: the verdict, the built package in the loader's cache,
and the compiled peers in Inductor's.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from bench.children import Result, take_jobs
from bench.machine import choose_device, precision_flags
from bench.measure import INPUT_SEED
from bench.peers import build
from bench.subject import Subject, construct, emit
from bench.verify import verify
from runtime import RuntimeFailure

COMPILED = ("compile",)  # peers whose making is slow and is kept on disk


def examine(job: Mapping[str, Any], setting: Mapping[str, Any]) -> Result:
    """{"verified", "verification"} of one package where `job["verify"]` asks for it, {"failure": why} when it cannot be built or run."""
    device = choose_device(setting["device"])
    target = setting["target"]
    try:
        emitted = emit(job["path"], job["precision"], target, Path(setting["out"]))
        subject = Subject(emitted, construct(emitted, device, target), device)
        result: Result = {}
        if job["verify"]:
            findings = verify(subject)
            result = {"verified": all(finding.ok for finding in findings), "verification": [finding.record() for finding in findings]}
        names = tuple(name for name in COMPILED if name in setting["peers"])
        subject.load({})
        torch.manual_seed(INPUT_SEED)
        x = emitted.module.get_inputs()[0].to(device)
        with torch.no_grad(), precision_flags(emitted.spec.precision.name):
            build(names, emitted, subject.eager, x)
        return result
    except (RuntimeFailure, RuntimeError) as error:
        return {"failure": f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), 'no message')[:300]}"}
    finally:
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    take_jobs(Path(sys.argv[1]), examine)
