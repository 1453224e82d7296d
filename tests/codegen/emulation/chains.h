// What norm kernels and stages need beyond the convolution's: an exchange within parts of a warp.
#pragma once

#include "tensor_cores.h"

template <typename T>
T __shfl_sync(unsigned, T v, int from, int width) {
  return emulation::exchange(v, emulation::current % 32 / width * width + from);
}
