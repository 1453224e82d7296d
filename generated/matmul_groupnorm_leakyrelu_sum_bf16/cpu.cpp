// matmul_groupnorm_leakyrelu_sum_bf16: everything after torch's linear, one group of one sample at a time
//
//   linear(in_features=8192, out_features=8192, bias=True)  # fc
//   group_norm(num_groups=512, eps=1e-05, affine=True)  # gn
//   leaky_relu(negative_slope=0.01)  # leaky_relu
//   add(from=leaky_relu)
//   x (1024, 8192) -> y (1024, 8192), bf16
//
// Plan for cpu on host:
//   a thread takes whole groups: 524288 of 16 values (0.0625 KB as float)
//   the group's values stay in a float scratch array, so that what comes before the norm is computed once
//   0.0625 KB of scratch a thread, on its stack
//
// Generated from specs/matmul_groupnorm_leakyrelu_sum.yaml; do not edit. Again: make generate SPEC=specs/matmul_groupnorm_leakyrelu_sum.yaml PRECISION=bf16

#include <cmath>
#include <cstdint>
#include <cstring>

namespace chain_cpu {
namespace {

constexpr int kBatch = 1024;  // batch
constexpr int kNumGroups = 512;  // group_norm's num_groups
constexpr int kGroupChannels = 16;  // channels / kNumGroups
constexpr int kGroupSize = 16;  // kGroupChannels
constexpr double kEps = 1e-05;  // group_norm's eps
constexpr float kLeakyReluNegativeSlope = 0.01f;  // leaky_relu's negative_slope

// bfloat16 is the upper half of a float.
inline float load(std::uint16_t bits) {
  const std::uint32_t wide = std::uint32_t{bits} << 16;
  float v;
  std::memcpy(&v, &wide, sizeof v);
  return v;
}

// To the nearest bfloat16, ties to even; NaN stays NaN.
inline std::uint16_t store(float v) {
  std::uint32_t bits;
  std::memcpy(&bits, &v, sizeof bits);
  const std::uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  return static_cast<std::uint16_t>(v == v ? rounded : 0x7FC0u);
}

// v above 0, slope * v below.
inline float leaky_relu(float v, float slope) {
  return v > 0.0f ? v : v * slope;
}

// What follows the norm.
inline float after_norm(float v) {
  v = leaky_relu(v, kLeakyReluNegativeSlope);
  v = v + v;
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

// One group of one sample: statistics, normalise, leaky_relu, add, store.
inline void run_group(const std::uint16_t* t0, const std::uint16_t* gn_weight_data, const std::uint16_t* gn_bias_data,
    std::uint16_t* y, int index) {
  alignas(64) float value[kGroupSize];  // the group's values before the norm
  const int first = index % kNumGroups * kGroupChannels;  // the group's first channel

  const std::uint16_t* const source = t0 + std::int64_t{index} * kGroupSize;
#pragma omp simd
  for (int i = 0; i < kGroupSize; ++i) {
    value[i] = load(source[i]);
  }

  const Moments group = moments(value, kGroupSize);
  const float mean = static_cast<float>(group.mean);
  const float mean_rest = static_cast<float>(group.mean - mean);  // what rounding took: it matters where the mean is large against the spread
  const float rstd = static_cast<float>(1.0 / std::sqrt(group.m2 / kGroupSize + kEps));

  std::uint16_t* const target = y + std::int64_t{index} * kGroupSize;
#pragma omp simd
  for (int i = 0; i < kGroupSize; ++i) {
    const float v = (value[i] - mean - mean_rest) * (load(gn_weight_data[first + i]) * rstd) + load(gn_bias_data[first + i]);
    target[i] = store(after_norm(v));
  }
}

}  // namespace
}  // namespace chain_cpu

// The chain behind torch's linear, on `threads` threads. Returns 0, or -1 for a wrong number of threads.
extern "C" int chain_cpu_launch(const std::uint16_t* t0, const std::uint16_t* gn_weight_data, const std::uint16_t* gn_bias_data,
    std::uint16_t* y, int threads, void*) {
  using namespace chain_cpu;
  if (threads < 1) return -1;
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int index = 0; index < kBatch * kNumGroups; ++index) {
    run_group(t0, gn_weight_data, gn_bias_data, y, index);
  }
  return 0;
}
