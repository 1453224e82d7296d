"""`fsk parallel`: a chain divided among the GPUs of one machine, beside one of them and beside torch's own ways to divide it.

    torchrun --nproc-per-node 2 -m fixed_shape_kernels parallel

All ranks do the same rounds and wait for one another in front of each trial; a figure is that of the slowest rank. Writes bench/results/<card>-x<ranks>/parallel.jsonl.
"""

from __future__ import annotations

import copy
import hashlib
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch
from filelock import FileLock
from rich.console import Console
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from bench import store
from bench.fleet import heard
from bench.jobs import build_all
from bench.machine import describe, precision_flags
from bench.measure import INPUT_SEED
from bench.metrics import compare, same_bits
from bench.packages import load_package
from bench.store import FORMAT, PARALLEL, RESULTS, Record
from bench.subject import SEED, Emitted, construct, emit, target_to_emit
from bench.timing import Time, capture, interleaved
from bench.verify import rounded
from codegen.ir.chain import chain_of
from codegen.ir.sharding import Sharding
from codegen.numerics import PRECISIONS
from codegen.ops import Kind
from fixed_shape_kernels.parallel import ChainParallel, ParallelError, ranks
from fixed_shape_kernels.parallel.building import emit as emit_parts
from runtime import Package
from runtime.load import best_target

SPECS = ("specs/default.yaml", "specs/gemm_biasadd_hardtanh_mish_groupnorm.yaml", "specs/conv2d_groupnorm_scale_maxpool_clamp.yaml")  # KernelBench's 30, 94 and 85
OURS, APART, GATHER, ALONE, GRAPH = "ours", "ours without the gather", "the gather alone", "ours, undivided", "ours in a CUDA graph"
EAGER, COLUMNS, BY_HAND = "eager, undivided", "ColwiseParallel + GroupNorm", "eager on local shards, gathered"


@dataclass(frozen=True)
class Case:
    """A package to divide: its spec's file, its whole package, how it is divided, and the folders of a rank's parts."""

    path: str
    emitted: Emitted
    sharding: Sharding
    parts: tuple[Path, ...]


def prepare(specs: tuple[str, ...], precisions: tuple[str, ...], mesh: DeviceMesh, out: Path) -> list[Case]:
    """Emit and compile all packages, several at once. The first rank of a machine to come does it under a lock, the others find them made.

    Raises ParallelError where one could not be compiled.
    """
    device = _device(mesh)
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    cases: list[Case] = []
    out.mkdir(parents=True, exist_ok=True)
    with FileLock(out / ".prepared.lock"):
        for path in specs:
            for precision in precisions:
                whole = emit(path, precision, target_to_emit(path, device, None), out)
                sharding = chain_of(whole.spec).shard(mesh.size(), mesh.get_local_rank())
                cases.append(Case(path, whole, sharding, tuple(emit_parts(whole.spec, sharding, device.type, out)[1])))
        folders = [folder for case in cases for folder in (case.emitted.folder, *case.parts)]
        targets = [(folder, best_target(Package(folder), capability).name if capability else "cpu") for folder in folders]
        failed = build_all(targets, capability)
    if failed:
        raise ParallelError("; ".join(f"{folder.name} could not be built: {why}" for folder, why in failed.items()))
    return cases


def _device(mesh: DeviceMesh) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if mesh.device_type == "cuda" else torch.device("cpu")


def measure(case: Case, mesh: DeviceMesh, out: Path, trials: int, graph: bool) -> Record:
    """The record of a case. Every rank calls it; all return the same."""
    device, spec = _device(mesh), case.emitted.spec
    torch.manual_seed(SEED)
    eager = case.emitted.module.Model(*case.emitted.module.get_init_inputs()).to(device).eval()
    torch.manual_seed(INPUT_SEED)
    inputs = tuple(given.to(device) for given in case.emitted.module.get_inputs())
    failed: dict[str, str] = {}
    with torch.no_grad(), precision_flags(spec.precision.name):
        exact = copy.deepcopy(eager).double()(*(given.double() for given in inputs))
        calls = _calls(case, eager, inputs, mesh, out, failed)
        results = {name: call() for name, call in calls.items() if name not in (APART, GATHER)}
        errors = {name: compare(y, exact, spec.precision.tolerance, None) for name, y in results.items()}
        again = calls[OURS]()
        repeatable = same_bits(results[OURS], again) and _on_all(results[OURS])
        del exact, results
        if graph and device.type == "cuda":
            try:
                calls[GRAPH] = capture(calls[OURS], device).replay
            except RuntimeError as error:
                failed[GRAPH] = str(error).splitlines()[0]
        token = torch.zeros(1, device=device)
        times = _slowest(interleaved(calls, device, math.inf, trials, trials, align=lambda: distributed.all_reduce(token)))
    with_gather, without = times[OURS].ms, times[APART].ms
    return {
        "format": FORMAT, "spec": spec.name, "path": spec.path, "precision": spec.precision.name, "ranks": mesh.size(), **describe(device).facts,
        **({"nvls": os.environ.get("NCCL_NVLS_ENABLE") != "0"} if device.type == "cuda" else {}), "collectives": [[one.kind, one.at, one.elements] for one in case.sharding.collectives],
        "keys": [{name: target.source_key for name, target in Package(folder).manifest.targets.items()} for folder in case.parts],
        "same_bits": repeatable, "communication_share": rounded(max(0.0, 1 - without / with_gather)),
        "speedup": rounded(times[ALONE].ms / with_gather), "speedup_ungathered": rounded(times[ALONE].ms / without),
        "calls": {
            name: {"ms": rounded(t.ms), "spread": round(t.spread, 3), "trials": t.trials}
            | ({"rel_error": rounded(errors[name].relative), "max_error": rounded(errors[name].largest)} if name in errors else {})
            for name, t in times.items()
        },
        "failed": failed,
    }  # fmt: skip


