"""Packs a generated package and its built libraries into a wheel that needs nothing but torch where it is installed.

    <name>/              the package: model.py, spec.yaml, manifest.json
        libraries/       one shared library per target
        prebuilt.json    what was packed (prebuilt.py)
        _runtime/        this runtime without its builder, under a name that belongs to the wheel alone
    <name>-<version>.dist-info/

The same libraries and version give the same bytes: no dates, no paths, members in a fixed order.
"""

import ast
import base64
import csv
import hashlib
import io
import json
import os
import platform
import re
import stat
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from .build import Build, ensure_built, plan_build
from .errors import PackageError, ToolchainError
from .files import cause_of, remedy_for
from .manifest import TargetManifest
from .package import Package
from .prebuilt import FOLDER, INDEX, INDEX_FORMAT
from .processor import PROCESSOR
from .compiler_flags import portable_flags

PRODUCT = "fixed-shape-kernels"
VERSION = "0.1.0"  # of a wheel that is given none: the product's
REQUIRES_PYTHON = ">=3.11"
REQUIRES = ("torch>=2.11,<3",)
TAG = "py3-none-linux_x86_64"
RUNTIME = "_runtime"

# Modules of this package that build, and that a wheel therefore leaves out.
BUILDER = frozenset("build cache cli commands compiler_flags diagnostics doctor folders kernel_report process resources supervisor toolchain tools wheel".split())
MIN_GXX_FOR_PROCESSOR = (11,)  # the first that knows -march=x86-64-v3

_VERSION = re.compile(r"(\d+!)?\d+(\.\d+)*((a|b|rc)\d+)?(\.post\d+)?(\.dev\d+)?(\+[a-z0-9]+(\.[a-z0-9]+)*)?")
_PLAIN_NAME = re.compile(r"[a-z0-9]+(_[a-z0-9]+)*")
_EPOCH = (1980, 1, 1, 0, 0, 0)  # the earliest date that a zip file can hold


def make_wheel(package: Package, out: Path, version: str | None = None) -> Path:
    """Builds every target of the generated ``package`` and writes the wheel into the folder ``out``; returns its path.

    ``version`` defaults to this product's, with the targets as its local part (``0.1.0+cpu.sm80``). Raises PackageError
    where the package cannot become a wheel, ToolchainError and BuildError as any build does.
    """
    manifest = package.manifest
    check_possible(package, version)
    files = package_files(package, manifest.name, own_runtime=True)
    files.update(_runtime_files(manifest.name))
    documented = ast.get_docstring(ast.parse((package.path / "model.py").read_text(encoding="utf-8"))) or manifest.name
    about = About(manifest.name, version or default_version(manifest.targets), documented.splitlines()[0].rstrip("."), REQUIRES, _description(package))
    return write_wheel(files, about, out)


@dataclass(frozen=True)
class About:
    """What pip reads of a wheel: the name that it is imported by, its version, a line on it, what it requires, and a page."""

    name: str
    version: str
    summary: str
    requires: tuple[str, ...]
    description: str


def default_version(targets: Iterable[str]) -> str:
    """This product's version, with the targets as its local part."""
    return f"{VERSION}+{'.'.join(sorted(name.replace('_', '') for name in targets))}"


def write_wheel(files: dict[str, bytes], about: About, out: Path) -> Path:
    """Writes a wheel with these files, by their paths where it is installed, into the folder ``out``; returns its path. Raises PackageError."""
    distribution = distribution_name(about.name)
    information = f"{distribution.replace('-', '_')}-{about.version}.dist-info"
    files = {**files, **_information_files(information, distribution, about)}
    files[f"{information}/RECORD"] = _record(files, f"{information}/RECORD")
    return _write(files, out / f"{distribution.replace('-', '_')}-{about.version}-{TAG}.whl")


def distribution_name(name: str) -> str:
    """What pip calls the package ``name``. Pip takes ``a_b``, ``a__b`` and ``A_b`` for one name; these stay apart here."""
    plain = re.sub(r"[-_.]+", "-", name).strip("-").lower()
    if _PLAIN_NAME.fullmatch(name):
        return plain
    return f"{plain}-{hashlib.sha256(name.encode()).hexdigest()[:8]}".lstrip("-")


