"""The packages of a sharding's kernels: one for all ranks, generated and compiled once on each machine."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import torch
from filelock import FileLock
from torch.distributed.device_mesh import DeviceMesh

from bench.fleet import heard
from bench.packages import load_package
from codegen.emit import write_package
from codegen.ir.sharding import Kernels, Sharding
from codegen.plan import Refusal
from codegen.spec import Spec, SpecError
from runtime import GeneratedModule, RuntimeFailure

from ..api import plan_package, read
from .collectives import ParallelError


def build(spec: Spec, sharding: Sharding, mesh: DeviceMesh, folder: Path) -> list[GeneratedModule]:
    """The modules of a sharding's kernels, without parameters, in order.

    Sources lie in `folder`, under a name that says what they compute. The first rank of a machine to come writes and compiles them under a lock, the others take
    what it made. Raises ParallelError on all ranks where one could not, or where they do not have the same sources.
    """
    made: list[GeneratedModule] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / ".lock"):
            told, written = emit(spec, sharding, mesh.device_type, folder)
            for package in written:
                module = load_package(package)
                with torch.device("meta"):
                    made.append(module.ModelNew(*module.get_init_inputs()).eval())
                made[-1].build()
        mine = (told, None)
    except (RuntimeFailure, Refusal, SpecError, ValueError, OSError) as error:
        mine = ("", str(error).strip() or type(error).__name__)
    _agreed(mine, mesh)
    return made


def emit(spec: Spec, sharding: Sharding, device_type: str, folder: Path) -> tuple[str, list[Path]]:
    """Write the packages of a sharding's kernels for the devices of this machine; a digest of what they compute, and their folders.

    Raises SpecError and Refusal as generate does.
    """
    layers = [_layer(spec, kernels) for kernels in sharding.kernels]
    targets = _targets(spec, device_type)
    told = hashlib.sha256(json.dumps([layers, targets], sort_keys=True).encode()).hexdigest()[:10]
    names = [f"{spec.name}_tp{sharding.tp}_{told}_{number}" for number in range(len(layers))]
    packages = [plan_package(read({**layer, "name": name}, prepack=spec.prepack), targets) for name, layer in zip(names, layers, strict=True)]
    return told, [write_package(package, folder, force=True).folder for package in packages]


def _agreed(mine: tuple[str, str | None], mesh: DeviceMesh) -> None:
    """Hear from all ranks whether they have their kernels, so that none waits for one that has not."""
    try:
        found = heard(mine, mesh.get_group())
    except RuntimeError as error:
        raise ParallelError(f"rank {mesh.get_local_rank()} of {mesh.size()}: another rank ended while kernels were built ({str(error).strip().splitlines()[0]})") from error
    for rank, (_, why) in enumerate(found):
        if why is not None:
            raise ParallelError(f"rank {rank} of {mesh.size()} could not build its kernels: {why}")
    if len({told for told, _ in found}) > 1:
        raise ParallelError(f"the {mesh.size()} ranks divide different layers, or on different kinds of device; give all of them the same spec")


def _layer(spec: Spec, kernels: Kernels) -> dict:
    """The spec of kernels with what the whole layer's says about how to compute it."""
    options = {"library": spec.library} | ({"math": spec.math, "gemm": spec.gemm} if kernels.product else {})
    return kernels.layer("layer", spec.precision.name) | {key: value for key, value in options.items() if value is not None}


def _targets(spec: Spec, device_type: str) -> tuple[str, ...]:
    """The targets to emit: the spec's, else the CPU's on CPUs and all that serve a GPU's kernels on GPUs, of which the loader takes the best."""
    return spec.targets or (() if device_type == "cuda" else ("cpu",))
