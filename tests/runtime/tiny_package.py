"""A small hand-written package with everything the runtime handles, a compiler that counts, and child processes."""

import hashlib
import importlib.util
import itertools
import json
import os
import subprocess
import sys
import textwrap
import zipfile
from dataclasses import dataclass
from pathlib import Path

from runtime import Package
from runtime.build import Build, plan_build

ROOT = Path(__file__).parents[2]
BATCH, FEATURES = 4, 8
_numbers = itertools.count()

CPU_SOURCE = """
#include <cstdint>

extern "C" int scale_launch(const void* x, const void* scale, void* workspace, void* y, int threads, void* stream) {
  const float* in = static_cast<const float*>(x);
  const float* by = static_cast<const float*>(scale);
  float* out = static_cast<float*>(y);
  if (stream != nullptr || threads < 1) return -1;
  if (reinterpret_cast<std::uintptr_t>(x) % 16 != 0) return -2;
  for (int row = 0; row < 4; ++row)
    for (int column = 0; column < 8; ++column) out[row * 8 + column] = in[row * 8 + column] * by[column];
  static_cast<char*>(workspace)[255] = 1;
  return 0;
}
"""

CUDA_SOURCE = """
#include <cuda_runtime.h>

namespace {
__global__ void scale_kernel(const float* x, const float* scale, float* y) {
  const int i = blockIdx.x * 8 + threadIdx.x;
  y[i] = x[i] * scale[threadIdx.x];
}
}  // namespace

extern "C" int scale_launch(const void* x, const void* scale, void* workspace, void* y, int device, void* stream) {
  int previous = 0;
  cudaError_t status = cudaGetDevice(&previous);
  if (status == cudaSuccess) status = cudaSetDevice(device);
  if (status != cudaSuccess) return status;
  scale_kernel<<<4, 8, 0, static_cast<cudaStream_t>(stream)>>>(
      static_cast<const float*>(x), static_cast<const float*>(scale), static_cast<float*>(y));
  status = cudaGetLastError();
  cudaSetDevice(previous);
  return status;
}
"""

CPU_BACKWARD = """
extern "C" int scale_backward(const void*, const void*, const void*, void*, void*, int, void*) { return 0; }
"""
CUDA_BACKWARD = """
__global__ void back_kernel(float* x) { x[threadIdx.x] = 0.0f; }
extern "C" int scale_backward(const void*, const void*, const void*, void* x, void*, int, void* stream) {
  back_kernel<<<1, 8, 0, static_cast<cudaStream_t>(stream)>>>(static_cast<float*>(x));
  return cudaGetLastError();
}
"""

MODEL = """
    from pathlib import Path

    import torch
    from torch import nn

    from runtime import GeneratedModule, Package

    PACKAGE = Package(Path(__file__).parent)


    class ModelNew(GeneratedModule):
        def __init__(self, features, scale_shape):
            super().__init__(PACKAGE, features=features, scale_shape=scale_shape)
            self.scale = nn.Parameter(torch.arange(1.0, 9.0))
"""


@dataclass
class TinyPackage:
    """A package on disk that multiplies the columns of a (4, 8) float32 input by ``scale``."""

    path: Path

    @property
    def package(self) -> Package:
        return Package(self.path)

    def plan(self, target: str = "cpu", capability: tuple[int, int] | None = None, portable: bool = False) -> Build:
        """The build of a target."""
        return plan_build(self.package, self.package.target(target), capability, portable)

    def edit(self, change) -> Package:
        """Rewrites the manifest with ``change(data)``; returns the package read afresh."""
        file = self.path / "manifest.json"
        data = json.loads(file.read_text())
        change(data)
        file.write_text(json.dumps(data))
        return self.package

    def change_source(self, name: str, old: str, new: str) -> None:
        """Replaces ``old`` in one of the sources."""
        file = self.path / name
        assert old in file.read_text()
        file.write_text(file.read_text().replace(old, new))

    def add_backward(self) -> Package:
        """A linear layer goes before the scaling, and both targets get backward sources, which compute nothing of use; for what looks at packages."""
        (self.path / "backward.cpp").write_text(CPU_BACKWARD)
        (self.path / "backward_sm80.cu").write_text(CUDA_BACKWARD)
        made = {"source_key": "", "gradients": ["scale"], "saved": [{"name": "t0", "shape": [BATCH, FEATURES], "dtype": "float32"}],
                "steps": [{"launch": "scale_backward", "args": ["grad:y", "t0", "scale", "grad:t0", "grad:scale"]}]}  # fmt: skip

        def change(data):
            data["parameters"].append({"key": "weight", "shape": [FEATURES, FEATURES], "dtype": "float32"})
            data["backward"] = {}
            for name, source, flags in (("cpu", "backward.cpp", ["-O1", "-march=native"]), ("sm_80", "backward_sm80.cu", ["-O1", "-std=c++17"])):
                data["targets"][name]["steps"] = [
                    {"library": "linear", "args": ["x", "weight", None], "out": "t0"},
                    {"launch": "scale_launch", "args": ["t0", "scale", "workspace", "y"]},
                ]
                data["backward"][name] = {**made, "sources": [source], "flags": flags}

        return self.edit(change)

    def model_class(self, name: str | None = None):
        """``ModelNew``, imported (again) as ``name``, or under a module name of its own."""
        name = name or f"tiny_package_{next(_numbers)}"
        spec = importlib.util.spec_from_file_location(name, self.path / "model.py")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
        return module.ModelNew

    def model(self):
        return self.model_class()(FEATURES, (FEATURES,))


