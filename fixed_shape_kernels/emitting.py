"""The commands that emit: `fsk generate`, `fsk explain` and `fsk standalone`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import click

from codegen.emit import write_package
from codegen.manifest import Package
from codegen.numerics import PRECISIONS
from codegen.spec import shipped
from codegen.targets import DEVICES, TARGETS

from . import api
from .progress import steps

SETTINGS = {"help_option_names": ["-h", "--help"]}

_PLAN_OPTIONS = (
    click.option(
        "--precision",
        type=click.Choice(list(PRECISIONS)),
        help="Override the spec's precision; the package is then <name>_<precision>.",
    ),
    click.option(
        "--prepack", is_flag=True, help="Prepared weights whatever the spec says; the package is then <name>_prepacked."
    ),
    click.option(
        "--no-algebra", "algebra", flag_value=False, default=True,
        help="The chain as written, operator by operator, whatever the spec says.",
    ),
    click.option(
        "--target", "targets", multiple=True, type=click.Choice(list(TARGETS)), help="Only this target (repeatable)."
    ),
    click.option(
        "--device-class",
        type=click.Choice(list(DEVICES)),
        help="Plan for this class of card instead of each target's default.",
    ),
)
_WRITE_OPTIONS = (
    click.option(
        "--out",
        type=click.Path(file_okay=False, path_type=Path),
        help="Folder for the packages.  [default: generated, with --debug build/debug]",
    ),
    click.option(
        "--debug",
        is_flag=True,
        help="Bounded waits that trap and name their barrier (sm_90a; the others wait for nothing).",
    ),
    click.option(
        "--force",
        is_flag=True,
        help="Replace a package that was generated from another spec, and files that are no package.",
    ),
)


def plan_options(command: Callable) -> Callable:
    """Add the options that decide a plan: precision, prepack, targets, device class."""
    for option in reversed(_PLAN_OPTIONS):
        command = option(command)
    return command


def _write_options(command: Callable) -> Callable:
    for option in reversed(_WRITE_OPTIONS):
        command = option(command)
    return command


def planned(
    specs: tuple[str, ...],
    precision: str | None,
    prepack: bool,
    algebra: bool,
    targets: tuple[str, ...],
    device_class: str | None,
    debug: bool = False,
) -> list[Package]:
    """The packages of all specs, before any is written.

    Raises click.UsageError without a spec, SpecError and Refusal.
    """
    if not specs:
        raise click.UsageError(f"name at least one spec; shipped: {', '.join(shipped())}")
    return [
        api.plan_package(api.read(spec, precision, prepack, algebra), targets, device_class, debug)
        for spec in steps(specs, "planning")
    ]


def _write(packages: list[Package], out: Path | None, debug: bool, force: bool, standalone: bool = False) -> None:
    for package in steps(packages, "writing"):
        click.echo(str(write_package(package, out or Path("build/debug" if debug else "generated"), standalone, force)))


@click.command(context_settings=SETTINGS)
@click.argument("specs", nargs=-1)
@plan_options
@_write_options
def generate(specs, precision, prepack, algebra, targets, device_class, out, debug, force) -> None:
    """Emit the packages of SPECS (YAML files; `specs/default.yaml` finds the shipped one)."""
    _write(planned(specs, precision, prepack, algebra, targets, device_class, debug), out, debug, force)


@click.command(context_settings=SETTINGS)
@click.argument("specs", nargs=-1)
@plan_options
@click.option("--debug", is_flag=True, help="The plan of the sources that `fsk generate --debug` writes.")
def explain(specs, precision, prepack, algebra, targets, device_class, debug) -> None:
    """Print the plans of SPECS and write nothing: kernels, tiles, memory, the floor, and why."""
    for package in planned(specs, precision, prepack, algebra, targets, device_class, debug):
        click.echo(api.describe(package))


@click.command(context_settings=SETTINGS)
@click.argument("specs", nargs=-1)
@plan_options
@_write_options
def standalone(specs, precision, prepack, algebra, targets, device_class, out, debug, force) -> None:
    """Emit the packages of SPECS, each with standalone.py.

    That is one file, which imports nothing of ours and compiles its CUDA text itself.
    """
    _write(planned(specs, precision, prepack, algebra, targets, device_class, debug), out, debug, force, standalone=True)
