// conv2d_groupnorm_tanh_hardswish_residualadd_logsumexp: gradients of everything after torch's conv2d, one group of one
//   sample at a time
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
//   a thread takes whole groups of a slab of 32 samples: 64 parts
//   sums over samples are in double precision and in a fixed order, for any number of threads
//   496.1 KB of scratch a thread, on the heap
//
// Generated from specs/conv2d_groupnorm_tanh_hardswish_residualadd_logsumexp.yaml; do not edit.
// Again: make generate SPEC=specs/conv2d_groupnorm_tanh_hardswish_residualadd_logsumexp.yaml

#include <cmath>
#include <cstdint>
#include <cstring>
#include <cstdlib>

#include <omp.h>

namespace chain_backward_cpu {
namespace {

constexpr int kBatch = 128;  // batch
constexpr int kChannels = 64;  // channels at the norm
constexpr int kNumGroups = 16;  // group_norm's num_groups
constexpr int kGroupChannels = 4;  // kChannels / kNumGroups
constexpr int kSpatial = 15876;  // 126 * 126, behind the convolution
constexpr int kGroupSize = 63504;  // kGroupChannels * kSpatial
constexpr int kPiece = 4096;  // values of a piece for statistics: 16 KB, in the first-level cache
constexpr double kEps = 1e-05;  // group_norm's eps
constexpr int kSlabs = 4;  // slabs of samples whose sums are formed apart
constexpr int kSlabSamples = 32;  // batch / kSlabs, rounded up
constexpr int kParameters = 2;  // parameters behind the producer
constexpr std::size_t kScratch = 508032;  // bytes a thread needs: 4 * (kGroupSize + kGroupSize), in whole cache lines

// 0 up to -3, 1 from 3 on, as PyTorch's hardswish.
inline float hardswish_grad(float v) {
  return v <= -3.0f ? 0.0f : (v >= 3.0f ? 1.0f : v * 0.333333333f + 0.5f);
}

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

// 1 - tanh(v)^2 = 4 e / (1 + e)^2 with e = e^-2|v|: no cancellation.
inline float hyperbolic_tangent_grad(float v) {
  const float e = exponential(v < 0.0f ? 2.0f * v : -2.0f * v);
  const float s = divide(1.0f, 1.0f + e);
  return 4.0f * e * s * s;
}

// Backward through the operators after the norm: the gradient of v, from the result's gradient g.
inline float after_norm_grad(float v, float g, float& conv_kept_second) {
  const float v1 = hyperbolic_tangent(v);
  conv_kept_second = g;
  g = g * hardswish_grad(v1);
  g = g * hyperbolic_tangent_grad(v);
  return g;
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

// Backward of one group of one sample: recomputes the chain as far as derivatives need it, then goes back.
inline void run_group(const float* t0, const float* group_norm_weight_data, const float* group_norm_bias_data,
    const float* grad_y, float* grad_t0, double* sums, int index, char* scratch) {
  float* const grad = reinterpret_cast<float*>(scratch);  // the gradient of the normalised values
  float* const second_grad = reinterpret_cast<float*>(grad + kGroupSize);  // gradient of the norm's input by its second use, around the norm
  const int first = index % kNumGroups * kGroupChannels;  // the group's first channel
  double* const group_norm_weight_sum = sums + first;
  double* const group_norm_bias_sum = sums + 1 * kChannels + first;

  const float* const value = t0 + std::int64_t{index} * kGroupSize;

  DoubleMoments group = moments(value, kPiece);
  for (int begin = kPiece; begin < kGroupSize; begin += kPiece) {
    const int count = kGroupSize - begin < kPiece ? kGroupSize - begin : kPiece;
    group = merge(group, begin, moments(value + begin, count), count);
  }
  const float mean = static_cast<float>(group.mean);
  const float mean_rest = static_cast<float>(group.mean - mean);
  const float rstd = static_cast<float>(1.0 / std::sqrt(group.m2 / kGroupSize + kEps));

  // Backward to the norm's result. The norm's derivative needs two sums over the group: the gradient, and its product
  // with the normalised value.
  double total = 0.0, total_normal = 0.0;
  const float* const incoming = grad_y + std::int64_t{index} * kGroupSize;
  for (int c = 0; c < kGroupChannels; ++c) {
    const float gamma = group_norm_weight_data[first + c];
    const float scale = gamma * rstd;
    const float shift = group_norm_bias_data[first + c];
    const float* const channel = value + c * kSpatial;
    double group_norm_weight_total = 0.0;
    double group_norm_bias_total = 0.0;
#pragma omp simd reduction(+ : total, total_normal, group_norm_weight_total, group_norm_bias_total)
    for (int i = 0; i < kSpatial; ++i) {
      const float normal = (channel[i] - mean - mean_rest) * rstd;
      const float v = (channel[i] - mean - mean_rest) * scale + shift;
      float conv_kept_second;
      const float g = after_norm_grad(v, incoming[c * kSpatial + i], conv_kept_second);
      group_norm_weight_total += static_cast<double>(g) * normal;
      group_norm_bias_total += g;
      const float scaled = g * gamma;
      grad[c * kSpatial + i] = scaled;
      second_grad[c * kSpatial + i] = conv_kept_second;
      total += scaled;
      total_normal += static_cast<double>(scaled) * normal;
    }
    group_norm_weight_sum[c] += group_norm_weight_total;
    group_norm_bias_sum[c] += group_norm_bias_total;
  }

  // Backward through the norm and the operators before it.
  const float mean_grad = static_cast<float>(total / kGroupSize);
  const float mean_product = static_cast<float>(total_normal / kGroupSize);
  float* const target = grad_t0 + std::int64_t{index} * kGroupSize;
  for (int c = 0; c < kGroupChannels; ++c) {
#pragma omp simd
    for (int i = c * kSpatial; i < (c + 1) * kSpatial; ++i) {
      const float normal = (value[i] - mean - mean_rest) * rstd;
      const float g = rstd * (grad[i] - mean_grad - normal * mean_product) + second_grad[i];
      target[i] = g;
    }
  }
}

// Gradient of a parameter with one value a channel: the slabs' sums, in their order.
inline void add_up(const double* sums, float* grad) {
  for (int channel = 0; channel < kChannels; ++channel) {
    double total = 0.0;
    for (int slab = 0; slab < kSlabs; ++slab) {
      total += sums[std::int64_t{slab} * kParameters * kChannels + channel];
    }
    grad[channel] = static_cast<float>(total);
  }
}

}  // namespace
}  // namespace chain_backward_cpu

// Computes the gradients of t0, torch's conv2d, and of the parameters behind it, from that of y, on `threads` threads.
// Returns 0, or -1 for a wrong number of threads, -2 if memory is short.
extern "C" int chain_backward_cpu_launch(const float* t0, const float* group_norm_weight_data, const float* group_norm_bias_data,
    const float* grad_y, float* grad_t0, float* group_norm_weight_grad, float* group_norm_bias_grad,
    double* sums, int threads, void*) {
  using namespace chain_backward_cpu;
  if (threads < 1) return -1;
  char* const scratch = static_cast<char*>(std::malloc(kScratch * threads));
  if (scratch == nullptr) return -2;
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int part = 0; part < kSlabs * kNumGroups; ++part) {
    const int slab = part / kNumGroups, group = part % kNumGroups;
    double* const slab_sums = sums + std::int64_t{slab} * kParameters * kChannels;
    for (int parameter = 0; parameter < kParameters; ++parameter) {
      for (int c = 0; c < kGroupChannels; ++c) {
        slab_sums[parameter * kChannels + group * kGroupChannels + c] = 0.0;
      }
    }
    for (int sample = slab * kSlabSamples; sample < (slab + 1) * kSlabSamples && sample < kBatch; ++sample) {
      run_group(t0, group_norm_weight_data, group_norm_bias_data, grad_y, grad_t0, slab_sums, sample * kNumGroups + group, scratch + kScratch * omp_get_thread_num());
    }
  }
  add_up(sums, group_norm_weight_grad);
  add_up(sums + 1 * kChannels, group_norm_bias_grad);
  std::free(scratch);
  return 0;
}
