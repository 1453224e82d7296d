"""Jobs in child processes, so that a crash or a hang is one job's failure.

The children share a folder: jobs.json holds all jobs, a child takes one by creating <job>.claim (which holds its process id) and ends it with
<job>.json. The parent hands results on as they appear, starts a new child for one that died, and kills one that hangs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.store import write_text

GRACE = 20.0  # seconds that a job in hand may run on behind the deadline
_POLL = 0.2
_LOST = 70

TOP = Path(__file__).resolve().parents[1]

Result = dict[str, Any]


def child_command(module: str, *arguments: object) -> list[str]:
    """The call of a module of ours, whatever the current folder holds under its name."""
    return [sys.executable, "-P", "-m", module, *map(str, arguments)]


def child_environment() -> dict[str, str]:
    """The environment in which `child_command` finds the same modules as this process."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(TOP), os.environ.get("PYTHONPATH")]))}


class ProcessLost(Exception):
    """A job ended with `result` but left its process unfit for another, as a fault on the GPU does."""

    def __init__(self, result: Result) -> None:
        super().__init__(str(result))
        self.result = result


def run_jobs(
    command: Callable[[Path], list[str]], setting: Mapping[str, Any], jobs: Mapping[str, Any], workers: int, limit_s: float, deadline: float | None,
    on_result: Callable[[str, Result], None], environment: Mapping[str, str] | None = None, cards: Sequence[str] = (),
) -> bool:  # fmt: skip
    """Run `jobs` (plain data by name) in up to `workers` children started as `command(folder)`; True when every job has ended.

    `setting` is handed to every child beside its jobs. Each child sees one of `cards` alone, which are dealt out in turn. `on_result` gets what a child
    finished with, or {"failure": why}. `limit_s` bounds one job; at `deadline` (time.time()) no job is begun any more. Raises RuntimeError when children
    end before they take a job.
    """
    with tempfile.TemporaryDirectory(prefix="jobs-") as name:
        folder = Path(name)
        write_text(folder / "jobs.json", json.dumps({"setting": dict(setting), "jobs": dict(jobs), "deadline": deadline}))
        crew = _Crew(folder, command, dict(environment or {}), jobs, limit_s, deadline, on_result, cards)
        try:
            crew.work(min(workers, len(jobs)))
        finally:
            crew.dismiss()
        return crew.ended == set(jobs)


class _Crew:
    """The children of one run and what is known of their jobs."""

    def __init__(self, folder, command, environment, jobs, limit_s, deadline, on_result, cards) -> None:
        self.folder, self.command, self.environment, self.limit_s, self.on_result = folder, command, environment, limit_s, on_result
        self.jobs, self.deadline = jobs, deadline
        self.ended: set[str] = set()
        self.running: dict[subprocess.Popen, str | None] = {}  # and the card that each sees
        self.cards = tuple(cards) or (None,)

    def work(self, workers: int) -> None:
        for worker in range(workers):
            self.hire(self.cards[worker % len(self.cards)])
        while self.running:
            time.sleep(_POLL)
            claims = self.collect()
            late = self.deadline is not None and time.time() > self.deadline + GRACE
            for child in list(self.running):
                mine = [job for job, (process, _) in claims.items() if process == child.pid]
                if child.poll() is None and not late and not any(time.time() - claims[job][1] > self.limit_s for job in mine):
                    continue
                hung = child.poll() is None
                if hung:
                    child.kill()
                child.wait()
                card = self.running.pop(child)
                if late:
                    continue
                self.collect()
                for job in mine:
                    if job not in self.ended:
                        self.ended.add(job)
                        why = f"took longer than {self.limit_s:.0f} s" if hung else f"ended its process with code {child.returncode}"
                        self.on_result(job, {"failure": why})
                if child.returncode and not any(path.read_text() == str(child.pid) for path in self.folder.glob("*.claim")):
                    raise RuntimeError(f"a child process ended with code {child.returncode} before it took a job")
                if child.returncode and any(not (self.folder / f"{job}.claim").exists() for job in self.jobs):
                    self.hire(card)

    def hire(self, card: str | None) -> None:
        own = {} if card is None else {"CUDA_VISIBLE_DEVICES": card}
        self.running[subprocess.Popen(self.command(self.folder), env={**child_environment(), **self.environment, **own})] = card

    def dismiss(self) -> None:
        for child in self.running:
            child.kill()
            child.wait()

    def collect(self) -> dict[str, tuple[int, float]]:
        """Hand on new results; returns (process, time of taking) of every job in hand."""
        claims = {}
        for job in self.jobs:
            if job in self.ended:
                continue
            result, claim = self.folder / f"{job}.json", self.folder / f"{job}.claim"
            if result.exists():
                self.ended.add(job)
                self.on_result(job, json.loads(result.read_text()))
            elif claim.exists() and (text := claim.read_text()):
                claims[job] = int(text), claim.stat().st_mtime
        return claims


def take_jobs(folder: Path, work: Callable[[Any, Mapping[str, Any]], Result]) -> None:
    """In a child: take jobs and finish each with `work(job, setting)` until there are none, or the next may run past the deadline."""
    plan = json.loads((folder / "jobs.json").read_text())
    longest = 0.0
    for name, job in plan["jobs"].items():
        if plan["deadline"] is not None and time.time() + 1.1 * longest > plan["deadline"]:
            return
        if not _claim(folder / f"{name}.claim"):
            continue
        begun = time.time()
        try:
            write_text(folder / f"{name}.json", json.dumps(work(job, plan["setting"])))
        except ProcessLost as lost:
            write_text(folder / f"{name}.json", json.dumps(lost.result))
            os._exit(_LOST)  # an ordinary exit would wait for the device
        longest = max(longest, time.time() - begun)


def _claim(path: Path) -> bool:
    """Create the file with this process's id in it; False where another child was first."""
    try:
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    except FileExistsError:
        return False
    with os.fdopen(descriptor, "w") as stream:
        stream.write(str(os.getpid()))
    return True
