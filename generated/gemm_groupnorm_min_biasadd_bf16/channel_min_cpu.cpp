// gemm_groupnorm_min_biasadd_bf16: min over the channels of a row
//
//   linear(in_features=8192, out_features=8192, bias=True)  # gemm
//   group_norm(num_groups=512, eps=1e-05, affine=True)  # group_norm
//   min(dim=1, keepdim=True)
//   add(shape=(1, 8192, 1, 1), init=randn)  # bias
//   x (1024, 8192) -> y (1, 8192, 1024, 1), bf16
//
// Plan for cpu on host:
//
// Generated from specs/gemm_groupnorm_min_biasadd.yaml; do not edit. Again: make generate SPEC=specs/gemm_groupnorm_min_biasadd.yaml PRECISION=bf16

#include <cmath>
#include <cstdint>
#include <cstring>

namespace channel_min_cpu {
namespace {

constexpr int kRows = 1024;  // batch
constexpr int kChannels = 8192;  // values of a row

// A float as an integer of the same order, NaN above all else, so that the maximum of integers is PyTorch's of floats, NaN included. It is one
// instruction without a branch, in a vector or not, which a comparison that minds NaN is not.
inline std::int32_t ordered(float v) {
  std::int32_t bits;
  std::memcpy(&bits, &v, sizeof bits);
  bits ^= (bits >> 31) & 0x7FFFFFFF;
  return v == v ? bits : 0x7FC00000;
}

inline float from_ordered(std::int32_t bits) {
  bits ^= (bits >> 31) & 0x7FFFFFFF;
  float v;
  std::memcpy(&v, &bits, sizeof v);
  return v;
}

inline std::int32_t maximum(std::int32_t a, std::int32_t b) {
  return a > b ? a : b;
}

// Folds the channels of a row.
inline void run(const float* input, float* output, int row) {
  const float* const values = input + std::int64_t{row} * kChannels;
  std::int32_t best = ordered(-INFINITY);  // of the negated values
#pragma omp simd reduction(max : best)
  for (int i = 0; i < kChannels; ++i) {
    best = maximum(best, ordered(-values[i]));
  }
  const float folded = -from_ordered(best);
  output[row] = folded;
}

}  // namespace
}  // namespace channel_min_cpu

// Min over the channels of a row, on `threads` threads. Returns 0, or -1 for a wrong number of threads.
extern "C" int channel_min_cpu_launch(const float* input, float* output, int threads, void*) {
  using namespace channel_min_cpu;
  if (threads < 1) return -1;
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int index = 0; index < kRows; ++index) {
    run(input, output, index);
  }
  return 0;
}
