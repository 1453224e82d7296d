"""`make bench`: our time beside the peers' at the same precision, in one process on one card, each figure with its error. With `--backward` a
forward and its backward together are timed instead, and stand in the forward's record as `backward`."""

from __future__ import annotations

import sys
from pathlib import Path

import click
import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from bench.backward import measure_backward, needs_backward
from bench.backward import table_of as table_of_backward
from bench.machine import Machine, choose_device, describe
from bench.measure import measure, save_machine
from bench.peers import AUTOTUNED, CHOICES, EVIDENCE
from bench.records import NOT_PREPARED, PREPARED, find, keep, with_backward_of, with_peers_of, with_verdict_of
from bench.store import Record
from bench.subject import Emitted, Subject, built_target, construct, emit, target_to_emit
from bench.timing import Ceilings, measure_ceilings
from bench.verify import table_of as table_of_findings
from bench.verify import verdict, verify
from codegen.numerics import PRECISIONS
from codegen.targets import TARGETS

GROUPS = {"evidence": EVIDENCE, "autotuned": AUTOTUNED, "all": CHOICES, "none": ()}


def chosen_peers(text: str) -> tuple[str, ...]:
    """`PEERS=eager,triton` or the name of a group; order kept, each once. Raises click.BadParameter."""
    names: list[str] = []
    for word in text.replace(",", " ").split():
        if word not in GROUPS and word not in CHOICES:
            raise click.BadParameter(f"{word!r} is none of {', '.join((*GROUPS, *CHOICES))}")
        names += GROUPS.get(word, (word,))
    return tuple(dict.fromkeys(names))


def ceilings_line(ceilings: Ceilings, machine: Machine) -> str:
    """The machine's rates; of a CPU the one that is measured there."""
    rates = ", ".join(f"{name} {getattr(ceilings, name):.3g}" for name in ("fp32", "tf32", "fp16", "bf16")[: 1 if machine.slug == "cpu" else 4])
    return f"{machine.gpu}, torch {machine.torch}: copy {ceilings.copy:.0f} GB/s; torch's GEMM {rates} TFLOP/s (measured in this process)"


def table_of(record: Record) -> Table:
    """A record for a terminal."""
    best = record["best_peer"]
    table = Table(title=f"{record['package']}, {record['precision']}, {record['target']} on {record['gpu']}", title_justify="left")
    table.add_column("")
    for column in ("ms", "spread", "error", "largest", "ours is faster by", "TFLOP/s", "GB/s", "of the roofline"):
        table.add_column(column, justify="right")
    rows = [(f"ours (weights {record['weights']})", record["ours"])] + sorted(record["peers"].items(), key=lambda item: item[1]["ms"])
    for name, row in rows:
        error = "-" if row["rel_error"] is None else f"{row['rel_error']:.1e}"
        largest = "-" if row["max_error"] is None else f"{row['max_error']:.1e}"
        ratio = "" if row is record["ours"] else f"{row['ms'] / row.get('ours_ms', record['ours']['ms']):.2f}x"
        style = "bold" if row is record["ours"] else "cyan" if name == best else None
        table.add_row(
            name, f"{row['ms']:.4f}", f"{row['spread']:.1%}", error, largest, ratio, f"{row['tflops']:.3g}", f"{row['gbs']:.3g}",
            f"{record['floor_ms'] / row['ms']:.0%}", style=style,
        )  # fmt: skip
    return table


def show(console: Console, record: Record) -> None:
    """Print a record: the table, on a GPU the flags and the cost of a launch, the conclusion."""
    console.print(table_of(record))
    floor = record["floor"]
    console.print(f"floor {record['floor_ms']:.4f} ms: arithmetic {floor['compute_ms']:.4f}, memory {floor['memory_ms']:.4f} at this card's measured rates")
    if "prepare" in record:
        console.print(f"weights are prepared ahead of the calls timed: {record['prepare']['ms']:.4f} ms, {record['prepare']['bytes'] / 1e6:.1f} MB kept")
    if record["target"] != "cpu":
        console.print("switches: " + ", ".join(f"{name}={value}" for name, value in record["flags"].items()))
    for name, row in record["overhead_us"].items():
        replay = "" if row["replay"] is None else f", in a CUDA graph {row['replay']:.1f} us"
        label = f"ours (weights {record['weights']})" if name == "ours" else name
        console.print(f"launch, {label}: host {row['host']:.1f} us, call after call {row['call']:.1f} us{replay}")
    for name, why in record["failed"].items():
        console.print(f"[yellow]{name} could not be run: {why}[/]")
    if record["best_peer"]:
        console.print(f"{record['speedup']}x the fastest peer of equal or better accuracy ({record['best_peer']})")
    if record["best_torch"]:
        console.print(f"{record['speedup_torch']}x the fastest of PyTorch's own ({record['best_torch']})")


