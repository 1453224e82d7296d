// gemm_groupnorm_hardtanh_fp16: everything after torch's linear, one group of one sample at a time
//
//   linear(in_features=8192, out_features=8192, bias=True)  # gemm
//   group_norm(num_groups=16, eps=1e-05, affine=True)  # group_norm
//   hardtanh(min_val=-2.0, max_val=2.0)  # hardtanh
//   x (1024, 8192) -> y (1024, 8192), fp16
//
// Plan for cpu on host:
//   a thread takes whole groups: 16384 of 512 values (2 KB as float)
//   the group's values stay in a float scratch array, so that operators before the norm are computed once
//   2 KB of scratch a thread, on its stack
//
// Generated from specs/default.yaml; do not edit.
// Again: make generate SPEC=specs/default.yaml PRECISION=fp16

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

// fp16 to float: the fields moved into place and the exponent's bias corrected by a product, which also normalises
// subnormal numbers.
inline float load(std::uint16_t bits) {
  const std::uint32_t magnitude = (bits & 0x7FFFu) << 13;
  const std::uint32_t sign = (bits & 0x8000u) << 16;
  float v;
  std::memcpy(&v, &magnitude, sizeof v);
  v *= 5.19229686e33f;  // 2^(127 - 15)
  std::uint32_t wide;
  std::memcpy(&wide, &v, sizeof wide);
  wide = ((bits & 0x7C00u) == 0x7C00u ? magnitude | 0x7F800000u : wide) | sign;  // infinity and NaN
  std::memcpy(&v, &wide, sizeof v);
  return v;
}

// Float to the nearest fp16, ties to even; infinity from 65520 on; NaN stays NaN.
inline std::uint16_t store(float v) {
  std::uint32_t bits;
  std::memcpy(&bits, &v, sizeof bits);
  const std::uint32_t sign = (bits >> 16) & 0x8000u;
  bits &= 0x7FFFFFFFu;
  const std::uint32_t normal = (bits + 0xFFFu + ((bits >> 13) & 1u) - (112u << 23)) >> 13;
  float small;
  std::memcpy(&small, &bits, sizeof small);
  small += 0.5f;  // rounds to multiples of 2^-24, fp16's smallest subnormal
  std::uint32_t subnormal;
  std::memcpy(&subnormal, &small, sizeof subnormal);
  subnormal -= 0x3F000000u;
  const std::uint32_t finite = bits < 0x38800000u ? subnormal : normal;  // below 2^-14
  const std::uint32_t beyond = bits > 0x7F800000u ? 0x7E00u : 0x7C00u;
  return static_cast<std::uint16_t>(sign | (bits < 0x477FF000u ? finite : beyond));
}

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
inline void run_group(const std::uint16_t* t0, const std::uint16_t* group_norm_weight_data,
    const std::uint16_t* group_norm_bias_data, std::uint16_t* y, int index) {
  alignas(64) float value[kGroupSize];  // the group's values before the norm
  const int first = index % kNumGroups * kGroupChannels;  // the group's first channel

  const std::uint16_t* const source = t0 + std::int64_t{index} * kGroupSize;
#pragma omp simd
  for (int i = 0; i < kGroupSize; ++i) {
    value[i] = load(source[i]);
  }

  const DoubleMoments group = moments(value, kGroupSize);
  const float mean = static_cast<float>(group.mean);
  const float mean_rest = static_cast<float>(group.mean - mean);  // rounding error of a large mean
  const float rstd = static_cast<float>(1.0 / std::sqrt(group.m2 / kGroupSize + kEps));

  std::uint16_t* const target = y + std::int64_t{index} * kGroupSize;
#pragma omp simd
  for (int i = 0; i < kGroupSize; ++i) {
    const float v = (value[i] - mean - mean_rest) * (load(group_norm_weight_data[first + i]) * rstd) + load(group_norm_bias_data[first + i]);
    target[i] = store(after_norm(v));
  }
}

}  // namespace
}  // namespace chain_cpu

// The chain behind torch's linear, on `threads` threads. Returns 0, or -1 for a wrong number of threads.
extern "C" int chain_cpu_launch(const std::uint16_t* t0, const std::uint16_t* group_norm_weight_data,
    const std::uint16_t* group_norm_bias_data, std::uint16_t* y, int threads, void*) {
  using namespace chain_cpu;
  if (threads < 1) return -1;
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int index = 0; index < kBatch * kNumGroups; ++index) {
    run_group(t0, group_norm_weight_data, group_norm_bias_data, y, index);
  }
  return 0;
}
