"""Finds nvcc, g++ and ninja, and says what is missing. Nothing here compiles."""

import dataclasses
import importlib.metadata
import importlib.util
import os
import re
import shlex
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from .commands import Command, find_program, first_named, split_command, split_host_option
from .errors import ToolchainError
from .tools import (
    MIN_GXX,
    MIN_NINJA,
    MIN_NVCC,
    Tool,
    check_version,
    dotted,
    link_directories,
    numbers,
    probe_gxx,
    probe_ninja,
    probe_nvcc,
    version_output,
)

# The wheels that make up a CUDA compiler, and a file that is there when the wheel is.
NVCC_WHEELS = {
    "nvidia-cuda-nvcc": "bin/nvcc",
    "nvidia-nvvm": "nvvm/bin/cicc",
    "nvidia-cuda-crt": "include/crt/host_config.h",
    "nvidia-cuda-runtime": "include/cuda_runtime.h",
    "nvidia-cuda-cccl": "include/cccl",
}
HOST_VARIABLES = ("CUDAHOSTCXX", "NVCC_CCBIN", "CXX")


@dataclass(frozen=True)
class Toolchain:
    """The tools of one build; ``nvcc`` is None where only C++ is compiled."""

    gxx: Tool
    ninja: Tool
    nvcc: Tool | None = None
    link_directories: tuple[str, ...] = ()

    @property
    def identity(self) -> str:
        """What the compilers say they are: part of every build key."""
        return "\n".join(tool.identity for tool in (self.gxx, self.nvcc) if tool is not None)


def toolchain(cuda: bool) -> Toolchain:
    """The tools needed to build CUDA (or only C++) sources; raises ToolchainError naming what is amiss."""
    if not cuda:
        return Toolchain(find_gxx(), find_ninja())
    nvcc = find_nvcc()
    return Toolchain(find_host_compiler(), find_ninja(), nvcc, link_directories(nvcc.path))


def find_nvcc() -> Tool:
    """nvcc: what NVCC names, else from CUDA_HOME, PATH, or the Python packages of NVCC_WHEELS, in this order."""
    command, origin = _locate_nvcc()
    tool = _with_command(probe_nvcc(command.asked_through, command.path, origin), command)
    check_version(tool, MIN_NVCC, "install a newer CUDA toolkit, or set CUDA_HOME to one that is installed")
    return dataclasses.replace(tool, flags=split_host_option(tool.flags)[0])


def find_gxx() -> Tool:
    """The compiler of C++ sources: what CXX names, else g++ on PATH."""
    return _find_gxx(*first_named(("CXX",), os.environ))


def find_host_compiler() -> Tool:
    """The compiler that nvcc calls for host code: that of ``-ccbin`` in NVCC, else what one of HOST_VARIABLES names, else g++ on PATH."""
    host = split_host_option(_locate_nvcc()[0].flags)[1]
    variable, text = ("NVCC's -ccbin", host) if host else first_named(HOST_VARIABLES, os.environ)
    if variable in ("NVCC's -ccbin", "NVCC_CCBIN"):  # nvcc takes one path there, of the compiler or of its folder
        text = shlex.quote(os.path.join(text, "g++") if os.path.isdir(text) else text)
    return _find_gxx(variable, text)


def _find_gxx(variable: str, text: str) -> Tool:
    command = split_command(variable, text)
    if command is None:
        path = find_program("g++")
        if path is None:
            raise ToolchainError(
                f"g++ was not found on PATH; g++ {dotted(MIN_GXX)} or later is needed to build generated code: "
                "install it (on Debian or Ubuntu: apt-get install g++) or set CXX to the compiler."
            )
        command = Command(path)
    tool = _with_command(probe_gxx(command.asked_through, command.path, variable or "PATH"), command)
    check_version(tool, MIN_GXX, f"install a newer g++, or set {variable or 'CXX'} to one that is installed")
    return tool


def _with_command(tool: Tool, command: Command) -> Tool:
    return dataclasses.replace(tool, launcher=command.launcher, flags=command.flags, left_out=command.left_out)


def find_ninja() -> Tool:
    """ninja from PATH, else beside the running Python, else from the Python package ``ninja``."""
    path, origin = find_program("ninja"), "PATH"
    if path is None:
        path, origin = find_program("ninja", str(Path(sys.executable).parent)), "beside Python"
    if path is None and importlib.util.find_spec("ninja") is not None:
        import ninja

        path, origin = find_program("ninja", ninja.BIN_DIR), "Python package"
    if path is None:
        raise ToolchainError(
            f"ninja was not found on PATH nor as a Python package; ninja {dotted(MIN_NINJA)} or later is needed "
            "to build generated code: pip install ninja"
        )
    tool = probe_ninja(path, origin)
    check_version(tool, MIN_NINJA, "pip install --upgrade ninja")
    return tool


