"""`make kernelbench LEVEL=2`: every level-2 problem of KernelBench that there is a spec for. Right? How fast beside PyTorch? What does the harness say?

Two phases, each of which goes on where an earlier call stopped. Ours (bench.level2_case): build all, verify several at once, then time one at a time, each
problem in a child process with a limit. The harness: its own script over standalone.py. One line a problem and precision in <card>/level2.jsonl.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console

from bench import harness, store
from bench.children import Result, child_command, run_jobs
from bench.jobs import EXAMINED
from bench.level2_case import rewritable
from bench.level2_classes import ORDINARY, class_of
from bench.machine import Machine, cards
from bench.store import LEVEL2, RESULTS, Record
from bench.sweep.draw import footprint
from bench.sweep.summary import geometric_mean
from codegen.plan import Refusal
from codegen.spec import Spec, SpecError, load_spec
from runtime.resources import usable_cores

SPECS = Path(__file__).resolve().parents[1] / "codegen" / "specs" / "kernelbench" / "level2"
EXAMINERS = 5  # children that verify at once on a card, at most; what finds too little memory is verified alone afterwards
JUDGES = 4  # runs of the harness at once on a card where only its verdict is asked for
OWN, EXACT = "own", "exact_reference"  # runs of the harness: as it is; with a reference that keeps fp32, by which name a record holds it
UNTIMED = 1  # trials of its times then, the least that it takes
HELD = 2.5  # times bench.sweep.draw.footprint: what verifying a large result holds on the card at most, with what torch's allocator keeps
_NUMBERED = re.compile(r"(\d+)_(\w+)\.yaml")

VERDICT = ("verified", "families", "worst", "error", "eager_error", "reference_outside", "problems")
TIMES = ("ours_ms", "spread", "peers", "failed", "best_torch", "speedup_torch")


@dataclass(frozen=True)
class Problem:
    """A problem at a precision: its number, its spec's file, the benchmark's name of it, and whether passes of algebra may rewrite its chain."""

    number: int
    path: str
    name: str
    precision: str
    algebra: bool = True

    @property
    def job(self) -> str:
        """The name of its jobs."""
        return f"{self.number:03d}-{self.precision}"

    @property
    def label(self) -> str:
        return f"{self.number} {self.name}, {self.precision}"

    @property
    def spec(self) -> Spec:
        """As written where algebra is off and would change it. Raises SpecError."""
        return load_spec(self.path, self.precision, algebra=self.spec_algebra)

    @property
    def spec_algebra(self) -> bool:
        """The spec's `algebra`: false where it is off and would change the chain."""
        return self.algebra or not self.rewritable

    @cached_property
    def rewritable(self) -> bool:
        """Does any pass of algebra rewrite its chain?"""
        return rewritable(self.path, self.precision)

    @property
    def identity(self) -> Record:
        """What tells its record from others'. What no pass rewrites has one record, of the chain as written."""
        return {"problem": self.number, "precision": self.precision, "algebra": self.algebra and self.rewritable}


def problems_in(folder: Path, numbers: tuple[int, ...], precisions: tuple[str, ...], algebra: bool = True) -> list[Problem]:
    """The problems that `folder` has specs for, by number; only `numbers` where there are any. Files of smaller shapes (..._small.yaml) are left out.

    Raises click.ClickException where there is none, or two of one number.
    """
    files: dict[int, Path] = {}
    for path in sorted(folder.glob("*.yaml")):
        found = _NUMBERED.fullmatch(path.name)
        if found is None or path.stem.endswith("_small"):
            continue
        number = int(found[1])
        if number in files:
            raise click.ClickException(f"{folder} has two specs of problem {number}: {files[number].name} and {path.name}")
        files[number] = path
    missing = [number for number in numbers if number not in files]
    if missing or not files:
        wanted = f"no spec of problem {', '.join(map(str, missing))}" if missing else "no spec called <number>_<name>.yaml"
        raise click.ClickException(f"{folder} has {wanted}; name a folder of level-2 specs with --specs")
    chosen = sorted(numbers or files)
    return [Problem(n, str(files[n]), files[n].stem.split("_", 1)[1], precision, algebra) for precision in precisions for n in chosen]


