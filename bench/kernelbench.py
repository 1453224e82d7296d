"""`make kernelbench`: KernelBench's own harness over standalone.py of the nine systems, or of a whole level. See docs/kernelbench.md."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console

from bench import level2, store
from bench.harness import ARCHITECTURES, PRECISIONS, check_start, command_line, environment, in_lanes, measure, on_cards, prebuild, problem_file, reference_source, told, warm_up, work_tree, write_standalone
from bench.machine import cards, choose_device, describe
from bench.store import FORMAT, KERNELBENCH, RESULTS
from codegen.spec import Spec, load_spec

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


def reference_path(run: Run, checkout: Path, work: Path) -> Path:
    """The problem's own file in the checkout, or for first-version shapes a reference emitted from our spec."""
    if run.shapes == "current":
        return problem_file(checkout, run.problem)
    path = work / run.spec.name / "reference.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(reference_source(run.spec), encoding="utf-8")
    return path


def whole_level(checkout, problems, precisions, results, work, budget_s, timeout_s, force, own, timing, judging, folder, device, seconds, algebra) -> None:
    """Both phases of a level, or one: our own where `own`, the harness's where there is a `checkout`."""
    where = choose_device(device)
    if checkout is not None and where.type != "cuda":
        raise click.ClickException("the harness needs a CUDA GPU; --no-harness verifies and times on the CPU")
    chosen = level2.problems_in(folder, problems, precisions, algebra)
    console = Console(width=None if sys.stdout.isatty() else 200, soft_wrap=not sys.stdout.isatty())
    deadline = time.time() + budget_s if budget_s else None
    level = level2.Level(describe(where), where, results, console, deadline, timeout_s, seconds, work / "packages")
    complete = level2.measure_all(level, chosen, timing, force) if own else True
    if checkout is not None and (deadline is None or time.time() < deadline):
        complete &= level2.run_harness(level, chosen, checkout, work, timeout_s, force, not judging)
    counted = [problem for problem in chosen if not own or level.is_current(problem)]
    records = [level.record(problem) for problem in counted]
    right = sum(bool(record.get("verified")) for record in records)
    mean = level2.geometric_mean(list(level2.speedups([record for record in records if "verified" in record])))
    console.print(f"{right} of {len(chosen)} verified" + (f"; {mean:.3f}x the fastest of PyTorch's own, the geometric mean of the ordinary ones" if mean else ""))
    if not complete:
        console.print("stopped for lack of time; run again to go on")
    sys.exit(own and right < len(chosen))


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
@click.option("--verdicts", is_flag=True, help="Of a level: the harness's verdicts alone, several runs at once on a card, without times.")
@click.option("--no-algebra", "algebra", flag_value=False, default=True, help="Of a level: chains as written. Their records stand beside those of rewritten ones.")
@click.option("--verify-only", is_flag=True, help="Of a level: verify by ourselves, time nothing.")
@click.option("--specs", "folder", type=click.Path(exists=True, file_okay=False, path_type=Path), help="Of a level: the folder of its specs, <number>_<name>.yaml.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), help="Of a level: where to run; else the GPU where one is visible.")
@click.option("--seconds", default=1.0, show_default=True, help="Of a level: time for our own trials of one problem.")
@click.option("--prepare-only", is_flag=True, help="Write the standalone files, references and stubs, print the command lines and run nothing.")
def main(checkout, level, problems, shapes, precisions, results, work, budget_s, timeout_s, force, warm, no_harness, harness_only, verdicts, algebra, verify_only, folder, device, seconds, prepare_only) -> None:
    """Run KernelBench's run_and_check.py on standalone.py of the nine systems, or of a whole level, and record what it says."""
    if level:
        if (harness_only or verdicts) and (no_harness or verify_only):
            raise click.UsageError("--harness-only and --verdicts ask the harness, which --no-harness and --verify-only leave out")
        needs_harness = not no_harness and not verify_only
        if needs_harness and checkout is None:
            raise click.UsageError("the harness needs --checkout; --no-harness verifies and times without it")
        whole_level(
            work_tree(checkout.resolve(), work.resolve()) if needs_harness else None, tuple(problems), precisions or ("fp32",), results, work, budget_s, timeout_s, force,
            not (harness_only or verdicts), not verify_only, verdicts, folder or level2.SPECS, device, seconds, algebra,
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
    check_start(checkout, env)
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
