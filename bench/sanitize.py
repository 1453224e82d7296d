"""`make sanitize`: compute-sanitizer's memcheck, racecheck, initcheck and synccheck over the generated kernels, at small shapes.

Only our kernels run on the device. A step that a plan gives to cuBLAS or cuDNN is computed on the CPU and copied there: racecheck crashes inside
some of the vendor's kernels, and initcheck does not see what their copy engine writes, so that our next kernel would seem to read rubbish.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import click
import torch
from rich.console import Console
from rich.markup import escape

from bench.faults import sentences
from bench.jobs import build_all
from bench.machine import choose_device, describe
from bench.packages import load_package
from bench.records import FORMAT, RESULTS, present_keys, read, write_json
from bench.shrink import BATCHES, shrink
from codegen import index
from codegen.emit import DEFAULT_TARGETS, make_package, write_if_different
from codegen.manifest import Package
from codegen.numerics import PRECISIONS
from codegen.plan import Library, Plan
from codegen.plan.routes import plan_for_class
from codegen.render import render
from codegen.spec import Spec, load_spec
from codegen.targets import TARGETS
from runtime import launch
from runtime.devices import visible_capabilities

TOOLS = ("racecheck", "initcheck", "memcheck", "synccheck")  # the slowest first, so that the last to finish is short
FEW_SMS = (4, 16)  # of the card that a small shape is planned for: beside more it would go to another kernel than the full one
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


def compute_library_steps_on_the_cpu() -> None:
    """Replace the runtime's two factories of library steps, for this process: float32 on the CPU, then the storage type, then the device."""
    host = torch.device("cpu")

    def on_the_cpu(factory):
        def made(step, precision: str, device: torch.device):
            compute = factory(step, precision, host)

            def call(*operands: torch.Tensor | None) -> torch.Tensor:
                y = compute(*(None if operand is None else operand.cpu().float() for operand in operands))
                return y.to(operands[0].dtype).contiguous().to(device)

            return call

        return made

    launch._linear, launch._conv2d = on_the_cpu(launch._linear), on_the_cpu(launch._conv2d)


def child(folder: Path, runs: int, read: bool) -> None:
    """What the tool watches: the model's own kernels, `runs` times on random parameters. Everything else is done on the CPU. `read` the result
    back, too: initcheck does not see what the copy engine has written and would call all of it rubbish."""
    compute_library_steps_on_the_cpu()
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


def examine(sanitizer: str, job: Job, timeout_s: float, threads: int) -> dict:
    """Run the tool in a child process of `threads` CPU threads and read its report."""
    command = [sanitizer, "--tool", job.tool, "--error-exitcode", "9", "--print-limit", "20", *_only(job.kernels)]
    command += ["--leak-check", "no", "--report-api-errors", "no"] if job.tool == "memcheck" else []
    command += [sys.executable, "-m", "bench.sanitize", "--child", str(job.folder), *(["--unread"] if job.tool == "initcheck" else [])]
    env = {**os.environ, "TARGETS": job.target, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "OMP_NUM_THREADS": str(threads)}
    start = time.perf_counter()
    try:
        finished = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout_s)
        output, code = finished.stdout, finished.returncode
    except subprocess.TimeoutExpired as error:
        output, code = (error.stdout or b"").decode(errors="replace"), -1
    return {"tool": job.tool, **parse(output, code), "seconds": round(time.perf_counter() - start, 1)}


