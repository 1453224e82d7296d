// conv2d_groupnorm_scale_maxpool_clamp: everything after torch's conv2d, one group of one sample at a time
//
//   conv2d(in_channels=8, out_channels=64, kernel_size=(3, 3), stride=(1, 1), padding=(0, 0), dilation=(1, 1),
//     groups=1, bias=True)  # conv
//   group_norm(num_groups=16, eps=1e-05, affine=True)  # group_norm
//   mul(shape=(64, 1, 1), init=ones)  # scale
//   max_pool2d(kernel_size=(4, 4), stride=(4, 4), padding=(0, 0), dilation=(1, 1), ceil_mode=False)  # maxpool
//   clamp(min=0.0, max=1.0)
//   x (128, 8, 128, 128) -> y (128, 64, 31, 31), fp32
//
// Plan for cpu on host:
//   a thread takes whole groups: 2048 of 63504 values (248.1 KB as float)
//   windows share no row: values are normalised as they are pooled and the normalised tensor is never written
//   0.4922 KB of scratch a thread, on its stack
//
// Generated from specs/conv2d_groupnorm_scale_maxpool_clamp.yaml; do not edit.
// Again: make generate SPEC=specs/conv2d_groupnorm_scale_maxpool_clamp.yaml

#include <cmath>
#include <cstdint>
#include <cstring>

namespace chain_cpu {
namespace {

constexpr int kBatch = 128;  // batch
constexpr int kNumGroups = 16;  // group_norm's num_groups
constexpr int kGroupChannels = 4;  // channels / kNumGroups
constexpr int kWidth = 126;  // columns behind the convolution
constexpr int kSpatial = 15876;  // height * kWidth
constexpr int kGroupSize = 63504;  // kGroupChannels * kSpatial
constexpr int kPiece = 4096;  // values of a piece for statistics: 16 KB, in the first-level cache
constexpr double kEps = 1e-05;  // group_norm's eps
constexpr int kPoolKernelHeight = 4;  // max_pool2d's kernel_size
constexpr int kPoolKernelWidth = 4;  // max_pool2d's kernel_size
constexpr int kPoolStrideHeight = 4;  // max_pool2d's stride
constexpr int kPoolStrideWidth = 4;  // max_pool2d's stride
constexpr int kPooledHeight = 31;  // (126 - 4) / 4 + 1
constexpr int kPooledWidth = 31;  // (126 - 4) / 4 + 1
constexpr int kRow = 126;  // columns that windows slide over: kWidth and the margin
constexpr int kOutputSize = 3844;  // values of y from a group
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

// Moments of the union of two sets (Chan, Golub and LeVeque, 1983).
inline DoubleMoments merge(DoubleMoments a, int count_a, DoubleMoments b, int count_b) {
  const double share_b = static_cast<double>(count_b) / (count_a + count_b);
  const double delta = b.mean - a.mean;
  return {a.mean + delta * share_b, a.m2 + b.m2 + delta * delta * share_b * count_a};
}

// One group of one sample: statistics, normalise, mul, max_pool2d, clamp, store.
inline void run_group(const float* t0, const float* group_norm_weight_data, const float* group_norm_bias_data,
    const float* scale_data, float* y, int index) {
  alignas(64) std::int32_t row_max[kRow];  // maxima over a window's rows, one for each column
  const int first = index % kNumGroups * kGroupChannels;  // the group's first channel

  const float* const value = t0 + std::int64_t{index} * kGroupSize;

  DoubleMoments group = moments(value, kPiece);
  for (int begin = kPiece; begin < kGroupSize; begin += kPiece) {
    const int count = kGroupSize - begin < kPiece ? kGroupSize - begin : kPiece;
    group = merge(group, begin, moments(value + begin, count), count);
  }
  const float mean = static_cast<float>(group.mean);
  const float mean_rest = static_cast<float>(group.mean - mean);  // rounding error of a large mean
  const float rstd = static_cast<float>(1.0 / std::sqrt(group.m2 / kGroupSize + kEps));

  float* target = y + std::int64_t{index} * kOutputSize;
  for (int c = 0; c < kGroupChannels; ++c) {
    const float scale = group_norm_weight_data[first + c] * rstd;
    const float shift = group_norm_bias_data[first + c];
    const float scale_c = scale_data[first + c];

    const float* const channel = value + c * kSpatial;
    // max_pool2d: the maximum over a window's rows in every column, then over its columns
    for (int row = 0; row < kPooledHeight; ++row) {
      for (int w = 0; w < kRow; ++w) {
        row_max[w] = ordered(-INFINITY);
      }
      for (int i = 0; i < kPoolKernelHeight; ++i) {
        const float* const line = channel + (row * kPoolStrideHeight + i) * kWidth;
#pragma omp simd
        for (int w = 0; w < kWidth; ++w) {
          const float v = (line[w] - mean - mean_rest) * scale + shift;
          row_max[w] = maximum(row_max[w], ordered(after_norm(v, scale_c)));
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
