"""`make verify`: is a generated model right? Against float64, beside PyTorch at the same precision, on ordinary and on adversarial data."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.table import Table

from bench.data import Draw
from bench.doubt import Doubt, doubt_of, overflows
from bench.families import FAMILIES, Family
from bench.machine import choose_device, describe
from bench.metrics import Errors, compare, same_bits
from bench.promise import NO_DIGIT, Yardsticks, allowed_error, allowed_outside, broken, by_chance, draws_for, independent, margin_of, pooled, pooled_errors
from bench.subject import EXACT_VALUES, Subject, built_target, construct, emit, target_to_emit
from codegen.ir.fused_form import departure, fused
from codegen.numerics import PRECISIONS
from codegen.ops import Kind
from codegen.ir.flop import producer_flop
from codegen.spec import Spec
from codegen.targets import TARGETS

TRAINING, EVALUATION = MODES = ("training", "evaluation")
STATE_MARGIN = 4  # running statistics are means of many values, each rounded once: their errors scatter more than a result's
CPU_FLOP = 2e9  # on a CPU, specs of more work than this compare some samples only (but for their own inputs) and repeat less


State = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Finding:
    """One family's measures and what is wrong with them: of one draw of its data, or of several together (`draws`)."""

    family: Family
    ours: Errors
    by: Yardsticks
    allowed: float
    allowed_outside: int | None
    repeats: int
    problems: tuple[str, ...]
    draws: int = 1
    mode: str = ""  # of a chain whose training computes something else: training or evaluation
    eager_in_single: tuple[str, ...] = ()  # what eager computed in float32, as PyTorch lacks it in the spec's 16 bits on a CPU
    unknown: int = 0  # elements of which float64 itself says nothing (bench.doubt)

    @property
    def name(self) -> str:
        """The family and, where there are two, the mode."""
        return self.family.name + (f", {self.mode}" if self.mode else "")

    @property
    def ok(self) -> bool:
        return not self.problems

    def record(self) -> dict:
        """As plain data for the ledger."""
        return {
            "family": self.name, "ok": self.ok, "rel_error": rounded(self.ours.relative), "allowed": rounded(self.allowed),
            "eager_rel_error": rounded(self.by.eager.relative), "max_error": rounded(self.ours.largest), "outside": self.ours.outside,
            "eager_outside": self.by.eager.outside, "elements": self.ours.elements, "group_mean": rounded(self.ours.group_mean),
            "group_std": rounded(self.ours.group_std), "problems": list(self.problems), "draws": self.draws,
            **({"eager_in_fp32": list(self.eager_in_single)} if self.eager_in_single else {}),
            **({"unknown": self.unknown} if self.unknown else {}),
        }  # fmt: skip


def verdict(findings: list[Finding]) -> dict[str, Any]:
    """What a record says of them: it counts as verified when every family is right."""
    return {"verified": all(finding.ok for finding in findings), "verification": [finding.record() for finding in findings]}


def rounded(value: float | None) -> float | None:
    """Four significant digits for a record; None for what is missing or not finite."""
    return float(f"{value:.4g}") if value is not None and math.isfinite(value) else None


def verify(subject: Subject, families: tuple[str, ...] = (), repeats: int = 3, seed: int = 1, on_finding=None) -> list[Finding]:
    """Run the families (all that apply, when none is named) and judge each. `repeats` further runs must give the same bits.

    Errors above the promise that may be luck are judged by more draws (bench.promise).
    """
    spec = subject.spec
    chosen = [family for family in (FAMILIES[name] for name in families or FAMILIES) if family.serves(spec)]
    cases = [(family, mode) for family in chosen for mode in (MODES if spec.has_modes else ("",))]
    findings = []
    for number, (family, mode) in enumerate(cases):
        again = repeats if family.initial else min(repeats, int(not _costly(spec, subject.device)))
        finding = _examine(subject, family, mode, again, seed + number)
        if not finding.ok and _lucky(spec, finding):
            finding = _again(subject, finding)
        findings.append(finding)
        if on_finding:
            on_finding(finding)
    subject.load({})
    return findings


