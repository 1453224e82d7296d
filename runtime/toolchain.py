"""Finds nvcc, g++ and ninja, says what is wrong with them, and knows every flag they are given.

Nothing here compiles. A tool that is missing, half installed or too old is named with the version found and the
version needed. A compiler's identity is what it prints as its version, never where it lies or when it was installed,
so a moved toolkit or another order of PATH is the same compiler.
"""

import dataclasses
import functools
import hashlib
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
from .process import run_program
from .processor import PROCESSOR

MIN_NVCC = (12, 4)
MIN_GXX = (9, 0)
MIN_NINJA = (1, 8)
PROBE_SECONDS = 30  # a compiler that does not tell its version by then is broken

# The wheels that make up a CUDA compiler, and a file that is there when the wheel is.
NVCC_WHEELS = {
    "nvidia-cuda-nvcc": "bin/nvcc",
    "nvidia-nvvm": "nvvm/bin/cicc",
    "nvidia-cuda-crt": "include/crt/host_config.h",
    "nvidia-cuda-runtime": "include/cuda_runtime.h",
    "nvidia-cuda-cccl": "include/cccl",
}
NEWEST_CAPABILITY_OF_MIN_NVCC = (9, 0)

NVCC_ENVIRONMENT = ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS")
HOST_VARIABLES = ("CUDAHOSTCXX", "NVCC_CCBIN", "CXX")


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
    return Toolchain(find_host_compiler(), find_ninja(), nvcc, _link_directories(nvcc.path))


# ---- what the compilers are told ------------------------------------------------------------------------------------


