// Enough of Hopper to run an emitted kernel on a CPU, one cluster after the other: each thread of a cluster is a fiber, which runs until it waits.
// The wrappers of single instructions are replaced by the functions below. Products are exact and sums are rounded toward zero once an
// instruction, nearly as the tensor cores do. Shared memory starts as NaN, a wait that cannot end stops the process, and copies and stores
// arrive at once, so no order of arrival but one is tried.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <vector>

#include "fibers.h"
#include "numbers.h"

using std::isinf;

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __grid_constant__
#define __align__(n) alignas(n)

namespace emulation {

struct Barrier {
  int arrived = 0;
  long generation = 0;
};

inline int block_size = 0, cluster_size = 1, cluster = 0;
inline std::vector<Barrier> warps, blocks, named;
inline Barrier whole_cluster;
inline std::vector<std::vector<unsigned char>> shared;
inline std::vector<std::uint32_t> words;  // what a thread shows its warp

inline int rank() { return current / block_size; }
inline unsigned char* shared_memory() { return shared[rank()].data(); }

inline void meet(Barrier& barrier, int members, bool waits = true) {
  const long generation = barrier.generation;
  if (++barrier.arrived == members) {
    barrier.arrived = 0;
    ++barrier.generation;
    return;
  }
  while (waits && barrier.generation == generation) yield();
}
inline void meet_warp() { meet(warps[current / 32], 32); }

// The word of every lane of the warp.
template <typename Reader>
auto exchange(std::uint32_t word, Reader read) {
  words[current] = word;
  meet_warp();
  const auto result = read(&words[current / 32 * 32]);
  meet_warp();
  return result;
}

inline void run_cluster(std::size_t shared_bytes) {
  const int count = block_size * cluster_size;
  words.assign(count, 0);
  warps.assign(count / 32, {});
  blocks.assign(cluster_size, {});
  named.assign(cluster_size * 16, {});
  whole_cluster = {};
  shared.assign(cluster_size, std::vector<unsigned char>(shared_bytes, 0xFF));
  run_threads(count);
}

// An mbarrier: a phase ends when nothing is pending, neither arrivals nor bytes.
struct Mbarrier {
  std::uint16_t arrivals;
  std::int16_t pending;
  std::int32_t bytes_and_phase;  // 2 x bytes to come + the phase's parity

  static Mbarrier& of(void* at) { return *static_cast<Mbarrier*>(at); }
  void arrive() {
    if (--pending < 0) fail("more arrivals than a barrier has");
    settle();
  }
  void complete(int bytes) {
    bytes_and_phase -= 2 * bytes;
    settle();
  }
  void settle() {
    if (pending > 0 || bytes_and_phase >> 1 != 0) return;
    bytes_and_phase ^= 1;
    pending = static_cast<std::int16_t>(arrivals);
  }
};
static_assert(sizeof(Mbarrier) == 8);

// The place of a cluster's shared address: the CTA's number above bit 24.
inline unsigned char* place(std::uint32_t address) { return shared[address >> 24].data() + (address & 0xFFFFFF); }

}  // namespace emulation

#define threadIdx (dim3(emulation::current % emulation::block_size))
#define blockIdx (dim3(emulation::cluster * emulation::cluster_size + emulation::rank()))
#define memory (emulation::shared_memory())

// --- the language ---

inline std::size_t __cvta_generic_to_shared(const void* p) {
  return (static_cast<const unsigned char*>(p) - emulation::shared_memory()) | static_cast<std::size_t>(emulation::rank()) << 24;
}
inline void __syncthreads() { emulation::meet(emulation::blocks[emulation::rank()], emulation::block_size); }
inline void __syncwarp() { emulation::meet_warp(); }
inline float __shfl_xor_sync(unsigned, float v, int mask) {
  return emulation::exchange(__float_as_uint(v), [=](const std::uint32_t* words) { return __uint_as_float(words[emulation::current % 32 ^ mask]); });
}
inline int __shfl_sync(unsigned, int v, int lane) {
  return emulation::exchange(static_cast<std::uint32_t>(v), [=](const std::uint32_t* words) { return static_cast<int>(words[lane]); });
}
inline std::uint32_t __reduce_max_sync(unsigned, std::uint32_t v) {
  return emulation::exchange(v, [](const std::uint32_t* words) { return *std::max_element(words, words + 32); });
}
template <typename Number>
Number __ldg(const Number* p) {
  return *p;
}
inline void atomicMax(std::uint32_t* to, std::uint32_t v) { *to = max(*to, v); }
[[noreturn]] inline void __trap() { emulation::fail("trap"); }

// --- the wrappers of single instructions ---

