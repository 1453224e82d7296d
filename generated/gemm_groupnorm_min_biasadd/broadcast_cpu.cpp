// gemm_groupnorm_min_biasadd: broadcast to another shape, then add
//
//   linear(in_features=8192, out_features=8192, bias=True)  # gemm
//   group_norm(num_groups=512, eps=1e-05, affine=True)  # group_norm
//   min(dim=1, keepdim=True)
//   add(shape=(1, 8192, 1, 1), init=randn)  # bias
//   x (1024, 8192) -> y (1, 8192, 1024, 1), fp32
//
// Plan for cpu on host:
//
// Generated from specs/gemm_groupnorm_min_biasadd.yaml; do not edit. Again: make generate SPEC=specs/gemm_groupnorm_min_biasadd.yaml

#include <cmath>
#include <cstdint>
#include <cstring>

namespace broadcast_cpu {
namespace {

constexpr int kOutputs = 8388608;  // 1 x 8192 x 1024 x 1 results

// What follows, for the result in place `index`.
inline float follow(float v, int index, const float* p_bias) {
  const float c_bias = p_bias[index / 1024];
  v = v + c_bias;  // add(shape=(1, 8192, 1, 1), init=randn)
  return v;
}

}  // namespace
}  // namespace broadcast_cpu

// Broadcast to another shape, then add, on `threads` threads. Returns 0, or -1 for a wrong number of threads.
extern "C" int broadcast_cpu_launch(const float* input, const float* p_bias, float* output, int threads, void*) {
  using namespace broadcast_cpu;
  if (threads < 1) return -1;
  for (int index = 0; index < kOutputs; ++index) {
    output[index] = follow(input[index % 1024], index, p_bias);
  }
  return 0;
}
