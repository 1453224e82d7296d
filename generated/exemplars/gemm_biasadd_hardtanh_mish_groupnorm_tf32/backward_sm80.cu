// gemm_biasadd_hardtanh_mish_groupnorm_tf32: gradients of everything after the linear, one group of one sample at a
//   time
//
//   linear(in_features=8192, out_features=8192, bias=True)  # gemm
//   add(shape=(8192,), init=randn)  # bias
//   hardtanh(min_val=-1.0, max_val=1.0)  # hardtanh
//   mish()  # mish
//   group_norm(num_groups=256, eps=1e-05, affine=True)  # groupnorm
//   x (1024, 8192) -> y (1024, 8192), tf32
//
// Plan for sm_80 on h100:
//   t0, the linear's result, is computed again by torch's library (137 GFLOP): no forward holds its 33.6 MB until then
//   a warp takes a group of 32 values, for 32 samples in turn: 8192 parts
//   the producer's result is read again wherever it is needed; a group's values are still in a cache then
//   sums over samples are added in a fixed order: the same bits on every run
//   1024 blocks of 256 threads, 0 bytes of shared memory
//
// Generated from specs/gemm_biasadd_hardtanh_mish_groupnorm.yaml; do not edit.
// Again: make generate SPEC=specs/gemm_biasadd_hardtanh_mish_groupnorm.yaml PRECISION=tf32

#include <cuda_runtime.h>
#include <cstdint>

