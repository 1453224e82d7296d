// gemm_groupnorm_hardtanh: everything after torch's linear, one group of one sample at a time
//
//   linear(in_features=8192, out_features=8192, bias=True)  # gemm
//   group_norm(num_groups=16, eps=1e-05, affine=True)  # group_norm
//   hardtanh(min_val=-2.0, max_val=2.0)  # hardtanh
//   x (1024, 8192) -> y (1024, 8192), fp32
//
// Plan for cpu on host:
//   a thread takes whole groups: 16384 of 512 values (2 KB as float)
//
// Generated from specs/default.yaml; do not edit.
// Again: make generate SPEC=specs/default.yaml

#include <cmath>
#include <cstdint>
#include <cstring>

namespace chain_cpu {
namespace {

constexpr int kBatch = 1024;  // batch
constexpr int kNumGroups = 16;  // group_norm's num_groups
constexpr int kGroupChannels = 512;  // channels / kNumGroups
constexpr int kGroupSize = 512;  // kGroupChannels
constexpr double kEps = 1e-05;  // group_norm's eps
constexpr float kHardtanhMinVal = -2.0f;  // hardtanh's min_val
constexpr float kHardtanhMaxVal = 2.0f;  // hardtanh's max_val

// min(max(v, lo), hi); NaN goes through.
inline float hardtanh(float v, float lo, float hi) {
  return v < lo ? lo : (v > hi ? hi : v);
}

// The operators after the norm.
inline float after_norm(float v) {
  v = hardtanh(v, kHardtanhMinVal, kHardtanhMaxVal);
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

// One group of one sample: statistics, normalise, hardtanh, store.
inline void run_group(const float* t0, const float* group_norm_weight_data, const float* group_norm_bias_data, float* y, int index) {
  const int first = index % kNumGroups * kGroupChannels;  // the group's first channel

  const float* const value = t0 + std::int64_t{index} * kGroupSize;

  const DoubleMoments group = moments(value, kGroupSize);
  const float mean = static_cast<float>(group.mean);
  const float mean_rest = static_cast<float>(group.mean - mean);  // rounding error of a large mean
  const float rstd = static_cast<float>(1.0 / std::sqrt(group.m2 / kGroupSize + kEps));

  float* const target = y + std::int64_t{index} * kGroupSize;
#pragma omp simd
  for (int i = 0; i < kGroupSize; ++i) {
    const float v = (value[i] - mean - mean_rest) * (group_norm_weight_data[first + i] * rstd) + group_norm_bias_data[first + i];
    target[i] = after_norm(v);
  }
}

}  // namespace
}  // namespace chain_cpu

// The chain behind torch's linear, on `threads` threads. Returns 0, or -1 for a wrong number of threads.
extern "C" int chain_cpu_launch(const float* t0, const float* group_norm_weight_data, const float* group_norm_bias_data, float* y, int threads, void*) {
  using namespace chain_cpu;
  if (threads < 1) return -1;
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int index = 0; index < kBatch * kNumGroups; ++index) {
    run_group(t0, group_norm_weight_data, group_norm_bias_data, y, index);
  }
  return 0;
}
