"""From a chain to the module that runs it: its plan, its package on disk, and the model's own parameters in it."""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from bench.packages import load_package
from codegen.emit import write_package
from codegen.manifest import Package
from codegen.package import make_package
from codegen.plan import Refusal
from codegen.plan.model import Library, Plan
from codegen.spec import Spec
from codegen.targets import TARGETS, cuda_targets, preference
from runtime import GeneratedModule, RuntimeFailure
from runtime.resources import usable_cores

from ..progress import steps
from .chains import Chain
from .report import Row

# What a child of a generated module has in common with the model's own.
SHARED = ("_parameters", "_buffers", "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@dataclass
class Candidate:
    """A chain on its way: its row, its plan, and once it is built the module that runs it."""

    chain: Chain
    row: Row
    package: Package | None = None
    model: GeneratedModule | None = None
    folder: Path | None = None


def named(chain: Chain) -> Spec:
    """The chain's spec under a name that says what it computes: another chain, shape or type has another one, the same one elsewhere has the same."""
    told = hashlib.sha256(f"{chain.spec.precision.name}\n{chain.text}".encode()).hexdigest()[:10]
    return replace(chain.spec, name=f"{chain.spec.name}_{told}")


def plan_all(candidates: list[Candidate], device: torch.device) -> None:
    """Plan chains for the device, or for a GPU of the default class where the model holds no data; those that compute the same once."""
    planned: dict[str, Candidate] = {}
    for candidate in candidates:
        spec = candidate.chain.spec = named(candidate.chain)
        first = planned.setdefault(spec.package, candidate)
        if first is candidate:
            _plan(candidate, spec, device)
        else:
            candidate.package = first.package
            candidate.row.status, candidate.row.why, candidate.row.plan, candidate.row.estimated_ms = first.row.status, first.row.why, first.row.plan, first.row.estimated_ms


def _plan(candidate: Candidate, spec: Spec, device: torch.device) -> None:
    names = [name for name in preference(cuda_targets().values())] if device.type in ("cuda", "meta") else ["cpu"]
    try:
        able = tuple(target for target in names if device.type != "cuda" or TARGETS[target].min_capability <= torch.cuda.get_device_capability(device))
        package = make_package(spec, able, optional=True)
    except Refusal as refusal:
        candidate.row.status, candidate.row.why = "refused", str(refusal)
        return
    plan = package.plans[0]
    candidate.row.plan = _word(plan)
    candidate.row.estimated_ms = max(plan.floor.compute_ms, plan.floor.memory_ms) if plan.target.language == "cuda" else None
    if not any(not isinstance(step, Library) for step in plan.steps):
        candidate.row.status, candidate.row.why = "unsupported", "torch's library would compute every step of it"
        return
    candidate.package = package


def _word(plan: Plan) -> str:
    kernels = sum(not isinstance(step, Library) for step in plan.steps)
    library = [step.operation for step in plan.steps if isinstance(step, Library) and step.operation != "view"]
    return f"{plan.target.name}: {kernels} kernel{'s' if kernels != 1 else ''}" + (f" + torch's {', '.join(library)}" if library else "")


def build_all(candidates: list[Candidate], folder: Path) -> None:
    """Emit and compile, several at once, with a bar, and chains that compute the same once; a failure is noted in the row."""
    planned: dict[str, list[Candidate]] = {}
    for candidate in candidates:
        if candidate.package is not None:
            planned.setdefault(candidate.package.spec.package, []).append(candidate)

    def one(alike: list[Candidate]) -> tuple[list[Candidate], Any]:
        try:
            written = write_package(alike[0].package, folder, False, True).folder
            return alike, [constructed(written) for _ in alike]
        except (RuntimeFailure, Refusal, OSError) as error:
            return alike, error

    with ThreadPoolExecutor(max(1, usable_cores() // 2)) as pool:
        for alike, made in pool.map(one, steps(list(planned.values()), "building")):
            for number, candidate in enumerate(alike):
                if isinstance(made, Exception):
                    candidate.row.status, candidate.row.why = "failed", next(iter(str(made).strip().splitlines()), type(made).__name__)
                else:
                    candidate.model = shared(made[number], candidate.chain)
                    candidate.folder = folder / candidate.package.spec.package


def constructed(folder: Path) -> GeneratedModule:
    """The module of a package; its parameters are its own, and random. Raises what the runtime raises."""
    module = load_package(folder)
    with torch.random.fork_rng():
        return module.ModelNew(*module.get_init_inputs())


def shared(made: GeneratedModule, chain: Chain) -> GeneratedModule:
    """The generated module with the model's own parameters and running statistics in the place of its own.

    Its children hold the dictionaries of the model's modules, of parameters, of buffers and of hooks, so that what changes there is seen here.
    """
    for name, module in chain.modules.items():
        if name in made._modules:
            made._modules[name].__dict__.update((held, module.__dict__[held]) for held in SHARED)
    for name, parameter in chain.parameters.items():
        if name in made._parameters:
            made._parameters[name] = parameter
    return made.train(chain.region.module.training)


