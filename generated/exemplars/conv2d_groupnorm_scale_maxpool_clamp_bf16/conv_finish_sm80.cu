// conv2d_groupnorm_scale_maxpool_clamp_bf16: merges a group's statistics, normalises its 3844 kept values and applies
//   the operators after the norm
//
//   conv2d(in_channels=8, out_channels=64, kernel_size=(3, 3), stride=(1, 1), padding=(0, 0), dilation=(1, 1),
//     groups=1, bias=True)  # conv
//   group_norm(num_groups=16, eps=1e-05, affine=True)  # group_norm
//   mul(shape=(64, 1, 1), init=ones)  # scale
//   max_pool2d(kernel_size=(4, 4), stride=(4, 4), padding=(0, 0), dilation=(1, 1), ceil_mode=False)  # maxpool
//   clamp(min=0.0, max=1.0)
//   x (128, 8, 128, 128) -> y (128, 64, 31, 31), bf16
//
// Plan for sm_80 on h100:
//   2048 blocks of 256 threads, 0 bytes of shared memory
//
// Generated from specs/conv2d_groupnorm_scale_maxpool_clamp.yaml; do not edit.
// Again: make generate SPEC=specs/conv2d_groupnorm_scale_maxpool_clamp.yaml PRECISION=bf16

#include <cuda_runtime.h>
#include <cuda_bf16.h>
#include <cstdint>

namespace conv_finish_sm80 {
namespace {

constexpr int kNumGroups = 16;  // groups of a sample
constexpr int kGroupChannels = 4;  // 64 channels / kNumGroups
constexpr int kGroupSize = 63504;  // values of a group before pooling: kGroupChannels x 126 x 126
constexpr int kSets = 64;  // moments of a group: kGroupChannels x 16 parts of a sample
constexpr int kPooledPlane = 961;  // values of a channel of y
constexpr int kPooledSize = kGroupChannels * kPooledPlane;  // values of a group in y
constexpr int kVector = 4;  // values of one access
constexpr int kThreads = 256;  // threads of a block, which takes a group
constexpr int kWarps = 8;  // kThreads / 32
constexpr int kBlocks = 2048;  // 128 samples x kNumGroups
constexpr float kEps = 1.0e-5f;  // group_norm's eps, added to the variance
constexpr float kClampMin = 0.0f;  // clamp's min
constexpr float kClampMax = 1.0f;  // clamp's max

// Early launch on Hopper: waits for the previous kernel's results, then allows the next kernel to launch.
__device__ __forceinline__ void await_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ float to_float(__nv_bfloat16 v) { return __bfloat162float(v); }

// Packs two values, rounded to nearest, into a 32-bit word.
__device__ __forceinline__ uint32_t pack(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

__device__ __forceinline__ void store(__nv_bfloat16* to, const float (&v)[4]) {
  *reinterpret_cast<uint2*>(to) = make_uint2(pack(v[0], v[1]), pack(v[2], v[3]));
}

// min(max(v, lo), hi); both comparisons are false for NaN, so NaN goes through.
__device__ __forceinline__ float clamp(float v, float lo, float hi) {
  return v < lo ? lo : (v > hi ? hi : v);
}

// The norm and the operators after it, for a kept value.
__device__ __forceinline__ float finish_value(
    float v,
    float mean,
    float mean_rest,
    float rstd,
    float c_gamma,
    float c_beta,
    float c_scale) {
  v = (__fsub_rn(v, mean) - mean_rest) * rstd;
  v = fmaf(v, c_gamma, c_beta);
  v = v * c_scale;  // mul(shape=(64, 1, 1), init=ones)
  v = clamp(v, kClampMin, kClampMax);  // clamp(min=0.0, max=1.0)
  return v;
}

// Applies finish_value to kVector consecutive values, from the group's value `index` on.
__device__ __forceinline__ void finish(
    float (&v)[kVector],
    int first_channel,
    int index,
    float mean,
    float mean_rest,
    float rstd,
    const __nv_bfloat16* p_gamma,
    const __nv_bfloat16* p_beta,
    const __nv_bfloat16* p_scale) {
#pragma unroll
  for (int e = 0; e < kVector; ++e) {
    const int channel = first_channel + (index + e) / kPooledPlane;
    v[e] = finish_value(v[e], mean, mean_rest, rstd, to_float(p_gamma[channel]), to_float(p_beta[channel]), to_float(p_scale[channel]));
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

// A block takes a group: it merges the moments of its channels' parts, then normalises the value kept of each pooling
// window.
__global__ void __launch_bounds__(kThreads) conv_finish(
    const float* __restrict__ kept,
    const float4* __restrict__ statistics,
    const __nv_bfloat16* __restrict__ p_gamma,
    const __nv_bfloat16* __restrict__ p_beta,
    const __nv_bfloat16* __restrict__ p_scale,
    __nv_bfloat16* __restrict__ output) {
  await_previous_kernel();
  const int first_channel = static_cast<int>(blockIdx.x) % kNumGroups * kGroupChannels;
  Moments own = {0.0f, 0.0f, 0.0f, 0.0f};
  for (int i = threadIdx.x; i < kSets; i += kThreads) {
    const float4 set = statistics[static_cast<int64_t>(blockIdx.x) * kSets + i];
    own = merge(own, {set.x, set.y, set.z, set.w});
  }
  const Moments total = block_merge(own);
  const float mean = total.mean;
  const float mean_rest = total.mean_rest;
  const float rstd = total.m2 < 0.0f ? rsqrtf(-total.m2 * (1.0f / kGroupSize)) * kShrink : rsqrtf(total.m2 * (1.0f / kGroupSize) + kEps);

  const float* from = kept + static_cast<int64_t>(blockIdx.x) * kPooledSize;
  __nv_bfloat16* to = output + static_cast<int64_t>(blockIdx.x) * kPooledSize;
  for (int index = threadIdx.x * kVector; index < kPooledSize; index += kThreads * kVector) {
    const float4 loaded = *reinterpret_cast<const float4*>(from + index);
    float v[kVector] = {loaded.x, loaded.y, loaded.z, loaded.w};
    finish(v, first_channel, index, mean, mean_rest, rstd, p_gamma, p_beta, p_scale);
    store(to + index, v);
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
}  // namespace conv_finish_sm80

extern "C" int conv_finish_sm80_launch(
    const float* kept,
    const float4* statistics,
    const __nv_bfloat16* p_gamma,
    const __nv_bfloat16* p_beta,
    const __nv_bfloat16* p_scale,
    __nv_bfloat16* output,
    int device,
    cudaStream_t stream) {
  using namespace conv_finish_sm80;
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
  return cudaLaunchKernelEx(&config, conv_finish, kept, statistics, p_gamma, p_beta, p_scale, output);
}
