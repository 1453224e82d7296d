// conv2d_add_scale_sigmoid_groupnorm_small: everything after torch's conv2d, one group of one sample at a time
//
//   conv2d(in_channels=3, out_channels=16, kernel_size=(3, 3), stride=(1, 1), padding=(0, 0), dilation=(1, 1), groups=1, bias=True)  # conv
//   add(shape=(16, 1, 1), init=randn)  # bias
//   mul(shape=(16, 1, 1), init=randn)  # scale
//   sigmoid()
//   group_norm(num_groups=8, eps=1e-05, affine=True)  # group_norm
//   x (128, 3, 32, 32) -> y (128, 16, 30, 30), fp32
//
// Plan for cpu on host:
//   a thread takes whole groups: 1024 of 1800 values (7.031 KB as float)
//   the group's values stay in a float scratch array, so that what comes before the norm is computed once
//   7.031 KB of scratch a thread, on its stack
//
// Generated from specs/conv2d_add_scale_sigmoid_groupnorm_small.yaml; do not edit. Again: make generate SPEC=specs/conv2d_add_scale_sigmoid_groupnorm_small.yaml

#include <cmath>
#include <cstdint>
#include <cstring>

namespace chain_cpu {
namespace {

constexpr int kBatch = 128;  // batch
constexpr int kNumGroups = 8;  // group_norm's num_groups
constexpr int kGroupChannels = 2;  // channels / kNumGroups
constexpr int kSpatial = 900;  // 30 * 30, behind the convolution
constexpr int kGroupSize = 1800;  // kGroupChannels * kSpatial
constexpr double kEps = 1e-05;  // group_norm's eps

// a / b for b >= 1, error at most 3 units; 0 for b > 2^126 on a GPU, whose fast division this is.
inline float divide(float a, float b) {
  return a / b;
}

// e^v, error at most 3 units; results below 2^-126 may be 0.
inline float exponential(float v) {
  const float shifted = v * 1.44269504f + 12582912.0f;
  const float n = shifted - 12582912.0f;
  const float r = (v - n * 0.693359375f) + n * 2.12194440e-4f;  // |r| <= ln 2 / 2
  float q = 1.38206338e-3f;
  q = q * r + 8.36867373e-3f;
  q = q * r + 4.16682661e-2f;
  q = q * r + 1.66665211e-1f;
  q = q * r + 4.99999940e-1f;
  const float mantissa = q * (r * r) + r + 1.0f;
  unsigned bits, exponent;
  memcpy(&bits, &mantissa, sizeof bits);
  memcpy(&exponent, &shifted, sizeof exponent);
  bits += exponent << 23;  // times 2^n
  float power;
  memcpy(&power, &bits, sizeof power);
  return v < -87.33654f ? 0.0f : (v <= 88.72283f ? power : v + INFINITY);  // v + INFINITY keeps NaN
}

// 1 / (1 + e^-v), error at most 5 units; results below 2^-126 may be 0.
inline float sigmoid(float v) {
  return divide(1.0f, 1.0f + exponential(-v));
}

// What comes before the norm.
inline float before_norm(float v, float bias_c, float scale_c) {
  v = v + bias_c;
  v = v * scale_c;
  v = sigmoid(v);
  return v;
}

struct Moments {
  double mean;
  double m2;  // sum of the squared deviations from the mean
};

// Two passes: the mean of values shifted by one of them, then the deviations from it. Equal values give exactly themselves and 0.
inline Moments moments(const float* value, int count) {
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

// One group of one sample: add, mul, sigmoid, statistics, normalise, store.
inline void run_group(const float* t0, const float* bias_data, const float* scale_data,
    const float* group_norm_weight_data, const float* group_norm_bias_data, float* y, int index) {
  alignas(64) float value[kGroupSize];  // the group's values before the norm
  const int first = index % kNumGroups * kGroupChannels;  // the group's first channel

  const float* const source = t0 + std::int64_t{index} * kGroupSize;
  for (int c = 0; c < kGroupChannels; ++c) {
    const float bias_c = bias_data[first + c];
    const float scale_c = scale_data[first + c];

#pragma omp simd
    for (int i = c * kSpatial; i < (c + 1) * kSpatial; ++i) {
      value[i] = before_norm(source[i], bias_c, scale_c);
    }
  }

  const Moments group = moments(value, kGroupSize);
  const float mean = static_cast<float>(group.mean);
  const float mean_rest = static_cast<float>(group.mean - mean);  // what rounding took: it matters where the mean is large against the spread
  const float rstd = static_cast<float>(1.0 / std::sqrt(group.m2 / kGroupSize + kEps));

  float* const target = y + std::int64_t{index} * kGroupSize;
  for (int c = 0; c < kGroupChannels; ++c) {
    const float scale = group_norm_weight_data[first + c] * rstd;
    const float shift = group_norm_bias_data[first + c];

#pragma omp simd
    for (int i = c * kSpatial; i < (c + 1) * kSpatial; ++i) {
      const float v = (value[i] - mean - mean_rest) * scale + shift;
      target[i] = v;
    }
  }
}

}  // namespace
}  // namespace chain_cpu

// The chain behind torch's conv2d, on `threads` threads. Returns 0, or -1 for a wrong number of threads.
extern "C" int chain_cpu_launch(const float* t0, const float* bias_data, const float* scale_data,
    const float* group_norm_weight_data, const float* group_norm_bias_data, float* y, int threads, void*) {
  using namespace chain_cpu;
  if (threads < 1) return -1;
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int index = 0; index < kBatch * kNumGroups; ++index) {
    run_group(t0, bias_data, scale_data, group_norm_weight_data, group_norm_bias_data, y, index);
  }
  return 0;
}
