// conv2d_groupnorm_scale_maxpool_clamp_small: GroupNorm, max pool and what follows in one read; a block takes a group of 1800 values
//
//   conv2d(in_channels=3, out_channels=16, kernel_size=(3, 3), stride=(1, 1), padding=(0, 0), dilation=(1, 1), groups=1, bias=True)  # conv
//   group_norm(num_groups=8, eps=1e-05, affine=True)  # group_norm
//   mul(shape=(16, 1, 1), init=ones)  # scale
//   max_pool2d(kernel_size=(2, 2), stride=(2, 2), padding=(0, 0), dilation=(1, 1), ceil_mode=False)  # maxpool
//   clamp(min=0.0, max=1.0)
//   x (128, 3, 32, 32) -> y (128, 16, 15, 15), fp32
//
// Plan for sm_80 on a100:
//   1024 blocks of 256 threads, 1928 bytes of shared memory
//
// Generated from specs/conv2d_groupnorm_scale_maxpool_clamp_small.yaml; do not edit. Again: make generate SPEC=specs/conv2d_groupnorm_scale_maxpool_clamp_small.yaml

#include <cuda_runtime.h>
#include <cstdint>

namespace group_norm_pool_sm80 {
namespace {

constexpr int kNumGroups = 8;  // groups of a sample
constexpr int kGroupChannels = 2;  // 16 channels / kNumGroups
constexpr int kPlane = 900;  // 30 x 30 positions of a channel
constexpr int kGroupSize = 1800;  // 2 channels x 30 x 30: one contiguous span
constexpr int kRow = 30;  // values of a row
constexpr int kPooledRow = 15;  // values of a pooled row
constexpr int kPooledPlane = 225;  // 15 x 15 results of a channel
constexpr int kPooledSize = kGroupChannels * kPooledPlane;  // results of a group
constexpr int kWindowHeight = 2;  // max_pool2d's kernel_size
constexpr int kStrideHeight = 2;  // max_pool2d's stride
constexpr int kWindowWidth = 2;  // max_pool2d's kernel_size
constexpr int kStrideWidth = 2;  // max_pool2d's stride
constexpr int kBandRows = 5;  // pooled rows of a band, which a warp takes
constexpr int kBands = 3;  // bands of a plane; the last may be short
constexpr int kWidth = 4;  // values of one access for the statistics: 16 bytes
constexpr int kBandVectors = 75;  // kBandRows x kStrideHeight x kRow / kWidth
constexpr int kPlaneVectors = 225;  // kPlane / kWidth
constexpr int kVectors = 3;  // accesses that a lane has in flight
constexpr int kWindowAccess = 2;  // values of one access to a window: 8 bytes
constexpr int kPooledWidth = 2;  // results that a thread stores at once
constexpr int kThreads = 256;  // threads of a block, which takes a group
constexpr int kWarps = 8;  // kThreads / 32
constexpr int kBlocks = 1024;  // 128 samples x kNumGroups
constexpr int kMinBlocks = 4;  // blocks that fit on an SM
constexpr float kEps = 1.0e-5f;  // group_norm's eps, added to the variance
constexpr float kClampMin = 0.0f;  // clamp's min
constexpr float kClampMax = 1.0f;  // clamp's max

__device__ __forceinline__ void load(const float* from, float (&v)[2]) {
  const float2 t = *reinterpret_cast<const float2*>(from);
  v[0] = t.x;
  v[1] = t.y;
}

__device__ __forceinline__ void load(const float* from, float (&v)[4]) {
  const float4 t = *reinterpret_cast<const float4*>(from);
  v[0] = t.x;
  v[1] = t.y;
  v[2] = t.z;
  v[3] = t.w;
}

__device__ __forceinline__ void store(float* to, const float (&v)[2]) {
  *reinterpret_cast<float2*>(to) = make_float2(v[0], v[1]);
}

// min(max(v, lo), hi); both comparisons are false for NaN, so NaN goes through.
__device__ __forceinline__ float clamp(float v, float lo, float hi) {
  return v < lo ? lo : (v > hi ? hi : v);
}

// From the producer's value to the norm's input.
__device__ __forceinline__ float prepare_value(float v, float c_conv_bias) {
  v = v + c_conv_bias;  // conv2d's bias
  return v;
}

// The norm and what follows it, for the value that the pool keeps.
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
  v = v * c_scale;  // mul(shape=(16, 1, 1), init=ones)
  v = clamp(v, kClampMin, kClampMax);  // clamp(min=0.0, max=1.0)
  return v;
}

// finish_value on kPooledWidth consecutive values, the first of which is the group's `index`-th.
__device__ __forceinline__ void finish(
    float (&v)[kPooledWidth],
    int first_channel,
    int index,
    float mean,
    float mean_rest,
    float rstd,
    const float* p_gamma,
    const float* p_beta,
    const float* p_scale) {
#pragma unroll
  for (int e = 0; e < kPooledWidth; ++e) {
    const int channel = first_channel + (index + e) / kPooledPlane;
    v[e] = finish_value(v[e], mean, mean_rest, rstd, p_gamma[channel], p_beta[channel], p_scale[channel]);
  }
}

// Moments of a set of values: their count, their mean as `mean` and the `mean_rest` that rounding left, and the sum of squared differences
// from it.
struct Moments {
  float count;
  float mean;
  float mean_rest;
  float m2;
};

// Moments of the union of two sets (Chan, Golub and LeVeque, 1983). The share's error of two units in the last place scales differences of
// means alone: where `a` is empty, the share is 1 exactly.
__device__ __forceinline__ Moments merge(const Moments& a, const Moments& b) {
  const float count = a.count + b.count;
  const float share = a.count == 0.0f ? 1.0f : __fdividef(b.count, count);
  const float delta = __fsub_rn(b.mean, a.mean);
  const float delta_rest = b.mean_rest - a.mean_rest;
  const float mean = fmaf(delta, share, a.mean);
  const float between = (delta + delta_rest) * (a.count * share) * (delta + delta_rest);
  return {count, mean, a.mean_rest + fmaf(delta_rest, share, fmaf(delta, share, __fsub_rn(a.mean, mean))), a.m2 + b.m2 + between};
}

// Lane 0 receives the moments of the warp's values.
__device__ __forceinline__ Moments warp_merge(Moments own) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    const Moments other = {__shfl_down_sync(0xffffffffu, own.count, offset), __shfl_down_sync(0xffffffffu, own.mean, offset),
                           __shfl_down_sync(0xffffffffu, own.mean_rest, offset), __shfl_down_sync(0xffffffffu, own.m2, offset)};
    own = merge(own, other);
  }
  return own;
}

