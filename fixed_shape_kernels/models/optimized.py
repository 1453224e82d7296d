"""`optimize`: find the chains of a model, build kernels for them, judge each, and put those in place that are right and faster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bench.timing import interleaved
from codegen.numerics import PRECISIONS
from codegen.spec import Spec

from ..progress import busy
from .building import Candidate, build_all, constructed, named, plan_all, shared
from .chains import chains_of
from .installed import Call, Optimized
from .judge import SECONDS, Judge, first_line
from .regions import Region, apart_of, kept_state, path_of, regions_of
from .report import FOUND, REPLACED, NotReplaced, Report, Row
from .saved import argument, read
from .seen import arguments_of


def explain_model(model: nn.Module, *example: Any, precision: str | None = None, apart: Sequence[nn.Module | type[nn.Module]] = ()) -> Report:
    """What `optimize` would try: the chains of a model with their plans and estimates. Nothing is compiled, and no GPU is needed.

    `model` may be on the meta device; `apart` is that of `optimize`. Raises what the model raises on the example.
    """
    report, _ = _found(model, example, precision, apart)
    return report


def optimize(
    model: nn.Module, *example: Any, precision: str | None = None, training: bool = False, min_gain: float = 1.05, strict: bool = False, verify: bool = True,
    cache_dir: str | Path | None = None, apart: Sequence[nn.Module | type[nn.Module]] = (),
) -> Optimized:  # fmt: skip
    """A module that runs `model` with generated kernels in the place of those of its chains where they are right and faster.

    `example` are the arguments of one call, on the device where the model will run. Weights, `state_dict` and hooks are the model's own, and the model
    itself runs as before. Each chain is compared with float64 on the example's data and on shifted ones (`verify`), timed beside the model's own modules,
    and used where it is `min_gain` times as fast. `precision` is tf32 or nothing: the rest follows from the tensors. With `training` chains are used
    where gradients are asked for, too: those are compared as well, and a forward is timed with its backward. A call with other shapes, types or constants runs the model's own modules, and is warned of once.
    `apart` are parts of the model, or classes of such, that stay modules that are called, since they will be sharded, checkpointed or hooked: no chain goes
    beyond one. Parts that have hooks are apart anyway. Sources are kept in `cache_dir`, by default build/models. With `strict` NotReplaced is raised where a chain stays as it was.

    Raises what the model raises on the example, ValueError for a wrong argument.
    """
    if precision not in (None, "tf32"):
        raise ValueError(f"precision: {precision!r}; tf32 or None, as the type of the tensors says the rest")
    def widen(*call: Any) -> Report:
        report, candidates = _found(model, call, precision, apart)
        build_all(candidates, Path(cache_dir or "build/models"))
        built = [candidate for candidate in candidates if candidate.model is not None]
        chosen = Judge(min_gain, verify, training).chosen(built, arguments_of(model, call, {candidate.chain.region for candidate in built}))
        if strict and any(row.status != REPLACED for row in report.rows):
            raise NotReplaced(report)
        made.install([(candidate.chain, candidate.model) for candidate in chosen])
        made.calls.append(Call(call, {candidate.chain.place: candidate.folder for candidate in chosen}))
        if chosen:
            with torch.no_grad(), kept_state(model):
                times = interleaved({"after": lambda: made(*call), "before": lambda: model(*call)}, device_of(model, call), SECONDS)
            report.before_ms, report.after_ms = times["before"].ms, times["after"].ms
        return report

    made = Optimized(model, Report(type(model).__name__, ""), training, precision, widen)
    parts = apart_of(model, apart)
    made.apart.extend(path for path, part in model.named_modules() if part in parts)
    made.__dict__["report"] = widen(*example)
    return made


def load_optimized(model: nn.Module, folder: str | Path) -> Optimized:
    """Put the kernels that `save_optimized` wrote into `model`, which is of the same class, on the same kind of device and in the same mode.

    Nothing is judged again. Libraries come from the build cache, or are compiled. Raises ValueError where the folder holds none, or is of another torch,
    device, mode or model; what the runtime raises where kernels cannot be built.
    """
    index, device = read(folder), device_of(model, ())
    present = {"torch": torch.__version__, "model": type(model).__name__, "training": model.training}
    wrong = [f"{key} {index[key]} (here {value})" for key, value in present.items() if index[key] != value]
    wrong += [f"device {index['report']['device']} (here {kind_of(device)})"] if index["report"]["device"] != kind_of(device) else []
    if wrong:
        raise ValueError(f"{folder} was saved for {', '.join(wrong)}; optimise again")
    report = Report(**{**{key: value for key, value in index["report"].items() if key != "summary"}, "rows": [Row(**row) for row in index["report"]["rows"]]})
    made = Optimized(model, report, index["trains"], index["precision"], None)
    made.apart.extend(index["apart"])
    parts = dict(model.named_modules())
    if gone := [path for path in made.apart if path not in parts]:
        raise ValueError(f"{folder} was saved for another model: this one has no part {', '.join(gone)}; optimise again")
    found = []
    for call in index["calls"]:
        arguments = tuple(argument(value, device) for value in call["arguments"])
        missing, built = dict(call["packages"]), []
        try:
            regions, _ = regions_of(model, arguments, [parts[path] for path in made.apart])
        except Exception as error:  # whatever the model raises
            raise ValueError(f"{folder} was saved for another model: this one fails on its example ({first_line(error)}); optimise again") from error
        for number, region in enumerate(regions):
            for chain in chains_of(region, name_of(region, number))[0]:
                chain.spec = at_precision(chain.spec, index["precision"])
                chain.spec = named(chain)
                if missing.get(chain.place) == chain.spec.package:
                    del missing[chain.place]
                    built.append((chain, shared(constructed(Path(folder) / chain.spec.package), chain)))
        if missing:
            raise ValueError(f"{folder} was saved for another model: this one has no chain of {', '.join(sorted(set(missing.values())))}; optimise again")
        found.append(built)
        made.calls.append(Call(arguments, {place: Path(folder) / name for place, name in call["packages"].items()}))
    for built in found:  # behind the last look at the model's own forwards
        made.install(built)
    return made


def device_of(model: nn.Module, example: tuple[Any, ...]) -> torch.device:
    tensors = [*model.parameters(), *(value for value in example if isinstance(value, torch.Tensor))]
    return tensors[0].device if tensors else torch.device("cpu")


def kind_of(device: torch.device) -> str:
    """The card's name, or the kind of any other device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def at_precision(spec: Spec, precision: str | None) -> Spec:
    """The spec of a chain as the model shall compute it."""
    return replace(spec, precision=PRECISIONS["tf32"]) if precision == "tf32" and spec.precision.name == "fp32" else spec


