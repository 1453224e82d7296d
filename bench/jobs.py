"""What the jobs of child processes share (bench.children): faults that become results, peers left in Inductor's cache, packages in the loader's."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch._inductor import config as inductor

from bench.children import ProcessLost, Result
from bench.machine import precision_flags
from bench.measure import INPUT_SEED
from bench.peers import build
from bench.subject import Subject
from codegen.plan import Refusal
from codegen.spec import SpecError
from runtime import Package, RuntimeFailure
from runtime.build import ensure_built, plan_build
from runtime.resources import usable_cores

EXAMINED = 0.6  # of a budget at most goes to building and verifying where times are wanted too, so that a call leaves complete results


def guarded(job: Mapping[str, Any], setting: Mapping[str, Any], work: Callable[[Mapping[str, Any], Mapping[str, Any]], Result]) -> Result:
    """`work(job, setting)`; a failure of ours becomes {"failure": why}, a lost CUDA context ends the process."""
    try:
        return work(job, setting)
    except (RuntimeFailure, RuntimeError, SpecError, Refusal) as error:
        result = {"failure": f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), 'no message')[:300]}"}
        if "CUDA error" in str(error) or "CUDA error" in repr(error.__cause__):
            raise ProcessLost(result) from error
        return result
    finally:
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()


def compile_peers(subject: Subject, peers: Iterable[str], training: bool = False) -> None:
    """Leave what torch.compile makes of the peer "compile", where it is among `peers`, in Inductor's cache.

    What it tries on the card meanwhile is not kept: beside other processes it would choose by chance, and the process that times chooses alone.
    """
    names = tuple(name for name in peers if name == "compile")
    if names:
        subject.load({}, training)
        torch.manual_seed(INPUT_SEED)
        inputs = tuple(given.to(subject.device) for given in subject.emitted.module.get_inputs())
        with torch.no_grad(), precision_flags(subject.spec.precision.name), inductor.patch(autotune_local_cache=False):
            build(names, subject.emitted, subject.eager, inputs)


def build_all(packages: Iterable[tuple[Path, str]], capability: tuple[int, int] | None, workers: int | None = None) -> dict[Path, str]:
    """Compile packages, named by folder and target, into the cache, several at once. Returns why those that could not be were not, by folder."""

    def one(named: tuple[Path, str]) -> tuple[Path, str | None]:
        folder, target = named
        try:
            package = Package(folder)
            ensure_built(plan_build(package, package.target(target), capability))
        except RuntimeFailure as error:
            return folder, str(error).strip().splitlines()[0]
        return folder, None

    with ThreadPoolExecutor(workers or usable_cores()) as pool:
        return {folder: why for folder, why in pool.map(one, dict.fromkeys(packages)) if why is not None}
