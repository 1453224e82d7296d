// gemm_groupnorm_min_biasadd_fp16: back through: min over the channels of a row
//
//   linear(in_features=8192, out_features=8192, bias=True)  # gemm
//   group_norm(num_groups=512, eps=1e-05, affine=True)  # group_norm
//   min(dim=1, keepdim=True)
//   add(shape=(1, 8192, 1, 1), init=randn)  # bias
//   x (1024, 8192) -> y (1, 8192, 1024, 1), fp16
//
// Plan for cpu on host:
//   the folded values are computed again
//
// Generated from specs/gemm_groupnorm_min_biasadd.yaml; do not edit. Again: make generate SPEC=specs/gemm_groupnorm_min_biasadd.yaml PRECISION=fp16

#include <cmath>
#include <cstdint>
#include <cstring>

namespace channel_min_backward_cpu {
namespace {

constexpr int kRows = 1024;  // batch
constexpr int kChannels = 8192;  // values of a row

// The channels of a row. The first of several equal extremes gets the gradient, the first NaN before all of them, as in PyTorch.
inline void run(const float* input, const float* grad_result, float* grad_input, int item) {
  const float* const values_in = input + std::int64_t{item} * kChannels;
  float* const target = grad_input + std::int64_t{item} * kChannels;
  float best = values_in[0];
  int winner = 0;
  for (int i = 1; i < kChannels; ++i) {
    const float v = values_in[i];
    if (v < best || (v != v && best == best)) {
      best = v;
      winner = i;
    }
  }
  const float g = grad_result[item];
#pragma omp simd
  for (int i = 0; i < kChannels; ++i) {
    target[i] = i == winner ? g : 0.0f;
  }
}

}  // namespace
}  // namespace channel_min_backward_cpu

// Back through: min over the channels of a row, on `threads` threads. Returns 0, or -1 for a wrong number of threads.
extern "C" int channel_min_backward_cpu_launch(const float* input, const float* grad_result, float* grad_input, int threads, void*) {
  using namespace channel_min_backward_cpu;
  if (threads < 1) return -1;
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int index = 0; index < kRows; ++index) {
    run(input, grad_result, grad_input, index);
  }
  return 0;
}
