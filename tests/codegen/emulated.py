"""Emitted CUDA on a CPU: g++ compiles it against tests/codegen/emulation, where each thread of a block is a fiber."""

from __future__ import annotations

import subprocess
from pathlib import Path

import torch

HEADERS = Path(__file__).parent / "emulation"
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
EXACT = ("-O2", "-ffp-contract=off", "-w")  # every operation rounds as it is written
# As nvcc contracts; a warning is a failure.
STRICT = (
    "-O1", "-ffp-contract=fast", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", "-Wno-unused-function", "-Wno-sign-compare", "-Wno-maybe-uninitialized",
)  # fmt: skip


def command(source: str, library: str, flags: tuple[str, ...]) -> list[str]:
    """What compiles `source` to `library`, both in the folder where it runs."""
    return ["g++", "-std=c++17", "-mf16c", "-mfma", *flags, f"-I{HEADERS}", "-fno-gnu-unique", "-shared", "-fPIC", "-o", library, source]


def compile_text(folder: Path, text: str, flags: tuple[str, ...]) -> Path:
    """The library made of `text`."""
    (folder / "emulated.cpp").write_text(text)
    done = subprocess.run(command("emulated.cpp", "emulated.so", flags), cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return folder / "emulated.so"