def _found(model: nn.Module, example: tuple[Any, ...], precision: str | None, apart: Sequence[nn.Module | type[nn.Module]]) -> tuple[Report, list[Candidate]]:
    """The chains of a model with their plans, and a report that has a row for each and for what is left alone."""
    device = device_of(model, example)
    report = Report(type(model).__name__, kind_of(device))
    with busy("finding chains"):
        regions, left = regions_of(model, example, apart)
        report.rows += [Row(path_of(one.path, one.kind), one.kind, "not traced", one.why) for one in left]
        return report, candidates_of(report, regions, precision, device)


def candidates_of(report: Report, regions: Sequence[Region], precision: str | None, device: torch.device) -> list[Candidate]:
    """The chains of regions with their plans for a device; rows for them and for what is left alone are added to the report."""
    candidates: list[Candidate] = []
    for number, region in enumerate(regions):
        chains, rest = chains_of(region, name_of(region, number))
        rows: list[tuple[int, Row]] = []
        order = {node: place for place, node in enumerate(region.graph.nodes)}
        for chain in chains:
            chain.spec = spec = at_precision(chain.spec, precision)
            row = Row(path_of(chain.path), chain.words, FOUND, where=chain.where, shapes=_shapes(spec), precision=spec.precision.name)
            candidates.append(Candidate(chain, row))
            rows.append((order[chain.nodes[0]], row))
        rows += [(order[one.node], Row(path_of(one.path), one.operator, "unsupported", one.why, one.where)) for one in rest]
        report.rows += [row for _, row in sorted(rows, key=lambda pair: pair[0])]
    plan_all(candidates, device)
    return candidates


def name_of(region: Region, number: int) -> str:
    """The beginning of the places of a region's chains."""
    return f"model_{number}" if not region.path else f"part_{number}"


def _shapes(spec: Spec) -> str:
    given = " and ".join("x".join(map(str, one.shape)) for one in spec.inputs)
    return f"{given} -> {'x'.join(map(str, spec.output_shape))}"