namespace backward_sm80 {
namespace {

constexpr int kChannels = 8192;  // channels at the norm
constexpr int kNumGroups = 256;  // group_norm's num_groups
constexpr int kGroupChannels = 32;  // kChannels / kNumGroups
constexpr int kGroupSize = 32;  // kGroupChannels
constexpr float kEps = 1.0e-5f;  // group_norm's eps, added to the variance
constexpr float kHardtanhMinVal = -1.0f;  // hardtanh's min_val
constexpr float kHardtanhMaxVal = 1.0f;  // hardtanh's max_val
constexpr int kSlabs = 32;  // slabs of samples whose sums are formed apart
constexpr int kSlabSamples = 32;  // batch / kSlabs, rounded up
constexpr int kParameters = 3;  // parameters behind the producer
constexpr int kThreads = 256;  // threads of a block
constexpr int kWarps = 8;  // kThreads / 32
constexpr int kSumChannels = 32;  // channels of a block that adds slabs up
constexpr int kSumLanes = 8;  // threads that share a channel there
constexpr int kTeamThreads = 32;  // threads that share a group

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

// t + v (1 - t^2) sigmoid(v) with t = tanh(log(1 + e^v)) = n / (n + 2): 1 - t^2 = 4 (1 + e^v)^2 / (n + 2)^2; 1 from v =
// 20 on.
__device__ __forceinline__ float mish_grad(float v) {
  const float c = v > 20.0f ? 20.0f : v;
  const float e = exponential(c);
  const float n = e * (e + 2.0f);
  const float w = divide(1.0f, n + 2.0f);
  return n * w + c * (4.0f * e * w) * ((1.0f + e) * w);
}

// min(max(v, lo), hi); NaN goes through.
__device__ __forceinline__ float hardtanh(float v, float lo, float hi) {
  return v < lo ? lo : (v > hi ? hi : v);
}

// 1 strictly inside the bounds, as PyTorch's hardtanh.
__device__ __forceinline__ float hardtanh_grad(float v, float lo, float hi) {
  return v > lo && v < hi ? 1.0f : 0.0f;
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

// The operators before the norm.
__device__ __forceinline__ float before_norm(float v, float bias_c) {
  v = v + bias_c;
  v = hardtanh(v, kHardtanhMinVal, kHardtanhMaxVal);
  v = mish(v);
  return v;
}

// Backward through the operators before the norm: the gradient of v, from the result's gradient g.
__device__ __forceinline__ float before_norm_grad(float v, float g, float bias_c, float& bias_g) {
  const float v1 = v + bias_c;
  const float v2 = hardtanh(v1, kHardtanhMinVal, kHardtanhMaxVal);
  g = g * mish_grad(v2);
  g = g * hardtanh_grad(v1, kHardtanhMinVal, kHardtanhMaxVal);
  bias_g = g;
  return g;
}

// Sums over the 32 lanes; all of them receive the same bits.
template <int kNumbers>
__device__ __forceinline__ void warp_sum(float (&v)[kNumbers]) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
#pragma unroll
    for (int n = 0; n < kNumbers; ++n) v[n] += __shfl_xor_sync(0xffffffffu, v[n], offset);
  }
}

// Adds one sample to a slab's sum, which one thread owns.
__device__ __forceinline__ void add(float* sum, float v, bool first_sample) { *sum = first_sample ? v : *sum + v; }

// Backward of one group, for each sample of a slab, by one team. The launch bounds ask for two blocks on an SM: without
// them ptxas spills to fit four.
__global__ void __launch_bounds__(kThreads, 2) back(
    const float* __restrict__ t0,
    const float* __restrict__ bias_data,
    const float* __restrict__ groupnorm_weight_data,
    const float* __restrict__ grad_y,
    float* __restrict__ grad_t0,
    float* sums) {
  const int item = static_cast<int>(blockIdx.x) * kWarps + static_cast<int>(threadIdx.x) / 32;
  const int thread = static_cast<int>(threadIdx.x) % 32;
  const int slab = item / kNumGroups;
  const int group = item % kNumGroups;
  const int first = group * kGroupChannels;  // the group's first channel
  float* const slab_sums = sums + int64_t{slab} * kParameters * kChannels + group * kGroupChannels;

#pragma unroll 1
  for (int sample = slab * kSlabSamples; sample < (slab + 1) * kSlabSamples; ++sample) {
    const bool fresh = sample == slab * kSlabSamples;
    const int64_t base = (int64_t{sample} * kNumGroups + group) * kGroupSize;
    const float* const source = t0 + base;

    // Statistics in two passes. The first sums differences from one value of the group, so that a constant group's mean
    // is exact. The second sums differences from that mean; their mean is the first pass's rounding error.
    const float shift = before_norm(source[0], bias_data[first]);
    float moment[1] = {0.0f};
    for (int i = thread; i < kGroupSize; i += kTeamThreads) {
      moment[0] += __fsub_rn(before_norm(source[i], bias_data[first + i]), shift);
    }
    warp_sum(moment);
    const float mean = fmaf(moment[0], 1.0f / kGroupSize, shift);
    float moments[2] = {0.0f, 0.0f};  // sums of differences and of their squares
    for (int i = thread; i < kGroupSize; i += kTeamThreads) {
      const float difference = __fsub_rn(before_norm(source[i], bias_data[first + i]), mean);
      moments[0] += difference;
      moments[1] = fmaf(difference, difference, moments[1]);
    }
    warp_sum(moments);
    const float mean_rest = moments[0] * (1.0f / kGroupSize);
    const float rstd = rsqrtf(fmaf(-mean_rest, moments[0], moments[1]) * (1.0f / kGroupSize) + kEps);

    // Backward to the norm's result. The norm's derivative needs two sums over the group: the gradient, and its product
    // with the normalised value.
    float totals[2] = {0.0f, 0.0f};
    for (int i = thread; i < kGroupSize; i += kTeamThreads) {
      const float normal = (__fsub_rn(before_norm(source[i], bias_data[first + i]), mean) - mean_rest) * rstd;
      const float g = grad_y[base + i];
      add(slab_sums + 1 * kChannels + i, g * normal, fresh);
      add(slab_sums + 2 * kChannels + i, g, fresh);
      const float scaled = g * groupnorm_weight_data[first + i];
      totals[0] += scaled;
      totals[1] = fmaf(scaled, normal, totals[1]);
    }
    warp_sum(totals);

    // Backward through the norm and the operators before it.
    const float mean_scaled = totals[0] * (1.0f / kGroupSize);
    const float mean_product = totals[1] * (1.0f / kGroupSize);
    for (int i = thread; i < kGroupSize; i += kTeamThreads) {
      const float normal = (__fsub_rn(before_norm(source[i], bias_data[first + i]), mean) - mean_rest) * rstd;
      const float g = grad_y[base + i];
      const float scaled = g * groupnorm_weight_data[first + i];
      float bias_g;
      const float result = before_norm_grad(source[i], rstd * (scaled - mean_scaled - normal * mean_product), bias_data[first + i], bias_g);
      add(slab_sums + i, bias_g, fresh);
      grad_t0[base + i] = result;
    }
  }
}

// Gradient of a parameter with one value a channel: the slabs' sums, added in a fixed order.
__global__ void __launch_bounds__(kSumChannels * kSumLanes) add_up(const float* __restrict__ sums, float* __restrict__ gradient) {
  __shared__ float partial[kSumLanes][kSumChannels];
  const int channel = static_cast<int>(blockIdx.x * kSumChannels + threadIdx.x);
  float sum = 0.0f;
  if (channel < kChannels) {
    for (int slab = static_cast<int>(threadIdx.y); slab < kSlabs; slab += kSumLanes) {
      sum += sums[int64_t{slab} * kParameters * kChannels + channel];
    }
  }
  partial[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y == 0 && channel < kChannels) {
    for (int i = 1; i < kSumLanes; ++i) sum += partial[i][threadIdx.x];
    gradient[channel] = sum;
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
}  // namespace backward_sm80

// Computes the gradients of t0, the linear's result, and of the parameters behind it, from the gradient of y.
extern "C" int backward_sm80_launch(
    const float* t0,
    const float* bias_data,
    const float* groupnorm_weight_data,
    const float* grad_y,
    float* grad_t0,
    float* bias_grad,
    float* groupnorm_weight_grad,
    float* groupnorm_bias_grad,
    float* sums,
    int device,
    cudaStream_t stream) {
  using namespace backward_sm80;
  const DeviceScope scope(device);
  if (scope.error != cudaSuccess) return scope.error;
  cudaLaunchConfig_t config = {};
  config.gridDim = 1024;
  config.blockDim = kThreads;
  config.stream = stream;
  cudaError_t error = cudaLaunchKernelEx(&config, back, t0, bias_data, groupnorm_weight_data, grad_y, grad_t0, sums);
  config.gridDim = (kChannels + kSumChannels - 1) / kSumChannels;
  config.blockDim = dim3(kSumChannels, kSumLanes);
  if (error == cudaSuccess) error = cudaLaunchKernelEx(&config, add_up, sums, bias_grad);
  if (error == cudaSuccess) error = cudaLaunchKernelEx(&config, add_up, sums + 1 * kChannels, groupnorm_weight_grad);
  if (error == cudaSuccess) error = cudaLaunchKernelEx(&config, add_up, sums + 2 * kChannels, groupnorm_bias_grad);
  return error;
}
