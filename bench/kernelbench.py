"""KernelBench's own harness over standalone.py: its script, its reference, its verdict, recorded as it prints them. See docs/kernelbench.md."""

from __future__ import annotations

import ast
import io
import json
import os
import re
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Lock
from typing import Any

import click
import torch
from rich.console import Console

from bench import level2, store
from bench.machine import cards, choose_device, describe
from bench.store import FORMAT, KERNELBENCH, RESULTS
from codegen.emit import make_package
from codegen.render import render
from codegen.spec import Spec, load_spec
from codegen.standalone import render_standalone
from codegen.targets import TARGETS, cuda_targets, preference
from codegen.torch_text import module_lines, parameters, reference_lines

PROBLEMS = {
    30: "specs/default.yaml",
    94: "specs/gemm_biasadd_hardtanh_mish_groupnorm.yaml",
    85: "specs/conv2d_groupnorm_scale_maxpool_clamp.yaml",
    62: "specs/matmul_groupnorm_leakyrelu_sum.yaml",
    88: "specs/gemm_groupnorm_swish_multiply_swish.yaml",
    37: "specs/matmul_swish_sum_groupnorm.yaml",
    21: "specs/conv2d_add_scale_sigmoid_groupnorm.yaml",
    75: "specs/gemm_groupnorm_min_biasadd.yaml",
    92: "specs/conv2d_groupnorm_tanh_hardswish_residualadd_logsumexp.yaml",
}
SMALL = {
    30: "specs/gemm_groupnorm_hardtanh_small.yaml",
    94: "specs/gemm_biasadd_hardtanh_mish_groupnorm_small.yaml",
    85: "specs/conv2d_groupnorm_scale_maxpool_clamp_small.yaml",
    62: "specs/matmul_groupnorm_leakyrelu_sum_small.yaml",
    88: "specs/gemm_groupnorm_swish_multiply_swish_small.yaml",
    37: "specs/matmul_swish_sum_groupnorm_small.yaml",
    21: "specs/conv2d_add_scale_sigmoid_groupnorm_small.yaml",
    75: "specs/gemm_groupnorm_min_biasadd_small.yaml",
    92: "specs/conv2d_groupnorm_tanh_hardswish_residualadd_logsumexp_small.yaml",
}
PRECISIONS = ("fp32", "fp16", "bf16")
SCRIPT = Path("scripts/run_and_check.py")
NOISE = 0.3  # a standard deviation above this share of the mean is noise, not a time
ARCHITECTURES = {(8, 0): "Ampere", (8, 6): "Ampere", (8, 9): "Ada", (9, 0): "Hopper"}

# The script imports these for its cloud mode and for asking language models; neither is used here.
_STUB = '''
class _Anything:
    def __call__(self, *args, **kwargs):
        return args[0] if len(args) == 1 and not kwargs and callable(args[0]) else self

    def __getattr__(self, name):
        return self


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return _Anything()
'''


@dataclass(frozen=True)
class Run:
    """One call of the harness: problem number, "current" or "first version" shapes, precision."""

    problem: int
    shapes: str
    precision: str

    @property
    def spec(self) -> Spec:
        return load_spec((PROBLEMS if self.shapes == "current" else SMALL)[self.problem], self.precision)

    @property
    def name(self) -> str:
        return f"problem {self.problem}, {self.shapes} shapes, {self.precision}"


def reference_source(spec: Spec) -> str:
    """The layer as a reference file for the harness: Model, get_inputs, get_init_inputs; always fp32, the harness converts it itself."""
    body = "\n".join(f"        {line}" for line in module_lines(spec))
    forward = "\n".join(f"        {line}" for line in reference_lines(spec))
    return f"""import torch
import torch.nn as nn
import torch.nn.functional as F


class Model(nn.Module):
    def __init__({", ".join(["self", *parameters(spec)])}):
        super().__init__()
{body}

    def forward(self, {", ".join(given.name for given in spec.inputs)}):
{forward}
        return v


def get_inputs():
    return [{", ".join(f"torch.{given.values}({', '.join(map(str, given.shape))})" for given in spec.inputs)}]


def get_init_inputs():
    return [{", ".join(map(repr, spec.init_values))}]
"""