def _lucky(spec: Spec, found: Finding) -> bool:
    """Could what is wrong with a draw be right with others?"""
    return by_chance(spec, found.ours, found.by, found.family.initial) and set(found.problems) <= set(broken(spec, found.ours, found.by, found.family.initial))


def _again(subject: Subject, first: Finding) -> Finding:
    """The verdict of several draws together, not of the one that gave rise to them; of one alone where it is wrong for certain."""
    spec, family = subject.spec, first.family
    count = draws_for(independent(spec, first.ours.elements))
    draws = [_examine(subject, family, first.mode, 0, 1000 * seed) for seed in range(1, count + 1)]
    certain = next((found for found in draws if not found.ok and not _lucky(spec, found)), None)
    if certain:
        return certain
    judged = [found for found in draws if not found.by.overflowed] or draws
    ours, by = [found.ours for found in judged], [found.by for found in judged]
    allowed, outside, problems = pooled(spec, ours, by, family.initial)
    eager = pooled_errors([one.eager for one in by])
    unknown = sum(found.unknown for found in judged)
    return Finding(
        family, pooled_errors(ours), replace(by[0], eager=eager), allowed, outside, first.repeats, tuple(problems), len(judged), first.mode, first.eager_in_single, unknown
    )  # fmt: skip


def _examine(subject: Subject, family: Family, mode: str, repeats: int, seed: int) -> Finding:
    spec = subject.spec
    draw = Draw(spec, subject.device, seed)
    inputs, parameters = draw.finish(*family.make(draw))
    subject.load(parameters, mode != EVALUATION)
    y = subject.run_ours(inputs)
    problems = _shape_problems(spec, y)
    if problems:
        nothing = Errors(math.inf, math.inf, 0, 0, None, None, None)
        return Finding(family, nothing, Yardsticks(nothing, nothing, None, 0.0, 0.0), 0.0, None, 0, tuple(problems), mode=mode)
    state = subject.state(subject.ours)
    changed = sum(not same_bits(y, subject.run_ours(inputs)) for _ in range(repeats))
    if changed and departure(spec.chain) is not None and not same_bits(subject.run_eager(inputs), subject.run_eager(inputs)):
        changed = 0  # an operator of PyTorch, which computes a step of the chain, gives other bits each time
    rows = _rows(spec, subject.device, family)
    part = inputs if rows is None else tuple(given[rows] if of.batched else given for given, of in zip(inputs, spec.inputs, strict=True))
    y = y if rows is None else y[rows]
    run_eager = subject.run_eager_beside_exact_norm if family.beyond else subject.run_eager
    eager_y = run_eager(part)
    eager_state = subject.state(subject.eager)
    exact = subject.run_exact(part)
    exact_state = subject.state(subject._exact)
    form = fused(spec)
    groups = form.num_groups if form and spec.output_shape[1:2] == (form.channels,) else None
    others = (lambda: run_eager(part, "fp32"), lambda: subject.run_tf32_model(part)) if spec.precision.name == "tf32" else ()
    ours, by = _measured(spec, y, exact, eager_y, others, groups)
    theirs = (eager_state, subject.state(subject._exact)) if others else (eager_state,)  # the exact model's latest run is then the TF32 model
    problems += state_problems(state, theirs, exact_state)
    wrong = broken(spec, ours, by, family.initial)
    unknown = 0
    if (wrong or by.eager.relative > NO_DIGIT) and exact.numel() <= EXACT_VALUES:
        doubt = doubt_of(lambda: subject.run_exact(part), spec.precision)
        if doubt.any:
            unknown = doubt.unknown
            ours, by = _measured(spec, y, exact, eager_y, others, groups, doubt)
            wrong = broken(spec, ours, by, family.initial)
            beyond = doubt.beyond(y, exact)
            problems += [f"{beyond} elements that are nothing but roundings are further off than these explain"] if beyond else []
        if ours.parity:
            unsure = torch.where(overflows(lambda: run_eager(part)), torch.nan, eager_y)
            ours, by = _measured(spec, y, exact, eager_y, others, groups, doubt if doubt.any else None, unsure)
            wrong = broken(spec, ours, by, family.initial)
    problems += wrong
    if changed:
        problems.append(f"{changed} of {repeats} repeated runs gave other bits")
    return Finding(
        family, ours, by, allowed_error(spec, by), allowed_outside(spec, by, family.initial), repeats, tuple(problems), mode=mode, eager_in_single=subject.eager_in_single,
        unknown=unknown,
    )  # fmt: skip


