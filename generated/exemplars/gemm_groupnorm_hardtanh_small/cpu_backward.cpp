// gemm_groupnorm_hardtanh_small: gradients of everything after torch's linear, one group of one sample at a time
//
//   linear(in_features=1024, out_features=512, bias=True)  # gemm
//   group_norm(num_groups=8, eps=1e-05, affine=True)  # group_norm
//   hardtanh(min_val=-2.0, max_val=2.0)  # hardtanh
//   x (128, 1024) -> y (128, 512), fp32
//
// Plan for cpu on host:
//   a thread takes whole groups of a slab of 16 samples: 64 parts
//   sums over samples are in double precision and in a fixed order, for any number of threads
//   0.25 KB of scratch a thread, on its stack
//
// Generated from specs/gemm_groupnorm_hardtanh_small.yaml; do not edit.
// Again: make generate SPEC=specs/gemm_groupnorm_hardtanh_small.yaml

#include <cmath>
#include <cstdint>
#include <cstring>

namespace chain_backward_cpu {
namespace {

constexpr int kBatch = 128;  // batch
constexpr int kChannels = 512;  // channels at the norm
constexpr int kNumGroups = 8;  // group_norm's num_groups
constexpr int kGroupChannels = 64;  // kChannels / kNumGroups
constexpr int kGroupSize = 64;  // kGroupChannels
constexpr double kEps = 1e-05;  // group_norm's eps
constexpr float kHardtanhMinVal = -2.0f;  // hardtanh's min_val
constexpr float kHardtanhMaxVal = 2.0f;  // hardtanh's max_val
constexpr int kSlabs = 8;  // slabs of samples whose sums are formed apart
constexpr int kSlabSamples = 16;  // batch / kSlabs, rounded up
constexpr int kParameters = 2;  // parameters behind the producer

// 1 strictly inside the bounds, as PyTorch's hardtanh.
inline float hardtanh_grad(float v, float lo, float hi) {
  return v > lo && v < hi ? 1.0f : 0.0f;
}

// Backward through the operators after the norm: the gradient of v, from the result's gradient g.
inline float after_norm_grad(float v, float g) {
  g = g * hardtanh_grad(v, kHardtanhMinVal, kHardtanhMaxVal);
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
inline void run_group(const float* t0, const float* group_norm_weight_data, const float* group_norm_bias_data,
    const float* grad_y, float* grad_t0, double* sums, int index) {
  alignas(64) float grad[kGroupSize];  // the gradient of the normalised values
  const int first = index % kNumGroups * kGroupChannels;  // the group's first channel
  double* const group_norm_weight_sum = sums + first;
  double* const group_norm_bias_sum = sums + 1 * kChannels + first;

  const float* const value = t0 + std::int64_t{index} * kGroupSize;

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
    const float v = (value[i] - mean - mean_rest) * (group_norm_weight_data[first + i] * rstd) + group_norm_bias_data[first + i];
    const float g = after_norm_grad(v, incoming[i]);
    group_norm_weight_sum[i] += static_cast<double>(g) * normal;
    group_norm_bias_sum[i] += g;
    grad[i] = g * group_norm_weight_data[first + i];
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
    const float g = rstd * (grad[i] - mean_grad - normal * mean_product);
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
extern "C" int chain_backward_cpu_launch(const float* t0, const float* group_norm_weight_data, const float* group_norm_bias_data,
    const float* grad_y, float* grad_t0, float* group_norm_weight_grad, float* group_norm_bias_grad,
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
      run_group(t0, group_norm_weight_data, group_norm_bias_data, grad_y, grad_t0, slab_sums, sample * kNumGroups + group);
    }
  }
  add_up(sums, group_norm_weight_grad);
  add_up(sums + 1 * kChannels, group_norm_bias_grad);
  return 0;
}
