"""Generate a package and import it, wherever it lies."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from codegen.emit import make_package, refuse_foreign, write_if_different
from codegen.manifest import Package
from codegen.render import render
from codegen.spec import load_spec


def generate(spec: str, precision: str | None = None, targets: tuple[str, ...] = (), device: str | None = None, out: Path = Path("generated"), prepack: bool = False) -> Path:
    """Emit one spec as `make generate` does; returns the package's folder. Raises SpecError or Refusal."""
    package: Package = make_package(load_spec(spec, precision, prepack), targets, device)
    folder = out / package.spec.package
    refuse_foreign(folder)
    write_if_different(folder, render(package))
    return folder


def load_package(folder: Path) -> ModuleType:
    """Import the generated package in `folder` under the name `generated.<folder>`; a second call returns the same module."""
    folder = folder.resolve()
    name = f"generated.{folder.name}"
    present = sys.modules.get(name)
    if present is not None and Path(present.__file__).parent == folder:
        return present
    found = importlib.util.spec_from_file_location(name, folder / "__init__.py", submodule_search_locations=[str(folder)])
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module
    sys.modules.pop(f"{name}.model", None)
    found.loader.exec_module(module)
    return module
