"""A package's folder: whose it is, and how its files are written. Whole files or none; what is equal, or not ours, stays untouched."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

from codegen.plan import Refusal
from codegen.source_text import is_source_text
from codegen.spec import Spec

MARK = "do not edit."  # in the header of everything that is emitted


def write_if_different(folder: Path, files: dict[str, str]) -> list[Path]:
    """Make `folder` hold exactly `files` (texts by name), touching only what differs; each file is replaced whole or not at all.

    Files of an earlier generation that are no longer emitted are removed; anything else in the folder stays. Returns what changed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    changed = []
    for name, text in files.items():
        path = folder / name
        if path.is_file() and path.read_bytes() == text.encode():
            continue
        descriptor, temporary = tempfile.mkstemp(dir=folder, prefix=".", suffix=".tmp")
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8", newline="\n") as stream:
                stream.write(text)
            os.chmod(temporary, 0o666 & ~_umask())
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
        # Python knows bytecode by the size and second of its source, so that of a file replaced soon after would be taken for the new one's.
        for stale in (folder / "__pycache__").glob(f"{path.stem}.*.pyc") if path.suffix == ".py" else ():
            stale.unlink(missing_ok=True)
        changed.append(path)
    for path in folder.iterdir():
        if path.name not in files and is_emitted(path):
            path.unlink()
            changed.append(path)
    return changed


def is_emitted(path: Path) -> bool:
    """Is `path` a source or a standalone.py that this generator wrote?"""
    return (path.suffix in (".cu", ".cpp") or path.name == "standalone.py") and MARK in path.read_text(encoding="utf-8", errors="replace")


def record_of(folder: Path) -> tuple[str, str] | None:
    """(spec, command) that the manifest of the package in `folder` gives; None where there is none, or one that this generator cannot have written."""
    try:
        data = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        spec, command = str(data["spec"]), str(data["regenerate"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return (spec, command) if is_source_text(spec) else None


def owner(folder: Path) -> str | None:
    """The spec that the package in `folder` was generated from; None where there is no package."""
    record = record_of(folder)
    return record and record[0]


def is_foreign(folder: Path) -> bool:
    """Does `folder` hold something, and no package that this generator wrote? One that has lost its manifest is known by its model.py."""
    if not folder.is_dir() or owner(folder) is not None or all(path.name == "__pycache__" for path in folder.iterdir()):
        return False
    model = folder / "model.py"
    return not (model.is_file() and MARK in model.read_text(encoding="utf-8", errors="replace"))


def refuse_foreign(folder: Path) -> None:
    """Raises Refusal where what is in `folder` is not ours to replace."""
    if is_foreign(folder):
        raise Refusal(f"{folder} is not empty and holds no generated package; move what is in it, choose another --out (make: OUT=), or pass --force (make: FORCE=1)")


def claim(folder: Path, spec: Spec) -> None:
    """Raises Refusal where `folder` holds anything but the package of this spec, one spec.yaml of its own included."""
    refuse_foreign(folder)
    held = owner(folder)
    if held not in (None, spec.path) and Path(spec.named).resolve() != (folder / "spec.yaml").resolve():
        raise Refusal(
            f"{folder} holds the package of {held}, and {spec.named} has the same name; change its name, choose another --out (make: OUT=), or pass --force (make: FORCE=1)"
        )


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