def _key(record: Record) -> tuple:
    """A record's identity; one that says nothing of algebra is of a chain as written."""
    return LEVEL2.key({"algebra": False} | record)


@dataclass
class Level:
    """A call's settings and the records of the card, kept on disk as they come."""

    machine: Machine
    device: torch.device
    results: Path
    console: Console
    deadline: float | None  # time.time()
    limit_s: float
    seconds: float
    out: Path

    def __post_init__(self) -> None:
        known = store.read(LEVEL2, self.results, self.machine.slug)
        # Those of another card or torch are no evidence beside these, and leave the file with the first new one.
        self.records = {_key(r): r for r in known if (r["gpu"], r["torch"]) == (self.machine.gpu, self.machine.torch)}
        self.keys: dict[Problem, str] = {}  # of today's sources, of problems that this call has built

    def record(self, problem: Problem) -> Record:
        """The record of a problem; of one that has none the beginning of it."""
        return self.records.get(_key(problem.identity), problem.identity)

    def is_current(self, problem: Problem) -> bool:
        """Is its record of the sources that this call has built?"""
        return self.keys.get(problem) == self.record(problem).get("key", "")

    def keep(self, problem: Problem, changes: Record, without: tuple[str, ...] = ()) -> Record:
        """Renew a problem's record on disk; fields in `without` leave it, and with a new key the list of earlier ones."""
        without += ("same_code_as",) if "key" in changes else ()
        before = {field: value for field, value in self.record(problem).items() if field not in without}
        facts = {"name": problem.name, "class": class_of(problem.number), **problem.identity, **self.machine.facts}
        self.records[_key(problem.identity)] = record = before | facts | changes
        store.replace(LEVEL2, self.results, self.machine.slug, self.records.values())
        return record

    def run(self, work: str, jobs: dict[Problem, Any], workers: int, until: float | None, on: tuple[str, ...], take, **setting) -> bool:
        """Jobs in children; `take(problem, result)` gets what each ended with. True when all have ended."""
        by_name, ended = {problem.job: problem for problem in jobs}, 0
        with self.console.status(f"{work}: {len(jobs)} problems") as status:

            def told(job: str, result: Result) -> None:
                nonlocal ended
                ended += 1
                status.update(f"{work}: {ended} of {len(jobs)} problems done")
                take(by_name[job], result)

            command = lambda folder: child_command("bench.level2_case", folder)  # noqa: E731
            return run_jobs(command, {"work": work, **setting}, {p.job: job for p, job in jobs.items()}, workers, self.limit_s, until, told, cards=on)


