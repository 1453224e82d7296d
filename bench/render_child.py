"""Renders packages with the `codegen` that PYTHONPATH names, which may be another commit's: `python -P render_child.py JOBS.json OUT`.

JOBS.json maps a folder's name to {spec, text, precision, prepack, device, algebra}. Of each package OUT/<folder> gets its files, standalone.py where it has
one, or error.txt. The program imports nothing else of ours, and of `codegen` only the steps from a spec to files.
"""

from __future__ import annotations

import inspect
import json
import sys
from pathlib import Path

from codegen.emit import make_package
from codegen.render import render
from codegen.spec import load_spec
from codegen.standalone import render_standalone


def files_of(job: dict, folder: Path) -> dict[str, str]:
    """The texts of a package by name. Raises what that version's generator raises."""
    path = job["spec"]
    if job["text"] is not None:
        folder.with_name(f"{folder.name}.specs").mkdir()
        path = folder.with_name(f"{folder.name}.specs") / job["spec"]
        path.write_text(job["text"], encoding="utf-8")
    written = {} if job.get("algebra", True) or "algebra" not in inspect.signature(load_spec).parameters else {"algebra": False}  # an earlier version rewrites nothing
    package = make_package(load_spec(path, job["precision"], job["prepack"], **written), (), job["device"])
    files = render(package)
    try:
        return files | {"standalone.py": render_standalone(package, files)}
    except Exception:  # no CUDA target, or a step without a text there: each version has its own class for it
        return files


def main(jobs: Path, out: Path) -> None:
    for name, job in json.loads(jobs.read_text(encoding="utf-8")).items():
        folder = out / name
        folder.mkdir()
        try:
            files = files_of(job, folder)
        except Exception as error:  # a spec that this version does not know: the caller tells of it
            files = {"error.txt": f"{type(error).__name__}: {error}"}
        for file, text in files.items():
            (folder / file).write_text(text, encoding="utf-8", newline="\n")
        print(name, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