def show_backward(console: Console, package: str, precision: str, gpu: str, made: dict) -> None:
    """Print the `backward` of a record."""
    console.print(table_of_backward(package, precision, gpu, made))
    for name, why in made["failed"].items():
        console.print(f"[yellow]{name} could not be run: {why}[/]")
    if made["best_torch"]:
        console.print(f"{made['speedup_torch']}x the fastest of PyTorch's own ({made['best_torch']})")


def judge(console: Console, size: Emitted, ours: nn.Module, where: torch.device, title: str) -> dict:
    """The verdict on a package for its record; printed in a line, with every finding where one is wrong."""
    findings = verify(Subject(size, ours, where))
    judged = verdict(findings)
    if judged["verified"]:
        console.print(f"{title}: [green]right[/] on {len(findings)} kinds of data")
    else:
        console.print(table_of_findings(findings, title))
    return judged


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("specs", nargs=-1, required=True)
@click.option("--precision", "precisions", multiple=True, type=click.Choice(list(PRECISIONS)), help="Precision (repeatable); else the spec's own.")
@click.option("--prepack", is_flag=True, help="With prepared weights whatever the spec says (package <name>_prepacked).")
@click.option("--no-algebra", "algebra", flag_value=False, default=True, help="The chain as written, operator by operator, whatever the spec says.")
@click.option("--target", type=click.Choice(list(TARGETS)), help="Time this target; else the best one for the device.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]))
@click.option("--peers", default="evidence", show_default=True, help=f"Groups ({', '.join(GROUPS)}) or peers ({', '.join(CHOICES)}), with commas.")
@click.option("--seconds", default=3.0, show_default=True, help="Time for the trials of one table.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=Path("generated"), show_default=True, help="Folder for the packages.")
@click.option("--results", type=click.Path(file_okay=False, path_type=Path), help="Also write records under this folder.")
@click.option("--verify", "verifying", is_flag=True, help="Verify first, for the record; exit code 1 says that one is wrong.")
@click.option("--backward", is_flag=True, help="Time a forward and its backward together, beside the peers that train; with --results the forward first "
              "where its record is missing or old.")  # fmt: skip
def main(specs, precisions, prepack, algebra, target, device, peers, seconds, out, results, verifying, backward) -> None:
    """Time the generated models of SPECS beside PyTorch and other peers."""
    console = Console(width=None if sys.stdout.isatty() else 180)
    if results and not algebra:
        raise click.UsageError("--results keeps records of what the specs ask for; --no-algebra is for a look at the other plan")
    names = chosen_peers(peers)
    where = choose_device("cpu" if target == "cpu" else device)
    made = [emit(path, p, target_to_emit(path, where, target), out, prepack, algebra) for path in specs for p in precisions or (None,)]
    for emitted in made if backward else ():
        needs_backward(emitted, where)
    machine, ceilings = describe(where), measure_ceilings(where)
    console.print(ceilings_line(ceilings, machine))
    wrong = []
    for emitted in made:
        ours = construct(emitted, where, target)
        for size in emitted.sizes:
            spec, runs = size.spec, built_target(ours, size.spec.batch)
            weights = PREPARED if size.prepares(runs) else NOT_PREPARED
            before = find(results, machine.slug, spec.name, spec.precision.name, target, weights, size.batch) if results else None
            current = before is not None and (before["target"], before["key"]) == (runs, size.key(runs))
            record = before if backward and current else {}
            judged = {}
            with console.status(size.label) as status:
                report = lambda what: status.update(f"{size.label}: {what}")  # noqa: E731, B023
                if verifying:
                    report("verifying")
                    judged = judge(console, size, ours, where, f"{size.label}, {spec.precision.name}, {runs} on {machine.gpu}")
                    wrong += [] if judged["verified"] else [size.label]
                if not backward or (results and not current):
                    record = measure(size, ours, where, machine, ceilings, names, seconds, report) | judged
                    show(console, record)
                    record = with_backward_of(with_peers_of(with_verdict_of(record, before), before), before)
                if backward:
                    timed = measure_backward(size, ours, where, machine, names, seconds, report)
                    show_backward(console, size.label, spec.precision.name, machine.gpu, timed)
                    record = {**record, **judged, "backward": timed}
            if results:
                keep(results, machine.slug, record, target)
                save_machine(results, machine, ceilings)
    if wrong:
        console.print(f"[bold red]wrong: {', '.join(wrong)}[/]")
        sys.exit(1)
