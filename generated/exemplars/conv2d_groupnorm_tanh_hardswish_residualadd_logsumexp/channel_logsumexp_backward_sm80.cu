// conv2d_groupnorm_tanh_hardswish_residualadd_logsumexp: backward of: logsumexp over the channels of a position
//
//   conv2d(in_channels=8, out_channels=64, kernel_size=(3, 3), stride=(1, 1), padding=(0, 0), dilation=(1, 1),
//     groups=1, bias=True)  # conv
//   group_norm(num_groups=16, eps=1e-05, affine=True)  # group_norm
//   tanh()  # tanh
//   hardswish()  # hard_swish
//   add(from=conv)
//   logsumexp(dim=1, keepdim=True)
//   x (128, 8, 128, 128) -> y (128, 1, 126, 126), fp32
//
// Plan for sm_80 on h100:
//   the reduced values are recomputed
//   7938 blocks of 256 threads, 0 bytes of shared memory
//
// Generated from specs/conv2d_groupnorm_tanh_hardswish_residualadd_logsumexp.yaml; do not edit.
// Again: make generate SPEC=specs/conv2d_groupnorm_tanh_hardswish_residualadd_logsumexp.yaml

#include <cuda_runtime.h>
#include <cstdint>

namespace channel_logsumexp_backward_sm80 {
namespace {

constexpr int kChannels = 64;  // values of a position
constexpr int kPlane = 15876;  // 126 x 126 positions
constexpr int kThreads = 256;  // threads of a block
constexpr int kBlocks = 7938;  // 2032128 positions, kThreads to a block

// e^v, error at most 3 units; results below 2^-126 may be 0.
__device__ __forceinline__ float exponential(float v) {
  return expf(v);
}

using Folded = float2;  // the largest value and the sum of e^(value - largest)

__device__ __forceinline__ Folded start() { return make_float2(-INFINITY, 0.0f); }

// Exponential e^(v - top), 1 for equal infinities.
__device__ __forceinline__ float share(float v, float top) { return exponential(v == top ? 0.0f : v - top); }

// Adds a value with one exponential. A NaN fails every comparison and enters the sum.
__device__ __forceinline__ void fold(Folded& own, float v) {
  const bool rises = v > own.x;
  const float e = rises ? share(own.x, v) : share(v, own.x);
  own.y = rises ? fmaf(own.y, e, 1.0f) : own.y + e;
  own.x = rises ? v : own.x;
}

// Backward of the reduction, one position a thread.
__global__ void __launch_bounds__(kThreads) back(
    const float* __restrict__ input,
    const float* __restrict__ grad_result,
    float* __restrict__ grad_input) {
  const int index = static_cast<int>(blockIdx.x * kThreads + threadIdx.x);
  const int64_t first = int64_t{index / kPlane} * kChannels * kPlane + index % kPlane;
  Folded own = start();
  for (int channel = 0; channel < kChannels; ++channel) {
    fold(own, input[first + int64_t{channel} * kPlane]);
  }
  const float g = grad_result[index];
  const float share_of_all = g / own.y;
  for (int channel = 0; channel < kChannels; ++channel) {
    grad_input[first + int64_t{channel} * kPlane] = share_of_all * exponential(input[first + int64_t{channel} * kPlane] - own.x);
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
}  // namespace channel_logsumexp_backward_sm80

// Backward of: logsumexp over the channels of a position.
extern "C" int channel_logsumexp_backward_sm80_launch(
    const float* input,
    const float* grad_result,
    float* grad_input,
    int device,
    cudaStream_t stream) {
  using namespace channel_logsumexp_backward_sm80;
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
