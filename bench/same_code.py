"""Machine code of two texts of a source: is it the same? Compiled alike, their objects are compared byte for byte, device and host code together.

An object holds every kernel with its parameters and resource usage, the launcher, and all names that a loader sees. Two things would differ
without meaning anything: line tables, which are left out, and the name that nvcc gives a source's anonymous namespace, a hash of its text.
"""

from __future__ import annotations

import hashlib
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

from codegen.targets import Target
from runtime.errors import BuildError
from runtime.process import run_program
from runtime.compiler_flags import arch_flags, compile_command, compile_flags, portable_flags
from runtime.toolchain import Tool, Toolchain, toolchain

_KEPT = ("--no-compress", "--keep", "--keep-dir", ".")  # device code as it is, no temporary file's name in the object, and nvcc's name of the source in a file


@dataclass(frozen=True)
class Unit:
    """A source to compile: its file name, its text, and the target with its flags."""

    name: str
    text: str
    target: Target
    flags: tuple[str, ...]

    @property
    def cuda(self) -> bool:
        return self.target.language == "cuda"


def object_of(unit: Unit, capability: tuple[int, int] | None) -> bytes:
    """The object of a source, compiled as for a wheel: without line tables. `capability` is the card's, for CUDA sources of no fixed architecture.

    Raises ToolchainError, or BuildError where it does not compile.
    """
    tools = toolchain(unit.cuda)
    arch = arch_flags(unit.target.arch, unit.target.min_capability, capability) if unit.cuda else ()
    flags = portable_flags(compile_flags(tools, unit.cuda, unit.flags, arch)) + (_KEPT if unit.cuda else ())
    with tempfile.TemporaryDirectory(prefix="same-code-") as name:
        folder = Path(name)
        (folder / unit.name).write_text(unit.text, encoding="utf-8", newline="\n")
        done = run_program([*compile_command(tools, unit.cuda, flags), "-c", unit.name, "-o", "made.o"], cwd=folder, env={"TMPDIR": "."})
        if done.status != 0:
            raise BuildError(f"{unit.name} does not compile: {done.output.strip()[:2000]}")
        made = (folder / "made.o").read_bytes()
        return without_name(made, (folder / f"{Path(unit.name).stem}.module_id").read_text().strip()) if unit.cuda else made


def without_name(made: bytes, name: str) -> bytes:
    """An object with zeros for the hashes in nvcc's `name` of its source, such as `_c4d24583_4_k_cu_becb7e9d`."""
    return made.replace(name.encode(), re.sub(r"(?<=_)[0-9a-f]{8}(?=_|$)", "0" * 8, name).encode())


def digest_of(unit: Unit, capability: tuple[int, int] | None) -> str:
    """SHA-256 of a source's machine code. Raises as `object_of` does."""
    return hashlib.sha256(object_of(unit, capability)).hexdigest()


def compilers(cuda: bool) -> str:
    """The compilers in words, such as `nvcc 13.0.88, g++ 12.2.0`. Raises ToolchainError."""
    tools: Toolchain = toolchain(cuda)
    found: list[Tool] = [tool for tool in (tools.nvcc, tools.gxx) if tool is not None]
    return ", ".join(f"{tool.name} {tool.version_text}" for tool in found)
