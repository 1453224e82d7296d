"""A saved optimised model as a wheel: its packages with their libraries, for machines that have this product and no compiler."""

from __future__ import annotations

from pathlib import Path

from codegen.from_module.entries import is_name
from runtime import PackageError
from runtime.package import Package
from runtime.wheel import About, check_possible, default_version, package_files, write_wheel

from .saved import INDEX, read

_MODULE = '''"""{summary}."""

from pathlib import Path


def load(model):
    """Put the kernels into `model`: fixed_shape_kernels.load_optimized with the folder of this package. Raises ValueError for another model, torch or device."""
    from fixed_shape_kernels import load_optimized

    return load_optimized(model, Path(__file__).parent)
'''


def make_model_wheel(folder: Path, out: Path, version: str | None = None) -> Path:
    """Build every package of a folder that `save_optimized` wrote, and write a wheel that is imported by the folder's name into `out`; returns its path.

    Its `load(model)` is `load_optimized`. `version` defaults to this product's, with the targets as its local part. Raises ValueError where the folder holds
    no optimised model, PackageError where that cannot become a wheel, what a build raises.
    """
    index, name = read(folder), folder.resolve().name
    if not is_name(name):
        raise PackageError(f"a wheel is imported by its folder's name, and {name} is none of Python's; save the model into a folder such as my_model.")
    packages = [Package(folder / package) for package in sorted({package for call in index["calls"] for package in call["packages"].values()})]
    if not packages:
        raise PackageError(f"{folder} holds no kernels: no chain of the model was replaced.")
    summary = f"Generated kernels for {len(packages)} chains of {index['model']} on {index['report']['device']}"
    files = {f"{name}/__init__.py": _MODULE.format(summary=summary).encode(), f"{name}/{INDEX}": (folder / INDEX).read_bytes()}
    for package in packages:
        check_possible(package, version, name)
        files.update(package_files(package, f"{name}/{package.path.name}", own_runtime=False))
    version = version or default_version({target for package in packages for target in package.manifest.targets})
    requires = ("fixed-shape-kernels", f"torch=={index['torch'].partition('+')[0]}")
    return write_wheel(files, About(name, version, summary, requires, f"`{name}.load(model)` puts the kernels into a {index['model']}. It needs no compiler.\n"), out)
