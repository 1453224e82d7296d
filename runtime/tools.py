"""Compilers and ninja as they tell of themselves: version, identity, what they were installed with, where they look.

A tool that is half installed or too old is named with the version found and the version needed. A compiler's identity is what it prints as its
version, never where it lies or when it was installed, so a moved toolkit or another order of PATH is the same compiler.
"""

import functools
import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

from .errors import ToolchainError
from .process import run_program

MIN_NVCC = (12, 4)
MIN_GXX = (9, 0)
MIN_NINJA = (1, 8)
PROBE_SECONDS = 30  # a compiler that does not tell its version by then is broken


@dataclass(frozen=True)
class Tool:
    """A program that was found: where, its version, what it said it is, and how it was found.

    A compiler's ``launcher`` is called in front of it; its ``flags`` are part of the command that names it, as were the
    launchers ``left_out``.
    """

    name: str
    path: str
    version: tuple[int, ...]
    identity: str
    origin: str
    launcher: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()

    @property
    def settings(self) -> tuple[str, ...]:
        """The assignments among the launcher's words, as in ``env CPATH=include g++``: they decide what is built."""
        return tuple(word for word in self.launcher if "=" in word)

    @property
    def version_text(self) -> str:
        return ".".join(str(part) for part in self.version)


@functools.lru_cache(maxsize=None)
def probe_nvcc(launcher: tuple[str, ...], path: str, origin: str) -> Tool:
    text = version_output("nvcc", path, launcher=launcher)
    match = re.search(r"release (\d+)\.(\d+), V(\d+(?:\.\d+)*)", text)
    if match is None:
        raise ToolchainError(f"{path} --version printed no CUDA release, so it is not a working nvcc: {text.strip()!r}")
    check_nvcc_is_whole(path)
    return Tool("nvcc", path, numbers(match[3]), _digest("nvcc", text), origin)


def check_nvcc_is_whole(path: str) -> None:
    """A toolkit without its device compiler or headers is found out here, not by a failing build."""
    shown = nvcc_settings(path)
    search = [shown.get("CICC_PATH", ""), *shown.get("PATH", "").split(":")]
    if not any(folder and os.access(Path(folder) / "cicc", os.X_OK) for folder in search):
        raise ToolchainError(
            f"{path} has no cicc beside it, so the CUDA toolkit is half installed: reinstall it, "
            "or install the Python package nvidia-nvvm of the same version."
        )
    folders = [Path(folder) for folder in re.findall(r'"-I([^"]+)"', shown.get("INCLUDES", ""))]
    folders.append(Path("/usr/include"))
    if not any((folder / "cuda_runtime.h").is_file() for folder in folders):
        raise ToolchainError(
            f"{path} has no cuda_runtime.h in {folders[0]}, so the CUDA toolkit is half installed: reinstall it, "
            "or install the Python packages nvidia-cuda-runtime and nvidia-cuda-crt of the same version."
        )


@functools.lru_cache(maxsize=None)
def probe_gxx(launcher: tuple[str, ...], path: str, origin: str) -> Tool:
    ask = functools.partial(version_output, "g++", path, launcher=launcher)
    text = ask()
    number = re.search(r"^\d+(\.\d+)*$", ask("-dumpfullversion"), re.MULTILINE)
    if "clang" in text or number is None:
        raise ToolchainError(
            f"{path} is not g++ (it says {text.splitlines()[0] if text else 'nothing'!r}); "
            f"g++ {dotted(MIN_GXX)} or later is needed: set CXX to a g++."
        )
    machine = ask("-dumpmachine").strip()
    first, _, rest = text.partition("\n")
    name_free = first.partition(" ")[2]  # the first word is how the program was called
    return Tool("g++", path, numbers(number[0]), _digest("g++", machine, name_free, rest), origin)


@functools.lru_cache(maxsize=None)
def probe_ninja(path: str, origin: str) -> Tool:
    text = version_output("ninja", path).strip()
    match = re.match(r"\d+(\.\d+)+", text)
    if match is None:
        raise ToolchainError(f"{path} --version printed no version, so it is not a working ninja: {text!r}")
    return Tool("ninja", path, numbers(match[0]), _digest("ninja", text), origin)


@functools.lru_cache(maxsize=None)
def known_capabilities(nvcc: str) -> tuple[tuple[int, int], ...]:
    text = run_program([nvcc, "--list-gpu-arch"]).output
    return tuple((int(major), int(minor)) for major, minor in re.findall(r"compute_(\d+)(\d)\b", text))


@functools.lru_cache(maxsize=None)
def nvcc_settings(nvcc: str) -> dict[str, str]:
    """What nvcc says about itself: TOP, CICC_PATH, INCLUDES, LIBRARIES, ..."""
    text = run_program([nvcc, "--dryrun", "-c", "none.cu"]).output
    return dict(re.findall(r"^#\$ (\w+)=(.*)$", text, re.MULTILINE))


@functools.lru_cache(maxsize=None)
def link_directories(nvcc: str) -> tuple[str, ...]:
    """``<prefix>/lib``, which the wheels use and nvcc does not search by itself."""
    top = nvcc_settings(nvcc).get("TOP")
    folder = None if top is None else Path(os.path.normpath(top)) / "lib"
    return (str(folder),) if folder is not None and (folder / "libcudart_static.a").is_file() else ()


def version_output(name: str, path: str, option: str = "--version", launcher: tuple[str, ...] = ()) -> str:
    try:
        finished = run_program([*launcher, path, option], limit_s=PROBE_SECONDS)
    except TimeoutError as error:
        raise ToolchainError(f"{error}, although it was only asked for its version ({option}); reinstall {name}.") from error
    except OSError as error:
        raise ToolchainError(f"{path} cannot be run ({error.strerror}); reinstall {name}.") from error
    if finished.status != 0:
        raise ToolchainError(f"{path} {option} failed with status {finished.status}; reinstall {name}: {finished.output}")
    return finished.output


def check_version(tool: Tool, needed: tuple[int, ...], remedy: str) -> None:
    if tool.version < needed:
        raise ToolchainError(
            f"{tool.name} {tool.version_text} was found at {tool.path} (from {tool.origin}), and "
            f"{tool.name} {dotted(needed)} or later is needed: {remedy}."
        )


def numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))


def dotted(version: tuple[int, ...]) -> str:
    return ".".join(str(part) for part in version)


def _digest(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()
