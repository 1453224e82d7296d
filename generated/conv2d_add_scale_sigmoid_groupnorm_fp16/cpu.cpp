// conv2d_add_scale_sigmoid_groupnorm_fp16: everything after torch's conv2d, one group of one sample at a time
//
//   conv2d(in_channels=8, out_channels=32, kernel_size=(3, 3), stride=(1, 1), padding=(0, 0), dilation=(1, 1), groups=1, bias=True)  # conv
//   add(shape=(32, 1, 1), init=randn)  # bias
//   mul(shape=(32, 1, 1), init=randn)  # scale
//   sigmoid()
//   group_norm(num_groups=8, eps=1e-05, affine=True)  # group_norm
//   x (128, 8, 256, 256) -> y (128, 32, 254, 254), fp16
//
// Plan for cpu on host:
//   a thread takes whole groups: 1024 of 258064 values (1008 KB as float)
//   the group's values stay in a float scratch array, so that what comes before the norm is computed once
//   1008 KB of scratch a thread, on the heap
//
// Generated from specs/conv2d_add_scale_sigmoid_groupnorm.yaml; do not edit. Again: make generate SPEC=specs/conv2d_add_scale_sigmoid_groupnorm.yaml PRECISION=fp16

#include <cmath>
#include <cstdint>
#include <cstring>
#include <cstdlib>

#include <omp.h>

namespace chain_cpu {
namespace {

constexpr int kBatch = 128;  // batch
constexpr int kNumGroups = 8;  // group_norm's num_groups
constexpr int kGroupChannels = 4;  // channels / kNumGroups
constexpr int kSpatial = 64516;  // 254 * 254, behind the convolution
constexpr int kGroupSize = 258064;  // kGroupChannels * kSpatial
constexpr int kPiece = 4096;  // values whose statistics are formed at a time: 16 KB, in the first-level cache
constexpr double kEps = 1e-05;  // group_norm's eps
constexpr std::size_t kScratch = 1032256;  // bytes a thread needs: 4 * (kGroupSize), in whole cache lines

// fp16 to float: the fields moved into place and the exponent's bias corrected by a product, which also normalises subnormal numbers.
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

// To the nearest fp16, ties to even; from 65520 on infinity; NaN stays NaN.
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

// The moments of two sets together (Chan, Golub, LeVeque).
inline Moments merge(Moments a, int count_a, Moments b, int count_b) {
  const double share_b = static_cast<double>(count_b) / (count_a + count_b);
  const double delta = b.mean - a.mean;
  return {a.mean + delta * share_b, a.m2 + b.m2 + delta * delta * share_b * count_a};
}

// One group of one sample: add, mul, sigmoid, statistics, normalise, store.
inline void run_group(const std::uint16_t* t0, const std::uint16_t* bias_data, const std::uint16_t* scale_data,
    const std::uint16_t* group_norm_weight_data, const std::uint16_t* group_norm_bias_data,
    std::uint16_t* y, int index, char* scratch) {
  float* const value = reinterpret_cast<float*>(scratch);  // the group's values before the norm
  const int first = index % kNumGroups * kGroupChannels;  // the group's first channel

  const std::uint16_t* const source = t0 + std::int64_t{index} * kGroupSize;
  for (int c = 0; c < kGroupChannels; ++c) {
    const float bias_c = load(bias_data[first + c]);
    const float scale_c = load(scale_data[first + c]);

#pragma omp simd
    for (int i = c * kSpatial; i < (c + 1) * kSpatial; ++i) {
      value[i] = before_norm(load(source[i]), bias_c, scale_c);
    }
  }

  Moments group = moments(value, kPiece);
  for (int begin = kPiece; begin < kGroupSize; begin += kPiece) {
    const int count = kGroupSize - begin < kPiece ? kGroupSize - begin : kPiece;
    group = merge(group, begin, moments(value + begin, count), count);
  }
  const float mean = static_cast<float>(group.mean);
  const float mean_rest = static_cast<float>(group.mean - mean);  // what rounding took: it matters where the mean is large against the spread
  const float rstd = static_cast<float>(1.0 / std::sqrt(group.m2 / kGroupSize + kEps));

  std::uint16_t* const target = y + std::int64_t{index} * kGroupSize;
  for (int c = 0; c < kGroupChannels; ++c) {
    const float scale = load(group_norm_weight_data[first + c]) * rstd;
    const float shift = load(group_norm_bias_data[first + c]);

#pragma omp simd
    for (int i = c * kSpatial; i < (c + 1) * kSpatial; ++i) {
      const float v = (value[i] - mean - mean_rest) * scale + shift;
      target[i] = store(v);
    }
  }
}

}  // namespace
}  // namespace chain_cpu

// The chain behind torch's conv2d, on `threads` threads. Returns 0, or -1 for a wrong number of threads, -2 for want of memory.
extern "C" int chain_cpu_launch(const std::uint16_t* t0, const std::uint16_t* bias_data, const std::uint16_t* scale_data,
    const std::uint16_t* group_norm_weight_data, const std::uint16_t* group_norm_bias_data,
    std::uint16_t* y, int threads, void*) {
  using namespace chain_cpu;
  if (threads < 1) return -1;
  char* const scratch = static_cast<char*>(std::malloc(kScratch * threads));
  if (scratch == nullptr) return -2;
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int index = 0; index < kBatch * kNumGroups; ++index) {
    run_group(t0, bias_data, scale_data, group_norm_weight_data, group_norm_bias_data, y, index, scratch + kScratch * omp_get_thread_num());
  }
  std::free(scratch);
  return 0;
}
