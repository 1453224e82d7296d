"""The command `fsk from-module`: a child process reads the problem file, this one writes the spec and generates."""

from __future__ import annotations

import json
import keyword
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import click
from rich.console import Console

from codegen import emit
from codegen.numerics import PRECISIONS
from codegen.ops import OPERATORS
from codegen.spec import SpecError, load_spec

TOP = Path(__file__).resolve().parents[2]


def split_target(text: str) -> tuple[Path, str]:
    """`path/to/file.py:Name` -> (the path, Name); Name is Model where it is left out."""
    path, colon, model = text.rpartition(":")
    return (Path(path), model) if colon and model.isidentifier() else (Path(text), "Model")


def default_name(path: Path) -> str:
    """A spec's name from the file's: `30_Gemm_GroupNorm.py` -> `gemm_groupnorm`."""
    words = re.sub(r"[^a-z0-9]+", "_", path.stem.lower()).strip("_")
    words = re.sub(r"^[0-9_]+", "", words)
    return f"layer_{words}".rstrip("_") if not words or keyword.iskeyword(words) else words


def ask(request: dict) -> dict:
    """Run the worker on `request`, in a process of its own that sees no GPU. Raises ClickException when it ends without an answer."""
    with tempfile.TemporaryDirectory() as folder:
        question, result = Path(folder) / "request.json", Path(folder) / "answer.json"
        question.write_text(json.dumps(request), encoding="utf-8")
        path = os.pathsep.join(filter(None, [str(TOP), os.environ.get("PYTHONPATH")]))
        env = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
        command = [sys.executable, "-P", "-m", "codegen.from_module.worker", str(question), str(result)]
        run = subprocess.run(command, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", check=False)
        if not result.is_file():
            tail = "\n".join((run.stderr or run.stdout).strip().splitlines()[-15:])
            raise click.ClickException(f"the process that imported {request['path']} ended with status {run.returncode} before it was read\n{tail}".rstrip())
        return json.loads(result.read_text(encoding="utf-8"))


def place(shown: Path, fault: dict) -> str:
    """`file.py:12: what is wrong`; without a line for what concerns the file as a whole."""
    return f"{shown}:{fault['line']}: {fault['message']}" if fault["line"] else f"{shown}: {fault['message']}"


def write(path: Path, text: str, force: bool) -> bool:
    """Write a spec whole; False where it is there already. Raises ClickException rather than replace another one."""
    if path.is_file():
        if path.read_text(encoding="utf-8", errors="replace") == text:
            return False
        if not force:
            raise click.ClickException(f"{path} exists and is another spec; choose another --name or --out, or pass --force (make: FORCE=1)")
    _write_whole(path, text)
    return True


def _write_whole(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8", newline="\n")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("target", metavar="FILE.py[:Model]")
@click.option("--name", help="The spec's name, and its package's.  [default: the file's name without its number]")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=Path("."), help="Folder for the spec.  [default: the current one]")
@click.option("--precision", type=click.Choice(list(PRECISIONS)), help="Write this precision into the spec.  [default: none, which means fp32]")
@click.option("--generate", is_flag=True, help="Also emit the package into generated/.")
@click.option("--no-check", is_flag=True, help="Do not compare initial weights and outputs with the file's Model.")
@click.option("--force", is_flag=True, help="Replace a spec, and with --generate a package, of the same name.")
def main(target, name, out, precision, generate, no_check, force) -> None:
    """Write the spec of a PyTorch layer: FILE.py defines Model (an nn.Module), get_inputs() and get_init_inputs(), as KernelBench's problems do.

    WARNING: the file is imported and its Model constructed and run, so whatever code it holds is executed, with your rights. It runs in a child
    process without a GPU, which protects nothing. Use it on files that you trust.
    """
    path, model = split_target(target)
    if not path.is_file():
        raise click.ClickException(f"{path}: {'is no file' if path.exists() else 'no such file'}")
    name = name or default_name(path)
    request = {"path": str(path.resolve()), "model": model, "name": name, "precision": precision, "check": not no_check}
    with Console(stderr=True).status(f"importing and tracing {path.name}"):
        found = ask(request)
    if found["faults"]:
        click.echo("\n".join(place(path, fault) for fault in found["faults"]), err=True)
        if any("no operator of the grammar" in fault["message"] for fault in found["faults"]):
            click.echo(f"the grammar has {', '.join(OPERATORS)} (docs/spec.md)", err=True)
        sys.exit(2)
    for note in found["notes"]:
        click.echo(f"note: {place(path, note)}")
    destination = out / f"{name}.yaml"
    try:
        changed = write(destination, found["yaml"], force)
        spec = load_spec(destination)
    except SpecError as error:
        raise click.ClickException(str(error)) from None
    except OSError as error:
        raise click.ClickException(f"{error.filename or destination}: {error.strerror or error}") from None
    chain = " -> ".join(step.operator.name for step in spec.chain)
    click.echo(f"{destination}: {chain}, x {spec.input_shape} -> y {spec.output_shape}" + ("" if changed else " (unchanged)"))
    click.echo("not checked against the file's Model" if no_check else "initial weights bit for bit those of the file's Model; outputs and gradients equal in float64, with ties and on bounds")
    if generate:
        click.echo(str(emit.write_package(emit.make_package(spec), Path("generated"), force=force)))
