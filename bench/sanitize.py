"""`make sanitize`: compute-sanitizer's memcheck, racecheck, initcheck and synccheck over the generated kernels, at small shapes."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import click
import torch
from rich.console import Console
from rich.table import Table

from bench.machine import choose_device, describe
from bench.packages import load_package
from bench.records import FORMAT, RESULTS, present_keys, read, write_json
from bench.shrink import shrink
from codegen import index
from codegen.emit import DEFAULT_TARGETS, make_package, write_if_different
from codegen.numerics import PRECISIONS
from codegen.plan import Library, PlanError
from codegen.render import render
from codegen.spec import Spec, SpecError, load_spec
from codegen.targets import TARGETS

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
_HOME = Path(os.environ.get("CUDA_HOME") or "/usr/local/cuda")


def find_sanitizer() -> str:
    """Path of compute-sanitizer. Raises RuntimeError where there is none."""
    beside = [str(_HOME / "bin"), str(_HOME / "compute-sanitizer"), os.environ.get("PATH", "")]
    found = shutil.which("compute-sanitizer", path=os.pathsep.join(beside))
    if found is None:
        raise RuntimeError("compute-sanitizer was not found on PATH or under CUDA_HOME; it comes with the CUDA toolkit")
    return found


def child(folder: Path, runs: int) -> None:
    """What the tool watches: the model's own kernels, `runs` times on random parameters. Everything else is prepared on the CPU."""
    package = load_package(folder)
    torch.manual_seed(0)
    model = package.ModelNew(*package.get_init_inputs())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter))
        model, x = model.to("cuda"), package.get_inputs()[0].to("cuda")
        for _ in range(runs):
            y = model(x)
        y = y.cpu()
    print(f"finite results: {int(torch.isfinite(y).sum())} of {y.numel()}")


def examine(sanitizer: str, tool: str, folder: Path, target: str, kernels: list[str], timeout_s: float) -> dict:
    """One tool over one package; only our kernels are instrumented, the library's are not ours to judge."""
    command = [sanitizer, "--tool", tool, "--error-exitcode", "9", "--print-limit", "20", *_only(kernels)]
    command += ["--leak-check", "no", "--report-api-errors", "no"] if tool == "memcheck" else []
    command += [sys.executable, "-m", "bench.sanitize", "--child", str(folder)]
    env = {**os.environ, "TARGETS": target, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    start = time.perf_counter()
    try:
        finished = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout_s)
        output, code = finished.stdout, finished.returncode
    except subprocess.TimeoutExpired as error:
        output, code = (error.stdout or b"").decode(errors="replace"), -1
    summary = re.findall(r"=+ ((?:ERROR|RACECHECK) SUMMARY: .*|LEAK SUMMARY: .*)", output)
    errors = [line.lstrip("= ") for line in output.splitlines() if re.match(r"=+ +(Error|Warning|Invalid|Uninitialized|Barrier|Race|Potential|Program hit)", line)]
    clean = code == 0 and "finite results" in output
    return {
        "tool": tool, "clean": clean, "summary": summary[-1] if summary else ("ended after the time allowed" if code == -1 else f"exit code {code}"),
        "errors": [] if clean else (errors or output.splitlines()[-8:])[:10], "seconds": round(time.perf_counter() - start, 1),
    }  # fmt: skip


def _only(kernels: list[str]) -> list[str]:
    """Options that restrict the tool to kernels whose mangled names hold these namespaces."""
    return [word for name in kernels for word in ("--kernel-name", f"kernel_substring={name}")]


