"""`fsk demo`: the main job once, end to end, on whatever this machine has, and how far its figures carry."""

from __future__ import annotations

import os
import shlex
import sys
import time
from pathlib import Path
from types import ModuleType

import click
import torch
from rich.console import Console
from rich.table import Table

from bench.comparison import LEAST_ROUNDS, compare_rounds
from bench.machine import precision_flags
from bench.packages import generate, load_package
from bench.timing import rounds, summary
from codegen.numerics import PRECISIONS
from codegen.spec import Spec, load_spec
from codegen.targets import DEVICES, TARGETS
from runtime import Package
from runtime.resources import usable_cores

MOST_ROUNDS = 60
BUSY = 1.5  # runnable processes a core, above which other work is taken to share the processor
OURS, EAGER = "ModelNew", "PyTorch eager"


def relative_error(y: torch.Tensor, reference: torch.Tensor) -> float:
    """Frobenius norm of the difference over that of the float64 reference."""
    return float((y.double() - reference).norm() / reference.norm())


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("spec", default="specs/default.yaml")
@click.option("--precision", type=click.Choice(list(PRECISIONS)), help="Override the spec's precision.")
@click.option("--prepack", is_flag=True, help="With prepared weights whatever the spec says.")
@click.option("--no-algebra", "algebra", flag_value=False, default=True, help="The chain as written, operator by operator, whatever the spec says.")
@click.option(
    "--target",
    "targets",
    multiple=True,
    type=click.Choice(list(TARGETS)),
    help="Emit for this target only (repeatable).",
)
@click.option(
    "--device-class",
    type=click.Choice(list(DEVICES)),
    help="Plan for this class of card instead of each target's default.",
)
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("generated"),
    show_default=True,
    help="Folder for the package.",
)
@click.option(
    "--seconds",
    default=20.0,
    show_default=True,
    help=f"Time for the timed rounds, of which there are {LEAST_ROUNDS} to {MOST_ROUNDS}.",
)
def main(
    spec: str,
    precision: str | None,
    prepack: bool,
    algebra: bool,
    targets: tuple[str, ...],
    device_class: str | None,
    out: Path,
    seconds: float,
) -> None:
    """Generate SPEC, build it for this machine, and run ModelNew beside the PyTorch reference."""
    loaded = load_spec(spec, precision, prepack, algebra)
    folder = generate(spec, precision, targets, device_class, out, prepack, algebra)
    click.echo(
        f"wrote {folder}: " + ", ".join(sorted(p.name for p in folder.iterdir() if p.suffix in (".cu", ".cpp", ".py")))
    )
    run(folder, loaded, seconds)
    options = [("--precision", precision), *(("--target", name) for name in targets), ("--device-class", device_class)]
    words = [
        shlex.quote(spec),
        *(f"{option} {value}" for option, value in options if value),
        *(["--prepack"] if prepack else []),
        *([] if algebra else ["--no-algebra"]),
    ]
    program = click.get_current_context().find_root().info_name
    click.echo(f"The sources lie in {folder}/; the plan: {program} explain {' '.join(words)}")


def run(folder: Path, spec: Spec, seconds: float) -> None:
    """Build the package in `folder`, print a table of ModelNew and the reference, and what follows from it."""
    console = Console(soft_wrap=True, highlight=False)
    emitted = Package(folder).manifest.targets.values()
    device = torch.device("cuda" if torch.cuda.is_available() and any(target.arch for target in emitted) else "cpu")
    card = torch.cuda.get_device_name() if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    load = os.getloadavg()[0]  # before our own work adds to it
    with Console(stderr=True).status("compiling") if sys.stderr.isatty() else _quiet() as status:
        package = load_package(folder)
        start = time.perf_counter()
        torch.manual_seed(42)
        ours = package.ModelNew(*package.get_init_inputs()).to(device)
        console.print(f"built and loaded in {time.perf_counter() - start:.1f} s for {card}")
        status.update("computing the float64 reference")
        torch.manual_seed(42)
        eager = package.Model(*package.get_init_inputs()).to(device)
        torch.manual_seed(0)
        x = package.get_inputs()[0].to(device)
        with torch.no_grad(), precision_flags(spec.precision.name):
            reference = _exact(package, eager, x)
            results = {name: model(x) for name, model in ((OURS, ours), (EAGER, eager))}
            errors = {
                name: (relative_error(y, reference), float((y.double() - reference).abs().max()))
                for name, y in results.items()
            }
            del reference, results
            calls = {OURS: lambda: ours(x), EAGER: lambda: eager(x)}
            library = f"PyTorch's {spec.chain[0].operator.name} alone"
            if device.type == "cpu":
                alone = eager.get_submodule(spec.chain[0].name)
                calls[library] = lambda: alone(x)
            tell = lambda done: status.update(f"timing, {done} rounds done")  # noqa: E731
            times = rounds(calls, device, seconds, MOST_ROUNDS, LEAST_ROUNDS, tell)
    console.print(_table(f"{folder.name} on {card}", times, errors))
    console.print(compare_rounds(times[OURS], times[EAGER]).sentence(OURS, EAGER))
    for line in _of_gpu() if device.type == "cuda" else _of_cpu(times, library, spec.chain[0].operator.name, load):
        console.print(line, soft_wrap=False)


class _quiet:
    """A status for where there is no terminal: says nothing."""

    def __enter__(self) -> _quiet:
        return self

    def __exit__(self, *_) -> None:
        pass

    def update(self, what: str) -> None:
        """Say nothing."""


def _exact(package: ModuleType, eager: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The float64 result with the parameters of `eager`."""
    exact = package.Model(*package.get_init_inputs()).to(x.device).double()
    exact.load_state_dict({key: value.double() for key, value in eager.state_dict().items()})
    return exact(x.double())


def _table(title: str, times: dict[str, list[float]], errors: dict[str, tuple[float, float]]) -> Table:
    table = Table(
        title=title,
        caption="ms: median of the rounds, half of which lie within the spread; errors: against float64",
        title_justify="left",
        caption_justify="left",
    )
    for column in ("", "ms", "spread", "error", "largest"):
        table.add_column(column, justify="left" if not column else "right")
    for name, samples in times.items():
        time_ = summary(samples)
        found = [f"{value:.2e}" for value in errors[name]] if name in errors else ["", ""]
        table.add_row(name, f"{time_.ms:.4g}", f"{time_.low:.4g} to {time_.high:.4g}", *found)
    return table


def _of_cpu(times: dict[str, list[float]], library: str, operator: str, load: float) -> list[str]:
    """The reach of these figures on a machine without a GPU."""
    share = compare_rounds(times[OURS], times[library]).ratio
    lines = [
        f"No GPU was used: the cpu target runs, which is torch's own {operator} and then one generated C++ pass over "
        f"its result. {library} takes {share:.0%} as "
        f"long as {OURS}; what lies beyond it is all that generated code can change here.",
        "This shows that generating, building and loading work on this machine, and that the results are right. It "
        "cannot show the speed of the CUDA kernels, for which the generator is made: there the whole chain is "
        "generated. Measured times on GPUs lie in bench/results.",
    ]
    if load > BUSY * usable_cores():
        lines.append(
            f"Other programs keep this machine busy ({load:.0f} runnable on {usable_cores()} cores), so that times "
            "scatter; the interval allows for that."
        )
    return lines


def _of_gpu() -> list[str]:
    """The reach of these figures on a GPU."""
    return [
        "Times are those of the device, by CUDA events, with the L2 cache overwritten before each call. PyTorch eager "
        "is not the fastest peer: the command bench "
        "adds torch.compile and others at equal precision, and verify examines adversarial data."
    ]