def compile_flags(tools: Toolchain, cuda: bool, flags: tuple[str, ...], arch: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Flags that turn one source into an object for a shared library: first those that the environment's commands name.

    But for these they are free of paths, so they can be part of a key.
    """
    return _named_flags(tools, cuda) + flags + arch + (("-Xcompiler", "-fPIC") if cuda else ("-fPIC",))


def _named_flags(tools: Toolchain, cuda: bool) -> tuple[str, ...]:
    if not cuda:
        return tools.gxx.flags
    return tools.nvcc.flags + tuple(word for flag in tools.gxx.flags for word in ("-Xcompiler", flag.replace(",", "\\,")))


def inherited_flags(tools: Toolchain, cuda: bool) -> tuple[str, ...]:
    """What steers the compilers beside their flags: part of the key, not of the command."""
    of_nvcc = tuple(os.environ.get(name, "") for name in NVCC_ENVIRONMENT) if cuda else ()
    return of_nvcc + tools.gxx.settings * (not cuda) + (tools.nvcc.settings if cuda else ())


def compile_command(tools: Toolchain, cuda: bool, flags: tuple[str, ...]) -> list[str]:
    """The command, but for ``-c source -o object``, with ``flags`` from compile_flags."""
    return [*_compiler(tools, cuda), *flags]


def _compiler(tools: Toolchain, cuda: bool) -> list[str]:
    """The compiler behind its launchers. nvcc takes the host compiler as one path, so its launchers are left out there."""
    if not cuda:
        return [*tools.gxx.launcher, tools.gxx.path]
    return [*tools.nvcc.launcher, tools.nvcc.path, "-ccbin", tools.gxx.path]


def portable_flags(flags: tuple[str, ...]) -> tuple[str, ...]:
    """A target's flags without what depends on this machine: its processor, and paths, which -lineinfo records."""
    return tuple(f"-march={PROCESSOR}" if flag == "-march=native" else flag for flag in flags if flag != "-lineinfo")


def link_command(tools: Toolchain, cuda: bool, flags: tuple[str, ...], portable: bool = False) -> list[str]:
    """The command, but for ``objects -o library``.

    The CUDA runtime is linked statically: a stream handle is a driver object, so it works across copies of the
    runtime, and the library then depends on no particular libcudart. A ``portable`` C++ library names no OpenMP library
    either: it takes the one that torch has loaded, under whatever name. Portable libraries carry no symbols but the launchers'.
    """
    named = _named_flags(tools, cuda)
    compiler = [*_compiler(tools, cuda), *(portable_flags(named) if portable else named)]
    if portable and not cuda:
        return [*compiler, "-shared", "-s", "-Wl,-Bsymbolic", "-Wl,--as-needed"]
    if not cuda:
        return [*compiler, "-shared", "-Wl,-Bsymbolic", "-Wl,-z,defs", *(f for f in flags if f == "-fopenmp")]
    directories = [f"-L{directory}" for directory in tools.link_directories]
    arch = [flag for flag in flags if flag.startswith("-gencode")]
    stripped = ["-Xlinker", "-s"] if portable else []
    return [*compiler, "-shared", "--cudart=static", "-Xlinker", "-Bsymbolic", *stripped, *arch, *directories]


def arch_flags(arch: str, least: tuple[int, int], capability: tuple[int, int] | None) -> tuple[str, ...]:
    """nvcc's architecture flags for a target.

    ``arch`` is ``native`` or fixed (``sm_90a``). ``native`` with a capability compiles for that device alone; without
    one it gives the ``least`` capability's code plus PTX that later devices can compile. A device that is newer than
    nvcc gets PTX of the newest architecture that nvcc knows.
    """
    if arch != "native":
        return (_gencode(arch.removeprefix("sm_"), "sm"),)
    if capability is None:
        number = _number(least)
        return _gencode(number, "sm"), _gencode(number, "compute")
    if capability > NEWEST_CAPABILITY_OF_MIN_NVCC:
        known = _known_capabilities(find_nvcc().path)
        if known and capability not in known:
            return (_gencode(_number(max(entry for entry in known if entry <= capability)), "compute"),)
    return (_gencode(_number(capability), "sm"),)


def _gencode(number: str, kind: str) -> str:
    return f"-gencode=arch=compute_{number},code={kind}_{number}"


def _number(capability: tuple[int, int]) -> str:
    return f"{capability[0]}{capability[1]}"


# ---- where the tools are --------------------------------------------------------------------------------------------


def find_nvcc() -> Tool:
    """nvcc: what NVCC names, else from CUDA_HOME, PATH, or the Python packages of NVCC_WHEELS, in this order."""
    command, origin = _locate_nvcc()
    tool = _with_command(_probe_nvcc(command.asked_through, command.path, origin), command)
    _check_version(tool, MIN_NVCC, "install a newer CUDA toolkit, or set CUDA_HOME to one that is installed")
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
                f"g++ was not found on PATH; g++ {_dotted(MIN_GXX)} or later is needed to build generated code: "
                "install it (on Debian or Ubuntu: apt-get install g++) or set CXX to the compiler."
            )
        command = Command(path)
    tool = _with_command(_probe_gxx(command.asked_through, command.path, variable or "PATH"), command)
    _check_version(tool, MIN_GXX, f"install a newer g++, or set {variable or 'CXX'} to one that is installed")
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
            f"ninja was not found on PATH nor as a Python package; ninja {_dotted(MIN_NINJA)} or later is needed "
            "to build generated code: pip install ninja"
        )
    tool = _probe_ninja(path, origin)
    _check_version(tool, MIN_NINJA, "pip install --upgrade ninja")
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
    match = re.search(r"V(\d+(?:\.\d+)*)", _version_output("cuobjdump", path))
    return Tool("cuobjdump", path, _numbers(match[1]) if match else (), "", "PATH")


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
                f"CUDA_HOME is {home!r}, but {nvcc} is not a program that can be run; nvcc {_dotted(MIN_NVCC)} or "
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
        f"nvcc {_dotted(MIN_NVCC)} or later is needed to build CUDA targets: install a CUDA toolkit, or "
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


