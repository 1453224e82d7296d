// conv2d_add_scale_sigmoid_groupnorm_bf16: gradients of everything after the conv2d, one group of one sample at a time
//
//   conv2d(in_channels=8, out_channels=32, kernel_size=(3, 3), stride=(1, 1), padding=(0, 0), dilation=(1, 1), groups=1, bias=True)  # conv
//   add(shape=(32, 1, 1), init=randn)  # bias
//   mul(shape=(32, 1, 1), init=randn)  # scale
//   sigmoid()
//   group_norm(num_groups=8, eps=1e-05, affine=True)  # group_norm
//   x (128, 8, 256, 256) -> y (128, 32, 254, 254), bf16
//
// Plan for sm_80 on h100:
//   t0, the conv2d's result, is computed again by torch's library (38.1 GFLOP): no forward holds its 529 MB until then
//   a block takes a group of 258064 values, one channel after the other, for 1 sample in turn: 1024 parts
//   the producer's result is read again wherever it is needed; a group's values are still in a cache then
//   sums over samples have an order of their own: the same bits on every run
//   1024 blocks of 256 threads, 0 bytes of shared memory
//
// Generated from specs/conv2d_add_scale_sigmoid_groupnorm.yaml; do not edit. Again: make generate SPEC=specs/conv2d_add_scale_sigmoid_groupnorm.yaml PRECISION=bf16

#include <cuda_runtime.h>
#include <cuda_bf16.h>
#include <cstdint>

