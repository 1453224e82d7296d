// conv2d_groupnorm_tanh_hardswish_residualadd_logsumexp: gradients of everything after the conv2d, one group of one
//   sample at a time
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
//   t0, the conv2d's result, is computed again by torch's library (18.7 GFLOP): no forward holds its 520 MB until then
//   a block takes a group of 63504 values, one channel after the other, for 2 samples in turn: 1024 parts
//   the producer's result is read again wherever it is needed; a group's values are still in a cache then
//   sums over samples are added in a fixed order: the same bits on every run
//   1024 blocks of 256 threads, 0 bytes of shared memory
//
// Generated from specs/conv2d_groupnorm_tanh_hardswish_residualadd_logsumexp.yaml; do not edit.
// Again: make generate SPEC=specs/conv2d_groupnorm_tanh_hardswish_residualadd_logsumexp.yaml

#include <cuda_runtime.h>
#include <cstdint>

namespace backward_sm80 {
namespace {

constexpr int kChannels = 64;  // channels at the norm
constexpr int kNumGroups = 16;  // group_norm's num_groups
constexpr int kGroupChannels = 4;  // kChannels / kNumGroups
constexpr int kSpatial = 15876;  // 126 * 126, behind the convolution
constexpr int kGroupSize = 63504;  // kGroupChannels * kSpatial
constexpr float kEps = 1.0e-5f;  // group_norm's eps, added to the variance
constexpr int kSlabs = 64;  // slabs of samples whose sums are formed apart
constexpr int kSlabSamples = 2;  // batch / kSlabs, rounded up
constexpr int kParameters = 2;  // parameters behind the producer
constexpr int kThreads = 256;  // threads of a block
constexpr int kWarps = 8;  // kThreads / 32
constexpr int kSumChannels = 32;  // channels of a block that adds slabs up
constexpr int kSumLanes = 8;  // threads that share a channel there
constexpr int kTeamThreads = kThreads;  // threads that share a group
constexpr int kChannelThreads = kTeamThreads;  // threads that share a channel

// 0 up to -3, 1 from 3 on, as PyTorch's hardswish.
__device__ __forceinline__ float hardswish_grad(float v) {
  return v <= -3.0f ? 0.0f : (v >= 3.0f ? 1.0f : v * 0.333333333f + 0.5f);
}

// tanh(v), error at most 6 units.
__device__ __forceinline__ float hyperbolic_tangent(float v) {
  return tanhf(v);
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

// 1 - tanh(v)^2 = 4 e / (1 + e)^2 with e = e^-2|v|: no cancellation.
__device__ __forceinline__ float hyperbolic_tangent_grad(float v) {
  const float e = exponential(v < 0.0f ? 2.0f * v : -2.0f * v);
  const float s = divide(1.0f, 1.0f + e);
  return 4.0f * e * s * s;
}

// Backward through the operators after the norm: the gradient of v, from the result's gradient g.
__device__ __forceinline__ float after_norm_grad(float v, float g, float& conv_kept_second) {
  const float v1 = hyperbolic_tangent(v);
  conv_kept_second = g;
  g = g * hardswish_grad(v1);
  g = g * hyperbolic_tangent_grad(v);
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
  const int lane = thread;
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
    for (int c = 0; c < kGroupChannels; ++c) {
      const float gamma = group_norm_weight_data[first + c];
      const float beta = group_norm_bias_data[first + c];
      const float* const channel = source + c * kSpatial;
      float numbers[2] = {};  // the channel's share of the totals
      for (int i = lane; i < kSpatial; i += kChannelThreads) {
        const float input = channel[i];
        const float normal = (__fsub_rn(input, mean) - mean_rest) * rstd;
        const float v = fmaf(normal, gamma, beta);
        float conv_kept_second;
        const float g = after_norm_grad(v, grad_y[base + c * kSpatial + i], conv_kept_second);
        numbers[0] += g;
        numbers[1] = fmaf(g, normal, numbers[1]);
      }
      block_sum(numbers, partial);
      if (lane == 0) {
        add(slab_sums + c, numbers[1], fresh);
        add(slab_sums + 1 * kChannels + c, numbers[0], fresh);
      }
      totals[0] = fmaf(gamma, numbers[0], totals[0]);
      totals[1] = fmaf(gamma, numbers[1], totals[1]);
    }

    // Backward through the norm and the operators before it.
    const float mean_scaled = totals[0] * (1.0f / kGroupSize);
    const float mean_product = totals[1] * (1.0f / kGroupSize);
    for (int c = 0; c < kGroupChannels; ++c) {
      const float gamma = group_norm_weight_data[first + c];
      const float beta = group_norm_bias_data[first + c];
      const float* const channel = source + c * kSpatial;
      for (int i = lane; i < kSpatial; i += kChannelThreads) {
        const float input = channel[i];
        const float normal = (__fsub_rn(input, mean) - mean_rest) * rstd;
        const float v = fmaf(normal, gamma, beta);
        float conv_kept_second;
        const float g = after_norm_grad(v, grad_y[base + c * kSpatial + i], conv_kept_second);
        const float scaled = g * gamma;
        const float result = rstd * (scaled - mean_scaled - normal * mean_product) + conv_kept_second;
        grad_t0[base + c * kSpatial + i] = result;
      }
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

// Computes the gradients of t0, the conv2d's result, and of the parameters behind it, from the gradient of y.
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
