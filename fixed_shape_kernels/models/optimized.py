"""`optimize`: find the chains of a model, build kernels for them, judge each, and put those in place that are right and faster."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from bench.packages import load_package
from bench.timing import interleaved
from codegen.emit import write_package
from codegen.manifest import Package
from codegen.numerics import PRECISIONS
from codegen.package import make_package
from codegen.plan import Refusal
from codegen.plan.model import Library, Plan
from codegen.spec import Spec
from codegen.targets import TARGETS, cuda_targets, preference
from runtime import GeneratedModule, RuntimeFailure
from runtime.resources import usable_cores

from ..progress import busy, steps
from .chains import Chain, chains_of
from .judge import SECONDS, judge
from .installed import Optimized, arguments_of
from .regions import Region, kept_state, path_of, regions_of, run
from .report import FOUND, REPLACED, NotReplaced, Report, Row


# What a child of a generated module has in common with the model's own.
SHARED = ("_parameters", "_buffers", "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@dataclass
class _Candidate:
    """A chain on its way: its row, its plan, and once it is built the module that runs it."""

    chain: Chain
    row: Row
    package: Package | None = None
    model: GeneratedModule | None = None


def explain_model(model: nn.Module, *example: Any, precision: str | None = None) -> Report:
    """What `optimize` would try: the chains of a model with their plans and estimates. Nothing is compiled, and no GPU is needed.

    `model` may be on the meta device. Raises what the model raises on the example.
    """
    report, _ = _found(model, example, precision)
    return report


def optimize(
    model: nn.Module, *example: Any, precision: str | None = None, training: bool = False, min_gain: float = 1.05, strict: bool = False, verify: bool = True,
    cache_dir: str | Path | None = None,
) -> Optimized:  # fmt: skip
    """A module that runs `model` with generated kernels in the place of those of its chains where they are right and faster.

    `example` are the arguments of one call, on the device where the model will run. Weights, `state_dict` and hooks are the model's own, and the model
    itself runs as before. Each chain is compared with float64 on the example's data and on shifted ones (`verify`), timed beside the model's own modules,
    and used where it is `min_gain` times as fast. `precision` is tf32 or nothing: the rest follows from the tensors. With `training` chains are used
    where gradients are asked for, too. A call with other shapes, types or constants runs the model's own modules, and is warned of once.
    Sources are kept in `cache_dir`, by default build/models. With `strict` NotReplaced is raised where a chain stays as it was.

    Raises what the model raises on the example, ValueError for a wrong argument.
    """
    if precision not in (None, "tf32"):
        raise ValueError(f"precision: {precision!r}; tf32 or None, as the type of the tensors says the rest")
    def widen(*call: Any) -> Report:
        report, candidates = _found(model, call, precision)
        _build(candidates, Path(cache_dir or "build/models"))
        chosen = _judged(model, call, [candidate for candidate in candidates if candidate.model is not None], min_gain, verify)
        if strict and any(row.status != REPLACED for row in report.rows):
            raise NotReplaced(report)
        made.install([(candidate.chain, candidate.model) for candidate in chosen])
        if chosen:
            with torch.no_grad(), kept_state(model):
                times = interleaved({"after": lambda: made(*call), "before": lambda: model(*call)}, _device(model, call), SECONDS)
            report.before_ms, report.after_ms = times["before"].ms, times["after"].ms
        return report

    made = Optimized(model, Report(type(model).__name__, ""), training)
    made.__dict__["_widen"] = widen
    made.__dict__["report"] = widen(*example)
    return made


def _device(model: nn.Module, example: tuple[Any, ...]) -> torch.device:
    tensors = [*model.parameters(), *(value for value in example if isinstance(value, torch.Tensor))]
    return tensors[0].device if tensors else torch.device("cpu")


def _found(model: nn.Module, example: tuple[Any, ...], precision: str | None) -> tuple[Report, list[_Candidate]]:
    """The chains of a model with their plans, and a report that has a row for each and for what is left alone."""
    device = _device(model, example)
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    report = Report(type(model).__name__, kind)
    candidates: list[_Candidate] = []
    with busy("finding chains"):
        regions, left = regions_of(model, example)
        found = [(region, *chains_of(region, _name(region, number))) for number, region in enumerate(regions)]
    report.rows += [Row(path_of(one.path, one.kind), one.kind, "not traced", one.why) for one in left]
    for region, chains, rest in found:
        rows: list[tuple[int, Row]] = []
        order = {node: place for place, node in enumerate(region.graph.nodes)}
        for chain in chains:
            spec = replace(chain.spec, precision=PRECISIONS["tf32"]) if precision == "tf32" and chain.spec.precision.name == "fp32" else chain.spec
            chain.spec = spec
            row = Row(path_of(chain.path), chain.words, FOUND, where=chain.where, shapes=_shapes(spec), precision=spec.precision.name)
            candidate = _Candidate(chain, row)
            _plan(candidate, device)
            candidates.append(candidate)
            rows.append((order[chain.nodes[0]], row))
        rows += [(0, Row(path_of(one.path), one.operator, "unsupported", one.why, one.where)) for one in rest]
        report.rows += [row for _, row in sorted(rows, key=lambda pair: pair[0])]
    return report, candidates


def _name(region: Region, number: int) -> str:
    return f"model_{number}" if not region.path else f"part_{number}"


def _shapes(spec: Spec) -> str:
    given = " and ".join("x".join(map(str, one.shape)) for one in spec.inputs)
    return f"{given} -> {'x'.join(map(str, spec.output_shape))}"


def _plan(candidate: _Candidate, device: torch.device) -> None:
    """Plan the chain for the device, or for a GPU of the default class where the model holds no data."""
    names = [name for name in preference(cuda_targets().values())] if device.type in ("cuda", "meta") else ["cpu"]
    spec = candidate.chain.spec
    name = f"{spec.name}_{hashlib.sha256(repr((spec.chain, spec.inputs, spec.precision.name)).encode()).hexdigest()[:10]}"
    spec = candidate.chain.spec = replace(spec, name=name)
    try:
        package = make_package(spec, tuple(target for target in names if device.type != "cuda" or TARGETS[target].min_capability <= torch.cuda.get_device_capability(device)))
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


def _build(candidates: list[_Candidate], folder: Path) -> None:
    """Emit and compile, several at once, with a bar; a failure is noted in the row."""
    planned = [candidate for candidate in candidates if candidate.package is not None]

    def one(candidate: _Candidate) -> tuple[_Candidate, Any]:
        try:
            module = load_package(write_package(candidate.package, folder, False, True).folder)
            with torch.random.fork_rng():
                return candidate, module.ModelNew(*module.get_init_inputs())
        except (RuntimeFailure, Refusal, OSError) as error:
            return candidate, error

    with ThreadPoolExecutor(max(1, usable_cores() // 2)) as pool:
        for candidate, made in pool.map(one, steps(planned, "building")):
            if isinstance(made, Exception):
                candidate.row.status, candidate.row.why = "failed", next(iter(str(made).strip().splitlines()), type(made).__name__)
            else:
                candidate.model = _shared(made, candidate.chain)


def _shared(made: GeneratedModule, chain: Chain) -> GeneratedModule:
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


def _judged(model: nn.Module, example: tuple[Any, ...], candidates: list[_Candidate], min_gain: float, verify: bool) -> list[_Candidate]:
    """Those that are right and faster. The model runs once on the example, and each region once more behind it."""
    chosen: list[_Candidate] = []
    by_region: dict[int, list[_Candidate]] = {}
    regions: dict[int, Region] = {}
    for candidate in candidates:
        regions[id(candidate.chain.region)] = candidate.chain.region
        by_region.setdefault(id(candidate.chain.region), []).append(candidate)
    arguments = arguments_of(model, example, list(regions.values()))
    bar = steps(candidates, "judging")
    for key, region in regions.items():
        waiting = {candidate.chain.nodes[0]: candidate for candidate in by_region[key]}
        values: dict[fx.Node, torch.Tensor] = {}
        wanted = {used for candidate in by_region[key] for used in candidate.chain.takes}
        with torch.no_grad(), kept_state(region.module), torch.random.fork_rng():
            given = [value.clone() for value in arguments[key]]
            for node, value in run(region, iter(given), before=lambda node: waiting.get(node) and _one(waiting.pop(node), values, min_gain, verify, chosen, bar)):
                if node in wanted:
                    values[node] = value
    return chosen


def _one(candidate: _Candidate, values: dict[fx.Node, torch.Tensor], min_gain: float, verify: bool, chosen: list[_Candidate], bar: Iterator[Any]) -> None:
    next(bar, None)
    row, chain = candidate.row, candidate.chain
    inputs = [values[used].clone() for used in chain.takes]
    try:
        found = judge(chain.spec, candidate.model, chain.eager, inputs, verify)
    except RuntimeFailure as failure:
        row.status, row.why = "failed", next(iter(str(failure).strip().splitlines()))
        return
    row.error, row.ours_ms, row.torch_ms = found.error, found.ours_ms, found.torch_ms
    if found.wrong:
        row.status, row.why = "wrong", found.wrong
    elif row.gain < min_gain:
        row.status, row.why = "slower", f"{row.gain:.2f}x, {min_gain:g} wanted"
    else:
        row.status = REPLACED
        chosen.append(candidate)
