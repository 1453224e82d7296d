"""`make sanitize`: compute-sanitizer's memcheck, racecheck, initcheck and synccheck over the generated kernels, at small shapes.

Only our kernels run on the device. A step that a plan gives to cuBLAS or cuDNN is computed on the CPU and copied there: racecheck crashes inside
some of the vendor's kernels, and initcheck does not see what their copy engine writes, so that our next kernel would seem to read rubbish.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from itertools import groupby, product
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.markup import escape

from bench import store
from bench.children import child_command, child_environment
from bench.jobs import build_all
from bench.machine import choose_device, describe
from bench.packages import load_package
from bench.records import present_keys
from bench.shrink import BATCHES, shrink
from bench.store import FORMAT, RESULTS, SANITIZE
from codegen import index
from codegen.folder import write_if_different
from codegen.ir.fused_form import FusedSpec
from codegen.manifest import Package
from codegen.numerics import PRECISIONS
from codegen.package import make_package
from codegen.plan import Library, Plan
from codegen.plan.planner import planned, ways_of
from codegen.plan.route import Choice, Request
from codegen.plan.stages.route import cut
from codegen.render import render
from codegen.spec import Spec, load_spec
from codegen.targets import DEFAULT_TARGETS, TARGETS, cuda_targets
from runtime import launch
from runtime.devices import visible_capabilities

TOOLS = ("racecheck", "initcheck", "memcheck", "synccheck")  # the slowest first, so that the last to finish is short
FEW_SMS = (4, 16)  # of the card that a small shape is planned for: beside more it would go to another kernel than the full one
READ, UNREAD = "read", "unread"  # whether the child looks at its results
_HOME = Path(os.environ.get("CUDA_HOME") or "/usr/local/cuda")


def find_sanitizer() -> str:
    """Path of compute-sanitizer. Raises RuntimeError where there is none."""
    beside = [str(_HOME / "bin"), str(_HOME / "compute-sanitizer"), os.environ.get("PATH", "")]
    found = shutil.which("compute-sanitizer", path=os.pathsep.join(beside))
    if found is None:
        raise RuntimeError("compute-sanitizer was not found on PATH or under CUDA_HOME; it comes with the CUDA toolkit")
    return found


@dataclass(frozen=True)
class Job:
    """One tool over one target of one package, whose small copy has been emitted to `folder` with kernels in these namespaces."""

    spec: Spec
    target: str
    tool: str
    key: str
    folder: Path
    kernels: tuple[str, ...]

    @property
    def identity(self) -> tuple[str, str, str, str]:
        return self.spec.name, self.spec.precision.name, self.target, self.tool

    def record(self, facts: Mapping[str, Any], found: Mapping[str, Any]) -> store.Record:
        """What was `found`, as a record; `facts` are the machine's."""
        spec, precision, target, tool = self.identity
        return {"format": FORMAT, **facts, "spec": spec, "precision": precision, "target": target, "tool": tool, "key": self.key, **found}


def compute_library_steps_on_the_cpu() -> None:
    """Replace the runtime's factory of library steps, for this process: float32 on the CPU, then the storage type, then the device."""
    factory = launch.call_of

    def on_the_cpu(name: str, options, precision: str):
        compute = factory(name, options, "fp32")

        def call(*operands: torch.Tensor | None):
            first = operands[0]
            moved = [None if operand is None else operand.cpu() if not operand.is_floating_point() else operand.cpu().float() for operand in operands]
            made = compute(*moved)
            back = [y.to(first.device, first.dtype if y.is_floating_point() else y.dtype).contiguous() for y in (made if isinstance(made, tuple) else (made,))]
            return tuple(back) if isinstance(made, tuple) else back[0]

        return call

    launch.call_of = on_the_cpu


def child(folders: list[Path], runs: int, read: bool) -> None:
    """What the tool watches: the models' own kernels, `runs` times each on random parameters. Everything else is done on the CPU. `read` the
    results back, too: initcheck does not see what the copy engine has written and would call all of it rubbish."""
    compute_library_steps_on_the_cpu()
    for folder in folders:
        _run(folder, runs, read)


def _run(folder: Path, runs: int, read: bool) -> None:
    package = load_package(folder)
    torch.manual_seed(0)
    model = package.ModelNew(*package.get_init_inputs())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter))
        model, x = model.to("cuda"), package.get_inputs()[0].to("cuda")
        for _ in range(runs):
            y = model(x)
        torch.cuda.synchronize()
    print(f"finite results: {int(torch.isfinite(y.cpu()).sum()) if read else 'not read'} of {y.numel()}")


