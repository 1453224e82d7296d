"""Emitted CUDA on a CPU: g++ compiles it against tests/codegen/emulation, where each thread of a block is a fiber."""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from codegen.plan.model import Plan
from codegen.render import render_kernel
from tests import tiers
from tests.compiler import gxx

HEADERS = Path(__file__).parent / "emulation"
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
EXACT = ("-O2", "-ffp-contract=off", "-fno-strict-aliasing", "-w")  # every operation rounds as it is written
SOON = ("-O1", *EXACT[1:])  # the same, for kernels that take longer to compile than to run
# As nvcc contracts; a warning is a failure.
STRICT = (
    "-O1", "-ffp-contract=fast", "-fno-strict-aliasing", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", "-Wno-unused-function", "-Wno-sign-compare", "-Wno-maybe-uninitialized",
)  # fmt: skip
_SHARED_OF_ALL = re.compile(r"^extern __shared__ __align__\(\d+\) unsigned char (\w+)\[\];", re.MULTILINE)  # of all functions
_SHARED = re.compile(r"extern __shared__ (?:__align__\(\d+\) )?(.*?) (\w+)\[\];")
_GRID = re.compile(r"(?<!config\.)\bgridDim\b")
_ASM = re.compile(r"\basm(?: volatile)?\(")
_OPAQUE = re.compile(r'asm volatile\("" : [^;]*\);')  # hides values from the compiler, and does nothing
_OPERAND = re.compile(r'"[^"]*"\s*\(')
MARGIN = bytes(range(1, 65))  # behind each tensor, for nobody to write to
# Calls the launchers named in calls.json with the tensors in *.bin, in which it leaves what they write.
RUNNER = """
import ctypes, json, mmap, sys
seed, calls, tensors = *json.load(open("calls.json")), {}
def pointer(name):
    if name not in tensors:
        with open(name + ".bin", "r+b") as file:
            tensors[name] = mmap.mmap(file.fileno(), 0)
    return ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(tensors[name])))
for file, function, names in calls:
    library = ctypes.CDLL("./" + file)
    library.emulate_in_order(seed)
    code = getattr(library, function)(*map(pointer, names), 0, None)
    if code:
        sys.exit(f"{function} returned {code}")
"""


def command(source: str, library: str, flags: tuple[str, ...]) -> list[str]:
    """What compiles `source` to `library`, both in the folder where it runs."""
    return [gxx(), "-std=c++17", "-mf16c", "-mfma", *flags, f"-I{HEADERS}", "-fno-gnu-unique", "-shared", "-fPIC", "-o", library, source]


def compile_text(folder: Path, text: str, flags: tuple[str, ...], stem: str = "emulated", header: str | None = None) -> Path:
    """The library made of `text`, which begins by including `header`: that is compiled once for all texts of a process."""
    tiers.claim("emulated")
    if header is not None:
        flags, text = (*flags, f"-I{precompiled(header, flags).name}"), f'#include "{header}"\n{text}'
    (folder / f"{stem}.cpp").write_text(text)
    run(command(f"{stem}.cpp", f"{stem}.so", flags), folder)
    return folder / f"{stem}.so"


@functools.cache
def precompiled(header: str, flags: tuple[str, ...]) -> tempfile.TemporaryDirectory:
    folder = tempfile.TemporaryDirectory()
    run(command(str(HEADERS / header), f"{header}.gch", (*flags, "-x", "c++-header")), Path(folder.name))
    return folder


def run(words: list[str], folder: Path) -> None:
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr or f"{words[0]} ended with {done.returncode}"


def emulated_text(plan: Plan) -> str:
    """The kernels of a plan for sm_80 as C++ behind ptx.h."""
    return "\n".join(_emulated_kernel(render_kernel(plan, kernel)) for kernel in plan.kernels)


def _emulated_kernel(text: str) -> str:
    text = _SHARED_OF_ALL.sub(r"unsigned char* const& \1 = emulation::shared_start;", calls_for_asm(_OPAQUE.sub("", text)))
    text = _SHARED.sub(r"\1* const \2 = reinterpret_cast<\1*>(emulation::shared_memory());", text)
    return _GRID.sub("emulation::grid_size", text)


def calls_for_asm(text: str) -> str:
    """`text` with a call of a function in place of every asm statement."""
    parts, at = [], 0
    for found in _ASM.finditer(text):
        end = _closing(text, found.end())
        parts += [text[at : found.start()], call_for(text[found.end() : end])]
        at = end + 1
    return "".join((*parts, text[at:]))


def call_for(statement: str) -> str:
    """`"cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(b), "f"(a)` -> `ptx::cvt_rn_f16x2_f32(pair, b, a)`: the operands in the order of the instruction's
    own text, numbers too."""
    instruction, rest = re.fullmatch(r'\s*"([^"]*);"(.*)', statement, re.DOTALL).groups()
    name, _, text = instruction.partition(" ")
    given, at = [], 0
    while found := _OPERAND.search(rest, at):
        at = _closing(rest, found.end())
        given.append(rest[found.end() : at])
    operands = [given[int(operand[1:])] if operand[0] == "%" else operand for operand in re.findall(r"%\d+|\b\d+\b", text)]
    return f"ptx::{re.sub(r'[.:]+', '_', name)}({', '.join(operands)})"


def _closing(text: str, at: int) -> int:
    """Where the parenthesis is closed that has been opened before `at`."""
    depth = 1
    while depth:
        depth += {"(": 1, ")": -1}.get(text[at], 0)
        at += 1
    return at - 1


def without_wrappers(text: str, names: Iterable[str]) -> str:
    """The source without those of its functions, of a line or more each, which stand for single instructions."""
    for name in names:
        body = r"\([^{]*\) \{(?:[^\n]*\}\n|.*?\n\}\n)"
        text = re.sub(rf"(template <int \w+>\n)?__device__ __forceinline__ \w+ {name}{body}", "", text, flags=re.DOTALL)
    return re.sub(r"#include <cuda\w*\.h>\n", "", text)


def run_apart(folder: Path, calls: Sequence[tuple[str, str, Sequence[str]]], tensors: dict[str, torch.Tensor], seed: int = 0) -> None:
    """Call launchers, (library in `folder`, function, names of its tensors) each, in a process of its own, which a wait without an end stops.
    `tensors` get what they hold afterwards. Raises AssertionError where a kernel stops or its launcher reports an error."""
    for name, tensor in tensors.items():
        (folder / f"{name}.bin").write_bytes(tensor.contiguous().view(torch.uint8).numpy().tobytes() + MARGIN)
    (folder / "calls.json").write_text(json.dumps([seed, calls]))
    run([sys.executable, "-S", "-c", RUNNER], folder)
    for name, tensor in tensors.items():
        data = bytearray((folder / f"{name}.bin").read_bytes())
        assert data[-len(MARGIN) :] == MARGIN, f"something is written behind {name}"
        tensor.copy_(torch.frombuffer(data, dtype=tensor.dtype, count=tensor.numel()).view(tensor.shape))
