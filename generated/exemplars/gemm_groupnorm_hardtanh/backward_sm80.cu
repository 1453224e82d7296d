// gemm_groupnorm_hardtanh: gradients of everything after the linear, one group of one sample at a time
//
//   linear(in_features=8192, out_features=8192, bias=True)  # gemm
//   group_norm(num_groups=16, eps=1e-05, affine=True)  # group_norm
//   hardtanh(min_val=-2.0, max_val=2.0)  # hardtanh
//   x (1024, 8192) -> y (1024, 8192), fp32
//
// Plan for sm_80 on h100:
//   t0, the linear's result, is computed again by torch's library (137 GFLOP): no forward holds its 33.6 MB until then
//   a block takes a group of 512 values, for 16 samples in turn: 1024 parts
//   the producer's result is read again wherever it is needed; a group's values are still in a cache then
//   sums over samples are added in a fixed order: the same bits on every run
//   1024 blocks of 256 threads, 0 bytes of shared memory
//
// Generated from specs/default.yaml; do not edit.
// Again: make generate SPEC=specs/default.yaml

#include <cuda_runtime.h>
#include <cstdint>

namespace backward_sm80 {
namespace {

constexpr int kChannels = 8192;  // channels at the norm
constexpr int kNumGroups = 16;  // group_norm's num_groups
constexpr int kGroupChannels = 512;  // kChannels / kNumGroups
constexpr int kGroupSize = 512;  // kGroupChannels
constexpr float kEps = 1.0e-5f;  // group_norm's eps, added to the variance
constexpr float kHardtanhMinVal = -2.0f;  // hardtanh's min_val
constexpr float kHardtanhMaxVal = 2.0f;  // hardtanh's max_val
constexpr int kSlabs = 64;  // slabs of samples whose sums are formed apart
constexpr int kSlabSamples = 16;  // batch / kSlabs, rounded up
constexpr int kParameters = 2;  // parameters behind the producer
constexpr int kThreads = 256;  // threads of a block
constexpr int kWarps = 8;  // kThreads / 32
constexpr int kSumChannels = 32;  // channels of a block that adds slabs up
constexpr int kSumLanes = 8;  // threads that share a channel there
constexpr int kTeamThreads = kThreads;  // threads that share a group

// 1 strictly inside the bounds, as PyTorch's hardtanh.
__device__ __forceinline__ float hardtanh_grad(float v, float lo, float hi) {
  return v > lo && v < hi ? 1.0f : 0.0f;
}

// Backward through the operators after the norm: the gradient of v, from the result's gradient g.
__device__ __forceinline__ float after_norm_grad(float v, float g) {
  g = g * hardtanh_grad(v, kHardtanhMinVal, kHardtanhMaxVal);
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

// Sums over the block; every thread receives the same bits.
template <int kNumbers>
__device__ __forceinline__ void block_sum(float (&v)[kNumbers], float* partial) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  warp_sum(v);
  __syncthreads();  // the previous sums may still be read
  if (lane == 0) {
#pragma unroll
    for (int n = 0; n < kNumbers; ++n) partial[n * kWarps + threadIdx.x / 32] = v[n];
  }
  __syncthreads();
#pragma unroll
  for (int n = 0; n < kNumbers; ++n) v[n] = lane < kWarps ? partial[n * kWarps + lane] : 0.0f;
  warp_sum(v);
}

// Adds one sample to a slab's sum, which one thread owns.
__device__ __forceinline__ void add(float* sum, float v, bool first_sample) { *sum = first_sample ? v : *sum + v; }

// Backward of one group, for each sample of a slab, by one team. The launch bounds ask for two blocks on an SM: without
// them ptxas spills to fit four.
__global__ void __launch_bounds__(kThreads, 2) back(
    const float* __restrict__ t0,
    const float* __restrict__ group_norm_weight_data,
    const float* __restrict__ group_norm_bias_data,
    const float* __restrict__ grad_y,
    float* __restrict__ grad_t0,
    float* sums) {
  __shared__ float partial[kWarps * 2];
  const int item = static_cast<int>(blockIdx.x);
  const int thread = static_cast<int>(threadIdx.x);
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
    const float shift = source[0];
    float moment[1] = {0.0f};
    for (int i = thread; i < kGroupSize; i += kTeamThreads) {
      moment[0] += __fsub_rn(source[i], shift);
    }
    block_sum(moment, partial);
    const float mean = fmaf(moment[0], 1.0f / kGroupSize, shift);
    float moments[2] = {0.0f, 0.0f};  // sums of differences and of their squares
    for (int i = thread; i < kGroupSize; i += kTeamThreads) {
      const float difference = __fsub_rn(source[i], mean);
      moments[0] += difference;
      moments[1] = fmaf(difference, difference, moments[1]);
    }
    block_sum(moments, partial);
    const float mean_rest = moments[0] * (1.0f / kGroupSize);
    const float rstd = rsqrtf(fmaf(-mean_rest, moments[0], moments[1]) * (1.0f / kGroupSize) + kEps);

    // Backward to the norm's result. The norm's derivative needs two sums over the group: the gradient, and its product
    // with the normalised value.
    float totals[2] = {0.0f, 0.0f};
    for (int i = thread; i < kGroupSize; i += kTeamThreads) {
      const float normal = (__fsub_rn(source[i], mean) - mean_rest) * rstd;
      const float v = fmaf(normal, group_norm_weight_data[first + i], group_norm_bias_data[first + i]);
      const float g = after_norm_grad(v, grad_y[base + i]);
      add(slab_sums + i, g * normal, fresh);
      add(slab_sums + 1 * kChannels + i, g, fresh);
      const float scaled = g * group_norm_weight_data[first + i];
      totals[0] += scaled;
      totals[1] = fmaf(scaled, normal, totals[1]);
    }
    block_sum(totals, partial);

    // Backward through the norm and the operators before it.
    const float mean_scaled = totals[0] * (1.0f / kGroupSize);
    const float mean_product = totals[1] * (1.0f / kGroupSize);
    for (int i = thread; i < kGroupSize; i += kTeamThreads) {
      const float normal = (__fsub_rn(source[i], mean) - mean_rest) * rstd;
      const float v = fmaf(normal, group_norm_weight_data[first + i], group_norm_bias_data[first + i]);
      const float g = after_norm_grad(v, grad_y[base + i]);
      const float scaled = g * group_norm_weight_data[first + i];
      const float result = rstd * (scaled - mean_scaled - normal * mean_product);
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
    const float* group_norm_weight_data,
    const float* group_norm_bias_data,
    const float* grad_y,
    float* grad_t0,
    float* group_norm_weight_grad,
    float* group_norm_bias_grad,
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
  cudaError_t error = cudaLaunchKernelEx(&config, back, t0, group_norm_weight_data, group_norm_bias_data, grad_y, grad_t0, sums);
  config.gridDim = (kChannels + kSumChannels - 1) / kSumChannels;
  config.blockDim = dim3(kSumChannels, kSumLanes);
  if (error == cudaSuccess) error = cudaLaunchKernelEx(&config, add_up, sums, group_norm_weight_grad);
  if (error == cudaSuccess) error = cudaLaunchKernelEx(&config, add_up, sums + 1 * kChannels, group_norm_bias_grad);
  return error;
}
