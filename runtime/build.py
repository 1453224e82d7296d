"""Turns the sources of one target into one shared library in the cache.

A build happens in a folder of its own, from copies of the sources under their bare names, so that neither the
checkout's path nor the cache's reaches a compiler's command line.
"""

import ctypes
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from . import cache as cache_module
from .cache import Cache, Record, build_key, default_cache, find_built, remove_private, sha256_of
from .diagnostics import explain_failure, ran_out_of_room
from .errors import BuildError, PackageError
from .files import cause_of
from .folders import cannot_write
from .manifest import TargetManifest
from .package import Package
from .prebuilt import open_library
from .process import run_program
from .resources import parallel_jobs
from .compiler_flags import arch_flags, compile_command, compile_flags, inherited_flags, link_command, portable_flags
from .toolchain import Toolchain, toolchain

NINJA_FILE = "build.ninja"
LOG_FILE = "build.log"
OPENING_ATTEMPTS = 10  # somebody may clear the cache between a build and its opening


@dataclass(frozen=True)
class Build:
    """Everything that one build needs. ``flags`` are complete; ``units`` are the sources that become objects.

    ``portable`` builds are for wheels: they leave out what only this machine is sure to have.
    """

    package: str
    target: str
    cuda: bool
    sources: dict[str, bytes]
    units: tuple[str, ...]
    flags: tuple[str, ...]
    functions: tuple[str, ...]
    tools: Toolchain
    key: str
    portable: bool = False

    @property
    def label(self) -> str:
        return f"{self.package} for {self.target}"

    def open(self) -> ctypes.CDLL:
        """The library, built first where the cache has none; BuildError where that fails."""
        for _ in range(OPENING_ATTEMPTS):
            path = ensure_built(self)
            try:
                return ctypes.CDLL(str(path))
            except OSError as error:
                if path.exists():
                    raise BuildError(f"{self.label} cannot be loaded: {error}; python -m fixed_shape_kernels cache clear removes it.") from error
        raise BuildError(f"{self.label} was removed from the cache each time it was built; stop what is clearing the cache.")


def plan_build(
    package: Package, target: TargetManifest, capability: tuple[int, int] | None = None, portable: bool = False
) -> Build:
    """The build of a target for a device of ``capability`` (None: the least device that the target runs on).

    A ``portable`` library does not lean on this machine: see Build.

    Raises ToolchainError where a tool is missing, half installed or too old, PackageError where a source is missing.
    """
    cuda = target.arch is not None
    tools = toolchain(cuda)
    arch = arch_flags(target.arch, target.least_capability, capability) if cuda else ()
    flags = compile_flags(tools, cuda, target.flags, arch)
    if portable:
        flags = portable_flags(flags)
    sources = package.read_sources(target)
    return Build(
        package=package.manifest.name,
        target=target.name,
        cuda=cuda,
        sources=sources,
        units=target.sources,
        flags=flags,
        functions=tuple(target.functions),
        tools=tools,
        key=build_key(sources, flags + inherited_flags(tools, cuda) + portable * ("portable",), tools.identity),
        portable=portable,
    )


def ensure_built(build: Build, cache: Cache | None = None) -> Path:
    """The path of the build's library: from the cache, or built now.

    Any number of processes and threads may ask at once: one builds, the others wait for it. A cache that holds the
    library need not be writable. Raises BuildError.
    """
    try:
        found = find_built(build.key) if cache is None else None
        if found is not None:
            return found
        cache = cache or default_cache()
        found = cache.find(build.key)
        if found is not None:
            return found
        with cache.locked(build.key):
            found = cache.find(build.key, warn=False)  # somebody else may have built it while this process waited
            return found or _build(build, cache)
    except OSError as error:
        raise cannot_write(error) from error


def _build(build: Build, cache: Cache) -> Path:
    folder = cache.private_folder(build.key)
    try:
        write_build_folder(build, folder)
        _run_ninja(build, folder, cache)
        _prove(build, folder, cache)
        finished = folder / "finished"
        finished.mkdir(mode=0o700)
        (folder / cache_module.LIBRARY).rename(finished / cache_module.LIBRARY)
        record = Record(build.key, sha256_of(finished / cache_module.LIBRARY), build.package, build.target, build.flags)
        return cache.publish(build.key, finished, record)
    finally:
        remove_private(folder)


