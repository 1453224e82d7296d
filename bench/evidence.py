"""`make evidence`, `make evidence-peers`: verify and time every shipped package on this card and write bench/results/<gpu>/.

First all packages are built and verified and their peers compiled, several at once; then each is timed, alone on a card. Both are done in child processes
(bench.children): a package that crashes its child or hangs it is reported, and a new child goes on with the rest. Each record is written as soon as
it is complete, and one that is up to date is not made again, so a run that is cut short is continued by the next.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console

from bench.children import Result, child_command, run_jobs
from bench.fleet import Fleet, fleet
from bench.jobs import EXAMINED
from bench.machine import cards, choose_device, describe
from bench.measure import save_machine
from bench.peers import CHOICES, EVIDENCE
from bench.records import NOT_PREPARED, PREPARED, VERDICT, find, keep, with_backward_of, with_peers_of
from bench.run import ceilings_line
from bench.store import RESULTS, Record, bundle
from bench.subject import emit, target_for, target_to_emit
from bench.timing import measure_ceilings
from codegen import index
from codegen.numerics import PRECISIONS
from codegen.spec import load_spec
from codegen.targets import TARGETS
from runtime.resources import usable_cores

INDEX = Path("generated")  # where index.yaml lists the shipped packages
EXAMINERS = 6  # children that verify at once on a card, at most: each holds a float64 reference on the card
Job = tuple[str, str]  # (spec path, precision)


def up_to_date(record: Record | None, key: str, torch_version: str, peers: tuple[str, ...], autotuned: bool) -> bool:
    """Does the record hold for these sources and this torch, with a verdict and everything that was asked for timed?"""
    if record is None or record["key"] != key or record["torch"] != torch_version or "verification" not in record:
        return False
    return set(peers) <= set(record.get("asked", ())) and (not autotuned or record.get("autotuned", False))


@dataclass(frozen=True)
class Pending:
    """A package to measure: what a child needs to know of it, and how its earlier record is found."""

    package: str
    task: dict[str, Any]
    before: Callable[[], Record | None]


def _line(record: Record) -> str:
    verdict = "[green]right[/]" if record["verified"] else "[bold red]WRONG[/] " + "; ".join(
        f"{f['family']}: {', '.join(f['problems'])}" for f in record["verification"] if not f["ok"]
    )
    return (
        f"{record['package']} ({record['target']}): {verdict}, {record['ours']['ms']:.4f} ms, error {record['ours']['rel_error']:.1e}, "
        f"{record['speedup']}x {record['best_peer']}, {record['speedup_torch']}x {record['best_torch']}"
    )


def wanted_jobs(specs: tuple[str, ...], precisions: tuple[str, ...], prepack: bool = False) -> list[Job]:
    """The packages of generated/index.yaml of `specs` (all without any; with `prepack` those listed as prepared), then those of specs that are not in it."""
    entries = index.prepared(INDEX) if prepack and not specs else index.entries(INDEX)
    paths = {load_spec(spec).path for spec in specs}
    jobs = [job for job in entries if (not specs or load_spec(job[0]).path in paths) and (not precisions or job[1] in precisions)]
    known = {load_spec(path).path for path, _ in entries}
    return jobs + [(s, p) for s in specs if load_spec(s).path not in known for p in precisions or (load_spec(s).precision.name,)]


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("specs", nargs=-1)
@click.option("--precision", "precisions", multiple=True, type=click.Choice(list(PRECISIONS)), help="Only this precision (repeatable).")
@click.option("--autotuned", is_flag=True, help="Time the autotuned peers too (minutes a package).")
@click.option("--prepack", is_flag=True, help="With prepared weights, where a target has them; the records say so in their names.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]))
@click.option("--target", type=click.Choice(list(TARGETS)), help="Measure this target instead of the loader's choice; its records carry its name.")
@click.option("--results", type=click.Path(file_okay=False, path_type=Path), default=RESULTS, help="Folder for the records; default bench/results.")
@click.option("--bundle", "archive", type=click.Path(dir_okay=False, path_type=Path), help="Keep a tar of the card's records here, renewed after each package.")
@click.option("--budget-s", default=0.0, help="Stop cleanly before this many seconds are over; 0 means no limit.")
@click.option("--limit-s", default=240.0, show_default=True, help="A package that takes longer is given up.")
@click.option("--seconds", default=2.0, show_default=True, help="Time for the trials of one package.")
@click.option("--force", is_flag=True, help="Measure again what is up to date.")
@click.option("--times-again", is_flag=True, help="Time again what is up to date; its verdict stays. Records with autotuned peers need --autotuned too.")
@click.option("--cache", type=click.Path(file_okay=False, path_type=Path), envvar="PEERS_CACHE", help="Keep Inductor's and Triton's caches here ($PEERS_CACHE).")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=Path("build/packages"), show_default=True, help="Folder for the packages, all of which are generated.")
def main(specs, precisions, autotuned, prepack, device, target, results, archive, budget_s, limit_s, seconds, force, times_again, cache, out) -> None:
    """Measure SPECS (all packages of generated/index.yaml when none is named, with --prepack those with prepared weights) and write the records.

    Under torchrun each rank takes its share of the packages.
    """
    given = {key: value for key, value in locals().items() if key != "results"}
    with fleet(results) as made:
        sys.exit(_measure(made, **given))


def _measure(
    made: Fleet, specs, precisions, autotuned, prepack, device, target, archive, budget_s, limit_s, seconds, force, times_again, cache, out
) -> int:  # fmt: skip
    """The rank's share; the exit code."""
    made.refuse("--bundle", archive is not None)
    results = made.results
    deadline = time.time() + budget_s if budget_s else None
    console = Console(width=None if sys.stdout.isatty() else 200, soft_wrap=not sys.stdout.isatty())
    peers = CHOICES if autotuned else EVIDENCE
    if cache:
        os.environ["TORCHINDUCTOR_CACHE_DIR"], os.environ["TRITON_CACHE_DIR"] = str((cache / "inductor").resolve()), str((cache / "triton").resolve())
    where = choose_device(device)
    machine, emitted_for = describe(where), target or ("cpu" if where.type == "cpu" else None)
    wrong = failed = 0
    pending: dict[str, Pending] = {}
    jobs = wanted_jobs(specs, precisions, prepack)
    if not jobs:
        raise click.UsageError("nothing to measure: name a spec, or call it where generated/index.yaml lists packages (the root of a clone)")
    for path, precision, emitted in [(path, precision, size) for path, precision in made.mine(jobs) for size in emit(path, precision, target_to_emit(path, where, target), out, prepack).sizes]:
        name = target_for(emitted, torch.cuda.get_device_capability(where) if where.type == "cuda" else None, target)
        if prepack and not emitted.prepares(name):
            console.print(f"{emitted.label} ({name}): this target prepares no weights for it")
            continue
        before = partial(find, results, machine.slug, emitted.spec.name, precision, target, PREPARED if prepack else NOT_PREPARED, emitted.batch)
        old = before()
        if not (force or times_again) and up_to_date(old, emitted.key(name), machine.torch, peers, autotuned):
            console.print(f"{emitted.label} ({name}): up to date" + ("" if old["verified"] else ", [bold red]WRONG[/]"))
            wrong += not old["verified"]
            continue
        if times_again and old and old.get("autotuned") and not autotuned:
            console.print(f"{emitted.label} ({name}): has times of autotuned peers, which would stay as they are; add --autotuned to time it again")
            continue
        known = old and old["key"] == emitted.key(name) and old.get("verification") and (autotuned or times_again)
        task = {"path": path, "precision": precision, "batch": emitted.spec.batch, "verdict": {k: old[k] for k in VERDICT if k in old} if known else None}
        pending[f"{len(pending):03}"] = Pending(emitted.label, task, before)
    setting = {"device": where.type, "target": emitted_for, "out": str(out), "peers": list(peers), "seconds": seconds, "autotuned": autotuned, "prepack": prepack}

    def run(work: str, tasks: dict[str, Any], workers: int, until: float | None, more: dict[str, Any], take) -> bool:
        command = lambda folder: child_command("bench.evidence_case", folder)  # noqa: E731
        ended = 0
        with console.status(f"{work}: {len(tasks)} packages") as status:

            def told(job: str, result: Result) -> None:
                nonlocal ended
                ended += 1
                status.update(f"{work}: {ended} of {len(tasks)} packages done")
                take(job, result)

            return run_jobs(command, {"work": work, **setting, **more}, tasks, workers, limit_s, until, told, cards=cards(where))

    def fail(job: str, why: str) -> None:
        nonlocal failed
        failed += 1
        console.print(f"[bold red]{pending[job].package} could not be measured:[/] {why}", highlight=False)

    tasks: dict[str, Any] = {}
    crowded: dict[str, Any] = {}  # found too little memory beside the others

    def examined(job: str, result: Result) -> None:
        if result.get("failure", "").startswith("OutOfMemoryError") and job not in crowded and workers > 1:
            crowded[job] = pending[job].task
        elif "failure" in result:
            fail(job, result["failure"])
        else:
            tasks[job] = pending[job].task | {"verdict": result}

    def timed(job: str, result: Result) -> None:
        nonlocal wrong
        if "failure" in result:
            return fail(job, result["failure"])
        before = pending[job].before()
        keep(results, machine.slug, with_backward_of(with_peers_of(result, before), before), target)
        wrong += not result["verified"]
        if archive:
            bundle(results, machine.slug, archive)
        console.print(f"[{list(tasks).index(job) + 1}/{len(tasks)}] {_line(result)}", highlight=False)

    if pending:
        places = max(1, len(cards(where)))
        workers, begun = max(1, min(EXAMINERS * places, usable_cores() // 2)), time.time()
        until = begun + EXAMINED * (deadline - begun) if deadline else None
        complete = run("examine", {job: one.task for job, one in pending.items()}, workers, until, {}, examined)
        if crowded:
            complete &= run("examine", crowded, 1, until, {}, examined)
        console.print(f"{len(tasks)} of {len(pending)} packages verified and their peers compiled, {workers} at a time, in {time.time() - begun:.0f} s")
        tasks = {job: tasks[job] for job in pending if job in tasks}  # in the packages' order
        ceilings = measure_ceilings(where)
        console.print(ceilings_line(ceilings, machine))
        save_machine(results, machine, ceilings)
        if where.type == "cuda":
            torch.cuda.empty_cache()
        complete &= run("times", tasks, places, deadline, {"ceilings": asdict(ceilings)}, timed)
        if not complete:
            console.print("stopped for lack of time; run again to go on")
    return int(bool(wrong or failed))
