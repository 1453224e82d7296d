// conv2d_groupnorm_tanh_hardswish_residualadd_logsumexp: logsumexp over the channels of a position
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
// Plan for sm_90a on h100:
//   1985 blocks of 256 threads, 0 bytes of shared memory
//
// Generated from specs/conv2d_groupnorm_tanh_hardswish_residualadd_logsumexp.yaml; do not edit.
// Again: make generate SPEC=specs/conv2d_groupnorm_tanh_hardswish_residualadd_logsumexp.yaml

#include <cuda_runtime.h>
#include <cstdint>

namespace channel_logsumexp_sm90a {
namespace {

constexpr int kChannels = 64;  // values of a position
constexpr int kPlane = 15876;  // 126 x 126 positions
constexpr int kWidth = 4;  // positions of a thread: neighbours
constexpr int kPlaneVectors = 3969;  // kPlane / kWidth
constexpr int kItems = 508032;  // 128 samples x kPlaneVectors
constexpr int kLanes = 256;  // threads of a slice, each with positions of its own
constexpr int kSlices = 1;  // parts of the channels that a block's threads share
constexpr int kThreads = 256;  // kLanes x kSlices
constexpr int kBlocks = 1985;  // kItems / kLanes, rounded up

__device__ __forceinline__ void load(const float* from, float (&v)[4]) {
  const float4 t = *reinterpret_cast<const float4*>(from);
  v[0] = t.x;
  v[1] = t.y;
  v[2] = t.z;
  v[3] = t.w;
}

__device__ __forceinline__ void store(float* to, const float (&v)[4]) {
  *reinterpret_cast<float4*>(to) = make_float4(v[0], v[1], v[2], v[3]);
}

// e^v, error at most 3 units; results below 2^-126 may be 0.
__device__ __forceinline__ float exponential(float v) {
  return expf(v);
}

// Early launch on Hopper: waits for the previous kernel's results, then allows the next kernel to launch.
__device__ __forceinline__ void await_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
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

__device__ __forceinline__ float result(Folded own) { return own.x + logf(own.y); }

// Reduces the channels; a thread takes kWidth neighbouring positions.
__global__ void __launch_bounds__(kThreads) fold_columns(const float* __restrict__ input, float* __restrict__ output) {
  await_previous_kernel();
  const int lane = threadIdx.x;
  const int item = blockIdx.x * kLanes + lane;
  if (item >= kItems) return;
  const float* values = input + static_cast<int64_t>(item / kPlaneVectors) * kChannels * kPlane + item % kPlaneVectors * kWidth;
  Folded own[kWidth];
#pragma unroll
  for (int e = 0; e < kWidth; ++e) own[e] = start();
#pragma unroll 4
  for (int channel = 0; channel < kChannels; channel += kSlices) {
    float v[kWidth];
    load(values + static_cast<int64_t>(channel) * kPlane, v);
#pragma unroll
    for (int e = 0; e < kWidth; ++e) fold(own[e], v[e]);
  }
  float folded[kWidth];
#pragma unroll
  for (int e = 0; e < kWidth; ++e) folded[e] = result(own[e]);
  store(output + item * kWidth, folded);
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
}  // namespace channel_logsumexp_sm90a

extern "C" int channel_logsumexp_sm90a_launch(const float* input, float* output, int device, cudaStream_t stream) {
  using namespace channel_logsumexp_sm90a;
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
  return cudaLaunchKernelEx(&config, fold_columns, input, output);
}
