"""`make demo`: the main job once, end to end, on whatever this machine has."""

from __future__ import annotations

import shlex
import sys
import time
from pathlib import Path

import click
import torch
from rich.console import Console
from rich.table import Table

from bench.machine import precision_flags
from bench.packages import generate, load_package
from codegen.numerics import PRECISIONS
from codegen.plan import Refusal
from codegen.spec import Spec, SpecError, load_spec
from codegen.targets import DEVICES, TARGETS
from runtime import RuntimeFailure


def relative_error(y: torch.Tensor, reference: torch.Tensor) -> float:
    """Frobenius norm of the difference over that of the float64 reference."""
    return float((y.double() - reference).norm() / reference.norm())


def timed(call, device: torch.device, trials: int) -> float:
    """Median time of `call` in milliseconds, after one call to warm up."""
    call()
    times = []
    for _ in range(trials):
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e3)
    return sorted(times)[len(times) // 2]


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("spec", default="specs/default.yaml")
@click.option("--precision", type=click.Choice(list(PRECISIONS)), help="Override the spec's precision.")
@click.option("--target", "targets", multiple=True, type=click.Choice(list(TARGETS)), help="Emit for this target only (repeatable).")
@click.option("--device-class", type=click.Choice(list(DEVICES)), help="Plan for this class of card instead of each target's default.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=Path("generated"), show_default=True, help="Folder for the package.")
@click.option("--trials", default=5, show_default=True, help="Timed calls of each.")
def main(spec: str, precision: str | None, targets: tuple[str, ...], device_class: str | None, out: Path, trials: int) -> None:
    """Generate SPEC, build it for this machine, and run ModelNew beside the PyTorch reference."""
    try:
        loaded = load_spec(spec, precision)
        folder = generate(spec, precision, targets, device_class, out)
    except SpecError as error:
        click.echo(str(error), err=True)
        sys.exit(2)
    except Refusal as error:
        raise click.ClickException(str(error)) from None
    click.echo(f"wrote {folder}: " + ", ".join(sorted(p.name for p in folder.iterdir() if p.suffix in (".cu", ".cpp", ".py"))))
    try:
        run(folder, loaded, trials)
    except RuntimeFailure as error:
        raise click.ClickException(str(error)) from None
    chosen = {"SPEC": spec, "PRECISION": precision, "TARGETS": " ".join(targets), "DEVICE": device_class}
    words = [f"{name}={shlex.quote(value)}" for name, value in chosen.items() if value]
    click.echo(f"The sources lie in {folder}/; the plan: make explain {' '.join(words)}")


def run(folder: Path, spec: Spec, trials: int) -> None:
    """Build the package in `folder` and print a table of ModelNew and the reference."""
    console = Console(soft_wrap=True, highlight=False)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    card = torch.cuda.get_device_name() if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    package = load_package(folder)
    start = time.perf_counter()
    torch.manual_seed(42)
    ours = package.ModelNew(*package.get_init_inputs()).to(device)
    console.print(f"built and loaded in {time.perf_counter() - start:.1f} s for {card}")
    torch.manual_seed(42)
    eager = package.Model(*package.get_init_inputs()).to(device)
    torch.manual_seed(0)
    x = package.get_inputs()[0].to(device)

    with torch.no_grad(), precision_flags(spec.precision.name):
        exact = package.Model(*package.get_init_inputs()).to(device).double()
        exact.load_state_dict({key: value.double() for key, value in eager.state_dict().items()})
        reference = exact(x.double())
        del exact
        table = Table(title=f"{folder.name} on {card}")
        for column in ("", "time", "error against float64", "largest error"):
            table.add_column(column, justify="left" if not column else "right")
        for name, model in (("ModelNew", ours), ("PyTorch eager", eager)):
            y = model(x)
            milliseconds = timed(lambda model=model: model(x), device, trials)
            table.add_row(name, f"{milliseconds:.3f} ms", f"{relative_error(y, reference):.2e}", f"{float((y.double() - reference).abs().max()):.2e}")
    console.print(table)


if __name__ == "__main__":
    main()