def _calls(case: Case, eager: nn.Module, inputs: tuple[torch.Tensor, ...], mesh: DeviceMesh, out: Path, failed: dict[str, str]) -> dict[str, Callable[[], Any]]:
    """All that is timed, by name; what torch refuses is noted in `failed`."""
    device = _device(mesh)
    alone = construct(case.emitted, device).eval()
    alone.load_state_dict(eager.state_dict())

    def divided(output: Placement | None) -> nn.Module:
        style = ChainParallel(case.path, precision=case.emitted.spec.precision.name, output_layouts=output, folder=out)
        return parallelize_module(copy.deepcopy(eager), mesh, style)

    ours, apart = divided(Replicate()), divided(None)
    local = apart(*inputs)
    calls: dict[str, Callable[[], Any]] = {
        OURS: lambda: ours(*inputs), APART: lambda: apart(*inputs), GATHER: lambda: apart.gathered(local), ALONE: lambda: alone(*inputs),
        EAGER: lambda: eager(*inputs),
    }  # fmt: skip
    producer = next(step for step in case.emitted.spec.chain if step.operator.kind is Kind.PRODUCER)
    try:
        columns = parallelize_module(copy.deepcopy(eager), mesh, {producer.name: ColwiseParallel(output_layouts=Replicate())})
        calls[COLUMNS] = lambda: columns(*inputs)
    except NotImplementedError as error:  # ColwiseParallel divides nn.Linear and nn.Embedding alone; the record says so
        failed[COLUMNS] = str(error).splitlines()[0]
    if len(case.parts) == 1 and not case.sharding.collectives:
        shard = load_package(case.parts[0])
        by_hand = shard.Model(*shard.get_init_inputs()).to(device).eval()
        by_hand.load_state_dict({key: value.to_local() if isinstance(value, DTensor) else value for key, value in apart.state_dict().items()})
        calls[BY_HAND] = lambda: apart.gathered(by_hand(*inputs))
    return calls


def _on_all(result: torch.Tensor) -> bool:
    """Whether all ranks have the same bits."""
    bits = result.contiguous().view(torch.uint8).cpu().numpy()
    return len(set(heard(hashlib.sha256(bits).hexdigest()))) == 1


def _slowest(own: dict[str, Time]) -> dict[str, Time]:
    """Of each call the time on the rank where it took longest."""
    ranked = heard(own)
    return {name: max((times[name] for times in ranked), key=lambda time: time.ms) for name in own}


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("specs", nargs=-1)
@click.option("--precision", "precisions", multiple=True, type=click.Choice(list(PRECISIONS)), help="Precision (repeatable); default fp32 and bf16.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), help="NCCL on GPUs or gloo on the CPU; default GPUs where there is one for each rank.")
@click.option("--trials", type=click.IntRange(3), default=30, show_default=True, help="Trials of each call.")
@click.option("--graph", is_flag=True, help="Also in a CUDA graph.")
@click.option("--results", type=click.Path(file_okay=False, path_type=Path), default=RESULTS, help="Folder for the records; default bench/results.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=Path("build/parallel"), show_default=True, help="Folder for the packages.")
def main(specs, precisions, device, trials, graph, results, out) -> None:
    """Divide SPECS (the three shipped systems when none is named) among the ranks that torchrun started, and time them."""
    begun, out = time.time(), out.absolute()
    with ranks(device) as mesh:
        console = Console(width=200, quiet=mesh.get_local_rank() != 0)
        cases = prepare(specs or SPECS, precisions or ("fp32", "bf16"), mesh, out)
        console.print(f"{len(cases)} packages and their parts are built after {time.time() - begun:.0f} s")
        card = f"{describe(_device(mesh)).slug}-x{mesh.size()}"
        for case in cases:
            record = measure(case, mesh, out, trials, graph)
            if mesh.get_local_rank() == 0:
                store.put(PARALLEL, results, card, [record])
            console.print(
                f"{record['spec']}, {record['precision']}: " + ", ".join(f"{name} {row['ms']:.4f} ms" for name, row in record["calls"].items())
                + f"; error {record['calls'][OURS]['rel_error']:.1e}, communication {record['communication_share']:.0%}"
                + "".join(f"; {name}: {why}" for name, why in record["failed"].items()), highlight=False,
            )  # fmt: skip
        console.print(f"{PARALLEL.path(results, card)} after {time.time() - begun:.0f} s")
