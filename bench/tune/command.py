"""`make tune SPEC=...`: which of the planner's candidates is the fastest on this card? Recorded in codegen/tuned/<device class>.yaml.

    candidates -> generate, build -> verify each in a child -> time the right ones in turn -> record

A spec whose candidates, sources and torch are those of its record is not measured again, so a run that is cut short is continued by the next.
Plans follow the record where they name the device class: make generate SPEC=... DEVICE=h100.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from bench.children import Result, child_command, run_jobs
from bench.fleet import Fleet, fleet
from bench.jobs import build_all
from bench.machine import Machine, choose_device, describe
from bench.sweep.judge import FAMILIES
from bench.sweep.summary import complaints
from codegen.folder import write_if_different
from codegen.manifest import Package as Emission
from codegen.numerics import PRECISIONS
from codegen.plan import Refusal, plan, tuned
from codegen.plan.planner import choices
from codegen.plan.route import Choice
from codegen.render import render
from codegen.spec import Spec, load_spec
from codegen.targets import DEVICES
from runtime import Package
from runtime.devices import visible_capabilities

KEY_DIGITS = 12  # of the source key: enough to see that sources changed


@dataclass(frozen=True)
class Try:
    """A choice for a spec and a target, generated: its package's folder and the key of its sources."""

    spec: Spec
    target: str
    choice: Choice
    folder: Path
    key: str

    @property
    def job(self) -> str:
        return self.folder.name


def generate(spec: Spec, device: str, work: Path) -> list[Try]:
    """Every choice that has a plan, emitted into a folder of its own; two that emit the same sources are one."""
    found: dict[str, Try] = {}
    for target, choice in choices(spec, DEVICES[device]):
        try:
            package = Emission(spec, (plan(spec, target, device, forced=choice),))
        except Refusal:
            continue
        folder = work / f"{spec.package}_b{spec.batch}__{target}_{choice.label}"
        write_if_different(folder, render(package))
        key = Package(folder).target(target).source_key[:KEY_DIGITS]
        found.setdefault(key, Try(spec, target, choice, folder, key))
    return list(found.values())


def up_to_date(record: dict[str, Any] | None, tries: list[Try], machine: Machine) -> bool:
    """Does the record hold for these sources on this card and torch?"""
    if record is None or (record["gpu"], record["torch"]) != (machine.gpu, machine.torch):
        return False
    return {row["key"] for row in record["candidates"]} == {one.key for one in tries}


def record_of(spec: Spec, tries: list[Try], machine: Machine, verdicts: dict[str, Result], times: dict[str, float]) -> dict[str, Any]:
    """The record: every candidate with its time and error, the fastest first, or with the reason for which it was rejected.

    A candidate whose child crashed, hung or could not begin was not judged: it has no row, and is tried again next time.
    """
    rows = []
    for one in tries:
        found = verdicts[one.job]
        if "failure" in found:
            continue
        row = {**tuned.row_of(one.target, one.choice), "key": one.key}
        if one.job in times:
            row |= {"ms": times[one.job], "error": next(family["rel_error"] for family in found["verification"] if family["family"] == "benchmark")}
        else:
            row["rejected"] = complaints(found)
        rows.append(row)
    rows.sort(key=lambda row: (row.get("ms", float("inf")), row["key"]))
    return {"spec": tuned.signature(spec), "gpu": machine.gpu, "torch": machine.torch, "candidates": rows}


class Tuner:
    """One run on one device: jobs go to children, a progress bar shows them."""

    def __init__(self, console: Console, device: torch.device, limit_s: float, deadline: float | None) -> None:
        self.console, self.device, self.limit_s, self.deadline = console, device, limit_s, deadline

    def run(self, module: str, jobs: dict[str, Any], setting: dict[str, Any], what: str) -> dict[str, Result] | None:
        """Results by job from children that run `module`; None where time ran out."""
        found: dict[str, Result] = {}
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=self.console, disable=not self.console.is_terminal) as progress:
            bar = progress.add_task(what, total=len(jobs))

            def take(job: str, result: Result) -> None:
                found[job] = result
                progress.advance(bar)

            command = lambda folder: child_command(module, folder)  # noqa: E731
            complete = run_jobs(command, {"device": self.device.type, **setting}, jobs, 1, self.limit_s, self.deadline, take)
        return found if complete else None

    def build(self, tries: list[Try]) -> None:
        """Compile all candidates, several at once; what fails shows when its turn comes."""
        capability = visible_capabilities()[self.device.index] if self.device.type == "cuda" else None
        build_all([(one.folder, one.target) for one in tries], capability)

    def measure(self, spec: Spec, file: str, tries: list[Try], machine: Machine, seconds: float) -> dict[str, Any] | None:
        """The record of a spec that lies in `file`; None where time ran out before it was complete."""
        verify = {
            t.job: {"spec": file, "precision": spec.precision.name, "batch": spec.batch, "folder": str(t.folder), "target": t.target, "peers": ()} for t in tries
        }  # fmt: skip
        verdicts = self.run("bench.sweep.case", verify, {"work": "examine", "families": FAMILIES}, f"{spec.package}: verifying")
        if verdicts is None:
            return None
        for one in tries:
            if "failure" in verdicts[one.job]:
                self.console.print(f"{one.job}: not judged and not recorded: {verdicts[one.job]['failure']}", markup=False, highlight=False)
        right = {t.job: t for t in tries if verdicts[t.job].get("verified")}
        if not right:
            return record_of(spec, tries, machine, verdicts, {})
        job = {
            "spec": file, "precision": spec.precision.name, "batch": spec.batch, "folders": {name: str(t.folder) for name, t in right.items()},
            "targets": {name: t.target for name, t in right.items()},
        }  # fmt: skip
        timed = self.run("bench.tune.case", {"times": job}, {"seconds": seconds}, f"{spec.package}: timing")
        if timed is None:
            return None
        if "failure" in timed["times"]:
            raise click.ClickException(f"{spec.package}: the candidates could not be timed: {timed['times']['failure']}")
        return record_of(spec, tries, machine, verdicts, timed["times"]["ms"])


