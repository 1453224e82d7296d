"""Generate a package and import it, wherever it lies."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from codegen.emit import write_package
from codegen.folder import refuse_foreign
from codegen.package import make_package
from codegen.spec import load_spec

_DIGEST = "__sources_digest__"  # of an imported package: which sources it was made from


def generate(
    spec: str,
    precision: str | None = None,
    targets: tuple[str, ...] = (),
    device: str | None = None,
    out: Path = Path("generated"),
    prepack: bool = False,
    algebra: bool = True,
) -> Path:
    """Emit one spec for a measurement, over the package of another spec of that name; returns the package's folder.

    Raises SpecError or Refusal.
    """
    package = make_package(load_spec(spec, precision, prepack, algebra), targets, device)
    refuse_foreign(out / package.spec.package)
    return write_package(package, out, force=True).folder


def load_package(folder: Path) -> ModuleType:
    """Import the generated package in `folder` under the name `generated.<folder>`.

    A second call returns the same module, unless the package was generated anew.
    """
    folder = folder.resolve()
    name = f"generated.{folder.name}"
    digest = _digest(folder)
    present = sys.modules.get(name)
    if present is not None and Path(present.__file__).parent == folder and getattr(present, _DIGEST, digest) == digest:
        return present
    found = importlib.util.spec_from_file_location(
        name, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    module = importlib.util.module_from_spec(found)
    setattr(module, _DIGEST, digest)
    sys.modules[name] = module
    sys.modules.pop(f"{name}.model", None)
    found.loader.exec_module(module)
    return module


def _digest(folder: Path) -> str:
    """The digest of the module's text and of the manifest, which names the sources of every kernel by their keys."""
    return hashlib.sha256(
        b"\0".join((folder / name).read_bytes() for name in ("model.py", "manifest.json"))
    ).hexdigest()