# ---- asking the tools ------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=None)
def _probe_nvcc(launcher: tuple[str, ...], path: str, origin: str) -> Tool:
    text = _version_output("nvcc", path, launcher=launcher)
    match = re.search(r"release (\d+)\.(\d+), V(\d+(?:\.\d+)*)", text)
    if match is None:
        raise ToolchainError(f"{path} --version printed no CUDA release, so it is not a working nvcc: {text.strip()!r}")
    _check_nvcc_is_whole(path)
    return Tool("nvcc", path, _numbers(match[3]), _digest("nvcc", text), origin)


def _check_nvcc_is_whole(path: str) -> None:
    """A toolkit without its device compiler or headers is found out here, not by a failing build."""
    shown = _nvcc_settings(path)
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
def _probe_gxx(launcher: tuple[str, ...], path: str, origin: str) -> Tool:
    ask = functools.partial(_version_output, "g++", path, launcher=launcher)
    text = ask()
    number = re.search(r"^\d+(\.\d+)*$", ask("-dumpfullversion"), re.MULTILINE)
    if "clang" in text or number is None:
        raise ToolchainError(
            f"{path} is not g++ (it says {text.splitlines()[0] if text else 'nothing'!r}); "
            f"g++ {_dotted(MIN_GXX)} or later is needed: set CXX to a g++."
        )
    machine = ask("-dumpmachine").strip()
    first, _, rest = text.partition("\n")
    name_free = first.partition(" ")[2]  # the first word is how the program was called
    return Tool("g++", path, _numbers(number[0]), _digest("g++", machine, name_free, rest), origin)


@functools.lru_cache(maxsize=None)
def _probe_ninja(path: str, origin: str) -> Tool:
    text = _version_output("ninja", path).strip()
    match = re.match(r"\d+(\.\d+)+", text)
    if match is None:
        raise ToolchainError(f"{path} --version printed no version, so it is not a working ninja: {text!r}")
    return Tool("ninja", path, _numbers(match[0]), _digest("ninja", text), origin)


@functools.lru_cache(maxsize=None)
def _known_capabilities(nvcc: str) -> tuple[tuple[int, int], ...]:
    text = run_program([nvcc, "--list-gpu-arch"]).output
    return tuple((int(major), int(minor)) for major, minor in re.findall(r"compute_(\d+)(\d)\b", text))


@functools.lru_cache(maxsize=None)
def _nvcc_settings(nvcc: str) -> dict[str, str]:
    """What nvcc says about itself: TOP, CICC_PATH, INCLUDES, LIBRARIES, ..."""
    text = run_program([nvcc, "--dryrun", "-c", "none.cu"]).output
    return dict(re.findall(r"^#\$ (\w+)=(.*)$", text, re.MULTILINE))


@functools.lru_cache(maxsize=None)
def _link_directories(nvcc: str) -> tuple[str, ...]:
    """``<prefix>/lib``, which the wheels use and nvcc does not search by itself."""
    top = _nvcc_settings(nvcc).get("TOP")
    folder = None if top is None else Path(os.path.normpath(top)) / "lib"
    return (str(folder),) if folder is not None and (folder / "libcudart_static.a").is_file() else ()


def _version_output(name: str, path: str, option: str = "--version", launcher: tuple[str, ...] = ()) -> str:
    try:
        finished = run_program([*launcher, path, option], limit_s=PROBE_SECONDS)
    except TimeoutError as error:
        raise ToolchainError(f"{error}, although it was only asked for its version ({option}); reinstall {name}.") from error
    except OSError as error:
        raise ToolchainError(f"{path} cannot be run ({error.strerror}); reinstall {name}.") from error
    if finished.status != 0:
        raise ToolchainError(f"{path} {option} failed with status {finished.status}; reinstall {name}: {finished.output}")
    return finished.output


def _check_version(tool: Tool, needed: tuple[int, ...], remedy: str) -> None:
    if tool.version < needed:
        raise ToolchainError(
            f"{tool.name} {tool.version_text} was found at {tool.path} (from {tool.origin}), and "
            f"{tool.name} {_dotted(needed)} or later is needed: {remedy}."
        )


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(str(part) for part in version)


def _digest(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()
