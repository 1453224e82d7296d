"""A small hand-written package with prepared weights: y = x * doubled, where ``doubled`` = 2 * ``scale`` is what is prepared."""

from pathlib import Path

from .tiny_package import BATCH, TinyPackage, write_tiny_package

CPU_SOURCE = """
extern "C" int double_launch(const void* scale, void* doubled, int threads, void* stream) {
  for (int i = 0; i < 8; ++i) static_cast<float*>(doubled)[i] = 2.0f * static_cast<const float*>(scale)[i];
  return stream != nullptr || threads < 1 ? -1 : 0;
}

extern "C" int scale_launch(const void* x, const void* doubled, void* y, int threads, void* stream) {
  for (int i = 0; i < 32; ++i) static_cast<float*>(y)[i] = static_cast<const float*>(x)[i] * static_cast<const float*>(doubled)[i % 8];
  return stream != nullptr || threads < 1 ? -1 : 0;
}
"""

CUDA_SOURCE = """
#include <cuda_runtime.h>

namespace {
__global__ void double_kernel(const float* scale, float* doubled) { doubled[threadIdx.x] = 2.0f * scale[threadIdx.x]; }

__global__ void scale_kernel(const float* x, const float* doubled, float* y) { y[threadIdx.x] = x[threadIdx.x] * doubled[threadIdx.x % 8]; }

template <typename Launch>
int on_device(int device, Launch launch) {
  int previous = 0;
  cudaError_t status = cudaGetDevice(&previous);
  if (status == cudaSuccess) status = cudaSetDevice(device);
  if (status != cudaSuccess) return status;
  launch();
  status = cudaGetLastError();
  cudaSetDevice(previous);
  return status;
}
}  // namespace

extern "C" int double_launch(const float* scale, float* doubled, int device, cudaStream_t stream) {
  return on_device(device, [=] { double_kernel<<<1, 8, 0, stream>>>(scale, doubled); });
}

extern "C" int scale_launch(const float* x, const float* doubled, float* y, int device, cudaStream_t stream) {
  return on_device(device, [=] { scale_kernel<<<1, 32, 0, stream>>>(x, doubled, y); });
}
"""


def write_prepared_package(path: Path, beside: bool = False) -> TinyPackage:
    """Writes the package into the folder ``path``. ``beside``: with a second input and with state, which stand before and behind the parameters
    and which nothing reads."""
    tiny = write_tiny_package(path, "prepared")
    (path / "cpu.cpp").write_text(CPU_SOURCE)
    (path / "scale_sm80.cu").write_text(CUDA_SOURCE)

    def change(data):
        data["prepack"] = True
        for target in data["targets"].values():
            target["buffers"] = {"doubled": {"shape": [8], "dtype": "float32"}}
            target["prepare"] = {"buffers": ["doubled"], "steps": [{"launch": "double_launch", "args": ["scale", "doubled"]}]}
            target["steps"] = [{"launch": "scale_launch", "args": ["x", "doubled", "y"]}]

    tiny.edit(change)
    if beside:
        tiny.edit(_put_beside)
        (path / "model.py").write_text((path / "model.py").read_text() + STATE)
    return tiny


STATE = """\
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
"""


def _put_beside(data: dict) -> None:
    data["inputs"] = [{**data["input"], "argument": "x"}, {"name": "other", "argument": "other", "shape": [BATCH], "dtype": "float32"}]
    data["state"] = [{"key": "count", "shape": [], "dtype": "int64"}]
    data["reference"] = {"steps": [{"library": "mul", "args": ["x", "scale"], "out": "y"}]}