def write_build_folder(build: Build, folder: Path) -> None:
    """Writes the sources and the ninja file; ``ninja`` in that folder then repeats the build."""
    for name, text in build.sources.items():
        (folder / name).write_bytes(text)
    compile_line = _ninja_command(compile_command(build.tools, build.cuda, build.flags))
    link_line = _ninja_command(link_command(build.tools, build.cuda, build.flags, build.portable))
    objects = {unit: f"{unit}.o" for unit in build.units}
    lines = [
        "ninja_required_version = 1.8",
        "rule compile",
        f"  command = {compile_line} -c $in -o $out",
        "  description = $in",
        "rule link",
        f"  command = {link_line} $in -o $out",
        "  description = $out",
        *(f"build {target}: compile {unit}" for unit, target in objects.items()),
        f"build {cache_module.LIBRARY}: link {' '.join(objects.values())}",
        "",
    ]
    (folder / NINJA_FILE).write_text("\n".join(lines), encoding="utf-8")


def _ninja_command(argv: list[str]) -> str:
    return shlex.join(argv).replace("$", "$$")


def _run_ninja(build: Build, folder: Path, cache: Cache) -> None:
    jobs = parallel_jobs(len(build.units))
    argv = [build.tools.ninja.path, "-f", NINJA_FILE, "-j", str(jobs)]
    progress = _Progress(build.label)
    # Temporary files go into the private folder: nvcc cannot quote every path, and a killed nvcc cleans nothing up.
    environment = {"NINJA_STATUS": "[%f/%t] ", "TMPDIR": "."}
    try:
        finished = run_program(argv, cwd=folder, env=environment, on_line=progress.show)
    except OSError as error:
        raise BuildError(f"{build.label} did not build: {argv[0]} could not be started ({cause_of(error)}).") from error
    finally:
        progress.end()
    if finished.status == 0:
        return
    explained = f"{build.label} did not build: {explain_failure(finished, build.sources)}"
    if ran_out_of_room(finished):
        raise BuildError(explained)  # what is kept would take the room that is missing
    (folder / LOG_FILE).write_text(finished.output, encoding="utf-8")
    raise _failure(explained, f"\nThe sources, {NINJA_FILE} and the whole {LOG_FILE} are kept in", build, folder, cache)


def _failure(sentence: str, where: str, build: Build, folder: Path, cache: Cache) -> BuildError:
    """The error of a failed build: ``sentence``, and behind ``where`` the folder that keeps it, if one could be made."""
    kept = cache.keep_failed(f"{build.package}-{build.target}", folder)
    return BuildError(sentence if kept is None else f"{sentence}{where} {kept}", kept)


def _prove(build: Build, folder: Path, cache: Cache) -> None:
    """Loads the library where it was built; what cannot be loaded is never published."""
    try:
        open_it = open_library if build.portable else ctypes.CDLL
        library = open_it(folder / cache_module.LIBRARY)
        missing = [name for name in build.functions if not hasattr(library, name)]
    except (OSError, PackageError) as error:
        raise _failure(f"{build.label} was built but cannot be loaded: {error}.", " It is kept in", build, folder, cache) from error
    if missing:
        raise _failure(
            f"{build.label} was built but has no function {', '.join(missing)}: the manifest and the sources do not "
            "belong together; generate the package again.",
            " The build is kept in", build, folder, cache,
        )  # fmt: skip


class _Progress:
    """One line on a terminal that is rewritten as sources get compiled; silent anywhere else."""

    def __init__(self, label: str):
        self.label = label
        self.shown = sys.stderr is not None and sys.stderr.isatty()
        self.width = 0
        self._write("starting")

    def show(self, line: str) -> None:
        if line.startswith("["):
            self._write(line.strip())

    def end(self) -> None:
        self._write("")
        if self.shown:
            sys.stderr.write("\r")

    def _write(self, text: str) -> None:
        if self.shown:
            line = f"building {self.label} {text}" if text else ""
            sys.stderr.write("\r" + line.ljust(self.width))
            sys.stderr.flush()
            self.width = len(line)
