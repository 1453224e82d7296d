"""KernelBench's own harness: its script run unchanged over standalone.py, and what it printed. See docs/kernelbench.md."""

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
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Lock
from typing import Any

import click
import torch

from codegen.package import make_package
from codegen.render import render
from codegen.spec import Spec
from codegen.standalone import render_standalone
from codegen.torch_text import module_lines, parameters, reference_lines, value_variable
from runtime.resources import usable_cores

PRECISIONS = ("fp32", "fp16", "bf16")
FP32_REFERENCE = {"NVIDIA_TF32_OVERRIDE": "0"}  # environment in which cuBLAS and cuDNN keep fp32, which torch's own switches leave to TF32 in convolutions
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
        return {value_variable(spec)}


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
    hopper = torch.cuda.is_available() and torch.cuda.get_device_capability(0) == (9, 0)
    target = "sm_90a" if hopper and "sm_90a" in targets else "sm_80"
    return path, target, targets[target]["source_key"]


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


def check_start(checkout: Path, env: dict[str, str], timeout_s: float = 120.0) -> None:
    """Start the script without arguments, which it refuses once all it imports is there. Raises click.ClickException that names a missing module."""
    output = call([sys.executable, str(SCRIPT)], checkout, env, timeout_s)
    if missing := re.search(r"(?:ModuleNotFoundError|ImportError): (.*)", output):
        raise click.ClickException(f"the harness does not start: {missing.group(1)}; install what {checkout.name}/pyproject.toml lists (pydra is pydra-config, dotenv is python-dotenv)")


def prebuild(sources: list[Path], env: dict[str, str], builds: Path) -> None:
    """Compile the standalone files several at once, where the harness will look for them; it finds nothing left to do."""
    program = (
        "import os, sys; text = open(sys.argv[1]).read(); os.environ['TORCH_EXTENSIONS_DIR'] = os.path.join(sys.argv[2], 'test_build', str(hash(text)));"
        "os.makedirs(os.environ['TORCH_EXTENSIONS_DIR'], exist_ok=True); scope = {}; exec(text, scope); scope['_library']()"
    )
    with ThreadPoolExecutor(usable_cores()) as pool:
        list(pool.map(lambda path: subprocess.run([sys.executable, "-c", program, str(path), str(builds)], env=env, capture_output=True), sources))


def _workers(places: int = 1) -> int:
    return max(1, min(6 * places, usable_cores() // 2))


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


def command_line(run: Any, reference: Path, standalone: Path, architecture: str, builds: Path, trials: int | None = None) -> list[str]:
    """The harness's own command line; `run` is anything that has a `precision`, `trials` how often it times, its own number without.

    The harness has no word for TF32: those files take and give fp32, and its reference may use TF32 where torch does by itself.
    """
    precision = "fp32" if run.precision == "tf32" else run.precision
    return [
        sys.executable, str(SCRIPT), "ref_origin=local", f"ref_arch_src_path={reference.resolve()}", f"kernel_src_path={standalone.resolve()}", "eval_mode=local",
        f'gpu_arch=["{architecture}"]', f"precision={precision}", "backend=cuda", f"build_dir_prefix={builds.resolve()}",
        *([f"num_perf_trials={trials}"] if trials else []),
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
