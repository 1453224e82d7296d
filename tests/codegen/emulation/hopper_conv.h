// The instructions of the one-pass convolution for Hopper.
#pragma once

#include "hopper.h"

#define memory (emulation::shared_memory())

inline void barrier_init(std::uint64_t* barrier, int arrivals) { emulation::make_mbarrier(__cvta_generic_to_shared(barrier), arrivals); }
inline void arrive(std::uint64_t* barrier) { emulation::mbarrier(__cvta_generic_to_shared(barrier)).arrive(); }
inline void wait(std::uint64_t* barrier, int parity, const char*) { emulation::mbarrier(__cvta_generic_to_shared(barrier)).wait(parity); }
inline void expect_bytes(std::uint64_t* barrier, int bytes) { emulation::mbarrier(__cvta_generic_to_shared(barrier)).arrive(bytes); }
inline void copy_run(void* to, const void* from, int bytes, std::uint64_t* barrier) {
  const auto address = static_cast<std::uint32_t>(__cvta_generic_to_shared(barrier));
  if (reinterpret_cast<std::uintptr_t>(from) % 16 != 0 || __cvta_generic_to_shared(to) % 16 != 0 || bytes % 16 != 0) {
    emulation::fail("a copy that is not aligned");
  }
  std::memset(to, 0xFF, bytes);
  emulation::later([=] {
    std::memcpy(to, from, bytes);
    emulation::mbarrier(address).complete(bytes);
  });
}
inline void store_remote(std::uint32_t to, float a, float b, float c, float d, std::uint32_t barrier) {
  const float4 values = {a, b, c, d};
  emulation::later([=] {
    std::memcpy(emulation::place(to, sizeof values), &values, sizeof values);
    emulation::mbarrier(barrier).complete(sizeof values);
  });
}
inline void max_remote(std::uint32_t to, std::uint32_t v) { atomicMax(reinterpret_cast<std::uint32_t*>(emulation::place(to)), v); }
inline void named_arrive(int id, int members) { emulation::meet(emulation::named[emulation::rank() * 16 + id], members, false); }
inline void fence_async() {}
inline void prefetch(const void*) {}
inline void wgmma_fence() {}
inline void wgmma_commit() {}
template <int kPending>
void wgmma_wait() {}

// A from registers: a lane's words hold k 2 (lane % 4) and the next of rows lane / 4 and 8 more. B without swizzle: 8 values of K a pixel.
template <int kAccumulators>
void wgmma(float (&d)[kAccumulators], const std::uint32_t (&first)[2], const std::uint32_t (&second)[2], std::uint64_t b, bool accumulate) {
  const int lane = emulation::current % 32;
  float a[2][16];
  for (int half = 0; half < 2; ++half) {
    for (int h = 0; h < 2; ++h) {
      emulation::exchange((half == 0 ? first : second)[h], [&](const std::uint32_t* words) {
        for (int k = 0; k < 8; ++k) a[h][half * 8 + k] = emulation::operand(static_cast<std::uint16_t>(words[lane / 4 * 4 + k / 2] >> k % 2 * 16));
        return 0;
      });
    }
  }
  const std::uint64_t start = b & 0xFFFF, distance = b >> 16 & 0x3FFF;
  if (distance == 0) emulation::fail("a leading byte offset of nothing");
  const auto* pixels = reinterpret_cast<const std::uint16_t*>(emulation::shared_memory());
  for (int i = 0; i < kAccumulators; ++i) {
    const int column = i / 4 * 8 + lane % 4 * 2 + i % 2;
    double sum = accumulate ? d[i] : 0.0;
    for (int k = 0; k < 16; ++k) {
      sum += static_cast<double>(a[i % 4 / 2][k]) * emulation::operand(pixels[(start + (k < 8 ? 0 : distance) + column) * 8 + k % 8]);
    }
    d[i] = emulation::toward_zero(sum);
  }
}
