// bfloat16 as the upper half of a float.
#pragma once

#include <cstdint>
#include <cstring>

struct __nv_bfloat16 {
  std::uint16_t bits;
};

inline float __bfloat162float(__nv_bfloat16 v) {
  const std::uint32_t wide = std::uint32_t{v.bits} << 16;
  float result;
  std::memcpy(&result, &wide, sizeof result);
  return result;
}

inline __nv_bfloat16 __float2bfloat16_rn(float v) {
  std::uint32_t bits;
  std::memcpy(&bits, &v, sizeof bits);
  return {static_cast<std::uint16_t>(v == v ? (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16 : 0x7FFFu)};
}
