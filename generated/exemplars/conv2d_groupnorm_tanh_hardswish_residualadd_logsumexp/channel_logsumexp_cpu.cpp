// conv2d_groupnorm_tanh_hardswish_residualadd_logsumexp: logsumexp over the channels of a position
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
//
// Generated from specs/conv2d_groupnorm_tanh_hardswish_residualadd_logsumexp.yaml; do not edit.
// Again: make generate SPEC=specs/conv2d_groupnorm_tanh_hardswish_residualadd_logsumexp.yaml

#include <cmath>
#include <cstdint>
#include <cstring>

namespace channel_logsumexp_cpu {
namespace {

constexpr int kBatch = 128;  // batch
constexpr int kChannels = 64;  // values of a position
constexpr int kPlane = 15876;  // 126 x 126 positions

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

constexpr int kSpan = kPlane < 256 ? kPlane : 256;  // positions at a time
constexpr int kSpans = (kPlane + kSpan - 1) / kSpan;

// Reduces the channels of kSpan neighbouring positions of a sample.
inline void run(const float* input, float* output, int item) {
  const int first = item % kSpans * kSpan;
  const int count = kPlane - first < kSpan ? kPlane - first : kSpan;
  const float* const values = input + std::int64_t{item / kSpans} * kChannels * kPlane + first;
  std::int32_t best[kSpan];  // maximum, NaN above all else
  for (int i = 0; i < count; ++i) {
    best[i] = ordered(-INFINITY);
  }
  for (int channel = 0; channel < kChannels; ++channel) {
    const float* const line = values + std::int64_t{channel} * kPlane;
#pragma omp simd
    for (int i = 0; i < count; ++i) {
      best[i] = maximum(best[i], ordered(line[i]));
    }
  }
  double sum[kSpan];
  for (int i = 0; i < count; ++i) {
    sum[i] = 0.0;
  }
  float shift[kSpan];
  for (int i = 0; i < count; ++i) {
    const float top = from_ordered(best[i]);
    shift[i] = std::fabs(top) == INFINITY ? 0.0f : top;
  }
  for (int channel = 0; channel < kChannels; ++channel) {
    const float* const line = values + std::int64_t{channel} * kPlane;
#pragma omp simd
    for (int i = 0; i < count; ++i) {
      sum[i] += exponential(line[i] - shift[i]);
    }
  }
  for (int i = 0; i < count; ++i) {
    const float folded = static_cast<float>(shift[i] + std::log(sum[i]));
    const int index = item / kSpans * kPlane + first + i;
    output[index] = folded;
  }
}

}  // namespace
}  // namespace channel_logsumexp_cpu

// Logsumexp over the channels of a position, on `threads` threads. Returns 0, or -1 for a wrong number of threads.
extern "C" int channel_logsumexp_cpu_launch(const float* input, float* output, int threads, void*) {
  using namespace channel_logsumexp_cpu;
  if (threads < 1) return -1;
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int index = 0; index < kBatch * kSpans; ++index) {
    run(input, output, index);
  }
  return 0;
}