def _measured(
    spec: Spec, y: torch.Tensor, exact: torch.Tensor, eager_y: torch.Tensor, others: Sequence[Callable[[], torch.Tensor]], groups: int | None,
    doubt: Doubt | None = None, unsure: torch.Tensor | None = None,
) -> tuple[Errors, Yardsticks]:  # fmt: skip
    """The errors of `y` and of what it is held against, eager and at tf32 `others`, eager with TF32 off and the TF32 model, as far as the exact result is known.

    Where `unsure`, by default eager's result, is no number, an intermediate value may have overflowed.
    """
    overflowing = eager_y if unsure is None else unsure
    measure = lambda result: compare(result, exact, spec.precision.tolerance, groups, overflowing, margin_of(spec), doubt)  # noqa: E731
    eager = measure(eager_y)
    fp32, tf32 = (measure(run()) for run in others) if others else (eager, None)
    finite = torch.isfinite(exact) if doubt is None else torch.isfinite(exact) & doubt.known
    return measure(y), Yardsticks(
        eager=eager,
        eager_fp32=fp32,
        tf32=tf32,
        rounded=compare(exact.to(y.dtype), exact, spec.precision.tolerance, None, doubt=doubt).relative,
        rms=float(exact[finite].square().mean().sqrt()) if bool(finite.any()) else 0.0,
        overflowed=not bool(torch.isfinite(eager_y[finite]).all()),
    )


def state_problems(ours: State, theirs: Sequence[State], exact: State) -> list[str]:
    """Every running statistic that is further from the exact one than STATE_MARGIN of the worst of `theirs`, or of a rounding of its type.

    `theirs` are PyTorch's own and, at tf32, those of the TF32 model: cuDNN takes fp32 for some convolutions though TF32 is allowed.
    """
    problems = []
    for key, wanted in exact.items():
        if not wanted.is_floating_point():
            problems += [] if torch.equal(ours[key], theirs[0][key]) else [f"{key} is {ours[key].tolist()}, expected {theirs[0][key].tolist()}"]
            continue
        error, *others = (compare(one[key], wanted, 0.0, None).relative for one in (ours, *theirs))
        allowed = STATE_MARGIN * max(*others, torch.finfo(ours[key].dtype).eps)
        problems += [] if error <= allowed else [f"{key}: relative error {error:.2e} > {allowed:.2e}"]
    return problems


def _shape_problems(spec: Spec, y: torch.Tensor) -> list[str]:
    dtype = getattr(torch, spec.precision.dtype)
    if tuple(y.shape) != spec.output_shape or y.dtype is not dtype:
        return [f"the result is {tuple(y.shape)} {y.dtype}, expected {spec.output_shape} {dtype}"]
    return []


def _rows(spec: Spec, device: torch.device, family: Family) -> torch.Tensor | None:
    """Which samples are compared: None for all; for costly specs on a CPU the first 8 and 16 spread over the batch."""
    if family.initial or not _costly(spec, device) or not spec.rows_are_samples or spec.has_modes:
        return None
    first = torch.arange(min(8, spec.batch))
    return torch.unique(torch.cat([first, torch.linspace(0, spec.batch - 1, min(16, spec.batch)).long()]))


