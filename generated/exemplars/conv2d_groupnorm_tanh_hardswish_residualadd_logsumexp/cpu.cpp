// conv2d_groupnorm_tanh_hardswish_residualadd_logsumexp: everything after torch's conv2d, one group of one sample at a
//   time
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
// Plan for cpu on host:
//   a thread takes whole groups: 2048 of 63504 values (248.1 KB as float)
//
// Generated from specs/conv2d_groupnorm_tanh_hardswish_residualadd_logsumexp.yaml; do not edit.
// Again: make generate SPEC=specs/conv2d_groupnorm_tanh_hardswish_residualadd_logsumexp.yaml

#include <cmath>
#include <cstdint>
#include <cstring>

namespace chain_cpu {
namespace {

constexpr int kBatch = 128;  // batch
constexpr int kNumGroups = 16;  // group_norm's num_groups
constexpr int kGroupChannels = 4;  // channels / kNumGroups
constexpr int kSpatial = 15876;  // 126 * 126, behind the convolution
constexpr int kGroupSize = 63504;  // kGroupChannels * kSpatial
constexpr int kPiece = 4096;  // values of a piece for statistics: 16 KB, in the first-level cache
constexpr double kEps = 1e-05;  // group_norm's eps

// e^v - 1 for v <= 0, error at most 4 units.
inline float exponential_minus_1(float v) {
  const float shifted = v * 1.44269504f + 12582912.0f;
  const float n = shifted - 12582912.0f;
  const float r = (v - n * 0.693359375f) + n * 2.12194440e-4f;  // |r| <= ln 2 / 2
  float q = 1.38206338e-3f;
  q = q * r + 8.36867373e-3f;
  q = q * r + 4.16682661e-2f;
  q = q * r + 1.66665211e-1f;
  q = q * r + 4.99999940e-1f;
  const float rest = q * (r * r) + r;  // e^r - 1
  unsigned exponent;
  memcpy(&exponent, &shifted, sizeof exponent);
  exponent = (exponent << 23) + 0x3F800000u;
  float power;  // 2^n
  memcpy(&power, &exponent, sizeof power);
  return v < -87.0f ? -1.0f : power * rest + (power - 1.0f);
}

// tanh(v), error at most 6 units.
inline float hyperbolic_tangent(float v) {
  const float m = exponential_minus_1(v < 0.0f ? 2.0f * v : -2.0f * v);
  const float t = m / (m + 2.0f);  // -tanh(|v|)
  return v > 0.0f ? -t : t;
}

// min(max(v, lo), hi); both comparisons are false for NaN, so NaN goes through.
inline float clamp(float v, float lo, float hi) {
  return v < lo ? lo : (v > hi ? hi : v);
}

// v relu6(v + 3) / 6.
inline float hardswish(float v) {
  return v * (clamp(v + 3.0f, 0.0f, 6.0f) * 0.166666667f);
}

// The operators after the norm.
inline float after_norm(float v, float conv_kept) {
  v = hyperbolic_tangent(v);
  v = hardswish(v);
  v = v + conv_kept;
  return v;
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

// One group of one sample: statistics, normalise, tanh, hardswish, add, store.
inline void run_group(const float* t0, const float* group_norm_weight_data, const float* group_norm_bias_data, float* y, int index) {
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

  float* const target = y + std::int64_t{index} * kGroupSize;
  for (int c = 0; c < kGroupChannels; ++c) {
    const float scale = group_norm_weight_data[first + c] * rstd;
    const float shift = group_norm_bias_data[first + c];

#pragma omp simd
    for (int i = c * kSpatial; i < (c + 1) * kSpatial; ++i) {
      const float v = (value[i] - mean - mean_rest) * scale + shift;
      target[i] = after_norm(v, value[i]);
    }
  }
}

}  // namespace
}  // namespace chain_cpu

// The chain behind torch's conv2d, on `threads` threads. Returns 0, or -1 for a wrong number of threads.
extern "C" int chain_cpu_launch(const float* t0, const float* group_norm_weight_data, const float* group_norm_bias_data, float* y, int threads, void*) {
  using namespace chain_cpu;
  if (threads < 1) return -1;
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int index = 0; index < kBatch * kNumGroups; ++index) {
    run_group(t0, group_norm_weight_data, group_norm_bias_data, y, index);
  }
  return 0;
}
