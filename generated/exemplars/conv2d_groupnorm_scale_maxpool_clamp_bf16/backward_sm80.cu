// conv2d_groupnorm_scale_maxpool_clamp_bf16: gradients of everything after the conv2d, one group of one sample at a
//   time
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
//   t0, the conv2d's result, is computed again by torch's library (18.7 GFLOP): no forward holds its 260 MB until then
//   a block takes a group of 63504 values, one channel after the other, for 2 samples in turn: 1024 parts
//   the producer's result is read again wherever it is needed; a group's values are still in a cache then
//   sums over samples are added in a fixed order: the same bits on every run
//   each window's maximum and gradient are stored first; a value then sums those of the windows around it
//   1024 blocks of 256 threads, 0 bytes of shared memory
//
// Generated from specs/conv2d_groupnorm_scale_maxpool_clamp.yaml; do not edit.
// Again: make generate SPEC=specs/conv2d_groupnorm_scale_maxpool_clamp.yaml PRECISION=bf16

#include <cuda_runtime.h>
#include <cuda_bf16.h>
#include <cstdint>

namespace backward_sm80 {
namespace {

constexpr int kChannels = 64;  // channels at the norm
constexpr int kNumGroups = 16;  // group_norm's num_groups
constexpr int kGroupChannels = 4;  // kChannels / kNumGroups
constexpr int kWidth = 126;  // columns behind the convolution
constexpr int kSpatial = 15876;  // height * kWidth
constexpr int kGroupSize = 63504;  // kGroupChannels * kSpatial
constexpr float kEps = 1.0e-5f;  // group_norm's eps, added to the variance
constexpr int kPoolKernelHeight = 4;  // max_pool2d's kernel_size
constexpr int kPoolKernelWidth = 4;  // max_pool2d's kernel_size
constexpr int kPoolStrideHeight = 4;  // max_pool2d's stride
constexpr int kPoolStrideWidth = 4;  // max_pool2d's stride
constexpr int kPooledHeight = 31;  // (126 - 4) / 4 + 1
constexpr int kPooledWidth = 31;  // (126 - 4) / 4 + 1
constexpr int kOutputSize = 3844;  // values of y from a group
constexpr float kClampMin = 0.0f;  // clamp's min
constexpr float kClampMax = 1.0f;  // clamp's max
constexpr int kPooledSize = 961;  // kPooledHeight * kPooledWidth
constexpr int kSlabs = 64;  // slabs of samples whose sums are formed apart
constexpr int kSlabSamples = 2;  // batch / kSlabs, rounded up
constexpr int kParameters = 3;  // parameters behind the producer
constexpr int kThreads = 256;  // threads of a block
constexpr int kWarps = 8;  // kThreads / 32
constexpr int kSumChannels = 32;  // channels of a block that adds slabs up
constexpr int kSumLanes = 8;  // threads that share a channel there
constexpr int kTeamThreads = kThreads;  // threads that share a group
constexpr int kChannelThreads = kTeamThreads;  // threads that share a channel

__device__ __forceinline__ float to_float(__nv_bfloat16 v) { return __bfloat162float(v); }

// 1 inside the bounds and on them, as PyTorch's clamp.
__device__ __forceinline__ float clamp_grad(float v, float lo, float hi) {
  return v >= lo && v <= hi ? 1.0f : 0.0f;
}

// The operators after the norm, up to the pooling.
__device__ __forceinline__ float after_norm(float v, float scale_c) {
  v = v * scale_c;
  return v;
}

// Backward through the operators after the norm: the gradient of v, from the result's gradient g.
__device__ __forceinline__ float after_norm_grad(float v, float g, float scale_c, float& scale_g) {
  scale_g = g * v;
  g = g * scale_c;
  return g;
}

// Backward through the operators after max_pool2d: the gradient of v, from the result's gradient g.
__device__ __forceinline__ float after_pool_grad(float v, float g) {
  g = g * clamp_grad(v, kClampMin, kClampMax);
  return g;
}

// Gradient of the value at `place` in a channel: the sum over the windows in which it is the largest.
__device__ __forceinline__ float collect(const int* winners, const float* windows, int place) {
  const int h = place / kWidth, w = place % kWidth;
  float sum = 0.0f;
  const int top = h < kPoolKernelHeight ? 0 : (h - kPoolKernelHeight) / kPoolStrideHeight + 1;
  const int left = w < kPoolKernelWidth ? 0 : (w - kPoolKernelWidth) / kPoolStrideWidth + 1;
  for (int row = top; row < kPooledHeight && row * kPoolStrideHeight <= h; ++row) {
    for (int column = left; column < kPooledWidth && column * kPoolStrideWidth <= w; ++column) {
      const int window = row * kPooledWidth + column;
      if (winners[window] == place) sum += windows[window];
    }
  }
  return sum;
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
    const __nv_bfloat16* __restrict__ t0,
    const __nv_bfloat16* __restrict__ group_norm_weight_data,
    const __nv_bfloat16* __restrict__ group_norm_bias_data,
    const __nv_bfloat16* __restrict__ scale_data,
    const __nv_bfloat16* __restrict__ grad_y,
    __nv_bfloat16* __restrict__ grad_t0,
    float* sums,
    int* winners,
    float* windows) {
  __shared__ float partial[kWarps * 3];
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

    // Statistics in two passes. The first sums differences from one value of the group, so that a constant group's mean
    // is exact. The second sums differences from that mean; their mean is the first pass's rounding error.
    const float shift = to_float(source[0]);
    float moment[1] = {0.0f};
    for (int i = thread; i < kGroupSize; i += kTeamThreads) {
      moment[0] += __fsub_rn(to_float(source[i]), shift);
    }
    block_sum(moment, partial);
    const float mean = fmaf(moment[0], 1.0f / kGroupSize, shift);
    float moments[2] = {0.0f, 0.0f};  // sums of differences and of their squares
    for (int i = thread; i < kGroupSize; i += kTeamThreads) {
      const float difference = __fsub_rn(to_float(source[i]), mean);
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
      const float scale_c = to_float(scale_data[first + c]);
      const float gamma = to_float(group_norm_weight_data[first + c]);
      const float beta = to_float(group_norm_bias_data[first + c]);
      const __nv_bfloat16* const channel = source + c * kSpatial;
      int* const channel_winners = winners + (int64_t{item} * kGroupChannels + c) * kPooledSize;
      float* const channel_windows = windows + (int64_t{item} * kGroupChannels + c) * kPooledSize;
      float numbers[3] = {};  // the channel's share of the totals, then of scale

      // max_pool2d: the first largest value of a window gets its gradient; of several NaN the last one, as in PyTorch.
      const __nv_bfloat16* const incoming = grad_y + (int64_t{sample} * kNumGroups + group) * kOutputSize + c * kPooledSize;
      for (int i = lane; i < kPooledSize; i += kChannelThreads) {
        const int top_row = i / kPooledWidth * kPoolStrideHeight;
        const int left = i % kPooledWidth * kPoolStrideWidth;
        float top = 0.0f;
        int winner = -1;
        for (int y = 0; y < kPoolKernelHeight; ++y) {
          const int h = top_row + y;
          for (int x = 0; x < kPoolKernelWidth; ++x) {
            const int w = left + x;
            const float value = to_float(channel[h * kWidth + w]);
            const float normal = (__fsub_rn(value, mean) - mean_rest) * rstd;
            const float v = after_norm(fmaf(normal, gamma, beta), scale_c);
            if (winner < 0 || v > top || v != v) {
              top = v;
              winner = h * kWidth + w;
            }
          }
        }
        channel_winners[i] = winner;
        channel_windows[i] = after_pool_grad(top, to_float(incoming[i]));
      }
      __syncthreads();

      for (int i = lane; i < kSpatial; i += kChannelThreads) {
        const float normal = (__fsub_rn(to_float(channel[i]), mean) - mean_rest) * rstd;
        const float v = fmaf(normal, gamma, beta);
        float scale_g;
        const float g = after_norm_grad(v, collect(channel_winners, channel_windows, i), scale_c, scale_g);
        numbers[2] += scale_g;
        numbers[0] += g;
        numbers[1] = fmaf(g, normal, numbers[1]);
      }
      block_sum(numbers, partial);
      if (lane == 0) {
        add(slab_sums + 2 * kChannels + c, numbers[2], fresh);
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
      const float scale_c = to_float(scale_data[first + c]);
      const float gamma = to_float(group_norm_weight_data[first + c]);
      const float beta = to_float(group_norm_bias_data[first + c]);
      const __nv_bfloat16* const channel = source + c * kSpatial;
      const int* const channel_winners = winners + (int64_t{item} * kGroupChannels + c) * kPooledSize;
      const float* const channel_windows = windows + (int64_t{item} * kGroupChannels + c) * kPooledSize;
      for (int i = lane; i < kSpatial; i += kChannelThreads) {
        const float normal = (__fsub_rn(to_float(channel[i]), mean) - mean_rest) * rstd;
        const float v = fmaf(normal, gamma, beta);
        float scale_g;
        const float g = after_norm_grad(v, collect(channel_winners, channel_windows, i), scale_c, scale_g);
        const float scaled = g * gamma;
        const float result = rstd * (scaled - mean_scaled - normal * mean_product);
        grad_t0[base + c * kSpatial + i] = __float2bfloat16_rn(result);
      }
    }
  }
}

// Gradient of a parameter with one value a channel: the slabs' sums, added in a fixed order.
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

// Computes the gradients of t0, the conv2d's result, and of the parameters behind it, from the gradient of y.
extern "C" int backward_sm80_launch(
    const __nv_bfloat16* t0,
    const __nv_bfloat16* group_norm_weight_data,
    const __nv_bfloat16* group_norm_bias_data,
    const __nv_bfloat16* scale_data,
    const __nv_bfloat16* grad_y,
    __nv_bfloat16* grad_t0,
    __nv_bfloat16* group_norm_weight_grad,
    __nv_bfloat16* group_norm_bias_grad,
    __nv_bfloat16* scale_grad,
    float* sums,
    int* winners,
    float* windows,
    int device,
    cudaStream_t stream) {
  using namespace backward_sm80;
  const DeviceScope scope(device);
  if (scope.error != cudaSuccess) return scope.error;
  cudaLaunchConfig_t config = {};
  config.gridDim = 1024;
  config.blockDim = kThreads;
  config.stream = stream;
  cudaError_t error = cudaLaunchKernelEx(&config, back, t0, group_norm_weight_data, group_norm_bias_data, scale_data, grad_y, grad_t0, sums, winners, windows);
  config.gridDim = (kChannels + kSumChannels - 1) / kSumChannels;
  config.blockDim = dim3(kSumChannels, kSumLanes);
  if (error == cudaSuccess) error = cudaLaunchKernelEx(&config, add_up, sums, group_norm_weight_grad);
  if (error == cudaSuccess) error = cudaLaunchKernelEx(&config, add_up, sums + 1 * kChannels, group_norm_bias_grad);
  if (error == cudaSuccess) error = cudaLaunchKernelEx(&config, add_up, sums + 2 * kChannels, scale_grad);
  return error;
}