def write_tiny_package(path: Path, name: str = "tiny") -> TinyPackage:
    """Writes the package into the folder ``path``."""
    path.mkdir(parents=True)
    (path / "cpu.cpp").write_text(CPU_SOURCE)
    (path / "scale_sm80.cu").write_text(CUDA_SOURCE)
    (path / "model.py").write_text(textwrap.dedent(MODEL))
    steps = [{"launch": "scale_launch", "args": ["x", "scale", "workspace", "y"]}]
    buffers = {"workspace": {"bytes": 256}}

    def target(source, text, flags, **more):
        key = hashlib.sha256(text.encode()).hexdigest()
        return {"sources": [source], "flags": flags, "source_key": key, "buffers": buffers, "steps": steps, **more}

    manifest = {
        "format": 1,
        "name": name,
        "spec": "specs/tiny.yaml",
        "regenerate": "make generate SPEC=specs/tiny.yaml",
        "batch": BATCH,
        "precision": "fp32",
        "init_args": [["features", FEATURES], ["scale_shape", [FEATURES]]],
        "input": {"name": "x", "shape": [BATCH, FEATURES], "dtype": "float32"},
        "output": {"shape": [BATCH, FEATURES], "dtype": "float32"},
        "parameters": [{"key": "scale", "shape": [FEATURES], "dtype": "float32"}],
        "targets": {
            "cpu": target("cpu.cpp", CPU_SOURCE, ["-O1", "-std=c++17"]),
            "sm_80": target(
                "scale_sm80.cu", CUDA_SOURCE, ["-O1", "-std=c++17"], min_capability=[8, 0], arch="native"
            ),
        },
        "plan": {},
    }
    (path / "manifest.json").write_text(json.dumps(manifest, indent=1))
    return TinyPackage(path)


@dataclass
class CountingCompiler:
    """A g++ that writes down each source it compiles and first waits for as long as the file ``delay`` says."""

    path: Path

    @property
    def compiled(self) -> list[str]:
        """The ``-c`` calls so far."""
        log = self.path.parent / "log"
        return log.read_text().splitlines() if log.exists() else []

    def set_delay(self, seconds: float) -> None:
        (self.path.parent / "delay").write_text(str(seconds))


def run_python(code: str, **environment) -> subprocess.CompletedProcess:
    """Runs ``code`` in a fresh Python that can import the repository and the tests; returns its output as text."""
    return subprocess.run([sys.executable, "-c", textwrap.dedent(code)], env=child_environment(**environment),
                          capture_output=True, text=True, timeout=120)  # fmt: skip


def child_environment(**more) -> dict[str, str]:
    """This process's environment for a child: the repository importable, nothing written beside the sources."""
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONDONTWRITEBYTECODE": "1", **more}


def unpack(path: Path, folder: Path) -> Path:
    """The wheel at ``path``, installed under ``folder``: the folder that Python would import."""
    with zipfile.ZipFile(path) as archive:
        archive.extractall(folder / "installed")
    return next(path.parent for path in (folder / "installed").glob("*/prebuilt.json"))
