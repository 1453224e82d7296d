// What the convolution for mma.sync needs beyond cuda_runtime.h: more of a warp's exchanges, vectors, and the tensor core's own instructions on fragments
// as the PTX ISA lays them out. A product is exact, a sum is rounded to fp32 once: the real one truncates.
#pragma once

#include <mutex>

#include "cuda_runtime.h"

namespace emulation {
inline dim3 grid_size;
inline std::uint64_t words[1024];

template <typename T>
T exchange(T v, int from) {
  words[current] = bits_as<std::uint32_t>(v);
  __syncwarp();
  const T other = bits_as<T>(static_cast<std::uint32_t>(words[current / 32 * 32 + from]));
  __syncwarp();
  return other;
}

inline float number(std::uint32_t word, int half, bool bf16) {
  const auto bits = static_cast<std::uint16_t>(word >> 16 * half);
  return bf16 ? __bfloat162float({bits}) : __half2float({bits});
}

// Matrices of 8 x 8 values: lane l names row l % 8 of matrix l / 8, as a place in `memory`.
template <int kCount>
void load_matrices(std::uint32_t (&values)[kCount], std::uint32_t row, const unsigned char* memory) {
  const int lane = current % 32;
  words[current] = row;
  __syncwarp();
  for (int i = 0; i < kCount; ++i) std::memcpy(&values[i], memory + words[current / 32 * 32 + i * 8 + lane / 4] + lane % 4 * 4, 4);
  __syncwarp();
}

// sums (16x8) += a (16x16) b (16x8)
inline void multiply(float (&sums)[4], const std::uint32_t (&a)[4], const std::uint32_t (&b)[2], bool bf16) {
  static float lefts[32][16][16], rights[32][16][8];
  auto& left = lefts[current / 32];
  auto& right = rights[current / 32];
  const int row = current % 32 / 4, pair = current % 4 * 2;
  for (int i = 0; i < 4; ++i) {
    for (int half = 0; half < 2; ++half) left[row + i % 2 * 8][pair + half + i / 2 * 8] = number(a[i], half, bf16);
  }
  for (int i = 0; i < 2; ++i) {
    for (int half = 0; half < 2; ++half) right[pair + half + i * 8][row] = number(b[i], half, bf16);
  }
  __syncwarp();
  for (int e = 0; e < 4; ++e) {
    double sum = sums[e];
    for (int k = 0; k < 16; ++k) sum += double{left[row + e / 2 * 8][k]} * right[k][pair + e % 2];
    sums[e] = static_cast<float>(sum);
  }
  __syncwarp();
}
}  // namespace emulation

template <typename T>
T __shfl_sync(unsigned, T v, int from) {
  return emulation::exchange(v, from);
}
inline float __shfl_down_sync(unsigned, float v, int offset) {
  const int lane = emulation::current % 32;
  return emulation::exchange(v, lane + offset < 32 ? lane + offset : lane);
}
inline std::uint32_t __reduce_max_sync(unsigned, std::uint32_t v) {
  std::uint32_t most = 0;
  for (int from = 0; from < 32; ++from) most = std::max(most, emulation::exchange(v, from));
  return most;
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
