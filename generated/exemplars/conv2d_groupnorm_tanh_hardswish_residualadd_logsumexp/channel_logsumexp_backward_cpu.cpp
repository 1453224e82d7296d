// conv2d_groupnorm_tanh_hardswish_residualadd_logsumexp: backward of: logsumexp over the channels of a position
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
//   the reduced values are recomputed
//
// Generated from specs/conv2d_groupnorm_tanh_hardswish_residualadd_logsumexp.yaml; do not edit.
// Again: make generate SPEC=specs/conv2d_groupnorm_tanh_hardswish_residualadd_logsumexp.yaml

#include <cmath>
#include <cstdint>
#include <cstring>

namespace channel_logsumexp_backward_cpu {
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

constexpr int kSpan = kPlane < 256 ? kPlane : 256;  // positions at a time
constexpr int kSpans = (kPlane + kSpan - 1) / kSpan;

// Backward of the reduction, for kSpan neighbouring positions of a sample.
inline void run(const float* input, const float* grad_result, float* grad_input, int item) {
  const int first = item % kSpans * kSpan;
  const int count = kPlane - first < kSpan ? kPlane - first : kSpan;
  const float* const values_in = input + std::int64_t{item / kSpans} * kChannels * kPlane + first;
  float* const target = grad_input + std::int64_t{item / kSpans} * kChannels * kPlane + first;
  float best[kSpan];
  for (int i = 0; i < count; ++i) {
    best[i] = values_in[i];
  }
  for (int channel = 1; channel < kChannels; ++channel) {
    const float* const line = values_in + std::int64_t{channel} * kPlane;
#pragma omp simd
    for (int i = 0; i < count; ++i) {
      const float v = line[i];
      best[i] = v > best[i] || v != v ? v : best[i];
    }
  }
  double sum[kSpan];
  for (int i = 0; i < count; ++i) {
    sum[i] = 0.0;
  }
  for (int channel = 0; channel < kChannels; ++channel) {
    const float* const line = values_in + std::int64_t{channel} * kPlane;
#pragma omp simd
    for (int i = 0; i < count; ++i) {
      sum[i] += exponential(line[i] - best[i]);
    }
  }
  float share[kSpan];
  for (int i = 0; i < count; ++i) {
    const int index = item / kSpans * kPlane + first + i;
    sum[i] = std::fabs(best[i]) == INFINITY ? 1.0 : sum[i];
    const float g = grad_result[index];
    share[i] = static_cast<float>(g / sum[i]);
  }
  for (int channel = 0; channel < kChannels; ++channel) {
    float* const line = target + std::int64_t{channel} * kPlane;
#pragma omp simd
    for (int i = 0; i < count; ++i) {
      line[i] = share[i] * exponential(values_in[std::int64_t{channel} * kPlane + i] - best[i]);
    }
  }
}

}  // namespace
}  // namespace channel_logsumexp_backward_cpu

// Backward of: logsumexp over the channels of a position, on `threads` threads. Returns 0, or -1 for a wrong number of
// threads.
extern "C" int channel_logsumexp_backward_cpu_launch(const float* input, const float* grad_result, float* grad_input, int threads, void*) {
  using namespace channel_logsumexp_backward_cpu;
  if (threads < 1) return -1;
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int index = 0; index < kBatch * kSpans; ++index) {
    run(input, grad_result, grad_input, index);
  }
  return 0;
}
