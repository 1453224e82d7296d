"""The command `fsk from-module`: a child process reads the problem file, this one writes the spec and generates."""

from __future__ import annotations

import json
import keyword
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import click

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


def files_of(target: Path) -> list[Path]:
    """The Python files of a folder, by their numbers, then by name. Raises ClickException where there is none."""
    found = sorted((path for path in target.glob("*.py") if path.name != "__init__.py"), key=lambda path: (number_of(path) or 0, path.name))
    if not found:
        raise click.ClickException(f"{target}: holds no Python file")
    return found


def number_of(path: Path) -> int | None:
    """The number that a file's name starts with: 30 of `30_Gemm_GroupNorm.py`."""
    found = re.match(r"[0-9]+", path.stem)
    return int(found[0]) if found else None


@dataclass(frozen=True)
class Job:
    """One file to read: the class in it, the spec's name, and the file that the spec goes to."""

    path: Path
    model: str
    name: str
    destination: Path


def jobs_of(targets: tuple[str, ...], name: str | None, out: Path) -> tuple[Job, ...]:
    """What the command line asks for. Specs of several files keep their numbers in front: `30_gemm_groupnorm.yaml`. Raises ClickException."""
    listed: list[tuple[Path, str]] = []
    for target in targets:
        if Path(target).is_dir():
            listed += [(path, "Model") for path in files_of(Path(target))]
            continue
        path, model = split_target(target)
        if not path.is_file():
            raise click.ClickException(f"{path}: {'is no file' if path.exists() else 'no such file'}")
        listed.append((path, model))
    if len(listed) == 1 and not Path(targets[0]).is_dir():
        ((path, model),) = listed
        name = name or default_name(path)
        return (Job(path, model, name, out / f"{name}.yaml"),)
    if name:
        raise click.ClickException("--name is for one file; several take their names from the files'")
    jobs: list[Job] = []
    for path, model in listed:
        number, plain = number_of(path), default_name(path)
        own = plain if plain not in {job.name for job in jobs} else f"{plain}_{len(jobs) if number is None else number}"
        jobs.append(Job(path, model, own, out / (f"{own}.yaml" if number is None else f"{number:02d}_{plain}.yaml")))
    return tuple(jobs)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("targets", metavar="FILE.py[:Model]|FOLDER...", nargs=-1, required=True)
@click.option("--name", help="The spec's name, and its package's; of one file.  [default: the file's name without its number]")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=Path("."), help="Folder for the specs.  [default: the current one]")
@click.option("--precision", type=click.Choice(list(PRECISIONS)), help="Write this precision into the spec.  [default: none, which means fp32]")
@click.option("--no-algebra", "algebra", flag_value=False, default=True, help="Write `algebra: false` into the spec: the chain as written, operator by operator.")
@click.option("--generate", is_flag=True, help="Also emit the package into generated/.")
@click.option("--no-check", is_flag=True, help="Do not compare initial weights and outputs with the file's Model.")
@click.option("--force", is_flag=True, help="Replace a spec, and with --generate a package, of the same name.")
@click.option("--jobs", type=click.IntRange(1), default=1, show_default=True, help="Files that are read at a time; each takes up to 3 GB.")
def main(targets, name, out, precision, algebra, generate, no_check, force, jobs) -> None:
    """Write the spec of a PyTorch layer: FILE.py defines Model (an nn.Module), get_inputs() and get_init_inputs(), as KernelBench's problems do.
    Of several files, or of a FOLDER's, it ends with how many became specs, and why the others did not.

    WARNING: the file is imported and its Model constructed and run, so whatever code it holds is executed, with your rights. It runs in a child
    process without a GPU, which protects nothing. Use it on files that you trust.
    """
    listed = jobs_of(targets, name, out)
    requests = [{"path": str(job.path.resolve()), "model": job.model, "name": job.name, "precision": precision, "algebra": algebra, "check": not no_check} for job in listed]
    refused: list[Job] = []
    with ThreadPoolExecutor(jobs) as pool:
        for job, found in zip(listed, pool.map(_asked if len(listed) > 1 else ask, requests), strict=True):
            if not _told(job, found, force):
                refused.append(job)
            elif generate:
                click.echo(str(emit.write_package(emit.make_package(load_spec(job.destination)), Path("generated"), force=force)))
    if len(listed) > 1:
        click.echo(f"{len(listed) - len(refused)} of {len(listed)} files became specs" + (f"; refused: {', '.join(job.path.name for job in refused)}" if refused else ""))
    if refused:
        sys.exit(2)


def _asked(request: dict) -> dict:
    """`ask`, with the end of a child process as a fault of its file, so that the other files are read."""
    try:
        return ask(request)
    except click.ClickException as error:
        return {"faults": [{"line": 0, "message": error.message}]}


def _told(job: Job, found: dict, force: bool) -> bool:
    """Write what was found and say so; False for a file that was refused, with every reason."""
    if found["faults"]:
        click.echo("\n".join(place(job.path, fault) for fault in found["faults"]), err=True)
        if any("no operator of the grammar" in fault["message"] for fault in found["faults"]):
            click.echo(f"the grammar has {', '.join(OPERATORS)} (docs/spec.md)", err=True)
        return False
    for note in found["notes"]:
        click.echo(f"note: {place(job.path, note)}")
    try:
        changed = write(job.destination, found["yaml"], force)
        spec = load_spec(job.destination)
    except SpecError as error:
        raise click.ClickException(str(error)) from None
    except OSError as error:
        raise click.ClickException(f"{error.filename or job.destination}: {error.strerror or error}") from None
    chain = " -> ".join(step.operator.name for step in spec.chain)
    shapes = ", ".join(f"{given.name} {given.shape}" for given in spec.inputs)
    click.echo(f"{job.destination}: {chain}, {shapes} -> y {spec.output_shape}" + ("" if changed else " (unchanged)"))
    click.echo(found["checked"] or "not checked against the file's Model")
    return True
