// gemm_biasadd_hardtanh_mish_groupnorm_tf32: gradients of everything after torch's linear, one group of one sample at a
//   time
//
//   linear(in_features=8192, out_features=8192, bias=True)  # gemm
//   add(shape=(8192,), init=randn)  # bias
//   hardtanh(min_val=-1.0, max_val=1.0)  # hardtanh
//   mish()  # mish
//   group_norm(num_groups=256, eps=1e-05, affine=True)  # groupnorm
//   x (1024, 8192) -> y (1024, 8192), tf32
//
// Plan for cpu on host:
//   a thread takes whole groups of a slab of 1024 samples: 256 parts
//   sums over samples are in double precision and in a fixed order, for any number of threads
//   0.25 KB of scratch a thread, on its stack
//
// Generated from specs/gemm_biasadd_hardtanh_mish_groupnorm.yaml; do not edit.
// Again: make generate SPEC=specs/gemm_biasadd_hardtanh_mish_groupnorm.yaml PRECISION=tf32

#include <cmath>
#include <cstdint>
#include <cstring>

namespace chain_backward_cpu {
namespace {

constexpr int kBatch = 1024;  // batch
constexpr int kChannels = 8192;  // channels at the norm
constexpr int kNumGroups = 256;  // group_norm's num_groups
constexpr int kGroupChannels = 32;  // kChannels / kNumGroups
constexpr int kGroupSize = 32;  // kGroupChannels
constexpr double kEps = 1e-05;  // group_norm's eps
constexpr float kHardtanhMinVal = -1.0f;  // hardtanh's min_val
constexpr float kHardtanhMaxVal = 1.0f;  // hardtanh's max_val
constexpr int kSlabs = 1;  // slabs of samples whose sums are formed apart
constexpr int kSlabSamples = 1024;  // batch / kSlabs, rounded up
constexpr int kParameters = 3;  // parameters behind the producer

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

// t + v (1 - t^2) sigmoid(v) with t = tanh(log(1 + e^v)) = n / (n + 2): 1 - t^2 = 4 (1 + e^v)^2 / (n + 2)^2; 1 from v =
// 20 on.
inline float mish_grad(float v) {
  const float c = v > 20.0f ? 20.0f : v;
  const float e = exponential(c);
  const float n = e * (e + 2.0f);
  const float w = divide(1.0f, n + 2.0f);
  return n * w + c * (4.0f * e * w) * ((1.0f + e) * w);
}

// min(max(v, lo), hi); NaN goes through.
inline float hardtanh(float v, float lo, float hi) {
  return v < lo ? lo : (v > hi ? hi : v);
}

// 1 strictly inside the bounds, as PyTorch's hardtanh.
inline float hardtanh_grad(float v, float lo, float hi) {
  return v > lo && v < hi ? 1.0f : 0.0f;
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

// Backward through the operators before the norm: the gradient of v, from the result's gradient g.
inline float before_norm_grad(float v, float g, float bias_c, float& bias_g) {
  const float v1 = v + bias_c;
  const float v2 = hardtanh(v1, kHardtanhMinVal, kHardtanhMaxVal);
  g = g * mish_grad(v2);
  g = g * hardtanh_grad(v1, kHardtanhMinVal, kHardtanhMaxVal);
  bias_g = g;
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

// Backward of one group of one sample: recomputes the chain as far as derivatives need it, then goes back.
inline void run_group(const float* t0, const float* bias_data, const float* groupnorm_weight_data, const float* grad_y,
    float* grad_t0, double* sums, int index) {
  alignas(64) float value[kGroupSize];  // the group's values before the norm
  alignas(64) float grad[kGroupSize];  // the gradient of the normalised values
  const int first = index % kNumGroups * kGroupChannels;  // the group's first channel
  double* const bias_sum = sums + first;
  double* const groupnorm_weight_sum = sums + 1 * kChannels + first;
  double* const groupnorm_bias_sum = sums + 2 * kChannels + first;

  const float* const source = t0 + std::int64_t{index} * kGroupSize;
#pragma omp simd
  for (int i = 0; i < kGroupSize; ++i) {
    value[i] = before_norm(source[i], bias_data[first + i]);
  }

  const DoubleMoments group = moments(value, kGroupSize);
  const float mean = static_cast<float>(group.mean);
  const float mean_rest = static_cast<float>(group.mean - mean);
  const float rstd = static_cast<float>(1.0 / std::sqrt(group.m2 / kGroupSize + kEps));

  // Backward to the norm's result. The norm's derivative needs two sums over the group: the gradient, and its product
  // with the normalised value.
  double total = 0.0, total_normal = 0.0;
  const float* const incoming = grad_y + std::int64_t{index} * kGroupSize;
#pragma omp simd reduction(+ : total, total_normal)
  for (int i = 0; i < kGroupSize; ++i) {
    const float normal = (value[i] - mean - mean_rest) * rstd;
    const float g = incoming[i];
    groupnorm_weight_sum[i] += static_cast<double>(g) * normal;
    groupnorm_bias_sum[i] += g;
    grad[i] = g * groupnorm_weight_data[first + i];
    total += grad[i];
    total_normal += static_cast<double>(grad[i]) * normal;
  }

  // Backward through the norm and the operators before it.
  const float mean_grad = static_cast<float>(total / kGroupSize);
  const float mean_product = static_cast<float>(total_normal / kGroupSize);
  float* const target = grad_t0 + std::int64_t{index} * kGroupSize;
#pragma omp simd
  for (int i = 0; i < kGroupSize; ++i) {
    const float normal = (value[i] - mean - mean_rest) * rstd;
    float bias_g;
    const float g = before_norm_grad(source[i], rstd * (grad[i] - mean_grad - normal * mean_product), bias_data[first + i], bias_g);
    bias_sum[i] += bias_g;
    target[i] = g;
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

// Computes the gradients of t0, torch's linear, and of the parameters behind it, from that of y, on `threads` threads.
// Returns 0, or -1 for a wrong number of threads.
extern "C" int chain_backward_cpu_launch(const float* t0, const float* bias_data, const float* groupnorm_weight_data, const float* grad_y,
    float* grad_t0, float* bias_grad, float* groupnorm_weight_grad, float* groupnorm_bias_grad,
    double* sums, int threads, void*) {
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
      run_group(t0, bias_data, groupnorm_weight_data, grad_y, grad_t0, slab_sums, sample * kNumGroups + group);
    }
  }
  add_up(sums, bias_grad);
  add_up(sums + 1 * kChannels, groupnorm_weight_grad);
  add_up(sums + 2 * kChannels, groupnorm_bias_grad);
  return 0;
}
