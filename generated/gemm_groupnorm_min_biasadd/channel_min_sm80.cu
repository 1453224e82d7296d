// gemm_groupnorm_min_biasadd: min over the channels of a row
//
//   linear(in_features=8192, out_features=8192, bias=True)  # gemm
//   group_norm(num_groups=512, eps=1e-05, affine=True)  # group_norm
//   min(dim=1, keepdim=True)
//   add(shape=(1, 8192, 1, 1), init=randn)  # bias
//   x (1024, 8192) -> y (1, 8192, 1024, 1), fp32
//
// Plan for sm_80 on h100:
//   1024 blocks of 256 threads, 64 bytes of shared memory
//
// Generated from specs/gemm_groupnorm_min_biasadd.yaml; do not edit. Again: make generate SPEC=specs/gemm_groupnorm_min_biasadd.yaml

#include <cuda_runtime.h>
#include <cstdint>

namespace channel_min_sm80 {
namespace {

constexpr int kChannels = 8192;  // values of a row
constexpr int kWidth = 4;  // values of one access: 16 bytes
constexpr int kVectors = 2048;  // kChannels / kWidth
constexpr int kLanes = 256;  // threads of a row
constexpr int kThreads = 256;  // threads of a block
constexpr int kBlocks = 1024;  // rows / rows_per_block

__device__ __forceinline__ void load(const float* from, float (&v)[4]) {
  const float4 t = *reinterpret_cast<const float4*>(from);
  v[0] = t.x;
  v[1] = t.y;
  v[2] = t.z;
  v[3] = t.w;
}

__device__ __forceinline__ void store(float* to, const float (&v)[1]) {
  *to = v[0];
}

// On Hopper a kernel may be launched while the one before it ends. From here on that one's results are there, and the next may be launched.
__device__ __forceinline__ void await_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

using Folded = float;

__device__ __forceinline__ Folded start() { return INFINITY; }

// A NaN wins, as in PyTorch.
__device__ __forceinline__ void fold(Folded& best, float v) { best = v < best || v != v ? v : best; }

__device__ __forceinline__ void join(Folded& best, Folded other) { fold(best, other); }

__device__ __forceinline__ float result(Folded best) { return best; }

// Joins what 32 lanes have, in a fixed order; lane 0 has all of it.
__device__ __forceinline__ void join_lanes(Folded& own) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    join(own, __shfl_down_sync(0xffffffffu, own, offset));
  }
}

// A block folds a row.
__global__ void __launch_bounds__(kThreads) fold_rows(const float* __restrict__ input, float* __restrict__ output) {
  await_previous_kernel();
  const int row = blockIdx.x;
  const int lane = threadIdx.x;
  const float* values = input + static_cast<int64_t>(row) * kChannels;
  Folded own = start();
#pragma unroll 4
  for (int i = lane; i < kVectors; i += kLanes) {
    float v[kWidth];
    load(values + i * kWidth, v);
#pragma unroll
    for (int e = 0; e < kWidth; ++e) fold(own, v[e]);
  }
  join_lanes(own);
  __shared__ Folded partial[kLanes / 32];
  if (lane % 32 == 0) partial[lane / 32] = own;
  __syncthreads();
  if (lane == 0) {
#pragma unroll
    for (int warp = 1; warp < kLanes / 32; ++warp) join(own, partial[warp]);
  }
  if (lane == 0) {
    const float folded[1] = {result(own)};
    store(output + row, folded);
  }
}

// Makes `device` current and gives the caller's device back at the end of the scope.
struct DeviceScope {
  int previous = -1;
  cudaError_t error;
  explicit DeviceScope(int device) {
    error = cudaGetDevice(&previous);
    if (error != cudaSuccess || previous == device) {
      previous = -1;
    } else {
      error = cudaSetDevice(device);
    }
  }
  ~DeviceScope() {
    if (previous >= 0) cudaSetDevice(previous);
  }
};

}  // namespace
}  // namespace channel_min_sm80

extern "C" int channel_min_sm80_launch(const float* input, float* output, int device, cudaStream_t stream) {
  using namespace channel_min_sm80;
  const DeviceScope scope(device);
  if (scope.error != cudaSuccess) return scope.error;
  cudaLaunchConfig_t config = {};
  config.gridDim = kBlocks;
  config.blockDim = kThreads;
  config.stream = stream;
#ifdef __CUDA_ARCH_LIST__
  constexpr int architectures[] = {__CUDA_ARCH_LIST__};
  cudaLaunchAttribute early = {};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &early;
  config.numAttrs = architectures[0] >= 900 ? 1 : 0;
#endif
  return cudaLaunchKernelEx(&config, fold_rows, input, output);
}