def examine(sanitizer: str, jobs: list[Job], timeout_s: float, threads: int) -> dict:
    """Run the tool of `jobs`, which share it and their target, over all of them in one child process of `threads` CPU threads; read its report.
    `seconds` are a job's share."""
    tool, target = jobs[0].tool, jobs[0].target
    command = [sanitizer, "--tool", tool, "--error-exitcode", "9", "--print-limit", "20", *_only(tuple(sorted({name for job in jobs for name in job.kernels})))]
    command += ["--leak-check", "no", "--report-api-errors", "no"] if tool == "memcheck" else []
    command += child_command("bench.sanitize", UNREAD if tool == "initcheck" else READ, *(job.folder for job in jobs))
    env = {**child_environment(), "TARGETS": target, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "OMP_NUM_THREADS": str(threads)}
    start = time.perf_counter()
    try:
        finished = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout_s)
        output, code = finished.stdout, finished.returncode
    except subprocess.TimeoutExpired as error:
        output, code = (error.stdout or b"").decode(errors="replace"), -1
    return {"tool": tool, **parse(output, code, len(jobs)), "seconds": round((time.perf_counter() - start) / len(jobs), 1)}


def examine_each(sanitizer: str, jobs: list[Job], left: Callable[[], float], timeout_s: float, threads: int) -> list[tuple[Job, dict]]:
    """What the tool says of each job: of all together, for a child's start under the tool takes longer than a job, and where that is not clean of
    each alone. `left` gives the seconds that remain; jobs beyond them are left out."""
    found = examine(sanitizer, jobs, min(timeout_s * len(jobs), left()), threads)
    if found["clean"] or len(jobs) == 1:
        return [(job, found) for job in jobs]
    return [pair for job in jobs if left() > 0 for pair in examine_each(sanitizer, [job], left, timeout_s, threads)]


def parse(output: str, code: int, results: int = 1) -> dict:
    """Verdict, summary line and first errors from what the tool printed over `results` packages; `code` is its exit code, -1 where it was ended."""
    summary = re.findall(r"=+ ((?:ERROR|RACECHECK) SUMMARY: .*|LEAK SUMMARY: .*)", output)
    wrong = r"=+ +(Error|Warning|Invalid|Uninitialized|Barrier|Race|Potential|Program hit)"
    errors = [line.lstrip("= ") for line in output.splitlines() if re.match(wrong, line)]
    clean = code == 0 and output.count("finite results") == results
    return {
        "clean": clean, "summary": summary[-1] if summary else ("ended after the time allowed" if code == -1 else f"exit code {code}"),
        "errors": [] if clean else (errors or output.splitlines()[-8:])[:10],
    }  # fmt: skip


def _only(kernels: tuple[str, ...]) -> list[str]:
    """Options that restrict the tool to kernels whose mangled names hold these namespaces."""
    return [word for name in kernels for word in ("--kernel-name", f"kernel_substring={name}")]


def small_package(spec: Spec, target: str) -> tuple[Path, tuple[str, ...]]:
    """Emit the shrunken package for one target into build/sanitize/<target>/; its folder and the namespaces of its kernels."""
    (full,) = make_package(spec, (target,)).plans
    library = any(isinstance(step, Library) for step in full.steps)
    # A small convolution may be faster another way, which is not the one to be examined.
    head = FusedSpec.of(spec)
    route = Choice(ways_of(Request(cut(head, TARGETS[target])[0], TARGETS[target], full.device)).best[0].name) if head.producer.operator.rank else None
    for batch, sms in product(BATCHES, FEW_SMS):
        small = shrink(spec, Path("build/sanitize/specs"), library, batch)
        plan = planned(Request(small, TARGETS[target], replace(full.device, sms=sms), forced=route))
        if _shape(plan) == _shape(full):
            break
    package = Package(small, (plan,))
    folder = Path("build/sanitize") / target / small.package
    write_if_different(folder, render(package))
    return folder, tuple(sorted({kernel.file(plan.target).removesuffix(".cu") for kernel in plan.kernels}))