def measure_all(level: Level, problems: list[Problem], timing: bool = True, force: bool = False) -> bool:
    """The first phase. True when nothing is left to do for lack of time."""
    cuda, began = level.device.type == "cuda", time.time()
    on = cards(level.device)
    capability = torch.cuda.get_device_capability(level.device) if cuda else None
    setting = {"device": level.device.type, "seconds": level.seconds, "timing": timing}
    built: dict[Problem, Result] = {}

    def refused(problem: Problem, work: str, why: str) -> None:
        level.keep(problem, {"verified": False, "failure": f"{work}: {why}"}, (*VERDICT, *TIMES))
        level.console.print(f"{problem.label}: [bold red]{work} failed[/]: {why}", highlight=False)

    def made(problem: Problem, result: Result) -> None:
        if "failure" in result:
            return refused(problem, "build", result["failure"])
        built[problem] = result
        level.keys[problem] = result["key"]

    asked = lambda p: {"path": p.path, "precision": p.precision, "algebra": p.spec_algebra}  # noqa: E731
    jobs = {problem: asked(problem) for problem in problems}
    target = None if cuda else "cpu"
    complete = level.run("build", jobs, max(1, usable_cores() - 1), level.deadline, (), made, target=target, out=str(level.out), capability=capability)
    level.console.print(f"{len(built)} of {len(problems)} built in {time.time() - began:.0f} s")

    jobs = {p: asked(p) | {"folder": b["folder"], "target": target} for p, b in built.items()}
    current = lambda p: level.is_current(p) and "families" in level.record(p)  # noqa: E731
    unknown = sorted((p for p in built if force or not current(p)), key=lambda p: -footprint(p.spec))
    places = max(1, len(on))
    most = max(1, min(EXAMINERS * places, usable_cores() // 2)) if cuda else 1
    memory = torch.cuda.get_device_properties(level.device).total_memory if cuda else 0
    heavy = {p: jobs[p] for p in unknown if HELD * footprint(p.spec) * most > memory * places}
    light = {p: jobs[p] for p in unknown if p not in heavy}
    few = max(1, min(most, int(memory * places / (HELD * max((footprint(p.spec) for p in heavy), default=1))))) if cuda else 1
    begun, crowded = time.time(), []

    def examined(problem: Problem, result: Result) -> None:
        if most > 1 and problem not in crowded and result.get("failure", "").startswith("OutOfMemoryError"):
            crowded.append(problem)
        elif "failure" in result:
            refused(problem, "verification", result["failure"])
        else:
            facts = {key: value for key, value in built[problem].items() if key != "folder"}
            record = level.keep(problem, facts | result, (*TIMES, "failure"))
            level.console.print(f"{problem.label}: {_judged(record)}", highlight=False)

    until = begun + EXAMINED * (level.deadline - begun) if level.deadline and timing else level.deadline
    for group, workers in ((light, most), (heavy, few)):
        if group:
            complete &= level.run("examine", group, workers, until, on, examined, **setting)
    if crowded:
        complete &= level.run("examine", {p: jobs[p] for p in crowded}, 1, until, on, examined, **setting)
    if timing:
        untimed = [p for p in built if current(p) and "ours_ms" not in level.record(p)]

        def timed(problem: Problem, result: Result) -> None:
            if "failure" in result:
                level.keep(problem, {"failed": {"times": result["failure"]}})
                return level.console.print(f"{problem.label}: [bold red]not timed[/]: {result['failure']}", highlight=False)
            level.console.print(f"{problem.label}: {_timed(level.keep(problem, result))}", highlight=False)

        if level.device.type == "cuda":
            torch.cuda.empty_cache()
        complete &= level.run("times", {p: jobs[p] for p in untimed}, places, level.deadline, on, timed, **setting)
    return complete


def _judged(record: Record) -> str:
    right = "[green]right[/]" if record["verified"] else f"[bold red]WRONG[/] {record['problems']}"
    return f"{right}, error {record['error']} (eager {record['eager_error']}), library steps: {', '.join(record['library_steps']) or 'none'}"


def _timed(record: Record) -> str:
    peers = ", ".join(f"{name} {ms:.4f}" for name, ms in record["peers"].items())
    return f"{record['ours_ms']:.4f} ms; {peers}; {record['speedup_torch']}x {record['best_torch']}"


def run_harness(level: Level, problems: list[Problem], checkout: Path, work: Path, timeout_s: float, force: bool = False, timing: bool = True) -> bool:
    """The second phase, by bench.harness. True when nothing is left to do for lack of time.

    Without `timing`, several runs share a card and their times are dropped; a call with it takes those that are right again. A file that the harness finds
    wrong where its reference may use TF32 is judged once more beside a reference that keeps fp32.
    """
    env, builds = harness.environment(checkout, work.resolve()), work / "build"
    harness.check_start(checkout, env)
    written: dict[Problem, tuple[Path, str]] = {}
    for problem in problems:
        try:
            path, _, _ = harness.write_standalone(problem.spec, work)
        except (SpecError, Refusal) as error:
            level.keep(problem, {"harness": {"verdict": "no file", "why": str(error), "key": ""}})
            level.console.print(f"{problem.label}: no standalone.py: {error}", highlight=False)
            continue
        written[problem] = path, hashlib.sha256(path.read_bytes()).hexdigest()
    runs = [(p, asked) for p, (_, key) in written.items() if (asked := _left_to_ask(p, {} if force else level.record(p).get("harness", {}), key, timing))]
    with level.console.status(f"compiling {len(runs)} files"):
        harness.prebuild([written[problem][0] for problem, _ in runs], env, builds)
    architecture = harness.ARCHITECTURES.get(torch.cuda.get_device_capability(level.device), "Hopper")
    commands = {p: harness.command_line(p, harness.problem_file(checkout, p.number), written[p][0], architecture, builds, None if timing else UNTIMED) for p, _ in runs}

    def measured(run: tuple[Problem, str], place: dict[str, str]) -> dict[str, dict[str, Any]]:
        problem, asked = run
        ask = lambda env: harness.measure(commands[problem], checkout, work, env, timeout_s)  # noqa: E731
        found = {OWN: ask(place)} if asked == OWN else {}
        again = asked == EXACT or found[OWN]["verdict"] == "wrong" and uses_tf32(problem.spec)
        return found | ({EXACT: ask(place | harness.FP32_REFERENCE)} if again else {})

    def take(run: tuple[Problem, str], found: dict[str, dict[str, Any]]) -> None:
        problem = run[0]
        told = {name: _told(one, timing) for name, one in found.items()}
        if OWN in told:
            told = told.pop(OWN) | {"tf32_reference": uses_tf32(problem.spec), "key": written[problem][1]} | told
        else:
            told = level.record(problem)["harness"] | told
        level.keep(problem, {"harness": told})
        said = [("" if name == OWN else "with a reference of fp32 ") + (harness.told(one) if timing else one["verdict"]) for name, one in found.items()]
        level.console.print(f"{problem.label}: {'; '.join(said)}", highlight=False)

    deadline = time.perf_counter() + level.deadline - time.time() if level.deadline else None
    lanes = cards(level.device) * (1 if timing else JUDGES)
    if not timing:  # else each run would start as many threads and compilers of Inductor's as there are cores
        env |= {"OMP_NUM_THREADS": str(max(1, usable_cores() // len(lanes))), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    return harness.in_lanes(runs, measured, take, harness.on_cards(env, lanes), deadline)


def _told(found: dict[str, Any], timing: bool) -> dict[str, Any]:
    """What is recorded of one run of the harness."""
    times = {name: found[f"{of}_ms"] if timing else None for name, of in (("ms", "ours"), ("eager_ms", "eager"), ("compile_ms", "compile"))}
    noise = {"spread": found["spread"], "noisy": found["noisy"]} if timing else {}
    return {"verdict": found["verdict"], **times, "static_errors": found["static_errors"], **noise, **({} if found["correct"] else {"output": found["output"][-12:]})}


def _left_to_ask(problem: Problem, known: Record, key: str, timing: bool) -> str:
    """What to ask the harness about a file: OWN, a run as it is; EXACT, only one whose reference keeps fp32; empty for nothing. What it finds wrong has no times."""
    if known.get("key") != key or timing and known["verdict"] == "correct" and known.get("ms") is None:
        return OWN
    return EXACT if known["verdict"] == "wrong" and EXACT not in known and uses_tf32(problem.spec) else ""


def uses_tf32(spec: Spec) -> bool:
    """May the harness's reference use TF32? It leaves torch's switches alone, which allow it to convolutions of fp32 and not to matrix products."""
    return spec.precision.dtype == "float32" and any(step.operator.name.startswith("conv") for step in spec.chain)


def speedups(records: list[Record], of: Callable[[Record], float | None] = lambda record: record.get("speedup_torch")) -> Iterator[float]:
    """Those of ordinary problems that are verified and timed."""
    for record in records:
        if record["class"] == ORDINARY and record["verified"] and (value := of(record)):
            yield value


__all__ = ["RESULTS", "SPECS", "Level", "Problem", "geometric_mean", "measure_all", "problems_in", "run_harness", "speedups", "uses_tf32"]
