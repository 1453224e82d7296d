// gemm_groupnorm_min_biasadd_fp16: broadcast to another shape, then add
//
//   linear(in_features=8192, out_features=8192, bias=True)  # gemm
//   group_norm(num_groups=512, eps=1e-05, affine=True)  # group_norm
//   min(dim=1, keepdim=True)
//   add(shape=(1, 8192, 1, 1), init=randn)  # bias
//   x (1024, 8192) -> y (1, 8192, 1024, 1), fp16
//
// Plan for cpu on host:
//
// Generated from specs/gemm_groupnorm_min_biasadd.yaml; do not edit. Again: make generate SPEC=specs/gemm_groupnorm_min_biasadd.yaml PRECISION=fp16

#include <cmath>
#include <cstdint>
#include <cstring>

namespace broadcast_cpu {
namespace {

constexpr int kOutputs = 8388608;  // 1 x 8192 x 1024 x 1 results

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

// What follows, for the result in place `index`.
inline float follow(float v, int index, const std::uint16_t* p_bias) {
  const float c_bias = load(p_bias[index / 1024]);
  v = v + c_bias;  // add(shape=(1, 8192, 1, 1), init=randn)
  return v;
}

}  // namespace
}  // namespace broadcast_cpu

// Broadcast to another shape, then add, on `threads` threads. Returns 0, or -1 for a wrong number of threads.
extern "C" int broadcast_cpu_launch(const float* input, const std::uint16_t* p_bias, std::uint16_t* output, int threads, void*) {
  using namespace broadcast_cpu;
  if (threads < 1) return -1;
  for (int index = 0; index < kOutputs; ++index) {
    output[index] = store(follow(input[index % 1024], index, p_bias));
  }
  return 0;
}
