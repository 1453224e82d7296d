"""`fsk optimize`: a model in a PyTorch file, its chains, and what becomes of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from torch import nn

from codegen.from_module.faults import Refused
from codegen.from_module.worker import import_file

from .optimized import explain_model, optimize
from .report import REPLACED


def built(source: str, device: str | None) -> tuple[nn.Module, tuple[Any, ...]]:
    """(model, example) of `file.py:function`, or of a file in KernelBench's form. Raises click.ClickException; runs the file."""
    path, _, name = source.rpartition(":") if ":" in source and not source.endswith(".py") else (source, "", "")
    if not Path(path).is_file():
        raise click.ClickException(f"{path} is no file; expected FILE.py, or FILE.py:FUNCTION that returns (model, example)")
    try:
        module = import_file(str(Path(path).resolve()))
    except Refused as refused:
        raise click.ClickException(f"{path}: {refused}") from None
    if name:
        function = getattr(module, name, None)
        if not callable(function):
            raise click.ClickException(f"{path} has no function {name}")
        made = function()
    elif all(hasattr(module, word) for word in ("Model", "get_inputs", "get_init_inputs")):
        made = module.Model(*module.get_init_inputs()), module.get_inputs()
    else:
        raise click.ClickException(f"{path} has no Model, get_inputs and get_init_inputs; name a function that returns (model, example): {path}:build")
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module)):
        raise click.ClickException(f"{source} gives {type(made).__name__}; expected (model, example), example being a tensor or a tuple of forward's arguments")
    model, example = made
    example = tuple(example) if isinstance(example, (tuple, list)) else (example,)
    if device == "cuda" and not torch.cuda.is_available():
        raise click.ClickException("no CUDA device is usable here; `fsk doctor` says what is missing, and --device cpu or --explain need none")
    if device:
        model, example = model.to(device), tuple(value.to(device) if isinstance(value, torch.Tensor) else value for value in example)
    return model, example


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("source", metavar="FILE.py[:FUNCTION]")
@click.option("--explain", "dry", is_flag=True, help="Find and plan the chains alone: nothing is compiled, no GPU is needed.")
@click.option("--train", is_flag=True, help="Leave the model in training mode, and use chains where gradients are asked for; else it is put into evaluation.")
@click.option("--precision", type=click.Choice(["tf32"]), help="Allow TF32 in fp32 models.")
@click.option("--min-gain", default=1.05, show_default=True, help="Replace a chain where it is so many times as fast.")
@click.option("--strict", is_flag=True, help="Exit code 1 where a chain stays as it was.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), help="Move model and example there first.")
@click.option("--cache-dir", type=click.Path(file_okay=False, path_type=Path), default=Path("build/models"), show_default=True, help="Folder for the packages.")
@click.option("--report", "out", type=click.Path(dir_okay=False, path_type=Path), help="Also write the report here: .html for a page, .json else.")
def main(source, dry, train, precision, min_gain, strict, device, cache_dir, out) -> None:
    """Replace the chains of a model where generated kernels are right and faster, and print what became of each.

    FUNCTION returns (model, example); without one the file has KernelBench's Model, get_inputs and get_init_inputs. The file's code is run.
    """
    model, example = built(source, device)
    model.train(train)
    report = explain_model(model, *example, precision=precision) if dry else optimize(model, *example, precision=precision, training=train, min_gain=min_gain, cache_dir=cache_dir).report
    console = Console()
    console.print(report.table() if console.is_terminal else str(report).rpartition("\n")[0], highlight=False, soft_wrap=not console.is_terminal)
    click.echo(report.summary)
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(report.to_html() if out.suffix == ".html" else report.to_json(), encoding="utf-8")
        click.echo(out)
    if strict and any(row.status != REPLACED for row in report.rows):
        raise SystemExit(1)
