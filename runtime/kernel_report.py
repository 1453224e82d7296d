"""Compiles one CUDA source and reports what ptxas made of it; no GPU needed.

The tests of the generator and ``fsk show --resources`` ask the same question here. A report without
warnings is kept in the cache under everything that determines it, so asking again compiles nothing. Comments do not
determine it: an edited comment compiles nothing either.
"""

import json
import os
import re
import shutil
import tempfile
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path

from .cache import Cache, CacheWarning, build_key, default_cache
from .diagnostics import explain_failure
from .errors import BuildError
from .files import cause_of, read_json
from .process import run_program
from .compiler_flags import arch_flags, compile_command, compile_flags, inherited_flags
from .toolchain import Toolchain, toolchain

REPORT_VERSION = "kernel-report-2"
VERBOSE = ("-Xptxas", "-v")

_COMMENT_OR_LITERAL = re.compile(r'"(?:\\.|[^"\\])*"|\'(?:\\[^\'\n]+|[^\'\\\n])\'|//[^\n]*|/\*.*?\*/', re.DOTALL)
_ENTRY = re.compile(r"Compiling entry function '(?P<name>[^']+)'")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")
_WARNING = re.compile(r"\bwarning\b|Potential Performance Loss", re.IGNORECASE)


@dataclass(frozen=True)
class KernelReport:
    """What one kernel takes: registers a thread; the rest in bytes. ``name`` is the mangled name."""

    name: str
    registers: int
    stack: int
    spill_stores: int
    spill_loads: int
    static_shared: int

    @property
    def short_name(self) -> str:
        """The function's own name without namespaces and template arguments."""
        rest = self.name.removeprefix("_Z").removeprefix("N")
        short = self.name
        while match := re.match(r"(\d+)", rest):
            start, length = match.end(), int(match[1])
            short, rest = rest[start : start + length], rest[start + length :]
        return short


@dataclass(frozen=True)
class CompileReport:
    """What came out of compiling one source: its kernels, the compilers' warnings, whether the PTX computes in double."""

    kernels: tuple[KernelReport, ...]
    warnings: tuple[str, ...]
    uses_double: bool


def compile_report(source: Path, flags: tuple[str, ...], arch: str, cache: Cache | None = None) -> CompileReport:
    """Compiles ``source`` for ``arch`` (``sm_80``, ``sm_90a``, ...) with ``flags``, device and host code.

    The flags are those of a manifest; what a build adds is added here. Raises BuildError with the source lines around
    the error where it does not compile, ToolchainError where nvcc or g++ is amiss.
    """
    tools = toolchain(cuda=True)
    complete = compile_flags(tools, True, tuple(flags) + VERBOSE, arch_flags(arch, (0, 0), None))
    text = source.read_bytes()
    cache = cache or default_cache()
    bare = without_comments(text.decode(errors="replace")).encode()
    key = build_key({source.name: bare}, (*complete, *inherited_flags(tools, True), REPORT_VERSION), tools.identity)
    report = _read(cache, key)
    if report is None:
        report = _compile(source.name, text, tools, complete)
        if not report.warnings:  # they name lines, which comments move
            _write(cache, key, report)
    return report


def without_comments(text: str) -> str:
    """C++ or CUDA text without comments, trailing blanks and empty lines: what a compiler makes the same code of."""
    bare = _COMMENT_OR_LITERAL.sub(lambda found: " " if found[0].startswith("/") else found[0], text)
    return "\n".join(line for line in map(str.rstrip, bare.splitlines()) if line)


def device_code(source: Path, flags: tuple[str, ...], arch: str, form: str) -> Path:
    """Compiles only the device code to ``form`` (``ptx`` or ``cubin``); returns the file, in a new temporary folder."""
    tools = toolchain(cuda=True)
    complete = compile_flags(tools, True, tuple(flags), arch_flags(arch, (0, 0), None))
    folder = Path(tempfile.mkdtemp(prefix="codegen-show-"))
    (folder / source.name).write_bytes(source.read_bytes())
    made = source.name + "." + form
    _run(source.name, source.read_bytes(), folder, compile_command(tools, True, complete) + [f"-{form}", source.name, "-o", made])
    return folder / made


def _compile(name: str, text: bytes, tools: Toolchain, flags: tuple[str, ...]) -> CompileReport:
    folder = Path(tempfile.mkdtemp(prefix="codegen-report-"))
    try:
        (folder / name).write_bytes(text)
        command = compile_command(tools, True, flags)
        output = _run(name, text, folder, [*command, "--keep", "-c", name, "-o", name + ".o"])
        ptx = "".join(path.read_text(errors="replace") for path in folder.glob("*.ptx"))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return CompileReport(
        kernels=tuple(parse_ptxas(output)),
        warnings=tuple(line.strip() for line in output.splitlines() if _WARNING.search(line) and "Remark" not in line),
        uses_double=".f64" in ptx,
    )


def _run(name: str, text: bytes, folder: Path, command: list[str]) -> str:
    finished = run_program(command, cwd=folder, env={"TMPDIR": "."})
    if finished.status != 0:
        raise BuildError(f"{name} did not compile: {explain_failure(finished, {name: text})}")
    return finished.output


def parse_ptxas(output: str) -> list[KernelReport]:
    """The kernels that ``ptxas -v`` reported on."""
    reports = []
    for part in re.split(r"(?=ptxas info\s+: Compiling entry function)", output)[1:]:
        stack, used, shared = _STACK.search(part), _USED.search(part), _SHARED.search(part)
        if stack is None or used is None:
            continue
        frame, stores, loads = (int(number) for number in stack.groups())
        name = _ENTRY.search(part)["name"]
        reports.append(KernelReport(name, int(used[1]), frame, stores, loads, int(shared[1]) if shared else 0))
    return reports


def _read(cache: Cache, key: str) -> CompileReport | None:
    try:
        data = read_json(cache.reports / f"{key}.json")
        kernels = tuple(KernelReport(**kernel) for kernel in data["kernels"])
        return CompileReport(kernels, tuple(data["warnings"]), data["uses_double"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write(cache: Cache, key: str, report: CompileReport) -> None:
    """Keeps the report; one that cannot be kept costs time alone."""
    temporary = None
    try:
        cache.reports.mkdir(mode=0o700, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=cache.reports)
        with open(handle, "w") as file:
            json.dump(asdict(report), file)
        os.replace(temporary, cache.reports / f"{key}.json")
    except OSError as error:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
        warnings.warn(f"the report cannot be kept in {cache.reports}: {cause_of(error)}.", CacheWarning, stacklevel=3)
