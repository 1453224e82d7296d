"""The steps from a spec to a folder of sources, and back from a package's folder to its spec.

    load_spec -> Spec -> make_package -> Package -> render -> {path: text} -> write_if_different
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

from codegen.folder import claim, record_of, write_if_different
from codegen.manifest import Package
from codegen.package import make_package
from codegen.plan import Refusal
from codegen.render import render
from codegen.spec import Spec, SpecError, load_spec
from codegen.standalone import render_standalone
from codegen.targets import DEVICES


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
        claim(folder, package.spec)
    files = render(package)
    if standalone:
        files["standalone.py"] = render_standalone(package, files)
    return Written(folder, tuple(files), tuple(write_if_different(folder, files)))


def read_spec_or_package(path: str, precision: str | None = None, prepack: bool = False, algebra: bool = True) -> Spec:
    """The spec at `path`. The spec.yaml of a package, unchanged, is the spec that the package was generated from: what it emits is the same."""
    spec = load_spec(path, precision, prepack, algebra)
    folder = Path(spec.named).parent
    record = record_of(folder) if Path(spec.named).name == "spec.yaml" else None
    if record is None:
        return spec
    spec_of_package, command = record
    asked, without = "PREPACK=1" in command, "ALGEBRA=0" in command
    device = next((name for name in re.findall(r" DEVICE=(\w+)", command) if name in DEVICES), None)
    try:
        plain = load_spec(path)
        files = render(make_package(replace(plain, path=spec_of_package, prepack_asked=asked and plain.prepack, algebra_asked=without and not plain.algebra), (), device))
    except (SpecError, Refusal):
        return spec
    present = [name for name in files if name != "manifest.json" and (folder / name).is_file()]  # the manifest has the targets of a command line, too
    if any((folder / name).read_text(encoding="utf-8") != files[name] for name in present):
        return spec
    return replace(
        spec, path=spec_of_package, prepack_asked=spec.prepack and (spec.prepack_asked or asked),
        algebra_asked=not spec.algebra and (spec.algebra_asked or without),
    )  # fmt: skip