def _costly(spec: Spec, device: torch.device) -> bool:
    """Is this a CPU, and is the spec's arithmetic more than CPU_FLOP?"""
    return device.type == "cpu" and sum(producer_flop(step) for step in spec.chain if step.operator.kind is Kind.PRODUCER) > CPU_FLOP


def table_of(findings: list[Finding], title: str) -> Table:
    """The findings for a terminal."""
    single = sorted({name for f in findings for name in f.eager_in_single})
    caption = f"eager computes {', '.join(single)} in fp32 and rounds once: PyTorch lacks it in 16 bits on a CPU" if single else None
    table = Table(title=title, title_justify="left", caption=caption, caption_justify="left")
    table.add_column("data")
    for column in ("rel. error", "allowed", "eager", "largest", "outside", "eager's", "group mean", "group std", "draws", "repeats"):
        table.add_column(column, justify="right")
    table.add_column("verdict", overflow="fold")
    for f in findings:
        verdict = "[green]right[/]" if f.ok else "[bold red]WRONG[/] " + "; ".join(f.problems)
        table.add_row(
            f.name, f"{f.ours.relative:.2e}", f"{f.allowed:.2e}", f"{f.by.eager.relative:.2e}", f"{f.ours.largest:.1e}",
            _share(f.ours), _share(f.by.eager), _short(f.ours.group_mean), _short(f.ours.group_std), str(f.draws), str(f.repeats), verdict,
        )  # fmt: skip
    return table


def _short(value: float | None) -> str:
    return "-" if value is None else f"{value:.1e}"


def _share(errors: Errors) -> str:
    return "0" if not errors.outside else f"{errors.outside_share:.2%}" if errors.outside_share >= 5e-5 else f"{errors.outside} of {errors.elements:.0e}"


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("specs", nargs=-1, required=True)
@click.option("--precision", type=click.Choice(list(PRECISIONS)), help="Override the spec's precision.")
@click.option("--prepack", is_flag=True, help="With prepared weights whatever the spec says (package <name>_prepacked).")
@click.option("--no-algebra", "algebra", flag_value=False, default=True, help="The chain as written, operator by operator, whatever the spec says.")
@click.option("--target", type=click.Choice(list(TARGETS)), help="Verify this target; else the best one for the device.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), help="Where to run; else the GPU where one is visible.")
@click.option("--family", "families", multiple=True, type=click.Choice(list(FAMILIES)), help="Only this family of data (repeatable).")
@click.option("--repeats", default=3, show_default=True, help="Repeated runs that must give the same bits.")
@click.option("--seed", default=1, show_default=True)
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=Path("generated"), show_default=True, help="Folder for the packages.")
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Also write the findings here.")
def main(specs, precision, prepack, algebra, target, device, families, repeats, seed, out, json_path) -> None:
    """Verify the generated models of SPECS (YAML files). Exit code 1 says that one is wrong, 2 that a spec is."""
    console = Console(width=None if sys.stdout.isatty() else 180)
    where = choose_device("cpu" if target == "cpu" else device)
    results = {}
    for path in specs:
        emitted = emit(path, precision, target_to_emit(path, where, target), out, prepack, algebra)
        ours = construct(emitted, where, target)
        for size in emitted.sizes:
            subject = Subject(size, ours, where)
            with console.status(f"{size.label}: verifying") as status:
                findings = verify(subject, families, repeats, seed, lambda f, name=size.label: status.update(f"{name}: {f.name} done"))
            console.print(table_of(findings, f"{size.label}, {size.spec.precision.name}, {built_target(ours, size.spec.batch)} on {describe(where).gpu}"))
            results[size.label] = findings
            del subject
        del ours
    if json_path:
        json_path.write_text(json.dumps({name: [f.record() for f in found] for name, found in results.items()}, indent=1) + "\n")
    wrong = [name for name, found in results.items() if not all(f.ok for f in found)]
    console.print(f"[bold red]wrong: {', '.join(wrong)}[/]" if wrong else "[green]all promises kept[/]")
    sys.exit(bool(wrong))
