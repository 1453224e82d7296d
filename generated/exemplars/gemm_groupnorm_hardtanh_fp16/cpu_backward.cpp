// gemm_groupnorm_hardtanh_fp16: gradients of everything after torch's linear, one group of one sample at a time
//
//   linear(in_features=8192, out_features=8192, bias=True)  # gemm
//   group_norm(num_groups=16, eps=1e-05, affine=True)  # group_norm
//   hardtanh(min_val=-2.0, max_val=2.0)  # hardtanh
//   x (1024, 8192) -> y (1024, 8192), fp16
//
// Plan for cpu on host:
//   a thread takes whole groups of a slab of 256 samples: 64 parts
//   sums over samples are in double precision and in a fixed order, for any number of threads
//   4 KB of scratch a thread, on its stack
//
// Generated from specs/default.yaml; do not edit.
// Again: make generate SPEC=specs/default.yaml PRECISION=fp16

#include <cmath>
#include <cstdint>
#include <cstring>

namespace chain_backward_cpu {
namespace {

constexpr int kBatch = 1024;  // batch
constexpr int kChannels = 8192;  // channels at the norm
constexpr int kNumGroups = 16;  // group_norm's num_groups
constexpr int kGroupChannels = 512;  // kChannels / kNumGroups
constexpr int kGroupSize = 512;  // kGroupChannels
constexpr double kEps = 1e-05;  // group_norm's eps
constexpr float kHardtanhMinVal = -2.0f;  // hardtanh's min_val
constexpr float kHardtanhMaxVal = 2.0f;  // hardtanh's max_val
constexpr int kSlabs = 4;  // slabs of samples whose sums are formed apart
constexpr int kSlabSamples = 256;  // batch / kSlabs, rounded up
constexpr int kParameters = 2;  // parameters behind the producer

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
inline void run_group(const std::uint16_t* t0, const std::uint16_t* group_norm_weight_data,
    const std::uint16_t* group_norm_bias_data, const std::uint16_t* grad_y, std::uint16_t* grad_t0,
    double* sums, int index) {
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

  const DoubleMoments group = moments(value, kGroupSize);
  const float mean = static_cast<float>(group.mean);
  const float mean_rest = static_cast<float>(group.mean - mean);
  const float rstd = static_cast<float>(1.0 / std::sqrt(group.m2 / kGroupSize + kEps));

  // Backward to the norm's result. The norm's derivative needs two sums over the group: the gradient, and its product
  // with the normalised value.
  double total = 0.0, total_normal = 0.0;
  const std::uint16_t* const incoming = grad_y + std::int64_t{index} * kGroupSize;
#pragma omp simd reduction(+ : total, total_normal)
  for (int i = 0; i < kGroupSize; ++i) {
    const float normal = (value[i] - mean - mean_rest) * rstd;
    const float v = (value[i] - mean - mean_rest) * (load(group_norm_weight_data[first + i]) * rstd) + load(group_norm_bias_data[first + i]);
    const float g = after_norm_grad(v, load(incoming[i]));
    group_norm_weight_sum[i] += static_cast<double>(g) * normal;
    group_norm_bias_sum[i] += g;
    grad[i] = g * load(group_norm_weight_data[first + i]);
    total += grad[i];
    total_normal += static_cast<double>(grad[i]) * normal;
  }

  // Backward through the norm and the operators before it.
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

// Gradient of a parameter with one value a channel: the slabs' sums, in their order.
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

// Computes the gradients of t0, torch's linear, and of the parameters behind it, from that of y, on `threads` threads.
// Returns 0, or -1 for a wrong number of threads.
extern "C" int chain_backward_cpu_launch(const std::uint16_t* t0, const std::uint16_t* group_norm_weight_data,
    const std::uint16_t* group_norm_bias_data, const std::uint16_t* grad_y, std::uint16_t* grad_t0,
    std::uint16_t* group_norm_weight_grad, std::uint16_t* group_norm_bias_grad, double* sums, int threads, void*) {
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
