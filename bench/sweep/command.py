"""`make sweep`: random specs, each generated, built, verified and timed beside PyTorch; writes bench/results/<gpu>/sweep.jsonl.

    draw -> generate -> (build, verify, compile the peers: many children at once) -> (times: one child a card, alone on it) -> summary

A case that is recorded as right for today's sources and this torch is not run again, so a run that is cut short is continued by the next. On a CPU the
models are verified and not timed.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console

from bench import store
from bench.children import Result, child_command, run_jobs
from bench.fleet import Fleet, fleet
from bench.jobs import EXAMINED, build_all
from bench.machine import Machine, cards, choose_device, describe
from bench.measure import save_machine
from bench.packages import load_package
from bench.store import FORMAT, RESULTS, SWEEP, bundle
from bench.subject import Emitted
from bench.sweep import summary
from bench.sweep.case import begin
from bench.sweep.draw import LARGE, SMALL, draw, producer_name
from bench.sweep.judge import FAMILIES
from bench.timing import measure_ceilings
from codegen.folder import write_if_different
from codegen.package import make_package
from codegen.plan import Refusal
from codegen.render import render
from codegen.spec import Spec, load_spec
from codegen.targets import DEVICES
from runtime import Package
from runtime.devices import visible_capabilities
from runtime.load import best_target
from runtime.resources import usable_cores

CHILD_BYTES = 5 << 30  # device memory that a child may need: a context and draw.LARGE's footprint
Key = tuple[bool, int, int]  # small, seed, index


@dataclass(frozen=True)
class Drawn:
    """A case on disk: its spec, the generated package, the target to run and the file of its spec."""

    index: int
    spec: Spec
    file: Path
    folder: Path
    target: str

    @property
    def job(self) -> str:
        return self.folder.name

    @property
    def task(self) -> dict[str, str]:
        """What a child needs to know of it."""
        return {"spec": str(self.file), "folder": str(self.folder), "target": self.target}


@dataclass(frozen=True)
class Aim:
    """What to generate for: targets (none: the loader's choice), the card's capability (None: the CPU) and the device class to plan for."""

    targets: tuple[str, ...]
    capability: tuple[int, int] | None
    device_class: str | None


def generate(index: int, seed: int, small: bool, aim: Aim, work: Path) -> Drawn:
    """Draw case `index` and emit its package. Raises Refusal where no target serves it on the device."""
    specs = work / "specs"
    spec = draw(seed, index, SMALL if small else LARGE, specs)
    folder = work / "packages" / spec.package
    package = make_package(spec, aim.targets, aim.device_class)
    write_if_different(folder, render(package))
    best = best_target(Package(folder), aim.capability) if aim.capability else Package(folder).target(aim.targets[0])
    if best is None:
        raise Refusal("; ".join(f"{name}: {reason}" for name, reason in package.skipped) or f"its targets do not run on capability {aim.capability}")
    return Drawn(index, spec, specs / f"{spec.name}.yaml", folder, best.name)


class Sweep:
    """One run: the drawn cases and the records of all, saved after each change."""

    def __init__(
        self, console: Console, device: torch.device, machine: Machine, results: Path, archive: Path | None, seed: int, small: bool
    ) -> None:
        self.console, self.device, self.machine = console, device, machine
        self.results, self.archive, self.seed, self.small = results, archive, seed, small
        self.cases: dict[Key, dict[str, Any]] = {SWEEP.key(case): case for case in store.read(SWEEP, results, machine.slug)}
        self.drawn: dict[str, Drawn] = {}
        self.saved = 0.0

    def draw(self, indices: Iterable[int], aim: Aim, work: Path) -> None:
        """Generate the cases of these indices. A case recorded as right stays as it is where its spec, sources and torch are the same."""
        for index in indices:
            key = (self.small, self.seed, index)
            try:
                drawn = generate(index, self.seed, self.small, aim, work)
            except Refusal as error:
                self.cases[key] = {**self.named(index), "verified": None, "failure": str(error), **_unplanned(work, self.seed, index)}
                continue
            self.drawn[drawn.job] = drawn
            emitted = Emitted(drawn.spec, drawn.folder, load_package(drawn.folder))
            fresh = self.named(index) | begin(emitted, drawn.target, drawn.file.read_text(encoding="utf-8"))
            old = self.cases.get(key)
            if old is None or not old["verified"] or old.get("failure") or any(old.get(name) != fresh[name] for name in ("spec", "target", "key", "torch")):
                self.cases[key] = fresh

    def named(self, index: int) -> dict[str, Any]:
        """Which case it is and where it runs, as its record says it."""
        return {"format": FORMAT, **self.machine.facts, "seed": self.seed, "index": index, "small": self.small}

    def of(self, job: str) -> dict[str, Any]:
        return self.cases[self.small, self.seed, self.drawn[job].index]

    @property
    def mine(self) -> list[dict[str, Any]]:
        """The records of this seed and size, as far as they were drawn."""
        return [case for (small, seed, _), case in self.cases.items() if (small, seed) == (self.small, self.seed)]

    def run(
        self, work: str, jobs: dict[str, tuple[str, ...]], workers: int, limit_s: float, deadline: float | None, setting: dict[str, Any],
        environment: dict[str, str],
    ) -> set[str]:  # fmt: skip
        """Let children do `work` on `jobs` (peers by job) and record what comes of it. Returns the jobs that ended."""
        begun, ended = time.time(), set()

        def take(job: str, result: Result) -> None:
            ended.add(job)
            case = self.of(job)
            case.pop("failure", None)
            case.update(result)
            self.save(final=False)
            if work != "prepare" or "failure" in case:
                self.console.print(f"[{len(ended)}/{len(jobs)}] {job} ({case['producer']}, {case['target']}): {_outcome(case)}", highlight=False)

        data = {job: self.drawn[job].task | {"peers": peers} for job, peers in jobs.items()}
        setting = {"work": work, "device": self.device.type, **setting}
        complete = run_jobs(_child, setting, data, workers, limit_s, deadline, take, environment, cards(self.device))
        self.save(final=True)
        rest = "" if complete else "; out of time, run again to go on"
        self.console.print(f"{work}: {len(ended)} of {len(jobs)} cases in {time.time() - begun:.0f} s{rest}")
        return ended

    def save(self, final: bool) -> None:
        """Write the records, once a second at most until the end."""
        if final or time.time() - self.saved > 1:
            store.replace(SWEEP, self.results, self.machine.slug, self.cases.values())
            if self.archive:
                bundle(self.results, self.machine.slug, self.archive)
            self.saved = time.time()


def _child(folder: Path) -> list[str]:
    return child_command("bench.sweep.case", folder)


def _unplanned(work: Path, seed: int, index: int) -> dict[str, str]:
    """What can be said of a case that no target serves."""
    path = work / "specs" / f"sweep_{seed}_{index:03d}.yaml"
    spec = load_spec(path)
    return {"spec": path.read_text(encoding="utf-8"), "package": spec.package, "precision": spec.precision.name, "producer": producer_name(spec)}


def _outcome(case: dict[str, Any]) -> str:
    if case.get("failure"):
        return f"[bold red]FAILED[/] {case['failure']}"
    if not case["verified"]:
        return f"[bold red]WRONG[/] {summary.complaints(case)}"
    error = "not finite" if case["error"] is None else f"{case['error']:.1e} of {case['allowed']:.1e} allowed ({case['worst']})"
    if "ours" not in case:
        return f"[green]right[/], error {error}"
    return f"{case['ours']['ms']:.4f} ms, {case['speedup']}x {case['best_peer']}"


def _build(drawn: list[Drawn], capability: tuple[int, int] | None, console: Console) -> int:
    """Compile every package into the cache; returns how many could not be."""
    begun = time.time()
    failed = build_all([(case.folder, case.target) for case in drawn], capability)
    for folder, why in failed.items():
        console.print(f"[bold red]not built[/] {folder.name}: {why}", highlight=False)
    console.print(f"{len(drawn) - len(failed)} packages are in the cache after {time.time() - begun:.0f} s")
    return len(failed)


def _crew(device: torch.device) -> int:
    """Children that may verify at once."""
    if device.type == "cpu":
        return usable_cores()
    return max(1, min(usable_cores(), len(cards(device)) * (torch.cuda.mem_get_info(device)[0] // CHILD_BYTES)))


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--seed", default=0, show_default=True, help="Which sequence of specs.")
@click.option("--count", type=click.IntRange(1), default=100, show_default=True, help="How many of it.")
@click.option("--small", is_flag=True, help="Sizes that a CPU verifies in milliseconds.")
@click.option("--device", "device_name", type=click.Choice(["cpu", "cuda"]))
@click.option("--target", "targets", multiple=True, help="Emit this target alone (repeatable), else the loader chooses.")
@click.option("--device-class", type=click.Choice(list(DEVICES)), help="Plan for this class of card; default: the present one's where it is known.")
@click.option("--family", "families", multiple=True, help=f"Verify on this family of data (repeatable), else on {', '.join(FAMILIES)}; `all` for all.")
@click.option("--verify-only", is_flag=True, help="No times (never taken on a CPU).")
@click.option("--build-only", is_flag=True, help="Generate and compile, then stop; needs no GPU with --capability.")
@click.option("--capability", help="With --build-only: compile for this compute capability, such as 9.0.")
@click.option("--compile-count", type=int, help="Time torch.compile on the first N cases only; all by default, --no-compile for none.")
@click.option("--no-compile", is_flag=True, help="Do not time torch.compile.")
@click.option("--results", type=click.Path(file_okay=False, path_type=Path), default=RESULTS, help="Folder for the records; default bench/results.")
@click.option("--bundle", "archive", type=click.Path(dir_okay=False, path_type=Path), help="Keep a tar of the card's records here, renewed as they grow.")
@click.option("--work", type=click.Path(file_okay=False, path_type=Path), default=Path("build/sweep"), show_default=True, help="Folder for specs and packages.")
@click.option("--cache", type=click.Path(file_okay=False, path_type=Path), envvar="PEERS_CACHE", help="Inductor's caches ($PEERS_CACHE); default WORK/peers.")
@click.option("--budget-s", default=0.0, help="Stop cleanly when so many seconds are over; 0 means no limit.")
@click.option("--limit-s", default=120.0, show_default=True, help="A case that takes longer is given up.")
@click.option("--seconds", default=0.4, show_default=True, help="Time for the trials of one case.")
@click.option("--workers", type=int, help="Children that build and verify at once; default: by cores and memory.")
@click.option("--force", is_flag=True, help="Run again what is recorded.")
def main(
    seed, count, small, device_name, targets, device_class, families, verify_only, build_only, capability, compile_count, no_compile, results, archive, work,
    cache, budget_s, limit_s, seconds, workers, force,
) -> None:  # fmt: skip
    """Draw COUNT random specs and find out of each whether it is right, and how fast beside PyTorch. Under torchrun each rank takes its share."""
    given = {key: value for key, value in locals().items() if key != "results"}
    with fleet(results) as made:
        sys.exit(_sweep(made, **given))


def _sweep(
    made: Fleet, seed, count, small, device_name, targets, device_class, families, verify_only, build_only, capability, compile_count, no_compile, archive, work,
    cache, budget_s, limit_s, seconds, workers, force,
) -> int:  # fmt: skip
    """The rank's share of a sweep; the exit code."""
    made.refuse("--bundle", archive is not None)
    results = made.results
    deadline = time.time() + budget_s if budget_s else None
    console = Console(width=None if sys.stdout.isatty() else 200, soft_wrap=not sys.stdout.isatty())
    if capability and not (build_only and re.fullmatch(r"\d+\.\d+", capability)):
        raise click.UsageError("--capability goes with --build-only and looks like 9.0")
    device = torch.device("cpu") if capability else choose_device(device_name)
    able = tuple(map(int, capability.split("."))) if capability else visible_capabilities()[device.index] if device.type == "cuda" else None
    sweep = Sweep(console, device, describe(device), results, archive, seed, small)
    if force:
        sweep.cases = {key: case for key, case in sweep.cases.items() if key[:2] != (small, seed) or key[2] >= count}
    card = device_class or (sweep.machine.slug if device.type == "cuda" and sweep.machine.slug in DEVICES else None)
    sweep.draw(made.mine(range(count)), Aim(targets or (() if able else ("cpu",)), able, card), work)
    if build_only:
        return int(bool(_build(list(sweep.drawn.values()), able, console)))
    timing = device.type == "cuda" and not verify_only
    compiled = 0 if no_compile else count if compile_count is None else compile_count
    peers = {job: ("eager", "graph") + (("compile",) if d.index < compiled else ()) for job, d in sweep.drawn.items()} if timing else {}
    caches = cache or work / "peers"
    environment = {  # threads that wait by spinning take the cores from those that they wait for
        "TORCHINDUCTOR_CACHE_DIR": str((caches / "inductor").resolve()), "TRITON_CACHE_DIR": str((caches / "triton").resolve()),
        "TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "2" if device.type == "cpu" else "1", "OMP_WAIT_POLICY": "passive",
    }  # fmt: skip
    to_verify = {job: peers.get(job, ()) for job in sweep.drawn if sweep.of(job)["verified"] is None}
    chosen = () if families == ("all",) else families or FAMILIES
    many = workers or _crew(device)
    until = time.time() + EXAMINED * (deadline - time.time()) if deadline and timing else deadline
    untimed = {job: names for job, names in peers.items() if job not in to_verify and not set(names) <= set(sweep.of(job).get("asked", ()))}
    ready = sweep.run("prepare", untimed, many, limit_s, until, {}, environment) if untimed else set()
    if to_verify:
        ready |= sweep.run("examine", to_verify, many, limit_s, until, {"families": chosen}, environment)
    missing = {job: names for job, names in peers.items() if job in ready and sweep.of(job)["verified"] and "failure" not in sweep.of(job)}
    if missing and (deadline is None or time.time() < deadline):
        ceilings = measure_ceilings(device)
        torch.cuda.empty_cache()
        save_machine(results, sweep.machine, ceilings, "sweep")
        sweep.run("times", missing, len(cards(device)), limit_s, deadline, {"ceilings": asdict(ceilings), "seconds": seconds}, environment)
    sweep.save(final=True)
    return _conclude(sweep, console, count)


def _conclude(sweep: Sweep, console: Console, count: int) -> int:
    """Print the summary; the exit code: 0 only where nothing is wrong and nothing failed."""
    cases = [case for case in sweep.mine if case["index"] < count]
    for case in cases:
        if case["verified"] is False or case.get("failure"):
            console.print(f"[bold red]{case['package']}[/] {summary.complaints(case)}\n{case['spec']}", highlight=False)
    for table in summary.tables(cases):
        console.print(table)
    found = summary.counts(cases)
    console.print(f"{found['right']} of {len(cases)} right, {found['wrong']} wrong, {found['failed']} failed, {found['open']} still to run")
    console.print(str(SWEEP.path(sweep.results, sweep.machine.slug)))
    return int(bool(found["wrong"] or found["failed"]))
