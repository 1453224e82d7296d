// conv2d_groupnorm_tanh_hardswish_residualadd_logsumexp_small: GroupNorm and what follows; a block holds a group of 1800 values
//
//   conv2d(in_channels=3, out_channels=16, kernel_size=(3, 3), stride=(1, 1), padding=(0, 0), dilation=(1, 1), groups=1, bias=True)  # conv
//   group_norm(num_groups=8, eps=1e-05, affine=True)  # group_norm
//   tanh()  # tanh
//   hardswish()  # hard_swish
//   add(from=conv)
//   logsumexp(dim=1, keepdim=True)
//   x (128, 3, 32, 32) -> y (128, 1, 30, 30), fp32
//
// Plan for sm_80 on h100:
//   1024 blocks of 96 threads, 36 bytes of shared memory
//
// Generated from specs/conv2d_groupnorm_tanh_hardswish_residualadd_logsumexp_small.yaml; do not edit. Again: make generate SPEC=specs/conv2d_groupnorm_tanh_hardswish_residualadd_logsumexp_small.yaml

#include <cuda_runtime.h>
#include <cstdint>

namespace backward_group_norm_sm80 {
namespace {

constexpr int kNumGroups = 8;  // groups of a sample
constexpr int kGroupChannels = 2;  // 16 channels / kNumGroups
constexpr int kPlane = 900;  // 30 x 30 positions of a channel
constexpr int kGroupSize = 1800;  // 2 channels x 30 x 30: one contiguous span
constexpr int kWidth = 4;  // values of one access: 16 bytes
constexpr int kGroupVectors = 450;  // kGroupSize / kWidth
constexpr int kVectors = 5;  // accesses of a thread
constexpr int kThreads = 96;  // threads of a block, which holds a group
constexpr int kWarps = 3;  // kThreads / 32
constexpr int kBlocks = 1024;  // 128 samples x kNumGroups
constexpr int kMinBlocks = 6;  // blocks that fit on an SM
constexpr float kEps = 1.0e-5f;  // group_norm's eps, added to the variance

// On Hopper a kernel may be launched while the one before it ends. From here on that one's results are there, and the next may be launched.
__device__ __forceinline__ void await_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

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

// tanh(v), error at most 6 units.
__device__ __forceinline__ float hyperbolic_tangent(float v) {
  return tanhf(v);
}

// min(max(v, lo), hi); both comparisons are false for NaN, so NaN goes through.
__device__ __forceinline__ float clamp(float v, float lo, float hi) {
  return v < lo ? lo : (v > hi ? hi : v);
}

// v relu6(v + 3) / 6.
__device__ __forceinline__ float hardswish(float v) {
  return v * (clamp(v + 3.0f, 0.0f, 6.0f) * 0.166666667f);
}

// The norm and what follows it. __fsub_rn is never fused with a product before it: a value equal to the mean gives 0.
__device__ __forceinline__ float finish_value(float v, float mean, float mean_rest, float rstd, float c_gamma, float c_beta) {
  const float conv_kept = v;
  v = (__fsub_rn(v, mean) - mean_rest) * rstd;
  v = fmaf(v, c_gamma, c_beta);
  v = hyperbolic_tangent(v);  // tanh()
  v = hardswish(v);  // hardswish()
  v = v + conv_kept;  // add(from=conv)
  return v;
}

// finish_value on kWidth consecutive values, the first of which is the group's `index`-th.
__device__ __forceinline__ void finish(
    float (&v)[kWidth],
    int first_channel,
    int index,
    float mean,
    float mean_rest,
    float rstd,
    const float* p_gamma,
    const float* p_beta) {
  const int channel = first_channel + index / kPlane;
  const float c_gamma = p_gamma[channel];
  const float c_beta = p_beta[channel];
#pragma unroll
  for (int e = 0; e < kWidth; ++e) {
    v[e] = finish_value(v[e], mean, mean_rest, rstd, c_gamma, c_beta);
  }
}

// Sum over 32 lanes, of one number or of two; all of them receive the same bits.
__device__ __forceinline__ float lane_sum(float v) {
#pragma unroll
  for (int offset = 32 / 2; offset > 0; offset /= 2) v += __shfl_xor_sync(0xffffffffu, v, offset);
  return v;
}

__device__ __forceinline__ float2 lane_sum(float2 v) { return make_float2(lane_sum(v.x), lane_sum(v.y)); }

// Squares may exceed fp32's range where values do not. What is formed of such values is formed of them times kShrink, a power of two: a sum of
// squares above 2^128 is then above 2^-32, and one of any values stays below 2^128.
constexpr float kShrink = 8.271806125530277e-25f;  // 2^-80
constexpr float kGrow = 1.2089258196146292e24f;    // 2^80

// Sum over the block; every thread receives the same bits. `partial` serves one call.
template <typename Number>
__device__ __forceinline__ Number block_sum(Number v, Number (&partial)[kWarps]) {
  v = lane_sum(v);
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = v;
  __syncthreads();
  const int lane = threadIdx.x % 32;
  return lane_sum(lane < kWarps ? partial[lane] : Number{});
}

// A thread's last vector may lie beyond the group.
__device__ __forceinline__ bool holds(int r) {
  return (r + 1) * kThreads <= kGroupVectors || r * kThreads + static_cast<int>(threadIdx.x) < kGroupVectors;
}

// A block normalises a group; its values live in the block's registers between the one read and the one write.
__global__ void __launch_bounds__(kThreads, kMinBlocks) group_norm(
    const float* __restrict__ input,
    const float* __restrict__ p_gamma,
    const float* __restrict__ p_beta,
    float* __restrict__ output) {
  await_previous_kernel();
  __shared__ float partial[kWarps];
  __shared__ float2 partials[kWarps];
  const int first_channel = static_cast<int>(blockIdx.x) % kNumGroups * kGroupChannels;
  const int64_t base = static_cast<int64_t>(blockIdx.x) * kGroupSize;

  // Load.
  float v[kVectors][kWidth];
#pragma unroll
  for (int r = 0; r < kVectors; ++r) {
    if (holds(r)) load(input + base + (r * kThreads + threadIdx.x) * kWidth, v[r]);
  }

  // Statistics in two passes over the registers. The first sums differences from one value of the group, so that a constant group's mean
  // is exact. The second sums differences from that mean: their own mean is what the first one's rounding left, however large the shift was.
  const float shift = input[base];
  float sum = 0.0f;
#pragma unroll
  for (int r = 0; r < kVectors; ++r) {
    if (!holds(r)) continue;
#pragma unroll
    for (int e = 0; e < kWidth; ++e) sum += __fsub_rn(v[r][e], shift);
  }
  float mean = fmaf(block_sum(sum, partial), 1.0f / kGroupSize, shift);
  float2 sums = make_float2(0.0f, 0.0f);  // of differences, of their squares
#pragma unroll
  for (int r = 0; r < kVectors; ++r) {
    if (!holds(r)) continue;
#pragma unroll
    for (int e = 0; e < kWidth; ++e) {
      const float difference = __fsub_rn(v[r][e], mean);
      sums.x += difference;
      sums.y = fmaf(difference, difference, sums.y);
    }
  }
  sums = block_sum(sums, partials);
  float mean_rest = sums.x * (1.0f / kGroupSize);
  const float m2 = fmaf(-mean_rest, sums.x, sums.y);
  float rstd = rsqrtf(m2 * (1.0f / kGroupSize) + kEps);
  const bool beyond = !(m2 < INFINITY);
  if (beyond) {  // the same of values kShrink times as large
    const float shrunk_shift = shift * kShrink;
    float sum = 0.0f;
#pragma unroll
    for (int r = 0; r < kVectors; ++r) {
      if (!holds(r)) continue;
#pragma unroll
      for (int e = 0; e < kWidth; ++e) sum += fmaf(v[r][e], kShrink, -shrunk_shift);
    }
    const float shrunk_mean = fmaf(block_sum(sum, partial), 1.0f / kGroupSize, shrunk_shift);
    float2 sums = make_float2(0.0f, 0.0f);
#pragma unroll
    for (int r = 0; r < kVectors; ++r) {
      if (!holds(r)) continue;
#pragma unroll
      for (int e = 0; e < kWidth; ++e) {
        const float difference = fmaf(v[r][e], kShrink, -shrunk_mean);
        sums.x += difference;
        sums.y = fmaf(difference, difference, sums.y);
      }
    }
    sums = block_sum(sums, partials);
    if (beyond) {
      const float shrunk_rest = sums.x * (1.0f / kGroupSize);
      mean = shrunk_mean * kGrow;
      mean_rest = shrunk_rest * kGrow;
      rstd = rsqrtf(fmaf(-shrunk_rest, sums.x, sums.y) * (1.0f / kGroupSize)) * kShrink;
    }
  }

  // Normalise and store.
#pragma unroll
  for (int r = 0; r < kVectors; ++r) {
    if (!holds(r)) continue;
    finish(v[r], first_channel, (r * kThreads + threadIdx.x) * kWidth, mean, mean_rest, rstd, p_gamma, p_beta);
    store(output + base + (r * kThreads + threadIdx.x) * kWidth, v[r]);
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
}  // namespace backward_group_norm_sm80

extern "C" int backward_group_norm_sm80_launch(
    const float* input,
    const float* p_gamma,
    const float* p_beta,
    float* output,
    int device,
    cudaStream_t stream) {
  using namespace backward_group_norm_sm80;
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
  return cudaLaunchKernelEx(&config, group_norm, input, p_gamma, p_beta, output);
}
