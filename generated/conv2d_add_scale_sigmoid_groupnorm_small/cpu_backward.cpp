// conv2d_add_scale_sigmoid_groupnorm_small: gradients of everything after torch's conv2d, one group of one sample at a time
//
//   conv2d(in_channels=3, out_channels=16, kernel_size=(3, 3), stride=(1, 1), padding=(0, 0), dilation=(1, 1), groups=1, bias=True)  # conv
//   add(shape=(16, 1, 1), init=randn)  # bias
//   mul(shape=(16, 1, 1), init=randn)  # scale
//   sigmoid()
//   group_norm(num_groups=8, eps=1e-05, affine=True)  # group_norm
//   x (128, 3, 32, 32) -> y (128, 16, 30, 30), fp32
//
// Plan for cpu on host:
//   a thread takes whole groups of a slab of 16 samples: 64 parts
//   sums over samples are in double precision and in an order of their own, whatever the number of threads
//   14.06 KB of scratch a thread, on its stack
//
// Generated from specs/conv2d_add_scale_sigmoid_groupnorm_small.yaml; do not edit. Again: make generate SPEC=specs/conv2d_add_scale_sigmoid_groupnorm_small.yaml

#include <cmath>
#include <cstdint>
#include <cstring>

namespace chain_backward_cpu {
namespace {

constexpr int kBatch = 128;  // batch
constexpr int kChannels = 16;  // channels at the norm
constexpr int kNumGroups = 8;  // group_norm's num_groups
constexpr int kGroupChannels = 2;  // kChannels / kNumGroups
constexpr int kSpatial = 900;  // 30 * 30, behind the convolution
constexpr int kGroupSize = 1800;  // kGroupChannels * kSpatial
constexpr double kEps = 1e-05;  // group_norm's eps
constexpr int kSlabs = 8;  // slabs of samples whose sums are formed apart
constexpr int kSlabSamples = 16;  // batch / kSlabs, rounded up
constexpr int kParameters = 4;  // parameters behind the producer

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

// a / b for b >= 1, error at most 3 units; 0 for b > 2^126 on a GPU, whose fast division this is.
inline float divide(float a, float b) {
  return a / b;
}

// sigmoid(v) sigmoid(-v) = e / (1 + e)^2 with e = e^-|v|: no cancellation.
inline float sigmoid_grad(float v) {
  const float e = exponential(v < 0.0f ? v : -v);
  const float s = divide(1.0f, 1.0f + e);
  return e * s * s;
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

// Back through what comes before the norm: the gradient of v for that of the result, g.
inline float before_norm_grad(float v, float g, float bias_c, float scale_c, float& bias_g, float& scale_g) {
  const float v1 = v + bias_c;
  const float v2 = v1 * scale_c;
  g = g * sigmoid_grad(v2);
  scale_g = g * v1;
  g = g * scale_c;
  bias_g = g;
  return g;
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

// One group of one sample: the chain again as far as the derivatives need it, then back.
inline void run_group(const float* t0, const float* bias_data, const float* scale_data,
    const float* group_norm_weight_data, const float* grad_y, float* grad_t0, double* sums, int index) {
  alignas(64) float value[kGroupSize];  // the group's values before the norm
  alignas(64) float grad[kGroupSize];  // the gradient of the normalised values
  const int first = index % kNumGroups * kGroupChannels;  // the group's first channel
  double* const bias_sum = sums + first;
  double* const scale_sum = sums + 1 * kChannels + first;
  double* const group_norm_weight_sum = sums + 2 * kChannels + first;
  double* const group_norm_bias_sum = sums + 3 * kChannels + first;

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
  const float mean_rest = static_cast<float>(group.mean - mean);
  const float rstd = static_cast<float>(1.0 / std::sqrt(group.m2 / kGroupSize + kEps));

  // Back to the norm. Its own derivative needs two sums over the group: of the gradient, and of its product with the normalised value.
  double total = 0.0, total_normal = 0.0;
  const float* const incoming = grad_y + std::int64_t{index} * kGroupSize;
  for (int c = 0; c < kGroupChannels; ++c) {
    const float gamma = group_norm_weight_data[first + c];
    const float* const channel = value + c * kSpatial;
    double group_norm_weight_total = 0.0;
    double group_norm_bias_total = 0.0;
#pragma omp simd reduction(+ : total, total_normal, group_norm_weight_total, group_norm_bias_total)
    for (int i = 0; i < kSpatial; ++i) {
      const float normal = (channel[i] - mean - mean_rest) * rstd;
      const float g = incoming[c * kSpatial + i];
      group_norm_weight_total += static_cast<double>(g) * normal;
      group_norm_bias_total += g;
      const float scaled = g * gamma;
      grad[c * kSpatial + i] = scaled;
      total += scaled;
      total_normal += static_cast<double>(scaled) * normal;
    }
    group_norm_weight_sum[c] += group_norm_weight_total;
    group_norm_bias_sum[c] += group_norm_bias_total;
  }

  // Back through the norm and what comes before it.
  const float mean_grad = static_cast<float>(total / kGroupSize);
  const float mean_product = static_cast<float>(total_normal / kGroupSize);
  float* const target = grad_t0 + std::int64_t{index} * kGroupSize;
  for (int c = 0; c < kGroupChannels; ++c) {
    const float bias_c = bias_data[first + c];
    const float scale_c = scale_data[first + c];
    double bias_total = 0.0;
    double scale_total = 0.0;
#pragma omp simd reduction(+ : bias_total, scale_total)
    for (int i = c * kSpatial; i < (c + 1) * kSpatial; ++i) {
      const float normal = (value[i] - mean - mean_rest) * rstd;
      float bias_g, scale_g;
      const float g = before_norm_grad(source[i], rstd * (grad[i] - mean_grad - normal * mean_product), bias_c, scale_c, bias_g, scale_g);
      bias_total += bias_g;
      scale_total += scale_g;
      target[i] = g;
    }
    bias_sum[c] += bias_total;
    scale_sum[c] += scale_total;
  }
}

// A parameter's gradient, a value per channel: the sums of the slabs, in their order.
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

// From the gradient of y to those of t0, torch's conv2d, and of the parameters behind it, on `threads` threads.
// Returns 0, or -1 for a wrong number of threads.
extern "C" int chain_backward_cpu_launch(const float* t0, const float* bias_data, const float* scale_data,
    const float* group_norm_weight_data, const float* grad_y, float* grad_t0, float* bias_grad,
    float* scale_grad, float* group_norm_weight_grad, float* group_norm_bias_grad, double* sums, int threads, void*) {
  using namespace chain_backward_cpu;
  if (threads < 1) return -1;
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
      run_group(t0, bias_data, scale_data, group_norm_weight_data, grad_y, grad_t0, slab_sums, sample * kNumGroups + group);
    }
  }
  add_up(sums, bias_grad);
  add_up(sums + 1 * kChannels, scale_grad);
  add_up(sums + 2 * kChannels, group_norm_weight_grad);
  add_up(sums + 3 * kChannels, group_norm_bias_grad);
  return 0;
}