def find_cuobjdump() -> Tool:
    """cuobjdump beside nvcc, else on PATH; only for looking at machine code."""
    beside = str(Path(find_nvcc().path).parent)
    path = shutil.which("cuobjdump", path=beside) or shutil.which("cuobjdump")
    if path is None:
        raise ToolchainError(
            "cuobjdump was not found beside nvcc or on PATH; it is only needed to show machine code: "
            "install it with the CUDA toolkit, or pip install nvidia-cuda-cuobjdump"
        )
    match = re.search(r"V(\d+(?:\.\d+)*)", version_output("cuobjdump", path))
    return Tool("cuobjdump", path, numbers(match[1]) if match else (), "", "PATH")


def _locate_nvcc() -> tuple[Command, str]:
    named = split_command("NVCC", os.environ.get("NVCC", ""))
    if named is not None:
        return named, "NVCC"
    home = os.environ.get("CUDA_HOME", "").strip()
    if home:
        if ":" in home:
            raise ToolchainError(
                f"CUDA_HOME is {home!r}: it must name one folder, and it holds a colon as if it were a search path; "
                "set CUDA_HOME to the CUDA toolkit's folder, such as /usr/local/cuda."
            )
        nvcc = Path(home) / "bin" / "nvcc"
        if not os.access(nvcc, os.X_OK) or nvcc.is_dir():
            raise ToolchainError(
                f"CUDA_HOME is {home!r}, but {nvcc} is not a program that can be run; nvcc {dotted(MIN_NVCC)} or "
                "later is needed: point CUDA_HOME at a CUDA toolkit, or unset it to search PATH and the Python packages."
            )
        return Command(os.path.abspath(nvcc)), "CUDA_HOME"
    on_path = find_program("nvcc")
    if on_path is not None:
        return Command(on_path), "PATH"
    for prefix in _wheel_prefixes():
        _check_wheels(prefix)
        return Command(str(prefix / "bin" / "nvcc")), "Python packages"
    raise ToolchainError(
        "nvcc was not found: CUDA_HOME is not set, PATH has none, and the Python packages have none; "
        f"nvcc {dotted(MIN_NVCC)} or later is needed to build CUDA targets: install a CUDA toolkit, or "
        f"pip install {' '.join(NVCC_WHEELS)} (all of one CUDA version), or set TARGETS=cpu to run on the CPU."
    )


def _wheel_prefixes() -> list[Path]:
    """Folders like ``site-packages/nvidia/cu13`` that hold ``bin/nvcc``, newest CUDA first."""
    spec = importlib.util.find_spec("nvidia")
    roots = [] if spec is None else [Path(root) for root in spec.submodule_search_locations or ()]
    found = [prefix for root in roots for prefix in root.glob("cu*") if os.access(prefix / "bin" / "nvcc", os.X_OK)]
    return sorted(found, key=lambda prefix: prefix.name, reverse=True)


def _check_wheels(prefix: Path) -> None:
    """The wheels must all be there and be of one CUDA version; torch brings some of them at a version of its own."""
    absent = [wheel for wheel, file in NVCC_WHEELS.items() if not (prefix / file).exists()]
    versions = {}
    for wheel in NVCC_WHEELS:
        try:
            versions[wheel] = ".".join(importlib.metadata.version(wheel).split(".")[:2])
        except importlib.metadata.PackageNotFoundError:
            continue  # unpacked by hand: the files and nvcc's own version are what counts
    if not absent and len(set(versions.values()) - {None}) <= 1:
        return
    wanted = versions.get("nvidia-cuda-runtime") or next(iter(versions.values()), None)
    command = " ".join(f"{wheel}=={wanted}.*" if wanted else wheel for wheel in NVCC_WHEELS)
    if absent:
        raise ToolchainError(
            f"the nvcc of the Python packages in {prefix} is half installed: {', '.join(absent)} "
            f"{'is' if len(absent) == 1 else 'are'} missing: pip install {command}"
        )
    listed = ", ".join(f"{wheel} {version}" for wheel, version in versions.items())
    raise ToolchainError(
        f"the Python packages that make up nvcc are of different CUDA versions ({listed}): pip install {command}"
    )
