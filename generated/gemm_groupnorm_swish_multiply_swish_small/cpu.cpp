// gemm_groupnorm_swish_multiply_swish_small: everything after torch's linear, one group of one sample at a time
//
//   linear(in_features=512, out_features=1024, bias=True)  # gemm
//   group_norm(num_groups=16, eps=1e-05, affine=True)  # group_norm
//   silu()
//   mul(shape=(1024,), init=randn)  # multiply_weight
//   silu()
//   x (128, 512) -> y (128, 1024), fp32
//
// Plan for cpu on host:
//   a thread takes whole groups: 2048 of 64 values (0.25 KB as float)
//
// Generated from specs/gemm_groupnorm_swish_multiply_swish_small.yaml; do not edit. Again: make generate SPEC=specs/gemm_groupnorm_swish_multiply_swish_small.yaml

#include <cmath>
#include <cstdint>
#include <cstring>

namespace chain_cpu {
namespace {

constexpr int kBatch = 128;  // batch
constexpr int kNumGroups = 16;  // group_norm's num_groups
constexpr int kGroupChannels = 64;  // channels / kNumGroups
constexpr int kGroupSize = 64;  // kGroupChannels
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

// v * sigmoid(v), error at most 5 units; results below 2^-119 may be 0.
inline float silu(float v) {
  return divide(v, 1.0f + exponential(-v));
}

// What follows the norm.
inline float after_norm(float v, float multiply_weight_c) {
  v = silu(v);
  v = v * multiply_weight_c;
  v = silu(v);
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

// One group of one sample: statistics, normalise, silu, mul, silu, store.
inline void run_group(const float* t0, const float* group_norm_weight_data, const float* group_norm_bias_data,
    const float* multiply_weight_data, float* y, int index) {
  const int first = index % kNumGroups * kGroupChannels;  // the group's first channel

  const float* const value = t0 + std::int64_t{index} * kGroupSize;

  const Moments group = moments(value, kGroupSize);
  const float mean = static_cast<float>(group.mean);
  const float mean_rest = static_cast<float>(group.mean - mean);  // what rounding took: it matters where the mean is large against the spread
  const float rstd = static_cast<float>(1.0 / std::sqrt(group.m2 / kGroupSize + kEps));

  float* const target = y + std::int64_t{index} * kGroupSize;
#pragma omp simd
  for (int i = 0; i < kGroupSize; ++i) {
    const float v = (value[i] - mean - mean_rest) * (group_norm_weight_data[first + i] * rstd) + group_norm_bias_data[first + i];
    target[i] = after_norm(v, multiply_weight_data[first + i]);
  }
}

}  // namespace
}  // namespace chain_cpu

// The chain behind torch's linear, on `threads` threads. Returns 0, or -1 for a wrong number of threads.
extern "C" int chain_cpu_launch(const float* t0, const float* group_norm_weight_data, const float* group_norm_bias_data,
    const float* multiply_weight_data, float* y, int threads, void*) {
  using namespace chain_cpu;
  if (threads < 1) return -1;
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int index = 0; index < kBatch * kNumGroups; ++index) {
    run_group(t0, group_norm_weight_data, group_norm_bias_data, multiply_weight_data, y, index);
  }
  return 0;
}
