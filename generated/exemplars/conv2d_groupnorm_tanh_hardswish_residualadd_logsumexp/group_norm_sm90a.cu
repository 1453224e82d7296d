// conv2d_groupnorm_tanh_hardswish_residualadd_logsumexp: GroupNorm and the operators after it; a block reads a group of
//   63504 values twice
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
//   2048 blocks of 1024 threads, 512 bytes of shared memory
//
// Generated from specs/conv2d_groupnorm_tanh_hardswish_residualadd_logsumexp.yaml; do not edit.
// Again: make generate SPEC=specs/conv2d_groupnorm_tanh_hardswish_residualadd_logsumexp.yaml

#include <cuda_runtime.h>
#include <cstdint>

namespace group_norm_sm90a {
namespace {

constexpr int kNumGroups = 16;  // groups of a sample
constexpr int kGroupChannels = 4;  // 64 channels / kNumGroups
constexpr int kPlane = 15876;  // 126 x 126 positions of a channel
constexpr int kGroupSize = 63504;  // 4 channels x 126 x 126: one contiguous span
constexpr int kWidth = 4;  // values of one access: 16 bytes
constexpr int kGroupVectors = 15876;  // kGroupSize / kWidth
constexpr int kVectors = 4;  // accesses that a thread has in flight
constexpr int kThreads = 1024;  // threads of a block, which takes a group
constexpr int kWarps = 32;  // kThreads / 32
constexpr int kChunk = 4096;  // kThreads x kVectors: accesses of a block in flight
constexpr int kLastChunk = 12288;  // first access of the group's last chunk
constexpr int kBlocks = 2048;  // 128 samples x kNumGroups
constexpr int kMinBlocks = 1;  // blocks that must fit on an SM
constexpr float kEps = 1.0e-5f;  // group_norm's eps, added to the variance

// Early launch on Hopper: waits for the previous kernel's results, then allows the next kernel to launch.
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

// The norm and the operators after it. __fsub_rn is never fused with a product before it: a value equal to the mean
// gives 0.
__device__ __forceinline__ float finish_value(float v, float mean, float mean_rest, float rstd, float c_gamma, float c_beta) {
  const float conv_kept = v;
  v = (__fsub_rn(v, mean) - mean_rest) * rstd;
  v = fmaf(v, c_gamma, c_beta);
  v = hyperbolic_tangent(v);  // tanh()
  v = hardswish(v);  // hardswish()
  v = v + conv_kept;  // add(from=conv)
  return v;
}

// Applies finish_value to kWidth consecutive values, from the group's value `index` on.
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

// Scale for values whose squares exceed fp32's range. Statistics are then formed of the values times kShrink, a power
// of two: a sum of squares above 2^128 becomes one above 2^-32, and every sum of squares stays below 2^128.
constexpr float kShrink = 8.271806125530277e-25f;  // 2^-80
constexpr float kGrow = 1.2089258196146292e24f;    // 2^80

// Moments of a set of values: count, mean (`mean` plus its rounding error `mean_rest`), and the sum m2 of squared
// differences from the mean.
// A negative m2 belongs to the values times kShrink: the sum of the values themselves exceeds fp32's range.
struct Moments {
  float count;
  float mean;
  float mean_rest;
  float m2;
};

// Moments of the union of two sets (Chan, Golub and LeVeque, 1983). The share's error, two units in the last place,
// only scales a difference of means. For an empty `a` the share is exactly 1.
__device__ __forceinline__ Moments merge_alike(const Moments& a, const Moments& b) {
  const float count = a.count + b.count;
  const float share = a.count == 0.0f ? 1.0f : __fdividef(b.count, count);
  const float delta = __fsub_rn(b.mean, a.mean);
  const float delta_rest = b.mean_rest - a.mean_rest;
  const float mean = fmaf(delta, share, a.mean);
  const float between = (delta + delta_rest) * (a.count * share) * (delta + delta_rest);
  return {count, mean, a.mean_rest + fmaf(delta_rest, share, fmaf(delta, share, __fsub_rn(a.mean, mean))), a.m2 + b.m2 + between};
}

__device__ __forceinline__ Moments shrunk(const Moments& v) {
  return {v.count, v.mean * kShrink, v.mean_rest * kShrink, v.m2 < 0.0f ? -v.m2 : v.m2 * kShrink * kShrink};
}

// Merge for values of any magnitude.
__device__ __forceinline__ Moments merge(const Moments& a, const Moments& b) {
  Moments both = merge_alike(a, b);
  if (a.m2 < 0.0f || b.m2 < 0.0f || !(both.m2 < INFINITY)) {
    both = merge_alike(shrunk(a), shrunk(b));
    both = {both.count, both.mean * kGrow, both.mean_rest * kGrow, -both.m2};
  }
  return both;
}

// Merges a warp's moments; lane 0 receives the result.
__device__ __forceinline__ Moments warp_merge(Moments own) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    const Moments other = {__shfl_down_sync(0xffffffffu, own.count, offset), __shfl_down_sync(0xffffffffu, own.mean, offset),
                           __shfl_down_sync(0xffffffffu, own.mean_rest, offset), __shfl_down_sync(0xffffffffu, own.m2, offset)};
    own = merge(own, other);
  }
  return own;
}