// Every thread receives the moments of the block's values.
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

// A lane's share of the rows that a band owns, from vector `first` on; `vectors` of the band are there.
__device__ __forceinline__ void load_chunk(float (&v)[kVectors][kWidth], const float* band, int first, int vectors) {
#pragma unroll
  for (int r = 0; r < kVectors; ++r) {
    if (first + r * 32 < vectors) load(band + (first + r * 32) * kWidth, v[r]);
  }
}

// Adds what load_chunk brought to a lane's moments: two passes over the registers, differences from the first value, then from the mean,
// whose own mean corrects it.
__device__ __forceinline__ void add_chunk(Moments& own, float (&v)[kVectors][kWidth], int first, int vectors, float c_conv_bias) {
  if (first >= vectors) return;
#pragma unroll
  for (int r = 0; r < kVectors; ++r) {
    if (first + r * 32 >= vectors) continue;
#pragma unroll
    for (int e = 0; e < kWidth; ++e) v[r][e] = prepare_value(v[r][e], c_conv_bias);
  }
  const float shift = v[0][0];
  float count = 0.0f;
  float sum = 0.0f;
#pragma unroll
  for (int r = 0; r < kVectors; ++r) {
    if (first + r * 32 >= vectors) continue;
    float part = 0.0f;
#pragma unroll
    for (int e = 0; e < kWidth; ++e) part += __fsub_rn(v[r][e], shift);
    sum += part;
    count += kWidth;
  }
  const float inverse = __fdividef(1.0f, count);
  const float mean = fmaf(sum, inverse, shift);
  float left = 0.0f;
  float m2 = 0.0f;
#pragma unroll
  for (int r = 0; r < kVectors; ++r) {
    if (first + r * 32 >= vectors) continue;
    float part = 0.0f;
#pragma unroll
    for (int e = 0; e < kWidth; ++e) {
      const float difference = __fsub_rn(v[r][e], mean);
      left += difference;
      part = fmaf(difference, difference, part);
    }
    m2 += part;
  }
  const float mean_rest = left * inverse;
  own = merge(own, {count, mean, mean_rest, fmaf(-mean_rest, left, m2)});
}