namespace backward_sm80 {
namespace {

constexpr int kChannels = 32;  // channels at the norm
constexpr int kNumGroups = 8;  // group_norm's num_groups
constexpr int kGroupChannels = 4;  // kChannels / kNumGroups
constexpr int kSpatial = 64516;  // 254 * 254, behind the convolution
constexpr int kGroupSize = 258064;  // kGroupChannels * kSpatial
constexpr float kEps = 1.0e-5f;  // group_norm's eps, added to the variance
constexpr int kSlabs = 128;  // slabs of samples whose sums are formed apart
constexpr int kSlabSamples = 1;  // batch / kSlabs, rounded up
constexpr int kParameters = 4;  // parameters behind the producer
constexpr int kThreads = 256;  // threads of a block
constexpr int kWarps = 8;  // kThreads / 32
constexpr int kSumChannels = 32;  // channels of a block that adds slabs up
constexpr int kSumLanes = 8;  // threads that share a channel there
constexpr int kTeamThreads = kThreads;  // threads that share a group
constexpr int kChannelThreads = kTeamThreads;  // threads that share a channel

__device__ __forceinline__ float to_float(__nv_bfloat16 v) { return __bfloat162float(v); }

// e^v, error at most 3 units; results below 2^-126 may be 0.
__device__ __forceinline__ float exponential(float v) {
  return expf(v);
}

// a / b for b >= 1, error at most 3 units; 0 for b > 2^126 on a GPU, whose fast division this is.
__device__ __forceinline__ float divide(float a, float b) {
  return __fdividef(a, b);
}

// sigmoid(v) sigmoid(-v) = e / (1 + e)^2 with e = e^-|v|: no cancellation.
__device__ __forceinline__ float sigmoid_grad(float v) {
  const float e = exponential(v < 0.0f ? v : -v);
  const float s = divide(1.0f, 1.0f + e);
  return e * s * s;
}

// 1 / (1 + e^-v), error at most 5 units; results below 2^-126 may be 0.
__device__ __forceinline__ float sigmoid(float v) {
  return divide(1.0f, 1.0f + exponential(-v));
}

// What comes before the norm.
__device__ __forceinline__ float before_norm(float v, float bias_c, float scale_c) {
  v = v + bias_c;
  v = v * scale_c;
  v = sigmoid(v);
  return v;
}

// Back through what comes before the norm: the gradient of v for that of the result, g.
__device__ __forceinline__ float before_norm_grad(float v, float g, float bias_c, float scale_c, float& bias_g, float& scale_g) {
  const float v1 = v + bias_c;
  const float v2 = v1 * scale_c;
  g = g * sigmoid_grad(v2);
  scale_g = g * v1;
  g = g * scale_c;
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

// Sums over the block; every thread receives the same bits.
template <int kNumbers>
__device__ __forceinline__ void block_sum(float (&v)[kNumbers], float* partial) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  warp_sum(v);
  __syncthreads();  // the sums before may still be read
  if (lane == 0) {
#pragma unroll
    for (int n = 0; n < kNumbers; ++n) partial[n * kWarps + threadIdx.x / 32] = v[n];
  }
  __syncthreads();
#pragma unroll
  for (int n = 0; n < kNumbers; ++n) v[n] = lane < kWarps ? partial[n * kWarps + lane] : 0.0f;
  warp_sum(v);
}

// A slab's sum so far, which one thread owns, and one sample more.
__device__ __forceinline__ void add(float* sum, float v, bool first_sample) { *sum = first_sample ? v : *sum + v; }

// A team goes back through one group of each sample of a slab. Two blocks must fit on an SM: asked for nothing, ptxas would rather spill than use
// more registers than four leave it.
__global__ void __launch_bounds__(kThreads, 2) back(
    const __nv_bfloat16* __restrict__ t0,
    const __nv_bfloat16* __restrict__ bias_data,
    const __nv_bfloat16* __restrict__ scale_data,
    const __nv_bfloat16* __restrict__ group_norm_weight_data,
    const __nv_bfloat16* __restrict__ grad_y,
    __nv_bfloat16* __restrict__ grad_t0,
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
    const __nv_bfloat16* const source = t0 + base;

    // Statistics in two walks. The first sums differences from one value of the group, so that a constant group's mean is exact. The second
    // sums differences from that mean: their own mean is what the first one's rounding left, however large the shift was.
    const float shift = before_norm(to_float(source[0]), to_float(bias_data[first]), to_float(scale_data[first]));
    float moment[1] = {0.0f};
    for (int i = thread; i < kGroupSize; i += kTeamThreads) {
      moment[0] += __fsub_rn(before_norm(to_float(source[i]), to_float(bias_data[first + i / kSpatial]), to_float(scale_data[first + i / kSpatial])), shift);
    }
    block_sum(moment, partial);
    const float mean = fmaf(moment[0], 1.0f / kGroupSize, shift);
    float moments[2] = {0.0f, 0.0f};  // of differences, of their squares
    for (int i = thread; i < kGroupSize; i += kTeamThreads) {
      const float difference = __fsub_rn(before_norm(to_float(source[i]), to_float(bias_data[first + i / kSpatial]), to_float(scale_data[first + i / kSpatial])), mean);
      moments[0] += difference;
      moments[1] = fmaf(difference, difference, moments[1]);
    }
    block_sum(moments, partial);
    const float mean_rest = moments[0] * (1.0f / kGroupSize);
    const float rstd = rsqrtf(fmaf(-mean_rest, moments[0], moments[1]) * (1.0f / kGroupSize) + kEps);

    // Back to the norm. Its own derivative takes two sums over the group: of the gradient, and of its product with the normalised value.
    float totals[2] = {0.0f, 0.0f};
    for (int c = 0; c < kGroupChannels; ++c) {
      const float bias_c = to_float(bias_data[first + c]);
      const float scale_c = to_float(scale_data[first + c]);
      const float gamma = to_float(group_norm_weight_data[first + c]);
      const __nv_bfloat16* const channel = source + c * kSpatial;
      float numbers[2] = {};  // the channel's share of the totals
      for (int i = lane; i < kSpatial; i += kChannelThreads) {
        const float normal = (__fsub_rn(before_norm(to_float(channel[i]), bias_c, scale_c), mean) - mean_rest) * rstd;
        const float g = to_float(grad_y[base + c * kSpatial + i]);
        numbers[0] += g;
        numbers[1] = fmaf(g, normal, numbers[1]);
      }
      block_sum(numbers, partial);
      if (lane == 0) {
        add(slab_sums + 2 * kChannels + c, numbers[1], fresh);
        add(slab_sums + 3 * kChannels + c, numbers[0], fresh);
      }
      totals[0] = fmaf(gamma, numbers[0], totals[0]);
      totals[1] = fmaf(gamma, numbers[1], totals[1]);
    }

    // Back through the norm and what comes before it.
    const float mean_scaled = totals[0] * (1.0f / kGroupSize);
    const float mean_product = totals[1] * (1.0f / kGroupSize);
    for (int c = 0; c < kGroupChannels; ++c) {
      const float bias_c = to_float(bias_data[first + c]);
      const float scale_c = to_float(scale_data[first + c]);
      const float gamma = to_float(group_norm_weight_data[first + c]);
      const __nv_bfloat16* const channel = source + c * kSpatial;
      float numbers[2] = {};  // the channel's share of bias, scale
      for (int i = lane; i < kSpatial; i += kChannelThreads) {
        const float normal = (__fsub_rn(before_norm(to_float(channel[i]), bias_c, scale_c), mean) - mean_rest) * rstd;
        const float g = to_float(grad_y[base + c * kSpatial + i]);
        const float scaled = g * gamma;
        float bias_g, scale_g;
        const float result = before_norm_grad(to_float(channel[i]), rstd * (scaled - mean_scaled - normal * mean_product), bias_c, scale_c, bias_g, scale_g);
        numbers[0] += bias_g;
        numbers[1] += scale_g;
        grad_t0[base + c * kSpatial + i] = __float2bfloat16_rn(result);
      }
      block_sum(numbers, partial);
      if (lane == 0) {
        add(slab_sums + c, numbers[0], fresh);
        add(slab_sums + 1 * kChannels + c, numbers[1], fresh);
      }
    }
  }
}

// A parameter's gradient, a value per channel: the slabs' sums in an order of their own.
__global__ void __launch_bounds__(kSumChannels * kSumLanes) add_up(const float* __restrict__ sums, __nv_bfloat16* __restrict__ gradient) {
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
    gradient[channel] = __float2bfloat16_rn(sum);
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

// From the gradient of y to those of t0, the conv2d's result, and of the parameters behind it.
extern "C" int backward_sm80_launch(
    const __nv_bfloat16* t0,
    const __nv_bfloat16* bias_data,
    const __nv_bfloat16* scale_data,
    const __nv_bfloat16* group_norm_weight_data,
    const __nv_bfloat16* grad_y,
    __nv_bfloat16* grad_t0,
    __nv_bfloat16* bias_grad,
    __nv_bfloat16* scale_grad,
    __nv_bfloat16* group_norm_weight_grad,
    __nv_bfloat16* group_norm_bias_grad,
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
  cudaError_t error = cudaLaunchKernelEx(&config, back, t0, bias_data, scale_data, group_norm_weight_data, grad_y, grad_t0, sums);
  config.gridDim = (kChannels + kSumChannels - 1) / kSumChannels;
  config.blockDim = dim3(kSumChannels, kSumLanes);
  if (error == cudaSuccess) error = cudaLaunchKernelEx(&config, add_up, sums, bias_grad);
  if (error == cudaSuccess) error = cudaLaunchKernelEx(&config, add_up, sums + 1 * kChannels, scale_grad);
  if (error == cudaSuccess) error = cudaLaunchKernelEx(&config, add_up, sums + 2 * kChannels, group_norm_weight_grad);
  if (error == cudaSuccess) error = cudaLaunchKernelEx(&config, add_up, sums + 3 * kChannels, group_norm_bias_grad);
  return error;
}