def parse(output: str, code: int) -> dict:
    """Verdict, summary line and first errors from what the tool printed; `code` is its exit code, -1 where it was ended."""
    summary = re.findall(r"=+ ((?:ERROR|RACECHECK) SUMMARY: .*|LEAK SUMMARY: .*)", output)
    wrong = r"=+ +(Error|Warning|Invalid|Uninitialized|Barrier|Race|Potential|Program hit)"
    errors = [line.lstrip("= ") for line in output.splitlines() if re.match(wrong, line)]
    clean = code == 0 and "finite results" in output
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
    for batch, sms in product(BATCHES, FEW_SMS):
        small = shrink(spec, Path("build/sanitize/specs"), library, batch)
        plan = plan_for_class(small, target, replace(full.device, sms=sms))
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
@click.option("--target", "targets", multiple=True, type=click.Choice([t for t in TARGETS if t != "cpu"]), help="Only this target (repeatable); else all that run here.")
@click.option("--tool", "tools", multiple=True, type=click.Choice(TOOLS), help="Only this tool (repeatable).")
@click.option("--device", type=click.Choice(["cuda"]), default="cuda", hidden=True)
@click.option("--results", type=click.Path(file_okay=False, path_type=Path), default=RESULTS, help="Folder for the record; default bench/results.")
@click.option("--budget-s", default=0.0, help="Stop cleanly before this many seconds are over; 0 means no limit.")
@click.option("--jobs", "workers", default=1, show_default=True, type=click.IntRange(1), help="Child processes at once.")
@click.option("--timeout-s", default=180.0, show_default=True, help="For one tool on one package.")
@click.option("--force", is_flag=True, help="Examine again what is recorded for today's sources.")
@click.option("--child", "folder", type=click.Path(path_type=Path), hidden=True)
@click.option("--unread", is_flag=True, hidden=True)
def main(specs, precisions, targets, tools, device, results, budget_s, workers, timeout_s, force, folder, unread) -> None:
    """Run compute-sanitizer over the kernels of SPECS (all checked-in packages without any) at small shapes."""
    if folder:
        child(folder, 2, not unread)
        return
    with sentences():
        wanted = {load_spec(spec).path for spec in specs}
        if not torch.cuda.is_available():
            raise click.ClickException("compute-sanitizer watches kernels on a CUDA GPU, and none is visible here")
        where = choose_device(device)
        sanitizer = find_sanitizer()
    start = time.perf_counter()
    machine, console = describe(where), Console(soft_wrap=True, highlight=False)
    able = [t for t in targets or DEFAULT_TARGETS if t != "cpu" and _runs_on(t, torch.cuda.get_device_capability(where))]
    packages = [e for e in index.entries(Path("generated")) if (not specs or load_spec(e[0]).path in wanted) and (not precisions or e[1] in precisions)]
    if not packages:
        raise click.ClickException("none of these is among the checked-in packages (generated/index.yaml), and only those are examined")
    at = results / machine.slug / "sanitize.json"
    record = read(at) or read(RESULTS / machine.slug / "sanitize.json") or {"format": FORMAT, **machine.facts, "runs": []}
    done = {(r["spec"], r["precision"], r["target"], r["tool"]): r for r in record["runs"]}
    with sentences():
        jobs = [job for job in _jobs(packages, able, tools or TOOLS) if force or done.get(job.identity, {}).get("key") != job.key or not done[job.identity]["clean"]]
    # What cannot be built shows when a tool's child meets it.
    build_all([(job.folder, job.target) for job in jobs], visible_capabilities()[where.index or 0], workers)
    console.print(f"{len(jobs)} examinations to do, their kernels compiled in {time.perf_counter() - start:.0f} s")
    longest, skipped = 0.0, 0

    def one(job: Job) -> dict | None:
        left = budget_s - (time.perf_counter() - start) if budget_s else timeout_s
        return None if left < longest * 1.2 else examine(sanitizer, job, min(timeout_s, left), max(1, (os.cpu_count() or 2) // workers))

    with ThreadPoolExecutor(workers) as pool:
        running = {pool.submit(one, job): job for job in jobs}
        for number, future in enumerate(as_completed(running), 1):
            job, found = running[future], future.result()
            if found is None:
                skipped += 1
                continue
            longest = max(longest, found["seconds"])
            done[job.identity] = {"spec": job.spec.name, "precision": job.spec.precision.name, "target": job.target, "key": job.key, **found}
            record["runs"] = [done[k] for k in sorted(done)]
            write_json(at, record)
            verdict = "[green]clean[/]" if found["clean"] else "[bold red]errors[/]"
            console.print(f"[{number}/{len(jobs)}] {job.spec.package} {job.target} {job.tool}: {verdict} ({found['seconds']:.0f} s) {escape(found['summary'])}")
            for line in found["errors"][:4]:
                console.print(f"    {line}", markup=False)
    if skipped:
        console.print(f"stopped for lack of time with {skipped} left; run again to go on")
    console.print(f"{sum(r['clean'] for r in record['runs'])} of {len(record['runs'])} recorded examinations are clean; {time.perf_counter() - start:.0f} s")
    sys.exit(not all(r["clean"] for r in record["runs"]))


def _runs_on(target: str, capability: tuple[int, int]) -> bool:
    return capability >= TARGETS[target].min_capability and (target != "sm_90a" or capability == (9, 0))


def _jobs(packages: list[tuple[str, str]], targets: list[str], tools: tuple[str, ...]) -> list[Job]:
    """Every tool over every package and target that the package serves; emits the small packages. Raises SpecError or PlanError."""
    emitted = []
    for path, precision in packages:
        spec, keys = load_spec(path, precision), present_keys(path, precision)
        emitted += [(spec, target, keys[target], *small_package(spec, target)) for target in targets if target in keys]
    return [Job(spec, target, tool, key, folder, kernels) for tool in tools for spec, target, key, folder, kernels in emitted]


if __name__ == "__main__":
    main()
