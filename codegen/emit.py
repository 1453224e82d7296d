"""The steps from a spec to a folder of sources, and what a folder holds already.

    load_spec -> Spec -> plan -> Plan -> render -> {path: text} -> write_if_different
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from codegen.manifest import Package
from codegen.plan import Refusal, plan
from codegen.render import render
from codegen.source_text import is_source_text
from codegen.spec import Spec, SpecError, load_spec
from codegen.standalone import render_standalone
from codegen.targets import DEFAULT_TARGETS, DEVICES, TARGETS

MARK = "do not edit."  # in the header of everything that is emitted


def make_package(spec: Spec, targets: tuple[str, ...] = (), device: str | None = None, debug: bool = False) -> Package:
    """Plan `spec` for the given targets (else the spec's own, else those of DEFAULT_TARGETS that can serve it).

    Of a range of batches every size has plans of its own. Raises Refusal when a target that was asked for cannot serve the spec, or none can; a size
    of a range may do without a target where another one for the same machines serves it.
    """
    asked = targets or spec.targets
    places = () if targets else spec.targets_at
    if device and not any(name in DEVICES[device].targets for name in asked or DEFAULT_TARGETS):
        raise Refusal(f"device class {device} goes with {', '.join(DEVICES[device].targets)}, not with {', '.join(asked or DEFAULT_TARGETS)}")
    if not spec.batches:
        return _one_size(spec, asked, device, debug, optional=not asked, places=places)
    made = [_of_range(size, asked, device, debug) for size in spec.sizes]
    for name in asked or ():
        if not any(one.plan_for(name) for one in made):
            raise Refusal(_unserved(spec, asked.index(name), name, f"serves no batch of the range: {dict(made[-1].skipped)[name]}", places))
    skipped = tuple((f"{name} at batch {one.spec.batch}", reason) for one in made for name, reason in one.skipped)
    return Package(spec, tuple(plan for one in made for plan in one.plans), skipped, tuple(made))


def _unserved(spec: Spec, at: int, name: str, reason: str, places: tuple[tuple[int, int], ...]) -> str:
    """What to say of the target that was asked for in place `at`: at `places`, (line, column) of the file, or on the command line."""
    where = ":".join(map(str, (spec.named or spec.path, *places[at]))) if places else spec.named or spec.path
    return f"{where}: targets: {name} {reason}" + ("; leave it out, or leave out targets, which is each that serves the spec" if places else "")


def _one_size(spec: Spec, asked: tuple[str, ...] | None, device: str | None, debug: bool, optional: bool, places: tuple[tuple[int, int], ...] = ()) -> Package:
    """The package of a spec with one batch; `optional`: a target that cannot serve it is left out."""
    plans, skipped = [], []
    for at, name in enumerate(asked or DEFAULT_TARGETS):
        try:
            plans.append(plan(spec, name, device if device and name in DEVICES[device].targets else None, debug))
        except Refusal as error:
            if not optional:
                raise Refusal(_unserved(spec, at, name, f"cannot serve this spec: {error}", places)) from None
            skipped.append((name, str(error)))
    if not plans:
        raise Refusal("no target can serve this spec: " + "; ".join(f"{name}: {reason}" for name, reason in skipped))
    return Package(spec, tuple(plans), tuple(skipped))


def _of_range(spec: Spec, asked: tuple[str, ...] | None, device: str | None, debug: bool) -> Package:
    """The package of one size of a range: its files and functions are named by the batch, so that all sizes fit into one library."""
    try:
        made = _one_size(spec, asked, device, debug, optional=True)
        served = {plan.target.language for plan in made.plans}
        for name, reason in made.skipped if asked else ():
            if TARGETS[name].language not in served:
                raise Refusal(reason)
    except Refusal as error:
        raise Refusal(f"batch {spec.batch}: {error}") from None
    plans = tuple(replace(plan, target=replace(plan.target, suffix=f"{plan.target.suffix}_b{spec.batch}")) for plan in made.plans)
    return replace(made, plans=plans)


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


def _record(folder: Path) -> tuple[str, str] | None:
    """(spec, command) that the manifest of the package in `folder` gives; None where there is none, or one that this generator cannot have written."""
    try:
        data = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        spec, command = str(data["spec"]), str(data["regenerate"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return (spec, command) if is_source_text(spec) else None


def owner(folder: Path) -> str | None:
    """The spec that the package in `folder` was generated from; None where there is no package."""
    record = _record(folder)
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


def read_spec_or_package(path: str, precision: str | None = None, prepack: bool = False) -> Spec:
    """The spec at `path`. The spec.yaml of a package, unchanged, is the spec that the package was generated from: what it emits is the same."""
    spec = load_spec(path, precision, prepack)
    folder = Path(spec.named).parent
    record = _record(folder) if Path(spec.named).name == "spec.yaml" else None
    if record is None:
        return spec
    spec_of_package, command = record
    asked = "PREPACK=1" in command
    device = next((name for name in re.findall(r" DEVICE=(\w+)", command) if name in DEVICES), None)
    try:
        plain = load_spec(path)
        files = render(make_package(replace(plain, path=spec_of_package, prepack_asked=asked and plain.prepack), (), device))
    except (SpecError, Refusal):
        return spec
    present = [name for name in files if name != "manifest.json" and (folder / name).is_file()]  # the manifest has the targets of a command line, too
    if any((folder / name).read_text(encoding="utf-8") != files[name] for name in present):
        return spec
    return replace(spec, path=spec_of_package, prepack_asked=spec.prepack and (spec.prepack_asked or asked))


def _claim(folder: Path, spec: Spec) -> None:
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


@dataclass(frozen=True)
class Written:
    """A package on disk: its folder, the names of its files, and the paths that were written or removed this time."""

    folder: Path
    files: tuple[str, ...]
    changed: tuple[Path, ...]

    def __str__(self) -> str:
        names = ", ".join(sorted(name for name in self.files if name not in ("__init__.py", "spec.yaml", "manifest.json")))
        return f"{self.folder}: {names}" + (f" ({len(self.changed)} files changed)" if self.changed else " (unchanged)")


def write_package(package: Package, out: Path, standalone: bool = False, force: bool = False) -> Written:
    """Write the sources of `package` into a folder of its name under `out`; `standalone` adds standalone.py.

    Raises Refusal where the folder holds the package of another spec, or files that are no package, unless `force` is set; OSError where it
    cannot be written.
    """
    folder = out / package.spec.package
    if not force:
        _claim(folder, package.spec)
    files = render(package)
    if standalone:
        files["standalone.py"] = render_standalone(package, files)
    return Written(folder, tuple(files), tuple(write_if_different(folder, files)))
