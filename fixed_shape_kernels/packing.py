"""The command `fsk package`: specs, or packages that are generated already, into wheels that need only torch."""

from __future__ import annotations

import tempfile
from pathlib import Path

import click

from codegen.emit import write_package
from runtime.package import Package
from runtime.wheel import make_wheel

from .emitting import SETTINGS, plan_options, planned
from .progress import busy


@click.command(context_settings=SETTINGS)
@click.argument("sources", metavar="SPEC_OR_PACKAGE...", nargs=-1, required=True)
@plan_options
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("dist"),
    show_default=True,
    help="Folder for the wheels.",
)
@click.option("--version", help="Version of the wheels.  [default: this product's, with the targets as its local part]")
def package(sources, precision, prepack, algebra, targets, device_class, out, version) -> None:
    """Compile specs or generated folders for all their targets into wheels, which need torch and no compiler.

    A folder that save_optimized wrote becomes a wheel of the chains of that model, which needs this product beside torch.

    The options on plans (precision, prepack, target, device class) are for specs.
    """
    folders = [Path(source) for source in sources if Path(source).is_dir()]
    specs = tuple(source for source in sources if not Path(source).is_dir())
    if folders and (precision or prepack or not algebra or targets or device_class):
        raise click.UsageError(f"{folders[0]} is generated already; the options on plans are for specs")
    made = planned(specs, precision, prepack, algebra, targets, device_class) if specs else []
    with tempfile.TemporaryDirectory() as temporary:
        folders += [write_package(one, Path(temporary)).folder for one in made]
        for folder in folders:
            if (folder / "optimized.json").is_file():
                from .models.wheel import make_model_wheel  # needs torch, which specs do not

                with busy(f"compiling the chains of {folder.name}"):
                    path = make_model_wheel(folder, out, version)
            else:
                opened = Package(folder)
                with busy(f"compiling {opened.manifest.name} for {', '.join(opened.manifest.targets)}"):
                    path = make_wheel(opened, out, version)
            click.echo(f"{path} ({path.stat().st_size / 1e6:.1f} MB)")