def write_standalone(spec: Spec, work: Path) -> tuple[Path, str, str]:
    """standalone.py of a spec; returns its path, the target that it runs on the present card and that target's source_key."""
    package = make_package(spec)
    files = render(package)
    path = work / spec.package / "standalone.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(render_standalone(package, files), encoding="utf-8")
    targets = json.loads(files["manifest.json"])["targets"]
    emitted = [TARGETS[name] for name in preference(cuda_targets().values()) if name in targets]
    capability = torch.cuda.get_device_capability(0) if torch.cuda.is_available() else None
    target = next((row.name for row in emitted if capability and row.runs_on(capability)), emitted[-1].name)
    return path, target, targets[target]["source_key"]


def reference_path(run: Run, checkout: Path, work: Path) -> Path:
    """The problem's own file in the checkout, or for first-version shapes a reference emitted from our spec."""
    if run.shapes == "current":
        return problem_file(checkout, run.problem)
    path = work / run.spec.name / "reference.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(reference_source(run.spec), encoding="utf-8")
    return path


def problem_file(checkout: Path, problem: int) -> Path:
    """A level-2 problem's own file. Raises click.ClickException."""
    found = sorted((checkout / "KernelBench" / "level2").glob(f"{problem}_*.py"))
    if not found:
        raise click.ClickException(f"{checkout}/KernelBench/level2 has no problem {problem}")
    return found[0]


