// gemm_biasadd_hardtanh_mish_groupnorm: everything after torch's linear, one group of one sample at a time
//
//   linear(in_features=8192, out_features=8192, bias=True)  # gemm
//   add(shape=(8192,), init=randn)  # bias
//   hardtanh(min_val=-1.0, max_val=1.0)  # hardtanh
//   mish()  # mish
//   group_norm(num_groups=256, eps=1e-05, affine=True)  # groupnorm
//   x (1024, 8192) -> y (1024, 8192), fp32
//
// Plan for cpu on host:
//   a thread takes whole groups: 262144 of 32 values (0.125 KB as float)
//   the group's values stay in a float scratch array, so that operators before the norm are computed once
//   0.125 KB of scratch a thread, on its stack
//
// Generated from specs/gemm_biasadd_hardtanh_mish_groupnorm.yaml; do not edit.
// Again: make generate SPEC=specs/gemm_biasadd_hardtanh_mish_groupnorm.yaml

#include <cmath>
#include <cstdint>
#include <cstring>

namespace chain_cpu {
namespace {

constexpr int kBatch = 1024;  // batch
constexpr int kNumGroups = 256;  // group_norm's num_groups
constexpr int kGroupChannels = 32;  // channels / kNumGroups
constexpr int kGroupSize = 32;  // kGroupChannels
constexpr double kEps = 1e-05;  // group_norm's eps
constexpr float kHardtanhMinVal = -1.0f;  // hardtanh's min_val
constexpr float kHardtanhMaxVal = 1.0f;  // hardtanh's max_val

// min(max(v, lo), hi); NaN goes through.
inline float hardtanh(float v, float lo, float hi) {
  return v < lo ? lo : (v > hi ? hi : v);
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

// a / b for b >= 1, error at most 1.1 units; may be 0 for b > 2^126.
inline float divide(float a, float b) {
  return a / b;
}

// v tanh(log(1 + e^v)) with n = e^v (e^v + 2): v n / (n + 2) below 0, where it is small, error at most 8 units; v - 2 v
// / (n + 2) above, error at most 4; v itself from 20 on.
inline float mish(float v) {
  const float c = v > 20.0f ? 20.0f : v;
  const float e = exponential(c);
  const float n = e * (e + 2.0f);
  const float q = divide(v < 0.0f ? n : 2.0f, n + 2.0f);
  return v < 0.0f ? v * q : v - c * q;
}

// The operators before the norm.
inline float before_norm(float v, float bias_c) {
  v = v + bias_c;
  v = hardtanh(v, kHardtanhMinVal, kHardtanhMaxVal);
  v = mish(v);
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

// One group of one sample: add, hardtanh, mish, statistics, normalise, store.
inline void run_group(const float* t0, const float* bias_data, const float* groupnorm_weight_data,
    const float* groupnorm_bias_data, float* y, int index) {
  alignas(64) float value[kGroupSize];  // the group's values before the norm
  const int first = index % kNumGroups * kGroupChannels;  // the group's first channel

  const float* const source = t0 + std::int64_t{index} * kGroupSize;
#pragma omp simd
  for (int i = 0; i < kGroupSize; ++i) {
    value[i] = before_norm(source[i], bias_data[first + i]);
  }

  const DoubleMoments group = moments(value, kGroupSize);
  const float mean = static_cast<float>(group.mean);
  const float mean_rest = static_cast<float>(group.mean - mean);  // rounding error of a large mean
  const float rstd = static_cast<float>(1.0 / std::sqrt(group.m2 / kGroupSize + kEps));

  float* const target = y + std::int64_t{index} * kGroupSize;
#pragma omp simd
  for (int i = 0; i < kGroupSize; ++i) {
    const float v = (value[i] - mean - mean_rest) * (groupnorm_weight_data[first + i] * rstd) + groupnorm_bias_data[first + i];
    target[i] = v;
  }
}

}  // namespace
}  // namespace chain_cpu

// The chain behind torch's linear, on `threads` threads. Returns 0, or -1 for a wrong number of threads.
extern "C" int chain_cpu_launch(const float* t0, const float* bias_data, const float* groupnorm_weight_data,
    const float* groupnorm_bias_data, float* y, int threads, void*) {
  using namespace chain_cpu;
  if (threads < 1) return -1;
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int index = 0; index < kBatch * kNumGroups; ++index) {
    run_group(t0, bias_data, groupnorm_weight_data, groupnorm_bias_data, y, index);
  }
  return 0;
}
