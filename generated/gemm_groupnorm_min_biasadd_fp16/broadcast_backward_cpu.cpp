// gemm_groupnorm_min_biasadd_fp16: back through: broadcast to another shape, then add
//
//   linear(in_features=8192, out_features=8192, bias=True)  # gemm
//   group_norm(num_groups=512, eps=1e-05, affine=True)  # group_norm
//   min(dim=1, keepdim=True)
//   add(shape=(1, 8192, 1, 1), init=randn)  # bias
//   x (1024, 8192) -> y (1, 8192, 1024, 1), fp16
//
// Plan for cpu on host:
//   sums over results have an order of their own: the same bits on every run
//
// Generated from specs/gemm_groupnorm_min_biasadd.yaml; do not edit. Again: make generate SPEC=specs/gemm_groupnorm_min_biasadd.yaml PRECISION=fp16

#include <cmath>
#include <cstdint>
#include <cstring>

namespace broadcast_backward_cpu {
namespace {

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

// Back through what follows: the gradient of v for that of the result, g.
inline float follow_grad(float g, float& bias_g) {
  bias_g = g;
  return g;
}

// The gradient of the input: terms `begin` to `end` of the sums over the results that elements `first` to `last` meet.
inline void sum_input(const std::uint16_t* grad_result, int first, int last, int begin, int end, double* total) {
  for (int element = first; element < last; ++element) {
    total[element - first] = 0.0;
  }
  for (int repeat = begin; repeat < end; ++repeat) {
    for (int element = first; element < last; ++element) {
      const int index = repeat * 1024 + element;
      float bias_g;
      const float g = follow_grad(load(grad_result[index]), bias_g);
      total[element - first] += g;
    }
  }
}

// That of bias: terms `begin` to `end` of the sums over the results that elements `first` to `last` meet.
inline void bias_sum(const std::uint16_t* grad_result, int first, int last, int begin, int end, double* total) {
  for (int element = first; element < last; ++element) {
    total[element - first] = 0.0;
  }
  for (int repeat = begin; repeat < end; ++repeat) {
    for (int element = first; element < last; ++element) {
      const int index = element * 1024 + repeat;
      float bias_g;
      follow_grad(load(grad_result[index]), bias_g);
      total[element - first] += bias_g;
    }
  }
}

}  // namespace
}  // namespace broadcast_backward_cpu

// Back through: broadcast to another shape, then add, on `threads` threads. Returns 0, or -1 for a wrong number of threads.
extern "C" int broadcast_backward_cpu_launch(
    const std::uint16_t* grad_result,
    float* grad_input,
    std::uint16_t* bias_grad,
    double* sums,
    int threads,
    void*) {
  using namespace broadcast_backward_cpu;
  if (threads < 1) return -1;
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int task = 0; task < 128; ++task) {  // 1024 elements, 64 at a time, in 8 parts of the 8192 terms
    double total[64];
    const int first = task % 16 * 64;
    const int last = first + 64;
    const int begin = task / 16 * 1024;
    const int end = begin + 1024;
    sum_input(grad_result, first, last, begin, end, total);
    for (int element = first; element < last; ++element) {
      sums[task / 16 * 1024 + element] = total[element - first];
    }
  }
  for (int element = 0; element < 1024; ++element) {
    double total = 0.0;
    for (int part = 0; part < 8; ++part) {
      total += sums[part * 1024 + element];
    }
    grad_input[element] = static_cast<float>(total);
  }
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int task = 0; task < 8192; ++task) {  // 8192 elements, 1 at a time
    double total[1];
    const int first = task;
    const int last = first + 1;
    bias_sum(grad_result, first, last, 0, 1024, total);
    for (int element = first; element < last; ++element) {
      bias_grad[element] = store(static_cast<float>(total[element - first]));
    }
  }
  return 0;
}
