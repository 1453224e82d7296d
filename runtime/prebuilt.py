"""The libraries that came with a package in a wheel: which there are, what each asks of a machine, whether each is whole.

``prebuilt.json`` beside the manifest makes a package a packed one: nothing is compiled for it. It names every library with
its digest, the CUDA version it was made with and the processor it was made for, and the digest of the manifest.
The digests find damage and mixed-up files; who can rewrite a library can rewrite them as well.
"""

import ctypes
import hashlib
import platform
from dataclasses import dataclass
from pathlib import Path

import torch

from .devices import Capability, driver_version
from .errors import PackageError, UnsupportedDeviceError
from .files import can_be_loaded, cause_of, read_json
from .processor import ABILITIES

INDEX = "prebuilt.json"
INDEX_FORMAT = 1
FOLDER = "libraries"

_OPENMP = "GOMP_parallel"  # what g++ calls for a parallel loop; GNU's, LLVM's and Intel's OpenMP libraries all have it


@dataclass(frozen=True)
class PrebuiltLibrary:
    """One library of a wheel, not opened yet. ``key`` is its digest."""

    target: str
    path: Path
    key: str

    def open(self) -> ctypes.CDLL:
        """The loaded library; PackageError where it is not the one that was packed, or cannot be loaded here."""
        if _digest_of(self.path) != self.key:
            raise PackageError(f"{self.path} is damaged: it is not the library that was packed; {_AGAIN}")
        return open_library(self.path)


class Prebuilt:
    """The packed libraries of the package in ``folder``, by target."""

    def __init__(self, folder: Path, index: dict):
        self.folder = folder
        self.index = index

    def library(self, target: str, capability: Capability | None) -> PrebuiltLibrary:
        """The library of ``target`` for a device of ``capability`` (None: the CPU, or no device in particular).

        Raises UnsupportedDeviceError where the processor or the driver cannot run it, PackageError where it is missing.
        """
        entry = self.index["libraries"].get(target)
        if entry is None:
            raise PackageError(f"{self.folder / INDEX} names no library for {target}; {_AGAIN}")
        if "processor" in entry:
            _check_processor(f"{self.folder.name} for {target}", entry["processor"])
        elif capability is not None:
            _check_driver(f"{self.folder.name} for {target}", entry, capability)
        return PrebuiltLibrary(target, self.folder / entry["file"], entry["sha256"])


def read_prebuilt(folder: Path) -> Prebuilt | None:
    """What the package in ``folder`` was packed with; None where its libraries are built on the machine that runs it.

    Raises PackageError where the index cannot be read or the manifest is not the one that was packed.
    """
    path = folder / INDEX
    try:
        index = read_json(path)
        found = index["format"]
        if found != INDEX_FORMAT:
            raise PackageError(f"{path} has format {found!r} and this runtime reads format {INDEX_FORMAT}; {_AGAIN}")
        manifest = index["manifest"]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PackageError(f"{path} cannot be read ({error}); {_AGAIN}") from error
    if _digest_of(folder / "manifest.json") != manifest:
        raise PackageError(f"{folder / 'manifest.json'} is damaged: it is not the manifest that was packed; {_AGAIN}")
    return Prebuilt(folder, index)


def open_library(path: Path) -> ctypes.CDLL:
    """Loads a library that was linked to no OpenMP of its own: it uses torch's, and so shares torch's threads."""
    _provide_openmp()
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        if not can_be_loaded(path):
            raise PackageError(
                f"{path} cannot be loaded: its file system is mounted noexec, or a security policy forbids it; install the wheel "
                "(or put the cache) where libraries may be loaded from."
            ) from error
        raise PackageError(
            f"{path} cannot be loaded: {error}. A wheel runs where the C library is at least as new as on the machine that "
            "made it: make the wheel on an older system."
        ) from error


_AGAIN = "install the wheel again (pip install --force-reinstall)."


def _provide_openmp() -> None:
    """Makes OpenMP's functions visible to what is loaded next; torch has usually done so."""
    if hasattr(ctypes.CDLL(None), _OPENMP):
        return
    home = Path(torch.__file__).parent
    bundled = [*home.glob("lib/libgomp*.so*"), *home.parent.glob("torch.libs/libgomp*.so*"), *home.glob("lib/libiomp5.so")]
    for name in [*map(str, bundled), "libgomp.so.1", "libiomp5.so", "libomp.so"]:
        try:
            if hasattr(ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL), _OPENMP):
                return
        except OSError:
            continue


def _check_processor(what: str, needed: str) -> None:
    if platform.machine() != "x86_64":
        raise UnsupportedDeviceError(f"{what} was made for x86-64 processors, and this machine is {platform.machine()}.")
    abilities = processor_abilities()
    missing = sorted(ABILITIES - abilities) if abilities else []
    if missing:
        raise UnsupportedDeviceError(
            f"{what} was made for processors of level {needed}, and this one lacks {', '.join(missing)}; "
            "generate the package and build it on this machine instead (make generate)."
        )


def processor_abilities() -> set[str]:
    """The flags of the first processor as Linux names them; empty where it does not say."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("flags"):
                return set(line.partition(":")[2].split())
    except OSError:
        pass
    return set()


def _check_driver(what: str, entry: dict, capability: Capability) -> None:
    """Machine code needs a driver of the compiler's major version; PTX, one that is not older than the compiler."""
    made, driver = tuple(entry["cuda"]), driver_version()
    if driver is None:
        return
    as_text = f"{what} was made with CUDA {made[0]}.{made[1]}, and the driver of this machine supports CUDA {driver[0]}.{driver[1]}"
    if made[0] > driver[0]:
        raise UnsupportedDeviceError(
            f"{as_text}: install a driver for CUDA {made[0]}, or make the wheel with a toolkit of CUDA {driver[0]}."
        )
    if capability[0] != entry["capability"][0] and made > driver:
        raise UnsupportedDeviceError(
            f"{as_text}; on a GPU of compute capability {capability[0]}.{capability[1]} the driver has to compile it, and it "
            f"must not be older for that: install a driver for CUDA {made[0]}.{made[1]} or later."
        )


def _digest_of(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise PackageError(f"{path} cannot be read: {cause_of(error)}; {_AGAIN}") from error
