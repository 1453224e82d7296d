"""`fsk models`: whole models before and after, in PyTorch and in torch.compile; a record a model and precision in <card>/models.jsonl."""

from __future__ import annotations

import copy
import time
from collections import Counter
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console

from bench import store
from bench.machine import Machine, choose_device, describe, precision_flags
from bench.peers import failure_text
from bench.store import MODELS, RESULTS, Record
from bench.timing import interleaved
from bench.verify import rounded
from codegen.numerics import PRECISIONS

from .compiled import NAME, sources
from .networks import NETWORKS
from .optimized import optimize
from .report import REPLACED, Report


def measure(name: str, precision: str, device: torch.device, machine: Machine, large: bool, seconds: float, against: str, min_gain: float, folder: Path) -> Record:
    """The record of one network at a precision: its chains, how far its result is from float64, and milliseconds of a call in the four ways to run it.

    Raises what building the model or running it as it is raises; what torch.compile or the kernels fail of is named in the record.
    """
    start = time.perf_counter()
    model, arguments = NETWORKS[name].build(large)
    dtype = getattr(torch, PRECISIONS[precision].dtype)
    model, arguments = model.to(device, dtype), tuple(one.to(device, dtype) for one in arguments)
    torch._dynamo.reset()
    inside: list[Report] = []
    with torch.no_grad(), precision_flags(precision):
        exact = copy.deepcopy(model).double()(*(one.double() for one in arguments))
        optimized = optimize(model, *arguments, precision="tf32" if precision == "tf32" else None, min_gain=min_gain, cache_dir=folder)
        options = {"cache_dir": str(folder), "against": against, "min_gain": min_gain, "precision": "tf32" if precision == "tf32" else None, "on_report": inside.append}
        ways = {
            "eager": model,
            "compile": torch.compile(copy.deepcopy(model), fullgraph=True, dynamic=False),
            "ours": optimized,
            "ours_compile": torch.compile(copy.deepcopy(model), backend=NAME, fullgraph=True, dynamic=False, options=options),
        }
        errors, failed = {}, {}
        for way, call in list(ways.items()):
            try:
                y = call(*arguments)
            except Exception as error:  # noqa: BLE001 - as of a peer: a fact to report
                if way == "eager":
                    raise
                failed[way] = failure_text(error)
                del ways[way]
                continue
            errors[way] = rounded(float((y.double() - exact).norm() / exact.norm()))
        setup = time.perf_counter() - start
        times = interleaved({way: lambda call=call: call(*arguments) for way, call in ways.items()}, device, seconds)
    report = optimized.report
    return {
        "model": name, "precision": precision, "sources": sources(), **machine.facts, "large": large, "parameters": sum(one.numel() for one in model.parameters()),
        "chains": len(report.chains), "replaced": len(report.replaced), "statuses": dict(sorted(Counter(row.status for row in report.rows).items())),
        "chains_in_compile": [len(one.chains) for one in inside], "replaced_in_compile": [len(one.replaced) for one in inside], "against": against, "min_gain": min_gain,
        "wrong": [f"{row.path}: {row.why}" for one in (report, *inside) for row in one.rows if row.status in ("wrong", "failed")],
        "ms": {way: rounded(measured.ms) for way, measured in times.items()}, "spread": {way: round(measured.spread, 3) for way, measured in times.items()},
        "error": max((row.error for row in report.rows if row.error is not None), default=None), "rel_errors": errors, "failed": failed, "setup_s": round(setup, 1),
        "rows": [_row(row) for row in report.rows if row.plan],
    }  # fmt: skip


def _row(row: Any) -> dict[str, Any]:
    """What is kept of a chain."""
    kept = {"path": row.path, "chain": row.chain, "shapes": row.shapes, "plan": row.plan, "status": row.status}
    times = {"ours_ms": row.ours_ms, "torch_ms": row.torch_ms, "error": row.error}
    return kept | {key: rounded(value) for key, value in times.items() if value is not None} | ({} if row.status == REPLACED else {"why": row.why})


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--model", "names", multiple=True, type=click.Choice(list(NETWORKS)), help="Only this network (repeatable).")
@click.option("--precision", "precisions", multiple=True, type=click.Choice(list(PRECISIONS)), default=("fp32", "bf16"), show_default=True, help="Types of the tensors (repeatable).")
@click.option("--device", "on", type=click.Choice(["cpu", "cuda"]), help="By default the GPU where one is visible.")
@click.option("--small", is_flag=True, help="At the sizes for a CPU, whatever the device.")
@click.option("--against", type=click.Choice(["inductor", "eager"]), default="inductor", show_default=True, help="What a chain within torch.compile has to be faster than.")
@click.option("--min-gain", default=1.05, show_default=True, help="Replace a chain where it is so many times as fast.")
@click.option("--seconds", default=1.0, show_default=True, help="For the trials of a model.")
@click.option("--budget-s", type=float, help="Begin no further model after so many seconds; call again to go on.")
@click.option("--force", is_flag=True, help="Measure again what has a record of this card, torch and sources.")
@click.option("--results", type=click.Path(file_okay=False, path_type=Path), default=RESULTS, help="Folder of the records.")
@click.option("--cache-dir", type=click.Path(file_okay=False, path_type=Path), default=Path("build/models"), show_default=True, help="Folder for the packages.")
def main(names, precisions, on, small, against, min_gain, seconds, budget_s, force, results, cache_dir) -> None:
    """Time whole networks as they are, with kernels, in torch.compile, and in torch.compile with kernels; each beside its error from float64.

    The networks are the blocks of known families with random weights; nothing is downloaded.
    """
    device, console, began = choose_device(on), Console(), time.perf_counter()
    machine, large = describe(device), device.type == "cuda" and not small
    wanted = [(name, precision) for name in names or NETWORKS for precision in precisions]
    left, broken = 0, False
    for name, precision in wanted:
        known = store.find(MODELS, results, machine.slug, model=name, precision=precision)
        if known and not force and all(known.get(key) == value for key, value in (("gpu", machine.gpu), ("torch", machine.torch), ("large", large), ("sources", sources()))):
            console.print(f"{name}, {precision}: has a record", highlight=False, soft_wrap=True)
            continue
        if budget_s and time.perf_counter() - began > budget_s:
            left += 1
            continue
        try:
            record = measure(name, precision, device, machine, large, seconds, against, min_gain, cache_dir)
        except Exception as error:  # noqa: BLE001 - one network's failure leaves the others their records
            console.print(f"{name}, {precision}: [bold red]failed[/]: {failure_text(error)}", highlight=False, soft_wrap=True)
            broken = True
            continue
        finally:
            if device.type == "cuda":
                torch.cuda.empty_cache()
        store.put(MODELS, results, machine.slug, [record])
        console.print(f"{name}, {precision}: {told(record)}", highlight=False, soft_wrap=True)
        broken |= bool(record["wrong"] or record["failed"])
    if left:
        console.print(f"{left} of {len(wanted)} are left; call again to go on")
    if broken:
        raise SystemExit(1)


def told(record: Record) -> str:
    """A record in a line."""
    times = ", ".join(f"{way.replace('_', ' in ')} {ms:.4g} ms" for way, ms in record["ms"].items())
    faults = "".join(f"; {what}" for what in (*record["wrong"], *(f"{way} failed: {why}" for way, why in record["failed"].items())))
    return f"{record['replaced']} of {record['chains']} chains replaced ({sum(record['replaced_in_compile'])} in torch.compile); {times}; error {record['rel_errors'].get('ours')} (eager {record['rel_errors']['eager']}){faults}"
