// gemm_groupnorm_min_biasadd_bf16: back through: min over the channels of a row
//
//   linear(in_features=8192, out_features=8192, bias=True)  # gemm
//   group_norm(num_groups=512, eps=1e-05, affine=True)  # group_norm
//   min(dim=1, keepdim=True)
//   add(shape=(1, 8192, 1, 1), init=randn)  # bias
//   x (1024, 8192) -> y (1, 8192, 1024, 1), bf16
//
// Plan for sm_80 on h100:
//   the folded values are computed again
//   1024 blocks of 256 threads, 0 bytes of shared memory
//
// Generated from specs/gemm_groupnorm_min_biasadd.yaml; do not edit. Again: make generate SPEC=specs/gemm_groupnorm_min_biasadd.yaml PRECISION=bf16

#include <cuda_runtime.h>
#include <cuda_bf16.h>
#include <cstdint>

namespace channel_min_backward_sm80 {
namespace {

constexpr int kChannels = 8192;  // values of a row
constexpr int kThreads = 256;  // threads of a block, which share a row
constexpr int kBlocks = 1024;  // rows

struct Folded {
  float v;
  int at;  // its channel
};

__device__ __forceinline__ Folded start() { return {INFINITY, kChannels}; }

// Of several equal extremes the first counts, as in PyTorch, and the first NaN before all of them.
__device__ __forceinline__ void join(Folded& own, Folded other) {
  const bool own_nan = own.v != own.v, other_nan = other.v != other.v;
  const bool equal = own_nan ? other_nan : other.v == own.v;
  if (equal ? other.at < own.at : other_nan || (!own_nan && other.v < own.v)) own = other;
}

// A block takes a row.
__global__ void __launch_bounds__(kThreads) back(
    const float* __restrict__ input,
    const float* __restrict__ grad_result,
    float* __restrict__ grad_input) {
  const int index = static_cast<int>(blockIdx.x);
  const int64_t first = int64_t{index} * kChannels;
  Folded own = start();
  for (int channel = static_cast<int>(threadIdx.x); channel < kChannels; channel += kThreads) {
    join(own, {input[first + channel], channel});
  }
  __shared__ Folded partial[kThreads];
  partial[threadIdx.x] = own;
#pragma unroll
  for (int half = kThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) join(partial[threadIdx.x], partial[threadIdx.x + half]);
  }
  __syncthreads();
  own = partial[0];
  const float g = grad_result[index];
  for (int channel = static_cast<int>(threadIdx.x); channel < kChannels; channel += kThreads) {
    grad_input[first + channel] = channel == own.at ? g : 0.0f;
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
}  // namespace channel_min_backward_sm80

// Back through: min over the channels of a row.
extern "C" int channel_min_backward_sm80_launch(
    const float* input,
    const float* grad_result,
    float* grad_input,
    int device,
    cudaStream_t stream) {
  using namespace channel_min_backward_sm80;
  const DeviceScope scope(device);
  if (scope.error != cudaSuccess) return scope.error;
  cudaLaunchConfig_t config = {};
  config.stream = stream;
  cudaError_t error = cudaSuccess;
  config.gridDim = kBlocks;
  config.blockDim = kThreads;
  error = cudaLaunchKernelEx(&config, back, input, grad_result, grad_input);
  return error;
}
