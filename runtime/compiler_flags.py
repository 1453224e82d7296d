"""What the compilers are told: every flag and command of a build."""

import os

from .processor import PROCESSOR
from .toolchain import Toolchain, find_nvcc
from .tools import known_capabilities

NEWEST_CAPABILITY_OF_MIN_NVCC = (9, 0)
NVCC_ENVIRONMENT = ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS")


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
        known = known_capabilities(find_nvcc().path)
        if known and capability not in known:
            return (_gencode(_number(max(entry for entry in known if entry <= capability)), "compute"),)
    return (_gencode(_number(capability), "sm"),)


def _gencode(number: str, kind: str) -> str:
    return f"-gencode=arch=compute_{number},code={kind}_{number}"


def _number(capability: tuple[int, int]) -> str:
    return f"{capability[0]}{capability[1]}"