def _shape(plan: Plan) -> list[tuple]:
    """Which kernels a plan has, and how their tiles lie."""
    return [(kernel.template, getattr(kernel, "layout", None)) for kernel in plan.kernels]


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("specs", nargs=-1)
@click.option("--precision", "precisions", multiple=True, type=click.Choice(list(PRECISIONS)), help="Only this precision (repeatable).")
@click.option("--target", "targets", multiple=True, type=click.Choice(list(cuda_targets())), help="Only this target (repeatable); else all that run here.")
@click.option("--tool", "tools", multiple=True, type=click.Choice(TOOLS), help="Only this tool (repeatable).")
@click.option("--device", type=click.Choice(["cuda"]), default="cuda", hidden=True)
@click.option("--results", type=click.Path(file_okay=False, path_type=Path), default=RESULTS, help="Folder for the record; default bench/results.")
@click.option("--budget-s", default=0.0, help="Stop cleanly before this many seconds are over; 0 means no limit.")
@click.option("--jobs", "workers", default=1, show_default=True, type=click.IntRange(1), help="Child processes at once.")
@click.option("--timeout-s", default=180.0, show_default=True, help="For one tool on one package.")
@click.option("--force", is_flag=True, help="Examine again what is recorded for today's sources.")
@click.option("--together", default=6, show_default=True, type=click.IntRange(1), help="Packages that one child process examines.")
def main(specs, precisions, targets, tools, device, results, budget_s, workers, timeout_s, force, together) -> None:
    """Run compute-sanitizer over the kernels of SPECS (all shipped packages without any) at small shapes."""
    wanted = {load_spec(spec).path for spec in specs}
    if not torch.cuda.is_available():
        raise click.ClickException("compute-sanitizer watches kernels on a CUDA GPU, and none is visible here")
    where = choose_device(device)
    sanitizer = find_sanitizer()
    start = time.perf_counter()
    machine, console = describe(where), Console(soft_wrap=True, highlight=False)
    able = [t for t in targets or DEFAULT_TARGETS if TARGETS[t].runs_on(torch.cuda.get_device_capability(where))]
    packages = [e for e in index.entries(Path("generated")) if (not specs or load_spec(e[0]).path in wanted) and (not precisions or e[1] in precisions)]
    if not packages:
        raise click.ClickException("none of these is among the shipped packages (generated/index.yaml), and only those are examined")
    recorded = store.read(SANITIZE, results, machine.slug) or store.read(SANITIZE, RESULTS, machine.slug)
    done = {SANITIZE.key(record): record for record in recorded}
    jobs = [job for job in _jobs(packages, able, tools or TOOLS) if force or done.get(job.identity, {}).get("key") != job.key or not done[job.identity]["clean"]]
    # What cannot be built shows when a tool's child meets it.
    with console.status("compiling"):
        build_all([(job.folder, job.target) for job in jobs], visible_capabilities()[where.index or 0], workers)
    console.print(f"{len(jobs)} examinations to do, their kernels compiled in {time.perf_counter() - start:.0f} s")
    longest = 0.0

    def left() -> float:
        return budget_s - (time.perf_counter() - start) if budget_s else math.inf

    def several(group: list[Job]) -> list[tuple[Job, dict]]:
        return [] if left() < longest * 1.2 else examine_each(sanitizer, group, left, timeout_s, max(1, (os.cpu_count() or 2) // workers))

    number = 0
    with ThreadPoolExecutor(workers) as pool:
        for future in as_completed([pool.submit(several, group) for group in _groups(jobs, together)]):
            found_of = future.result()
            longest = max(longest, sum(found["seconds"] for _, found in found_of))
            for job, found in found_of:
                number += 1
                done[job.identity] = job.record(machine.facts, found)
                verdict = "[green]clean[/]" if found["clean"] else "[bold red]errors[/]"
                console.print(f"[{number}/{len(jobs)}] {job.spec.package} {job.target} {job.tool}: {verdict} ({found['seconds']:.0f} s) {escape(found['summary'])}")
                for line in found["errors"][:4]:
                    console.print(f"    {line}", markup=False)
            store.put(SANITIZE, results, machine.slug, done.values())
    if number < len(jobs):
        console.print(f"stopped for lack of time with {len(jobs) - number} left; run again to go on")
    console.print(f"{sum(r['clean'] for r in done.values())} of {len(done)} recorded examinations are clean; {time.perf_counter() - start:.0f} s")
    sys.exit(not all(r["clean"] for r in done.values()))


def _groups(jobs: list[Job], together: int) -> Iterator[list[Job]]:
    """Jobs of one tool and target, at most `together` at a time, in order."""
    for _, same in groupby(sorted(jobs, key=lambda job: (TOOLS.index(job.tool), job.target)), key=lambda job: (job.tool, job.target)):
        listed = list(same)
        yield from (listed[i : i + together] for i in range(0, len(listed), together))


def _jobs(packages: list[tuple[str, str]], targets: list[str], tools: tuple[str, ...]) -> list[Job]:
    """Every tool over every package and target that the package serves; emits the small packages. Raises SpecError or Refusal."""
    emitted = []
    for path, precision in packages:
        spec, keys = load_spec(path, precision), present_keys(path, precision)
        emitted += [(spec, target, keys[target], *small_package(spec, target)) for target in targets if target in keys]
    return [Job(spec, target, tool, key, folder, kernels) for tool in tools for spec, target, key, folder, kernels in emitted]


if __name__ == "__main__":  # the process that a tool watches
    child([Path(folder) for folder in sys.argv[2:]], 2, sys.argv[1] == READ)