def check_possible(package: Package, version: str | None, name: str = "") -> None:
    """Raises PackageError where a package cannot become a wheel, or a part of one that is imported as ``name``."""
    name = name or package.manifest.name
    if platform.machine() != "x86_64" or not sys.platform.startswith("linux"):
        raise PackageError(f"wheels are made on and for Linux on x86-64, and this is {sys.platform} on {platform.machine()}.")
    if package.prebuilt is not None:
        raise PackageError(f"{package.path} comes from a wheel, which holds no sources; name a generated folder.")
    if name in sys.stdlib_module_names or name in ("torch", "numpy", "runtime"):
        raise PackageError(f"a wheel that imports as {name} would hide Python's or torch's own {name}; change the spec's name.")
    if version is not None and not _VERSION.fullmatch(version):
        raise PackageError(f"{version!r} is not a version that Python packages may have, such as 1.2.0 or 1.2.0+cpu.")


# ---- the package ----------------------------------------------------------------------------------------------------


def package_files(package: Package, name: str, own_runtime: bool) -> dict[str, bytes]:
    """The files of a package and its libraries, built for processors and cards like those that it is for, under the folder ``name``.

    Its modules import the runtime that lies beside them (``own_runtime``), or the installed one. Raises what a build raises.
    """
    files = {}
    for path in sorted(package.path.glob("*.py")):
        if path.name != "standalone.py":
            files[f"{name}/{path.name}"] = _with_own_runtime(path) if own_runtime else path.read_bytes()
    if (package.path / "spec.yaml").is_file():
        files[f"{name}/spec.yaml"] = (package.path / "spec.yaml").read_bytes()
    libraries = {}
    for target in _buildable(package):
        build = plan_build(package, target, portable=True)
        _check_compiler(build)
        library = ensure_built(build).read_bytes()
        file = f"{FOLDER}/{target.name}.so"
        files[f"{name}/{file}"] = library
        libraries[target.name] = {"file": file, "sha256": hashlib.sha256(library).hexdigest(), **_demands(target, build)}
    manifest = _packed_manifest(package)
    files[f"{name}/manifest.json"] = manifest
    index = {"format": INDEX_FORMAT, "manifest": hashlib.sha256(manifest).hexdigest(), "libraries": libraries}
    files[f"{name}/{INDEX}"] = _as_json(index)
    return files


def _buildable(package: Package) -> list[TargetManifest]:
    """Everything of a package that is compiled: its targets, and the backwards that are libraries of their own."""
    manifest = package.manifest
    return [*manifest.targets.values(), *(entry.target for entry in manifest.backward.values())]


def _demands(target: TargetManifest, build: Build) -> dict:
    """What a library asks of the machine that runs it."""
    if not build.cuda:
        return {"processor": PROCESSOR, "compiler": f"g++ {build.tools.gxx.version_text}"}
    return {
        "capability": list(target.least_capability),
        "cuda": list(build.tools.nvcc.version[:2]),
        "code": [flag.rpartition("code=")[2] for flag in build.flags if flag.startswith("-gencode")],
        "compiler": f"nvcc {build.tools.nvcc.version_text}, g++ {build.tools.gxx.version_text}",
    }


def _check_compiler(build: Build) -> None:
    gxx = build.tools.gxx
    if f"-march={PROCESSOR}" in build.flags and gxx.version < MIN_GXX_FOR_PROCESSOR:
        raise ToolchainError(
            f"g++ {gxx.version_text} was found at {gxx.path}, and a wheel's cpu target needs g++ {MIN_GXX_FOR_PROCESSOR[0]} or "
            f"later, which knows -march={PROCESSOR}: set CXX to a newer g++, or leave cpu out of TARGETS."
        )


def _packed_manifest(package: Package) -> bytes:
    """The manifest with the flags that were used, and with the command that makes another wheel."""
    data = json.loads((package.path / "manifest.json").read_text(encoding="utf-8"))
    data["regenerate"] = data["regenerate"].replace("make generate", "make package")
    for size in (data, *data.get("sizes", ())):
        for section in ("targets", "backward"):
            for entry in size.get(section, {}).values():
                entry["flags"] = list(portable_flags(entry["flags"]))
    return _as_json(data)


