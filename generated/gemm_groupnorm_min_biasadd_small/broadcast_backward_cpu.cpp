// gemm_groupnorm_min_biasadd_small: back through: broadcast to another shape, then add
//
//   linear(in_features=512, out_features=256, bias=True)  # gemm
//   group_norm(num_groups=8, eps=1e-05, affine=True)  # group_norm
//   min(dim=1, keepdim=True)
//   add(shape=(1, 256, 1, 1), init=randn)  # bias
//   x (128, 512) -> y (1, 256, 128, 1), fp32
//
// Plan for cpu on host:
//   sums over results have an order of their own: the same bits on every run
//
// Generated from specs/gemm_groupnorm_min_biasadd_small.yaml; do not edit. Again: make generate SPEC=specs/gemm_groupnorm_min_biasadd_small.yaml

#include <cmath>
#include <cstdint>
#include <cstring>

namespace broadcast_backward_cpu {
namespace {

// Back through what follows: the gradient of v for that of the result, g.
inline float follow_grad(float g, float& bias_g) {
  bias_g = g;
  return g;
}

// The gradient of the input: terms `begin` to `end` of the sums over the results that elements `first` to `last` meet.
inline void sum_input(const float* grad_result, int first, int last, int begin, int end, double* total) {
  for (int element = first; element < last; ++element) {
    total[element - first] = 0.0;
  }
  for (int repeat = begin; repeat < end; ++repeat) {
    for (int element = first; element < last; ++element) {
      const int index = repeat * 128 + element;
      float bias_g;
      const float g = follow_grad(grad_result[index], bias_g);
      total[element - first] += g;
    }
  }
}

// That of bias: terms `begin` to `end` of the sums over the results that elements `first` to `last` meet.
inline void bias_sum(const float* grad_result, int first, int last, int begin, int end, double* total) {
  for (int element = first; element < last; ++element) {
    total[element - first] = 0.0;
  }
  for (int repeat = begin; repeat < end; ++repeat) {
    for (int element = first; element < last; ++element) {
      const int index = element * 128 + repeat;
      float bias_g;
      follow_grad(grad_result[index], bias_g);
      total[element - first] += bias_g;
    }
  }
}

}  // namespace
}  // namespace broadcast_backward_cpu

// Back through: broadcast to another shape, then add, on `threads` threads. Returns 0, or -1 for a wrong number of threads.
extern "C" int broadcast_backward_cpu_launch(const float* grad_result, float* grad_input, float* bias_grad, int threads, void*) {
  using namespace broadcast_backward_cpu;
  if (threads < 1) return -1;
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int task = 0; task < 2; ++task) {  // 128 elements, 64 at a time
    double total[64];
    const int first = task * 64;
    const int last = first + 64;
    sum_input(grad_result, first, last, 0, 256, total);
    for (int element = first; element < last; ++element) {
      grad_input[element] = static_cast<float>(total[element - first]);
    }
  }
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int task = 0; task < 256; ++task) {  // 256 elements, 1 at a time
    double total[1];
    const int first = task;
    const int last = first + 1;
    bias_sum(grad_result, first, last, 0, 128, total);
    for (int element = first; element < last; ++element) {
      bias_grad[element] = static_cast<float>(total[element - first]);
    }
  }
  return 0;
}