def work_tree(checkout: Path, work: Path) -> Path:
    """The checkout, or where it is a git directory without files, what the harness needs of it, written under `work`. Raises click.ClickException."""
    if (checkout / SCRIPT).is_file():
        return checkout
    if not (checkout / "objects").is_dir():
        raise click.ClickException(f"{checkout} is no checkout of KernelBench: it has no {SCRIPT}")
    tree = work / "checkout"
    tree.mkdir(parents=True, exist_ok=True)
    git = ["git", f"--git-dir={checkout}", "archive", "HEAD", "--", "src", "scripts", "KernelBench/level2", "pyproject.toml"]
    archived = subprocess.run(git, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    if archived.returncode:
        raise click.ClickException(f"{checkout}: git cannot read it ({archived.stderr.decode(errors='replace').strip()})")
    with tarfile.open(fileobj=io.BytesIO(archived.stdout)) as tar:
        tar.extractall(tree, filter="data")
    return tree


def environment(checkout: Path, work: Path) -> dict[str, str]:
    """The harness's environment: stubs first, its sources behind, and a fixed hash seed, from which it names its build folders."""
    stubs = work / "stubs"
    stubs.mkdir(parents=True, exist_ok=True)
    for name in ("modal", "openai", "litellm"):
        (stubs / f"{name}.py").write_text(_STUB, encoding="utf-8")
    path = [str(stubs), str(checkout / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path), "PYTHONHASHSEED": "0"}


def prebuild(sources: list[Path], env: dict[str, str], builds: Path) -> None:
    """Compile the standalone files several at once, where the harness will look for them; it finds nothing left to do."""
    program = (
        "import os, sys; text = open(sys.argv[1]).read(); os.environ['TORCH_EXTENSIONS_DIR'] = os.path.join(sys.argv[2], 'test_build', str(hash(text)));"
        "os.makedirs(os.environ['TORCH_EXTENSIONS_DIR'], exist_ok=True); scope = {}; exec(text, scope); scope['_library']()"
    )
    with ThreadPoolExecutor(_workers()) as pool:
        list(pool.map(lambda path: subprocess.run([sys.executable, "-c", program, str(path), str(builds)], env=env, capture_output=True), sources))


def _workers(places: int = 1) -> int:
    return max(1, min(6 * places, (os.cpu_count() or 2) // 2))


def call(command: list[str], checkout: Path, env: dict[str, str], timeout_s: float) -> str:
    """What the harness's script printed, whatever became of it."""
    try:
        return subprocess.run(command, cwd=checkout, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout_s).stdout
    except subprocess.TimeoutExpired as error:
        return f"{(error.stdout or b'').decode(errors='replace')}\nended after {timeout_s:.0f} s"


def on_cards(env: dict[str, str], places: tuple[str, ...]) -> list[dict[str, str]]:
    """The environment of a process on each of the cards."""
    return [{**env, "CUDA_VISIBLE_DEVICES": place} for place in places]


def warm_up(commands: list[list[str]], checkout: Path, places: list[dict[str, str]], timeout_s: float) -> None:
    """Run them all, several at once on each card, and forget the outcome: Inductor's cache and the extensions' build folders are full afterwards."""
    with ThreadPoolExecutor(_workers(len(places))) as pool:
        list(pool.map(lambda numbered: call(numbered[1], checkout, places[numbered[0] % len(places)], timeout_s), enumerate(commands)))


def measure(command: list[str], checkout: Path, work: Path, env: dict[str, str], timeout_s: float) -> dict[str, Any]:
    """One run's record: the harness's verdict and times; run twice where the first was noisy."""
    output, earlier = call(command, checkout, env, timeout_s), None
    if noisy(output):
        output, earlier = call(command, checkout, env, timeout_s), output
    folders = (checkout, work, Path.cwd())
    found = {**parse(output), "spread": spreads(output), "noisy": earlier is not None, "output": verbatim(output, *folders)}
    return found | ({"first_output": verbatim(earlier, *folders)} if earlier is not None else {})


def in_lanes(
    runs: Sequence[Any], perform: Callable[[Any, dict[str, str]], dict[str, Any]], take: Callable[[Any, dict[str, Any]], None],
    places: list[dict[str, str]], deadline: float | None,
) -> bool:  # fmt: skip
    """Perform `runs` in their order, one at a time in each of `places` (environments, one a card), and `take` each result, one at a time.

    Ends where the next run may outlast the deadline (time.perf_counter()); True when all were performed.
    """
    taking, waiting = Lock(), SimpleQueue()
    for run in runs:
        waiting.put(run)

    def lane(place: dict[str, str]) -> None:
        longest = 0.0
        while deadline is None or deadline - time.perf_counter() >= longest * 1.1:
            try:
                run = waiting.get_nowait()
            except Empty:
                return
            began = time.perf_counter()
            found = perform(run, place)
            longest = max(longest, time.perf_counter() - began)
            with taking:
                take(run, found)

    with ThreadPoolExecutor(len(places)) as lanes:
        list(lanes.map(lane, places))
    return waiting.empty()


def told(found: dict[str, Any]) -> str:
    """A run's outcome in a line."""
    again = ", noisy, so run twice" if found["noisy"] else ""
    return f"{found['verdict']}, {found['speedup_eager']}x eager, {found['speedup_compile']}x torch.compile{again}"


def command_line(run: Run, reference: Path, standalone: Path, architecture: str, builds: Path) -> list[str]:
    """The harness's own command line, for a run or anything else of a precision."""
    return [
        sys.executable, str(SCRIPT), "ref_origin=local", f"ref_arch_src_path={reference.resolve()}", f"kernel_src_path={standalone.resolve()}", "eval_mode=local",
        f'gpu_arch=["{architecture}"]', f"precision={run.precision}", "backend=cuda", f"build_dir_prefix={builds.resolve()}",
    ]  # fmt: skip


def parse(output: str) -> dict:
    """Verdict, times (ms) and speed-ups from what the script printed; None for what it did not print."""
    number = lambda pattern: float(m.group(1)) if (m := re.search(pattern, output)) else None  # noqa: E731
    warnings = re.search(r"\[WARN\] Static check warnings: (.*)", output)
    refused = re.search(r"Static check failed\. Errors: (.*?)\. Warnings:", output)
    compiled, correct = "compiled=True" in output, "correctness=True" in output
    return {
        "static_errors": refused.group(1) if refused else "[]", "static_warnings": warnings.group(1) if warnings else "[]", "compiled": compiled,
        "correct": correct, "verdict": "correct" if correct else "static check failed" if refused else "wrong" if compiled else "did not run",
        "eager_ms": number(r"Reference Eager exec time: ([\d.]+) ms"), "compile_ms": number(r"torch\.compile time: ([\d.]+) ms"),
        "ours_ms": number(r"Custom Kernel exec time: ([\d.]+) ms"), "speedup_eager": number(r"over eager: ([\d.]+)x"),
        "speedup_compile": number(r"over torch\.compile: ([\d.]+)x"),
    }  # fmt: skip


def spreads(output: str) -> dict[str, float]:
    """Standard deviation over mean of the harness's own trials, of `ours` and of the `reference`, where it printed them."""
    found = {}
    for name, label in (("ours", r"(?<!ref_)runtime_stats"), ("reference", "ref_runtime_stats")):
        printed = re.search(label + r"=(\{[^{}]*\})", output)
        stats = ast.literal_eval(printed.group(1)) if printed else {}
        if stats.get("mean", 0) > 0 and "std" in stats:
            found[name] = round(stats["std"] / stats["mean"], 3)
    return found


def noisy(output: str) -> bool:
    """Did one of the two scatter so much that its mean says little?"""
    return any(spread > NOISE for spread in spreads(output).values())


def verbatim(output: str, *folders: Path) -> list[str]:
    """The lines of the harness's report, without this machine's folders."""
    text = output
    for folder in folders:
        text = text.replace(str(folder.resolve()), "...")
    start = text.find("[INFO] Evaluating")
    lines = text[max(start, 0) :].splitlines()
    return [line for line in lines if line.strip()][-60:]


def whole_level(checkout, problems, precisions, results, work, budget_s, timeout_s, force, own, timing, folder, device, seconds) -> None:
    """Both phases of a level, or one: our own where `own`, the harness's where there is a `checkout`."""
    where = choose_device(device)
    if checkout is not None and where.type != "cuda":
        raise click.ClickException("the harness needs a CUDA GPU; --no-harness verifies and times on the CPU")
    chosen = level2.problems_in(folder, problems, precisions)
    console = Console(width=None if sys.stdout.isatty() else 200, soft_wrap=not sys.stdout.isatty())
    deadline = time.time() + budget_s if budget_s else None
    level = level2.Level(describe(where), where, results, console, deadline, timeout_s, seconds, work / "packages")
    complete = level2.measure_all(level, chosen, timing, force) if own else True
    if checkout is not None and (deadline is None or time.time() < deadline):
        complete &= level2.run_harness(level, chosen, checkout, work, timeout_s, sys.modules[__name__], force)
    records = [level.record(problem) for problem in chosen]
    right = sum(bool(record.get("verified")) for record in records)
    mean = level2.geometric_mean(list(level2.speedups([record for record in records if "verified" in record])))
    console.print(f"{right} of {len(records)} verified" + (f"; {mean:.3f}x the fastest of PyTorch's own, the geometric mean of the ordinary ones" if mean else ""))
    if not complete:
        console.print("stopped for lack of time; run again to go on")
    sys.exit(own and right < len(records))


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--checkout", type=click.Path(exists=True, file_okay=False, path_type=Path), envvar="KERNELBENCH", help="A checkout of KernelBench, or its git directory ($KERNELBENCH); only --level 2 --no-harness needs none.")
@click.option("--level", type=click.Choice(["2"]), help="All problems of the level that there are specs for, verified and timed by us too: <gpu>/level2.jsonl.")
@click.option("--problem", "problems", multiple=True, type=click.IntRange(1, 100), help="Only this problem (repeatable).")
@click.option("--shapes", type=click.Choice(["current", "first version"]), help="Only these shapes.")
@click.option("--precision", "precisions", multiple=True, type=click.Choice([*PRECISIONS, "tf32"]), help="Only this precision (repeatable); of a level fp32 without.")
@click.option("--results", type=click.Path(file_okay=False, path_type=Path), default=RESULTS, help="Folder for the record; default bench/results.")
@click.option("--work", type=click.Path(file_okay=False, path_type=Path), default=Path("build/kernelbench"), show_default=True)
@click.option("--budget-s", default=0.0, help="Stop cleanly before this many seconds are over; 0 means no limit.")
@click.option("--timeout-s", default=240.0, show_default=True, help="For one run of the harness.")
@click.option("--force", is_flag=True, help="Run again what is recorded for today's sources.")
@click.option("--warm", is_flag=True, help="First run every case once, several at once, and discard the results: the caches are full when the measuring begins.")
@click.option("--no-harness", is_flag=True, help="Of a level: verify and time by ourselves alone.")
@click.option("--harness-only", is_flag=True, help="Of a level: the harness alone.")
@click.option("--verify-only", is_flag=True, help="Of a level: verify by ourselves, time nothing.")
@click.option("--specs", "folder", type=click.Path(exists=True, file_okay=False, path_type=Path), help="Of a level: the folder of its specs, <number>_<name>.yaml.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), help="Of a level: where to run; else the GPU where one is visible.")
@click.option("--seconds", default=1.0, show_default=True, help="Of a level: time for our own trials of one problem.")
@click.option("--prepare-only", is_flag=True, help="Write the standalone files, references and stubs, print the command lines and run nothing.")
def main(checkout, level, problems, shapes, precisions, results, work, budget_s, timeout_s, force, warm, no_harness, harness_only, verify_only, folder, device, seconds, prepare_only) -> None:
    """Run KernelBench's run_and_check.py on standalone.py of the nine systems, or of a whole level, and record what it says."""
    if level:
        needs_harness = not no_harness and not verify_only
        if needs_harness and checkout is None:
            raise click.UsageError("the harness needs --checkout; --no-harness verifies and times without it")
        whole_level(
            work_tree(checkout.resolve(), work.resolve()) if needs_harness else None, tuple(problems), precisions or ("fp32",), results, work, budget_s, timeout_s, force,
            not harness_only, not verify_only, folder or level2.SPECS, device, seconds,
        )  # fmt: skip
        return
    if checkout is None:
        raise click.UsageError("Missing option '--checkout': a checkout of KernelBench ($KERNELBENCH)")
    checkout = work_tree(checkout.resolve(), work.resolve())
    for number in problems:
        if number not in PROBLEMS:
            raise click.UsageError(f"problem {number} is none of the nine systems ({', '.join(map(str, PROBLEMS))}); --level 2 has all")
    runs = [
        Run(number, which, precision)
        for which in ("current", "first version") for number in PROBLEMS for precision in PRECISIONS
        if (not problems or number in problems) and (not shapes or which == shapes) and (not precisions or precision in precisions)
    ]  # fmt: skip
    env, builds = environment(checkout, work.resolve()), work / "build"
    written = {run: write_standalone(run.spec, work) for run in runs}
    if prepare_only:
        for run in runs:
            click.echo(" ".join(command_line(run, reference_path(run, checkout, work), written[run][0], "Hopper", builds)))
        return
    if not torch.cuda.is_available():
        raise click.ClickException("the harness needs a CUDA GPU; --prepare-only writes what it needs and prints its command lines")
    machine = describe(torch.device("cuda", 0))
    architecture = ARCHITECTURES.get(torch.cuda.get_device_capability(0), "Hopper")
    recorded = store.read(KERNELBENCH, results, machine.slug) or store.read(KERNELBENCH, RESULTS, machine.slug)
    # Runs of another card or torch are no evidence beside these, and leave the file with the first new one.
    recorded = [record for record in recorded if (record["gpu"], record["torch"]) == (machine.gpu, machine.torch)]
    start = time.perf_counter()
    done = {(r["problem"], r["shapes"], r["precision"]): r for r in recorded}
    runs = [run for run in runs if force or done.get((run.problem, run.shapes, run.precision), {}).get("key") != written[run][2]]
    with Console(stderr=True).status("compiling"):
        prebuild([written[run][0] for run in runs], env, builds)
    commands = {run: command_line(run, reference_path(run, checkout, work), written[run][0], architecture, builds) for run in runs}
    places = on_cards(env, cards(torch.device("cuda", 0)))
    if warm:
        warm_up(list(commands.values()), checkout, places, min(timeout_s, budget_s or timeout_s))
        click.echo(f"{len(commands)} cases run once, results discarded ({time.perf_counter() - start:.0f} s)")

    def take(run: Run, found: dict[str, Any]) -> None:
        _, target, key = written[run]
        done[(run.problem, run.shapes, run.precision)] = {
            "format": FORMAT, **machine.facts, "problem": run.problem, "shapes": run.shapes, "precision": run.precision, "package": run.spec.package, "target": target, "key": key, **found,
        }  # fmt: skip
        store.replace(KERNELBENCH, results, machine.slug, done.values())
        click.echo(f"{run.name}: {told(found)}")

    if not in_lanes(runs, lambda run, place: measure(commands[run], checkout, work, place, timeout_s), take, places, start + budget_s if budget_s else None):
        click.echo("stopped for lack of time; run again to go on")
    sys.exit(not all(r["correct"] for r in done.values()))