def _with_own_runtime(path: Path) -> bytes:
    """A module of the package, importing the runtime that lies beside it instead of one that may be installed."""
    text = re.sub(r"^from runtime(?=[ .])", f"from .{RUNTIME}", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    for module in imported_modules(text):
        if module.partition(".")[0] in ("runtime", "codegen", "generated"):
            raise PackageError(f"{path} imports {module}, which a wheel does not hold; generate the package again.")
    return text.encode()


def imported_modules(text: str) -> list[str]:
    """The modules that a Python source imports by absolute names, anywhere in it."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found.append(node.module)
    return found


def _runtime_files(name: str) -> dict[str, bytes]:
    modules = sorted(path for path in Path(__file__).parent.glob("*.py") if path.stem not in BUILDER)
    return {f"{name}/{RUNTIME}/{path.name}": path.read_bytes() for path in modules}


# ---- what pip reads -------------------------------------------------------------------------------------------------


def _information_files(folder: str, distribution: str, about: About) -> dict[str, bytes]:
    header = [
        "Metadata-Version: 2.1",
        f"Name: {distribution}",
        f"Version: {about.version}",
        f"Summary: {about.summary}",
        "License: MIT",
        "Classifier: Operating System :: POSIX :: Linux",
        "Classifier: Programming Language :: Python :: 3",
        f"Requires-Python: {REQUIRES_PYTHON}",
        *(f"Requires-Dist: {requirement}" for requirement in about.requires),
        "Description-Content-Type: text/markdown",
    ]
    files = {
        f"{folder}/METADATA": "\n".join([*header, "", about.description]).encode(),
        f"{folder}/WHEEL": (
            f"Wheel-Version: 1.0\nGenerator: {PRODUCT} {VERSION}\nRoot-Is-Purelib: false\nTag: {TAG}\n".encode()
        ),
        f"{folder}/top_level.txt": f"{about.name}\n".encode(),
    }
    text = _license()
    if text is not None:
        files[f"{folder}/LICENSE"] = text
    return files


def _description(package: Package) -> str:
    manifest = package.manifest
    sizes = manifest.sizes or (manifest,)
    lines = [
        f"`{manifest.name}` computes one layer at {'one shape' if len(sizes) == 1 else f'{len(sizes)} shapes'}, precision {manifest.precision}:",
        "",
        *(f"- `{size.input.name}` {size.input.shape} {size.input.dtype} -> {size.output.shape} {size.output.dtype}" for size in sizes),
        *(["", f"Another batch up to {manifest.batches[-1]} runs the next larger one."] if manifest.pad_batch else []),
        "",
        "```python",
        f"from {manifest.name} import ModelNew, get_init_inputs, get_inputs",
        "",
        "model = ModelNew(*get_init_inputs())",
        "```",
        "",
        "Holds built libraries for:",
        "",
    ]
    for target in manifest.targets.values():
        if target.arch is None:
            lines.append(f"- `{target.name}`: processors of level {PROCESSOR} (2013 and later)")
        else:
            major, minor = target.least_capability
            lines.append(f"- `{target.name}`: GPUs of compute capability {major}.{minor}{' and later' * (target.arch == 'native')}")
    lines += ["", "It needs torch, and no compiler.", ""]
    return "\n".join(lines)


def _license() -> bytes | None:
    """The licence of the runtime inside: from the checkout, else from the installed product."""
    beside = Path(__file__).parents[1] / "LICENSE"
    if beside.is_file():
        return beside.read_bytes()
    try:
        found = [file for file in metadata.files(PRODUCT) or () if file.name == "LICENSE"]
    except metadata.PackageNotFoundError:
        return None
    return found[0].locate().read_bytes() if found else None


def _record(files: dict[str, bytes], own_name: str) -> bytes:
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    for name, content in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        rows.writerow((name, f"sha256={digest}", len(content)))
    rows.writerow((own_name, "", ""))
    return text.getvalue().encode()


def _write(files: dict[str, bytes], path: Path) -> Path:
    """The zip file, whole or not at all."""
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".tmp")
        with os.fdopen(descriptor, "wb") as stream, zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, content in files.items():
                member = zipfile.ZipInfo(name, _EPOCH)
                mode = 0o755 if name.endswith(".so") else 0o644
                member.create_system, member.external_attr = 3, (stat.S_IFREG | mode) << 16  # 3: Unix
                member.compress_type = zipfile.ZIP_DEFLATED
                archive.writestr(member, content)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException as error:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
        if isinstance(error, OSError):
            remedy = remedy_for(error)
            raise PackageError(
                f"the wheel cannot be written to {path.parent}: {cause_of(error)}; {f'{remedy}, or ' if remedy else ''}name another folder (--out)."
            ) from error
        raise
    return path


def _as_json(data: dict) -> bytes:
    return (json.dumps(data, indent=1) + "\n").encode()
