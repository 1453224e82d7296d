// conv2d_groupnorm_scale_maxpool_clamp_small: everything after torch's conv2d, one group of one sample at a time
//
//   conv2d(in_channels=3, out_channels=16, kernel_size=(3, 3), stride=(1, 1), padding=(0, 0), dilation=(1, 1),
//     groups=1, bias=True)  # conv
//   group_norm(num_groups=8, eps=1e-05, affine=True)  # group_norm
//   mul(shape=(16, 1, 1), init=ones)  # scale
//   max_pool2d(kernel_size=(2, 2), stride=(2, 2), padding=(0, 0), dilation=(1, 1), ceil_mode=False)  # maxpool
//   clamp(min=0.0, max=1.0)
//   x (128, 3, 32, 32) -> y (128, 16, 15, 15), fp32
//
// Plan for cpu on host:
//   a thread takes whole groups: 1024 of 1800 values (7.031 KB as float)
//   rows are short: a channel is normalised once into scratch, then pooled
//   3.633 KB of scratch a thread, on its stack
//
// Generated from specs/conv2d_groupnorm_scale_maxpool_clamp_small.yaml; do not edit.
// Again: make generate SPEC=specs/conv2d_groupnorm_scale_maxpool_clamp_small.yaml

#include <cmath>
#include <cstdint>
#include <cstring>

namespace chain_cpu {
namespace {

constexpr int kBatch = 128;  // batch
constexpr int kNumGroups = 8;  // group_norm's num_groups
constexpr int kGroupChannels = 2;  // channels / kNumGroups
constexpr int kWidth = 30;  // columns behind the convolution
constexpr int kSpatial = 900;  // height * kWidth
constexpr int kGroupSize = 1800;  // kGroupChannels * kSpatial
constexpr double kEps = 1e-05;  // group_norm's eps
constexpr int kPoolKernelHeight = 2;  // max_pool2d's kernel_size
constexpr int kPoolKernelWidth = 2;  // max_pool2d's kernel_size
constexpr int kPoolStrideHeight = 2;  // max_pool2d's stride
constexpr int kPoolStrideWidth = 2;  // max_pool2d's stride
constexpr int kPooledHeight = 15;  // (30 - 2) / 2 + 1
constexpr int kPooledWidth = 15;  // (30 - 2) / 2 + 1
constexpr int kRow = 30;  // columns that windows slide over: kWidth and the margin
constexpr int kOutputSize = 450;  // values of y from a group
constexpr float kClampMin = 0.0f;  // clamp's min
constexpr float kClampMax = 1.0f;  // clamp's max

// min(max(v, lo), hi); both comparisons are false for NaN, so NaN goes through.
inline float clamp(float v, float lo, float hi) {
  return v < lo ? lo : (v > hi ? hi : v);
}

// The operators after the norm, up to the pooling.
inline float after_norm(float v, float scale_c) {
  v = v * scale_c;
  return v;
}

// The operators after max_pool2d.
inline float after_pool(float v) {
  v = clamp(v, kClampMin, kClampMax);
  return v;
}

// A float as an integer of the same order, NaN above all else: the maximum of the integers is PyTorch's maximum of the
// floats. An integer maximum is one instruction; a float comparison that respects NaN is not.
inline std::int32_t ordered(float v) {
  std::int32_t bits;
  std::memcpy(&bits, &v, sizeof bits);
  bits ^= (bits >> 31) & 0x7FFFFFFF;
  return v == v ? bits : 0x7FC00000;
}

inline float from_ordered(std::int32_t bits) {
  bits ^= (bits >> 31) & 0x7FFFFFFF;
  float v;
  std::memcpy(&v, &bits, sizeof v);
  return v;
}

inline std::int32_t maximum(std::int32_t a, std::int32_t b) {
  return a > b ? a : b;
}

struct DoubleMoments {
  double mean;
  double m2;  // sum of squared deviations from the mean
};

// Moments in two passes: the mean of values shifted by one of them, then the deviations. Equal values give exactly
// their value and 0.
inline DoubleMoments moments(const float* value, int count) {
  const double shift = value[0];
  double sum = 0.0;
#pragma omp simd reduction(+ : sum)
  for (int i = 0; i < count; ++i) {
    sum += value[i] - shift;
  }
  const double mean = shift + sum / count;
  double m2 = 0.0;
#pragma omp simd reduction(+ : m2)
  for (int i = 0; i < count; ++i) {
    const double deviation = value[i] - mean;
    m2 += deviation * deviation;
  }
  return {mean, m2};
}

// One group of one sample: statistics, normalise, mul, max_pool2d, clamp, store.
inline void run_group(const float* t0, const float* group_norm_weight_data, const float* group_norm_bias_data,
    const float* scale_data, float* y, int index) {
  alignas(64) std::int32_t plane[kSpatial];  // one channel behind the norm, ordered
  alignas(64) std::int32_t row_max[kRow];  // maxima over a window's rows, one for each column
  const int first = index % kNumGroups * kGroupChannels;  // the group's first channel

  const float* const value = t0 + std::int64_t{index} * kGroupSize;

  const DoubleMoments group = moments(value, kGroupSize);
  const float mean = static_cast<float>(group.mean);
  const float mean_rest = static_cast<float>(group.mean - mean);  // rounding error of a large mean
  const float rstd = static_cast<float>(1.0 / std::sqrt(group.m2 / kGroupSize + kEps));

  float* target = y + std::int64_t{index} * kOutputSize;
  for (int c = 0; c < kGroupChannels; ++c) {
    const float scale = group_norm_weight_data[first + c] * rstd;
    const float shift = group_norm_bias_data[first + c];
    const float scale_c = scale_data[first + c];

    const float* const channel = value + c * kSpatial;
#pragma omp simd
    for (int i = 0; i < kSpatial; ++i) {
      const float v = (channel[i] - mean - mean_rest) * scale + shift;
      plane[i] = ordered(after_norm(v, scale_c));
    }
    // max_pool2d: the maximum over a window's rows in every column, then over its columns
    for (int row = 0; row < kPooledHeight; ++row) {
      for (int w = 0; w < kRow; ++w) {
        row_max[w] = ordered(-INFINITY);
      }
      for (int i = 0; i < kPoolKernelHeight; ++i) {
        const std::int32_t* const line = plane + (row * kPoolStrideHeight + i) * kWidth;
#pragma omp simd
        for (int w = 0; w < kWidth; ++w) {
          row_max[w] = maximum(row_max[w], line[w]);
        }
      }
      for (int w = 0; w < kPooledWidth; ++w) {
        std::int32_t top = row_max[w * kPoolStrideWidth];
        for (int j = 1; j < kPoolKernelWidth; ++j) {
          top = maximum(top, row_max[w * kPoolStrideWidth + j]);
        }
        target[row * kPooledWidth + w] = after_pool(from_ordered(top));
      }
    }
    target += kPooledHeight * kPooledWidth;
  }
}

}  // namespace
}  // namespace chain_cpu

// The chain behind torch's conv2d, on `threads` threads. Returns 0, or -1 for a wrong number of threads.
extern "C" int chain_cpu_launch(const float* t0, const float* group_norm_weight_data, const float* group_norm_bias_data,
    const float* scale_data, float* y, int threads, void*) {
  using namespace chain_cpu;
  if (threads < 1) return -1;
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int index = 0; index < kBatch * kNumGroups; ++index) {
    run_group(t0, group_norm_weight_data, group_norm_bias_data, scale_data, y, index);
  }
  return 0;
}