// The extreme of a window before the norm: the largest value where `direction` is 1, the smallest where it is -1.
__device__ __forceinline__ float window_extreme(const float* plane, int row, int column, float direction, float c_conv_bias) {
  const int top = row * kStrideHeight;
  const int left = column * kStrideWidth;
  float best = -INFINITY;
#pragma unroll
  for (int y = 0; y < kWindowHeight; ++y) {
    const int at_row = top + y;
#pragma unroll
    for (int x = 0; x < kWindowWidth; x += kWindowAccess) {
      const int at_column = left + x;
      float v[kWindowAccess];
      load(plane + at_row * kRow + at_column, v);
#pragma unroll
      for (int e = 0; e < kWindowAccess; ++e) best = fmaxf(best, direction * v[e]);
    }
  }
  return prepare_value(direction * best, c_conv_bias);
}

// A block reads a group once. A warp takes a band of rows at a time: it adds the band to the statistics and keeps one value of each pooling
// window, because every operator between the norm and the pool rises or falls with its input; the signs of the channel's factors
// tell whether the largest or the smallest. A NaN in the group makes its statistics NaN, and with them every result.
__global__ void __launch_bounds__(kThreads, kMinBlocks) group_norm_pool(
    const float* __restrict__ input,
    const float* __restrict__ p_conv_bias,
    const float* __restrict__ p_gamma,
    const float* __restrict__ p_beta,
    const float* __restrict__ p_scale,
    float* __restrict__ output) {
  __shared__ float extremes[kPooledSize];
  const int first_channel = static_cast<int>(blockIdx.x) % kNumGroups * kGroupChannels;
  const float* group_values = input + static_cast<int64_t>(blockIdx.x) * kGroupSize;
  const int lane = threadIdx.x % 32;

  // One read: statistics and window extremes.
  Moments own = {0.0f, 0.0f, 0.0f, 0.0f};
  for (int task = threadIdx.x / 32; task < kGroupChannels * kBands; task += kWarps) {
    const int channel = task / kBands;
    const int band = task % kBands;
    const float* plane = group_values + channel * kPlane;
    const float c_conv_bias = p_conv_bias[first_channel + channel];
    const float c_gamma = p_gamma[first_channel + channel];
    const float c_scale = p_scale[first_channel + channel];
    const float direction = copysignf(1.0f, c_gamma) * copysignf(1.0f, c_scale);
    const float* rows = plane + band * kBandVectors * kWidth;
    const int vectors = min(kBandVectors, kPlaneVectors - band * kBandVectors);
    // The band is on its way while the windows are read: both wait for the memory once.
    float v[kVectors][kWidth];
    load_chunk(v, rows, lane, vectors);
    for (int window = lane; window < kBandRows * kPooledRow; window += 32) {
      const int row = band * kBandRows + window / kPooledRow;
      const int column = window % kPooledRow;
      extremes[channel * kPooledPlane + row * kPooledRow + column] = window_extreme(plane, row, column, direction, c_conv_bias);
    }
    add_chunk(own, v, lane, vectors, c_conv_bias);
  }
  const Moments total = block_merge(own);
  const float mean = total.mean;
  const float mean_rest = total.mean_rest;
  const float rstd = rsqrtf(total.m2 * (1.0f / kGroupSize) + kEps);

  // Normalise what the pool keeps, apply the rest, store.
  float* pooled = output + static_cast<int64_t>(blockIdx.x) * kPooledSize;
  for (int index = threadIdx.x * kPooledWidth; index < kPooledSize; index += kThreads * kPooledWidth) {
    float v[kPooledWidth];
#pragma unroll
    for (int e = 0; e < kPooledWidth; ++e) v[e] = extremes[index + e];
    finish(v, first_channel, index, mean, mean_rest, rstd, p_gamma, p_beta, p_scale);
    store(pooled + index, v);
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
}  // namespace group_norm_pool_sm80

extern "C" int group_norm_pool_sm80_launch(
    const float* input,
    const float* p_conv_bias,
    const float* p_gamma,
    const float* p_beta,
    const float* p_scale,
    float* output,
    int device,
    cudaStream_t stream) {
  using namespace group_norm_pool_sm80;
  const DeviceScope scope(device);
  if (scope.error != cudaSuccess) return scope.error;
  cudaLaunchConfig_t config = {};
  config.gridDim = kBlocks;
  config.blockDim = kThreads;
  config.stream = stream;
  return cudaLaunchKernelEx(&config, group_norm_pool, input, p_conv_bias, p_gamma, p_beta, p_scale, output);
}