inline void barrier_init(std::uint64_t* barrier, int arrivals) {
  emulation::Mbarrier::of(barrier) = {static_cast<std::uint16_t>(arrivals), static_cast<std::int16_t>(arrivals), 0};
}
inline void arrive(std::uint64_t* barrier) { emulation::Mbarrier::of(barrier).arrive(); }
inline void wait(std::uint64_t* barrier, int parity) {
  while ((emulation::Mbarrier::of(barrier).bytes_and_phase & 1) == parity) emulation::yield();
}
inline void expect_bytes(std::uint64_t* barrier, int bytes) {
  emulation::Mbarrier::of(barrier).bytes_and_phase += 2 * bytes;
  emulation::Mbarrier::of(barrier).arrive();
}
inline void copy_run(void* to, const void* from, int bytes, std::uint64_t* barrier) {
  if (reinterpret_cast<std::uintptr_t>(from) % 16 != 0 || bytes % 16 != 0) emulation::fail("a copy that is not aligned");
  std::memcpy(to, from, bytes);
  emulation::Mbarrier::of(barrier).complete(bytes);
}
inline int cluster_rank() { return emulation::rank(); }
inline void cluster_sync() { emulation::meet(emulation::whole_cluster, emulation::block_size * emulation::cluster_size); }
inline std::uint32_t remote_address(const void* p, int rank) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(p) & 0xFFFFFF) | static_cast<std::uint32_t>(rank) << 24;
}
inline void store_remote(std::uint32_t to, float a, float b, float c, float d, std::uint32_t barrier) {
  const float values[4] = {a, b, c, d};
  std::memcpy(emulation::place(to), values, sizeof values);
  emulation::Mbarrier::of(emulation::place(barrier)).complete(sizeof values);
}
inline void max_remote(std::uint32_t to, std::uint32_t v) { atomicMax(reinterpret_cast<std::uint32_t*>(emulation::place(to)), v); }
inline void named_barrier(int id, int members) { emulation::meet(emulation::named[emulation::rank() * 16 + id], members); }
inline void named_arrive(int id, int members) { emulation::meet(emulation::named[emulation::rank() * 16 + id], members, false); }
template <int kRegisters>
void give_registers() {}
template <int kRegisters>
void take_registers() {}
inline void fence_operands() {}
inline void prefetch(const void*) {}
inline void wgmma_fence() {}
inline void wgmma_commit() {}
template <int kAccumulators>
void wgmma_wait(float (&)[kAccumulators]) {}

inline float operand(std::uint16_t bits) { return kBf16Operands ? __bfloat162float({bits}) : __half2float({bits}); }

// A from registers: a lane's words hold k 2 (lane % 4) and the next of rows lane / 4 and 8 more. B without swizzle: 8 values of K a pixel.
template <int kAccumulators>
void wgmma(float (&d)[kAccumulators], const std::uint32_t (&first)[2], const std::uint32_t (&second)[2], std::uint64_t b, bool accumulate) {
  const int lane = emulation::current % 32;
  float a[2][16];
  for (int half = 0; half < 2; ++half) {
    for (int h = 0; h < 2; ++h) {
      emulation::exchange((half == 0 ? first : second)[h], [&](const std::uint32_t* words) {
        for (int k = 0; k < 8; ++k) a[h][half * 8 + k] = operand(static_cast<std::uint16_t>(words[lane / 4 * 4 + k / 2] >> k % 2 * 16));
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
    for (int k = 0; k < 16; ++k) sum += static_cast<double>(a[i % 4 / 2][k]) * operand(pixels[(start + (k < 8 ? 0 : distance) + column) * 8 + k % 8]);
    const float nearest = static_cast<float>(sum);
    d[i] = std::isfinite(nearest) && std::fabs(nearest) > std::fabs(sum) ? std::nextafter(nearest, 0.0f) : nearest;
  }
}

// --- the host side ---

enum cudaError_t { cudaSuccess = 0 };
enum { cudaFuncAttributeMaxDynamicSharedMemorySize, cudaLaunchAttributeClusterDimension };
using cudaStream_t = void*;
struct cudaLaunchAttribute {
  int id;
  struct {
    struct {
      unsigned x, y, z;
    } clusterDim;
  } val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  std::size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  int numAttrs;
};
inline cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
inline cudaError_t cudaSetDevice(int) { return cudaSuccess; }
template <typename Kernel>
cudaError_t cudaFuncSetAttribute(Kernel, int, int) {
  return cudaSuccess;
}
template <typename Kernel>
cudaError_t cudaOccupancyMaxActiveClusters(int* count, Kernel, const cudaLaunchConfig_t*) {
  return *count = 1, cudaSuccess;
}
template <typename Kernel>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* count, Kernel, int, int) {
  return *count = 1, cudaSuccess;
}
template <typename... Parameters, typename... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...), Arguments... arguments) {
  emulation::block_size = static_cast<int>(config->blockDim.x);
  emulation::cluster_size = config->numAttrs ? static_cast<int>(config->attrs[0].val.clusterDim.x) : 1;
  emulation::body = [=] { kernel(arguments...); };
  const int clusters = static_cast<int>(config->gridDim.x) / emulation::cluster_size;
  for (emulation::cluster = 0; emulation::cluster < clusters; ++emulation::cluster) emulation::run_cluster(config->dynamicSmemBytes);
  return cudaSuccess;
}
