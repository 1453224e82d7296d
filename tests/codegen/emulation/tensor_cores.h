// What the convolution for mma.sync needs beyond cuda_runtime.h: more of a warp's exchanges, vectors, and the tensor core's own instructions on fragments
// as the PTX ISA lays them out. A product is exact, and the sum of an instruction is rounded toward zero once, nearly as the device does it.
#pragma once

#include <mutex>

#include "cuda_runtime.h"

namespace emulation {
inline std::uint64_t words[1024];

template <typename T>
T exchange(T v, int from) {
  words[current] = bits_as<std::uint32_t>(v);
  __syncwarp();
  const T other = bits_as<T>(static_cast<std::uint32_t>(words[current / 32 * 32 + from]));
  __syncwarp();
  return other;
}

// What the lanes of a warp do together: each brings `own`, and the last to come does the work for all.
template <typename Lane, typename Work>
void together(const Lane& own, Work work) {
  static Lane lanes[32][32];
  auto& warp = lanes[current / 32];
  warp[current % 32] = own;
  Barrier& barrier = warps[current / 32];
  if (barrier.members != 32) fail("an instruction of a warp whose lanes are not all there");
  if (barrier.arrived + 1 == barrier.members) work(warp);
  wait(barrier);
}

// What `join` makes of the warp's numbers, lane by lane.
template <typename Join>
std::uint32_t reduce(std::uint32_t v, Join join) {
  together(&v, [=](std::uint32_t* const(&lanes)[32]) {
    for (int lane = 1; lane < 32; ++lane) *lanes[0] = join(*lanes[0], *lanes[lane]);
    for (std::uint32_t* to : lanes) *to = *lanes[0];
  });
  return v;
}

// Matrices of 8 x 8 values: lane l names row l % 8 of matrix l / 8, as a place in `memory`.
template <int kCount>
void load_matrices(std::uint32_t (&values)[kCount], std::uint32_t row, const unsigned char* memory) {
  struct Rows {
    std::uint32_t* values;
    std::uint32_t row;
  };
  together(Rows{values, row}, [=](const Rows (&lanes)[32]) {
    for (int lane = 0; lane < 32; ++lane) {
      for (int i = 0; i < kCount; ++i) std::memcpy(&lanes[lane].values[i], memory + lanes[i * 8 + lane / 4].row + lane % 4 * 4, 4);
    }
  });
}

// The float next to a sum on the side of zero: what the mantissa of a float cannot hold is cut off. (A denormal one is the nearest.)
inline float toward_zero(double sum) { return static_cast<float>(bits_as<double>(bits_as<std::uint64_t>(sum) & ~0x1FFFFFFFull)); }

enum class Operand { kFp16, kBf16, kTf32 };

// Value `i` of a 32-bit word: TF32 has one, whose last 13 bits the tensor core does not see.
template <Operand kOperand>
float number(std::uint32_t word, int i) {
  if (kOperand == Operand::kTf32) return __uint_as_float(word & 0xFFFFE000u);
  const auto bits = static_cast<std::uint16_t>(word >> 16 * i);
  return kOperand == Operand::kBf16 ? __bfloat162float({bits}) : __half2float({bits});
}

struct Multiply {
  float* sums[4];
  std::uint32_t a[4], b[2];
};

// sums (16x8) += a (16xK) b (Kx8), K = 16, or 8 of TF32. A lane's words are at row lane / 4 of `a` or column lane / 4 of `b`, at values lane % 4 x
// values in a word of K; the second word of `a` is 8 rows further down, its last two and the second of `b` in the second half of K.
template <Operand kOperand>
void multiply(const Multiply& own) {
  together(own, [](const Multiply (&lanes)[32]) {
    constexpr int kPerWord = kOperand == Operand::kTf32 ? 1 : 2, kK = 8 * kPerWord;
    using Four = double __attribute__((vector_size(32)));  // added as one, whatever the compiler is told to do
    double a[16][kK];
    Four b[kK][2];
    for (int lane = 0; lane < 32; ++lane) {
      for (int v = 0; v < kPerWord; ++v) {
        const int row = lane / 4, k = lane % 4 * kPerWord + v;
        for (int i = 0; i < 4; ++i) a[row + i % 2 * 8][k + i / 2 * kK / 2] = number<kOperand>(lanes[lane].a[i], v);
        for (int i = 0; i < 2; ++i) b[k + i * kK / 2][row / 4][row % 4] = number<kOperand>(lanes[lane].b[i], v);
      }
    }
    for (int row = 0; row < 16; ++row) {
      const auto at = [&](int column) { return lanes[row % 8 * 4 + column / 2].sums[row / 8 * 2 + column % 2]; };
      Four low, high;
      for (int i = 0; i < 4; ++i) low[i] = *at(i), high[i] = *at(i + 4);
      for (int k = 0; k < kK; ++k) low += a[row][k] * b[k][0], high += a[row][k] * b[k][1];
      for (int i = 0; i < 4; ++i) *at(i) = toward_zero(low[i]), *at(i + 4) = toward_zero(high[i]);
    }
  });
}
}  // namespace emulation

template <typename T>
T __shfl_sync(unsigned, T v, int from) {
  return emulation::exchange(v, from);
}
inline float __shfl_down_sync(unsigned, float v, int offset, int width = 32) {
  const int lane = emulation::current % 32;
  return emulation::exchange(v, lane % width + offset < width ? lane + offset : lane);
}
inline std::uint32_t __reduce_max_sync(unsigned, std::uint32_t v) {
  return emulation::reduce(v, [](std::uint32_t a, std::uint32_t b) { return max(a, b); });
}
inline bool __syncthreads_and(bool v) {
  static int refusals = 0;
  __syncthreads();
  refusals = 0;
  __syncthreads();
  refusals += !v;
  __syncthreads();
  return refusals == 0;
}

enum cudaDeviceAttribute { cudaDevAttrMultiProcessorCount };
enum cudaFunctionAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttribute, int) { return *value = 3, cudaSuccess; }
template <typename Kernel>
cudaError_t cudaFuncSetAttribute(Kernel, cudaFunctionAttribute, int) {
  return cudaSuccess;
}
template <typename Kernel>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* count, Kernel, int, int) {
  return *count = 1, cudaSuccess;
}