def small_package(spec: Spec, target: str) -> tuple[Path, list[str]]:
    """Emit the shrunken package for one target into build/sanitize/<target>/; its folder and the namespaces of its kernels."""
    full = make_package(spec, (target,))
    small = shrink(spec, Path("build/sanitize/specs"), library=any(isinstance(step, Library) for step in full.plans[0].steps))
    package = make_package(small, (target,))
    folder = Path("build/sanitize") / target / small.package
    write_if_different(folder, render(package))
    (plan,) = package.plans
    return folder, sorted({kernel.file(plan.target).removesuffix(".cu") for kernel in plan.kernels})


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("specs", nargs=-1)
@click.option("--precision", "precisions", multiple=True, type=click.Choice(list(PRECISIONS)), help="Only this precision (repeatable).")
@click.option("--target", "targets", multiple=True, type=click.Choice([t for t in TARGETS if t != "cpu"]), help="Only this target (repeatable); else all that run here.")
@click.option("--tool", "tools", multiple=True, type=click.Choice(TOOLS), help="Only this tool (repeatable).")
@click.option("--device", type=click.Choice(["cuda"]), default="cuda", hidden=True)
@click.option("--results", type=click.Path(file_okay=False, path_type=Path), default=RESULTS, help="Folder for the record; default bench/results.")
@click.option("--budget-s", default=0.0, help="Stop cleanly before this many seconds are over; 0 means no limit.")
@click.option("--timeout-s", default=180.0, show_default=True, help="For one tool on one package.")
@click.option("--force", is_flag=True, help="Examine again what is recorded for today's sources.")
@click.option("--child", "folder", type=click.Path(path_type=Path), hidden=True)
def main(specs, precisions, targets, tools, device, results, budget_s, timeout_s, force, folder) -> None:
    """Run compute-sanitizer over the kernels of SPECS (all checked-in packages without any) at small shapes."""
    if folder:
        child(folder, 2)
        return
    try:
        where = choose_device(device)
        sanitizer = find_sanitizer()
    except RuntimeError as error:
        raise click.ClickException(str(error)) from None
    machine, console = describe(where), Console(width=None if sys.stdout.isatty() else 180)
    capability = torch.cuda.get_device_capability(where)
    jobs = [job for job in index.entries(Path("generated")) if (not specs or load_spec(job[0]).path in {load_spec(s).path for s in specs}) and (not precisions or job[1] in precisions)]
    at = results / machine.slug / "sanitize.json"
    record = read(at) or {"format": FORMAT, **machine.facts, "runs": []}
    done = {(r["spec"], r["precision"], r["target"], r["tool"]): r for r in record["runs"]}
    start, longest, table = time.perf_counter(), 0.0, Table("package", "target", "tool", "verdict", "summary")
    able = [t for t in targets or DEFAULT_TARGETS if t != "cpu" and capability >= TARGETS[t].min_capability and (t != "sm_90a" or capability == (9, 0))]
    for (path, precision), target, tool in ((job, target, tool) for job in jobs for target in able for tool in tools or TOOLS):
        spec, key = load_spec(path, precision), present_keys(path, precision).get(target)
        identity = (spec.name, precision, target, tool)
        if key is None or (not force and done.get(identity, {}).get("key") == key and done[identity]["clean"]):
            continue
        if budget_s and budget_s - (time.perf_counter() - start) < longest * 1.2:
            console.print("stopped for lack of time; run again to go on")
            break
        began = time.perf_counter()
        try:
            folder, kernels = small_package(spec, target)
        except (SpecError, PlanError) as error:
            raise click.ClickException(str(error)) from None
        found = examine(sanitizer, tool, folder, target, kernels, timeout_s)
        longest = max(longest, time.perf_counter() - began)
        done[identity] = {"spec": spec.name, "precision": precision, "target": target, "key": key, **found}
        record["runs"] = [done[k] for k in sorted(done)]
        write_json(at, record)
        verdict = "[green]clean[/]" if found["clean"] else "[bold red]errors[/]"
        table.add_row(spec.package, target, tool, verdict, found["summary"] + ("" if found["clean"] else "\n" + "\n".join(found["errors"][:4])))
    console.print(table)
    sys.exit(not all(r["clean"] for r in record["runs"]))


if __name__ == "__main__":
    main()