// Merges a block's moments; every thread receives the result.
__device__ __forceinline__ Moments block_merge(Moments own) {
  __shared__ Moments partial[kWarps];
  own = warp_merge(own);
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = own;
  __syncthreads();
  if (threadIdx.x < 32) {
    own = warp_merge(threadIdx.x < kWarps ? partial[threadIdx.x] : Moments{0.0f, 0.0f, 0.0f, 0.0f});
    __syncwarp();
    if (threadIdx.x == 0) partial[0] = own;
  }
  __syncthreads();
  return partial[0];
}

// Norm of groups beyond registers, one block a group: it reads the group twice, the second time from the L2 cache.
__global__ void __launch_bounds__(kThreads, kMinBlocks) group_norm(
    const float* __restrict__ input,
    const float* __restrict__ p_gamma,
    const float* __restrict__ p_beta,
    float* __restrict__ output) {
  await_previous_kernel();
  const int first_channel = static_cast<int>(blockIdx.x) % kNumGroups * kGroupChannels;
  const int64_t base = static_cast<int64_t>(blockIdx.x) * kGroupSize;
  const float* group_values = input + base;

  // Statistics in two passes over each chunk's registers: differences from its first value, then from its mean, whose
  // mean corrects it. Chunks are merged.
  Moments own = {0.0f, 0.0f, 0.0f, 0.0f};
  for (int first = static_cast<int>(threadIdx.x); first < kGroupVectors; first += kChunk) {
    float v[kVectors][kWidth];
#pragma unroll
    for (int r = 0; r < kVectors; ++r) {
      if (first + r * kThreads < kGroupVectors) load(group_values + (first + r * kThreads) * kWidth, v[r]);
    }
    const float shift = v[0][0];
    float count = 0.0f;
    float sum = 0.0f;
#pragma unroll
    for (int r = 0; r < kVectors; ++r) {
      if (first + r * kThreads >= kGroupVectors) break;
      count += kWidth;
#pragma unroll
      for (int e = 0; e < kWidth; ++e) sum += __fsub_rn(v[r][e], shift);
    }
    const float inverse = __fdividef(1.0f, count);
    const float mean = fmaf(sum, inverse, shift);
    float left = 0.0f;
    float m2 = 0.0f;
#pragma unroll
    for (int r = 0; r < kVectors; ++r) {
      if (first + r * kThreads >= kGroupVectors) break;
#pragma unroll
      for (int e = 0; e < kWidth; ++e) {
        const float difference = __fsub_rn(v[r][e], mean);
        left += difference;
        m2 = fmaf(difference, difference, m2);
      }
    }
    const float mean_rest = left * inverse;
    Moments chunk = {count, mean, mean_rest, fmaf(-mean_rest, left, m2)};
    if (!(chunk.m2 < INFINITY)) {
      const float shift = v[0][0] * kShrink;
      float sum = 0.0f;
#pragma unroll
      for (int r = 0; r < kVectors; ++r) {
        if (first + r * kThreads >= kGroupVectors) continue;
#pragma unroll
        for (int e = 0; e < kWidth; ++e) sum += fmaf(v[r][e], kShrink, -shift);
      }
      const float mean = fmaf(sum, inverse, shift);
      float left = 0.0f;
      float m2 = 0.0f;
#pragma unroll
      for (int r = 0; r < kVectors; ++r) {
        if (first + r * kThreads >= kGroupVectors) continue;
#pragma unroll
        for (int e = 0; e < kWidth; ++e) {
          const float difference = fmaf(v[r][e], kShrink, -mean);
          left += difference;
          m2 = fmaf(difference, difference, m2);
        }
      }
      const float mean_rest = left * inverse;
      m2 = fmaf(-mean_rest, left, m2);
      chunk = {count, mean * kGrow, mean_rest * kGrow, -m2};
    }
    own = merge(own, chunk);
  }

  const Moments total = block_merge(own);
  const float mean = total.mean;
  const float mean_rest = total.mean_rest;
  const float rstd = total.m2 < 0.0f ? rsqrtf(-total.m2 * (1.0f / kGroupSize)) * kShrink : rsqrtf(total.m2 * (1.0f / kGroupSize) + kEps);

  // Normalise and store in reverse order: the values read last are most likely cached.
  for (int first = kLastChunk + static_cast<int>(threadIdx.x); first >= 0; first -= kChunk) {
    float v[kVectors][kWidth];
#pragma unroll
    for (int r = 0; r < kVectors; ++r) {
      if (first + r * kThreads < kGroupVectors) load(group_values + (first + r * kThreads) * kWidth, v[r]);
    }
#pragma unroll
    for (int r = 0; r < kVectors; ++r) {
      if (first + r * kThreads >= kGroupVectors) break;
      finish(v[r], first_channel, (first + r * kThreads) * kWidth, mean, mean_rest, rstd, p_gamma, p_beta);
      store(output + base + (first + r * kThreads) * kWidth, v[r]);
    }
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
}  // namespace group_norm_sm90a

extern "C" int group_norm_sm90a_launch(
    const float* input,
    const float* p_gamma,
    const float* p_beta,
    float* output,
    int device,
    cudaStream_t stream) {
  using namespace group_norm_sm90a;
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
