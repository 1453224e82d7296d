// gemm_biasadd_hardtanh_mish_groupnorm_tf32: GroupNorm and the operators after it; 8 lanes hold a group of 32 values
//
//   linear(in_features=8192, out_features=8192, bias=True)  # gemm
//   add(shape=(8192,), init=randn)  # bias
//   hardtanh(min_val=-1.0, max_val=1.0)  # hardtanh
//   mish()  # mish
//   group_norm(num_groups=256, eps=1e-05, affine=True)  # groupnorm
//   x (1024, 8192) -> y (1024, 8192), tf32
//
// Plan for sm_90a on h100:
//   16384 blocks of 128 threads, 0 bytes of shared memory
//
// Generated from specs/gemm_biasadd_hardtanh_mish_groupnorm.yaml; do not edit.
// Again: make generate SPEC=specs/gemm_biasadd_hardtanh_mish_groupnorm.yaml PRECISION=tf32

#include <cuda_runtime.h>
#include <cstdint>

namespace group_norm_sm90a {
namespace {

constexpr int kNumGroups = 256;  // groups of a sample
constexpr int kGroupChannels = 32;  // 8192 channels / kNumGroups
constexpr int kGroupSize = 32;  // values of a group: one contiguous span
constexpr int kWidth = 4;  // values of one access: 16 bytes
constexpr int kVectors = 1;  // accesses of a thread
constexpr int kLanes = 8;  // threads of a group
constexpr int kThreads = 128;  // threads of a block
constexpr int kGroupsPerBlock = 16;  // kThreads / kLanes
constexpr int kBlocks = 16384;  // 1024 samples x kNumGroups / kGroupsPerBlock
constexpr int kMinBlocks = 10;  // blocks that fit on an SM
constexpr float kEps = 1.0e-5f;  // group_norm's eps, added to the variance
constexpr float kHardtanhMinVal = -1.0f;  // hardtanh's min_val
constexpr float kHardtanhMaxVal = 1.0f;  // hardtanh's max_val

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

// min(max(v, lo), hi); NaN goes through.
__device__ __forceinline__ float hardtanh(float v, float lo, float hi) {
  return v < lo ? lo : (v > hi ? hi : v);
}

// e^v, error at most 3 units; results below 2^-126 may be 0.
__device__ __forceinline__ float exponential(float v) {
  return expf(v);
}

// a / b for b >= 1, error at most 1.1 units; may be 0 for b > 2^126.
__device__ __forceinline__ float divide(float a, float b) {
  const float fast = __fdividef(a, b);  // error at most 3 units
  const float rest = fmaf(-b, fast, a);  // exact; NaN where a or b is infinite, and fast is right
  return rest == rest ? fmaf(rest, __fdividef(1.0f, b), fast) : fast;
}

// v tanh(log(1 + e^v)) with n = e^v (e^v + 2): v n / (n + 2) below 0, where it is small, error at most 8 units; v - 2 v
// / (n + 2) above, error at most 4; v itself from 20 on.
__device__ __forceinline__ float mish(float v) {
  const float c = v > 20.0f ? 20.0f : v;
  const float e = exponential(c);
  const float n = e * (e + 2.0f);
  const float q = divide(v < 0.0f ? n : 2.0f, n + 2.0f);
  return v < 0.0f ? v * q : v - c * q;
}

// The norm's input, from the producer's value.
__device__ __forceinline__ float prepare_value(float v, float c_bias) {
  v = v + c_bias;  // add(shape=(8192,), init=randn)
  v = hardtanh(v, kHardtanhMinVal, kHardtanhMaxVal);  // hardtanh(min_val=-1.0, max_val=1.0)
  v = mish(v);  // mish()
  return v;
}

// Applies prepare_value to kWidth consecutive values, from the group's value `index` on.
__device__ __forceinline__ void prepare(float (&v)[kWidth], int first_channel, int index, const float* p_bias) {
  float c_bias[kWidth];
  load(p_bias + first_channel + index, c_bias);
#pragma unroll
  for (int e = 0; e < kWidth; ++e) {
    v[e] = prepare_value(v[e], c_bias[e]);
  }
}

// The norm and the operators after it. __fsub_rn is never fused with a product before it: a value equal to the mean
// gives 0.
__device__ __forceinline__ float finish_value(float v, float mean, float mean_rest, float rstd, float c_gamma, float c_beta) {
  v = (__fsub_rn(v, mean) - mean_rest) * rstd;
  v = fmaf(v, c_gamma, c_beta);
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
  float c_gamma[kWidth];
  load(p_gamma + first_channel + index, c_gamma);
  float c_beta[kWidth];
  load(p_beta + first_channel + index, c_beta);
#pragma unroll
  for (int e = 0; e < kWidth; ++e) {
    v[e] = finish_value(v[e], mean, mean_rest, rstd, c_gamma[e], c_beta[e]);
  }
}

// Sum over kLanes lanes, of one number or of two; all of them receive the same bits.
__device__ __forceinline__ float lane_sum(float v) {
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2) v += __shfl_xor_sync(0xffffffffu, v, offset);
  return v;
}

__device__ __forceinline__ float2 lane_sum(float2 v) { return make_float2(lane_sum(v.x), lane_sum(v.y)); }

// Scale for values whose squares exceed fp32's range. Statistics are then formed of the values times kShrink, a power
// of two: a sum of squares above 2^128 becomes one above 2^-32, and every sum of squares stays below 2^128.
constexpr float kShrink = 8.271806125530277e-25f;  // 2^-80
constexpr float kGrow = 1.2089258196146292e24f;    // 2^80

// Norm, kLanes lanes a group: its values stay in their registers between the one read and the one write.
__global__ void __launch_bounds__(kThreads, kMinBlocks) group_norm(
    float* values,
    const float* __restrict__ p_bias,
    const float* __restrict__ p_gamma,
    const float* __restrict__ p_beta) {
  await_previous_kernel();
  const int lane = threadIdx.x % kLanes;
  const int group = blockIdx.x * kGroupsPerBlock + threadIdx.x / kLanes;
  const int first_channel = group % kNumGroups * kGroupChannels;
  const int64_t base = static_cast<int64_t>(group) * kGroupSize;

  // Load.
  float v[kVectors][kWidth];
#pragma unroll
  for (int r = 0; r < kVectors; ++r) {
    load(values + base + (r * kLanes + lane) * kWidth, v[r]);
  }
#pragma unroll
  for (int r = 0; r < kVectors; ++r) {
    prepare(v[r], first_channel, (r * kLanes + lane) * kWidth, p_bias);
  }

  // Statistics in two passes over the registers. The first sums differences from one value of the group, so that a
  // constant group's mean is exact. The second sums differences from that mean; their mean is the first pass's rounding
  // error.
  const float shift = __shfl_sync(0xffffffffu, v[0][0], 0, kLanes);
  float sum = 0.0f;
#pragma unroll
  for (int r = 0; r < kVectors; ++r) {
#pragma unroll
    for (int e = 0; e < kWidth; ++e) sum += __fsub_rn(v[r][e], shift);
  }
  float mean = fmaf(lane_sum(sum), 1.0f / kGroupSize, shift);
  float2 sums = make_float2(0.0f, 0.0f);  // sums of differences and of their squares
#pragma unroll
  for (int r = 0; r < kVectors; ++r) {
#pragma unroll
    for (int e = 0; e < kWidth; ++e) {
      const float difference = __fsub_rn(v[r][e], mean);
      sums.x += difference;
      sums.y = fmaf(difference, difference, sums.y);
    }
  }
  sums = lane_sum(sums);
  float mean_rest = sums.x * (1.0f / kGroupSize);
  const float m2 = fmaf(-mean_rest, sums.x, sums.y);
  float rstd = rsqrtf(m2 * (1.0f / kGroupSize) + kEps);
  const bool beyond = !(m2 < INFINITY);
  if (__any_sync(0xffffffffu, beyond)) {  // repeated with the values times kShrink
    const float shrunk_shift = shift * kShrink;
    float sum = 0.0f;
#pragma unroll
    for (int r = 0; r < kVectors; ++r) {
#pragma unroll
      for (int e = 0; e < kWidth; ++e) sum += fmaf(v[r][e], kShrink, -shrunk_shift);
    }
    const float shrunk_mean = fmaf(lane_sum(sum), 1.0f / kGroupSize, shrunk_shift);
    float2 sums = make_float2(0.0f, 0.0f);
#pragma unroll
    for (int r = 0; r < kVectors; ++r) {
#pragma unroll
      for (int e = 0; e < kWidth; ++e) {
        const float difference = fmaf(v[r][e], kShrink, -shrunk_mean);
        sums.x += difference;
        sums.y = fmaf(difference, difference, sums.y);
      }
    }
    sums = lane_sum(sums);
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
    finish(v[r], first_channel, (r * kLanes + lane) * kWidth, mean, mean_rest, rstd, p_gamma, p_beta);
    store(values + base + (r * kLanes + lane) * kWidth, v[r]);
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
    float* values,
    const float* p_bias,
    const float* p_gamma,
    const float* p_beta,
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
  return cudaLaunchKernelEx(&config, group_norm, values, p_bias, p_gamma, p_beta);
}
