// fp16 by the processor's own conversions.
#pragma once

#include <immintrin.h>

struct __half {
  unsigned short bits;
};

inline float __half2float(__half v) { return _cvtsh_ss(v.bits); }
inline __half __float2half_rn(float v) { return {_cvtss_sh(v, _MM_FROUND_TO_NEAREST_INT)}; }
