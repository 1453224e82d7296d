// gemm_groupnorm_min_biasadd_bf16: gradients of everything after torch's linear, one group of one sample at a time
//
//   linear(in_features=8192, out_features=8192, bias=True)  # gemm
//   group_norm(num_groups=512, eps=1e-05, affine=True)  # group_norm
//   min(dim=1, keepdim=True)
//   add(shape=(1, 8192, 1, 1), init=randn)  # bias
//   x (1024, 8192) -> y (1, 8192, 1024, 1), bf16
//
// Plan for cpu on host:
//   a thread takes whole groups of a slab of 1024 samples: 512 parts
//   sums over samples are in double precision and in an order of their own, whatever the number of threads
//   0.125 KB of scratch a thread, on its stack
//
// Generated from specs/gemm_groupnorm_min_biasadd.yaml; do not edit. Again: make generate SPEC=specs/gemm_groupnorm_min_biasadd.yaml PRECISION=bf16

#include <cmath>
#include <cstdint>
#include <cstring>

namespace chain_backward_cpu {
namespace {

constexpr int kBatch = 1024;  // batch
constexpr int kChannels = 8192;  // channels at the norm
constexpr int kNumGroups = 512;  // group_norm's num_groups
constexpr int kGroupChannels = 16;  // kChannels / kNumGroups
constexpr int kGroupSize = 16;  // kGroupChannels
constexpr double kEps = 1e-05;  // group_norm's eps
constexpr int kSlabs = 1;  // slabs of samples whose sums are formed apart
constexpr int kSlabSamples = 1024;  // batch / kSlabs, rounded up
constexpr int kParameters = 2;  // parameters behind the producer

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
inline void run_group(const std::uint16_t* t0, const std::uint16_t* group_norm_weight_data, const float* grad_y,
    std::uint16_t* grad_t0, double* sums, int index) {
  alignas(64) float value[kGroupSize];  // the group's values before the norm
  alignas(64) float grad[kGroupSize];  // the gradient of the normalised values
  const int first = index % kNumGroups * kGroupChannels;  // the group's first channel
  double* const group_norm_weight_sum = sums + first;
  double* const group_norm_bias_sum = sums + 1 * kChannels + first;

  const std::uint16_t* const source = t0 + std::int64_t{index} * kGroupSize;
#pragma omp simd
  for (int i = 0; i < kGroupSize; ++i) {
    value[i] = load(source[i]);
  }

  const Moments group = moments(value, kGroupSize);
  const float mean = static_cast<float>(group.mean);
  const float mean_rest = static_cast<float>(group.mean - mean);
  const float rstd = static_cast<float>(1.0 / std::sqrt(group.m2 / kGroupSize + kEps));

  // Back to the norm. Its own derivative needs two sums over the group: of the gradient, and of its product with the normalised value.
  double total = 0.0, total_normal = 0.0;
  const float* const incoming = grad_y + std::int64_t{index} * kGroupSize;
#pragma omp simd reduction(+ : total, total_normal)
  for (int i = 0; i < kGroupSize; ++i) {
    const float normal = (value[i] - mean - mean_rest) * rstd;
    const float g = incoming[i];
    group_norm_weight_sum[i] += static_cast<double>(g) * normal;
    group_norm_bias_sum[i] += g;
    grad[i] = g * load(group_norm_weight_data[first + i]);
    total += grad[i];
    total_normal += static_cast<double>(grad[i]) * normal;
  }

  // Back through the norm and what comes before it.
  const float mean_grad = static_cast<float>(total / kGroupSize);
  const float mean_product = static_cast<float>(total_normal / kGroupSize);
  std::uint16_t* const target = grad_t0 + std::int64_t{index} * kGroupSize;
#pragma omp simd
  for (int i = 0; i < kGroupSize; ++i) {
    const float normal = (value[i] - mean - mean_rest) * rstd;
    const float g = rstd * (grad[i] - mean_grad - normal * mean_product);
    target[i] = store(g);
  }
}

// A parameter's gradient, a value per channel: the sums of the slabs, in their order.
inline void add_up(const double* sums, std::uint16_t* grad) {
  for (int channel = 0; channel < kChannels; ++channel) {
    double total = 0.0;
    for (int slab = 0; slab < kSlabs; ++slab) {
      total += sums[std::int64_t{slab} * kParameters * kChannels + channel];
    }
    grad[channel] = store(static_cast<float>(total));
  }
}

}  // namespace
}  // namespace chain_backward_cpu

// From the gradient of y to those of t0, torch's linear, and of the parameters behind it, on `threads` threads.
// Returns 0, or -1 for a wrong number of threads.
extern "C" int chain_backward_cpu_launch(const std::uint16_t* t0, const std::uint16_t* group_norm_weight_data, const float* grad_y,
    std::uint16_t* grad_t0, std::uint16_t* group_norm_weight_grad, std::uint16_t* group_norm_bias_grad,
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
      run_group(t0, group_norm_weight_data, grad_y, grad_t0, slab_sums, sample * kNumGroups + group);
    }
  }
  add_up(sums, group_norm_weight_grad);
  add_up(sums + 1 * kChannels, group_norm_bias_grad);
  return 0;
}