def _table(spec: Spec, record: dict[str, Any]) -> Table:
    table = Table(title=f"{spec.package}: {record['spec']}", title_justify="left")
    for column in ("target", "choice", "ms", "error"):
        table.add_column(column, overflow="fold")
    for row in record["candidates"]:
        error = "-" if row.get("error") is None else f"{row['error']:.1e}"
        table.add_row(row["target"], tuned.choice_of(row).label, f"{row['ms']:.4f}" if "ms" in row else row["rejected"], error)
    return table


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("specs", nargs=-1, required=True)
@click.option("--precision", "precisions", multiple=True, type=click.Choice(list(PRECISIONS)), help="Precision (repeatable); else the spec's own.")
@click.option("--device-class", type=click.Choice(list(DEVICES)), help="The card's device class, where its name does not say it.")
@click.option("--device", "device_name", type=click.Choice(["cpu", "cuda"]))
@click.option("--work", type=click.Path(file_okay=False, path_type=Path), default=Path("build/tune"), show_default=True, help="Folder for the packages.")
@click.option("--budget-s", default=0.0, help="Stop when so many seconds are over, with what is complete recorded; 0 means no limit.")
@click.option("--limit-s", default=180.0, show_default=True, help="A candidate that takes longer is given up and not recorded.")
@click.option("--seconds", default=2.0, show_default=True, help="Time for the trials of one spec.")
@click.option("--force", is_flag=True, help="Measure again what is recorded.")
def main(specs, precisions, device_class, device_name, work, budget_s, limit_s, seconds, force) -> None:
    """Measure the planner's candidates for SPECS on this card and record them for its device class. Under torchrun each rank takes its share."""
    given = locals().copy()
    with fleet() as made:
        sys.exit(_tune(made, **given))


def _tune(made: Fleet, specs, precisions, device_class, device_name, work, budget_s, limit_s, seconds, force) -> int:
    """The rank's share; the exit code. After each round of a spec a rank, the first one records what all have found."""
    console = Console(width=None if sys.stdout.isatty() else 200)
    deadline = time.time() + budget_s if budget_s else None
    device = choose_device(device_name)
    machine = describe(device)
    name = device_class or ("host" if device.type == "cpu" else machine.slug)
    if name not in DEVICES:
        raise click.UsageError(f"{machine.gpu} is none of the device classes {', '.join(DEVICES)}; name the nearest with --device-class")
    tuner = Tuner(console, device, limit_s, deadline)
    rejected = []
    wanted = [(path, size) for path in specs for precision in precisions or (None,) for size in load_spec(path, precision).sizes]
    late = False
    for begin in range(0, len(wanted), made.size):
        found = None
        known = made.heard(tuned.records(name))[0]
        for file, spec in [] if late else wanted[begin : begin + made.size][made.rank : made.rank + 1]:
            tries = generate(spec, name, work / name)
            if not tries:
                raise click.ClickException(f"{spec.package}: no candidate has a plan for {name}")
            if not force and up_to_date(known.get(tuned.signature(spec)), tries, machine):
                console.print(f"{spec.package}: up to date")
                continue
            tuner.build(tries)
            record = tuner.measure(spec, file, tries, machine, seconds)
            if record is None:
                console.print(f"{spec.package}: out of time and not recorded; run again to go on")
                late = True
                continue
            console.print(_table(spec, record))
            if any("ms" in row for row in record["candidates"]):
                found = file, record
            else:
                rejected.append(spec.package)
                console.print(f"[bold red]{spec.package}: all candidates rejected; nothing is recorded[/]")
        complete = [one for one in made.heard(found) if one is not None]
        if complete and made.first:
            recorded = tuned.write(name, known | {record["spec"]: record for _, record in complete})
            for file, _ in complete:
                console.print(f"{recorded}: recorded; make generate SPEC={file} DEVICE={name} follows it")
    return int(bool(rejected))
