// Enough of Hopper to run an emitted kernel on a CPU, one cluster after the other: each thread of a cluster is a fiber, which runs until it waits.
// The wrappers of single instructions are replaced by functions of the same meaning; here is what the kernels share. Shared memory starts as NaN,
// what the copy engine and other CTAs write arrives some turns later, and a rule of the PTX ISA that is broken or a wait that cannot end stops the
// launch. With another `emulation::seed` the threads take other turns and what is under way arrives in another order.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <numeric>
#include <unordered_map>
#include <vector>

#include "fibers.h"
#include "numbers.h"

using std::isinf;

#define __device__
#define __global__
#define __constant__
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __grid_constant__
#define __align__(n) alignas(n)
#define __shared__ static

namespace emulation {

// What the lanes of a warp do together.
enum class Together { kSync, kExchange, kMultiply, kStore };
struct Barrier {
  int arrived = 0, members = 0;
  long generation = 0;
  Together what = Together::kSync;
};

inline int block_size = 0, cluster_size = 1, cluster = 0;
inline unsigned grid_size = 0;
inline std::vector<Barrier> warps, blocks, named;
inline Barrier whole_cluster;
inline std::vector<std::vector<unsigned char>> shared;
inline std::vector<std::uint32_t> words[2];  // what a thread shows its warp, in turns
inline std::vector<unsigned char> turn;
inline std::vector<int> alive;  // threads of each CTA that have not ended

inline int rank() { return current / block_size; }
inline unsigned char* shared_memory() { return shared[rank()].data(); }

inline void meet(Barrier& barrier, int members, bool waits = true) {
  if (barrier.arrived != 0 && barrier.members != members) fail("a barrier's threads do not agree on how many they are");
  barrier.members = members;
  if (++barrier.arrived == members) {
    barrier.arrived = 0;
    ++barrier.generation;
    return;
  }
  if (waits) sleep_on(barrier.generation);
}
inline void meet_warp(Together what = Together::kSync) {
  Barrier& warp = warps[current / 32];
  if (warp.arrived == 0) warp.what = what;
  if (warp.what != what) fail("lanes of a warp wait for each other at different instructions");
  meet(warp, 32);
}

// The word of every lane of the warp. Nobody writes a word again before all have read it: in between they meet for the other one.
template <typename Reader>
auto exchange(std::uint32_t word, Reader read) {
  auto& shown = words[turn[current] ^= 1];
  shown[current] = word;
  meet_warp(Together::kExchange);
  return read(&shown[current / 32 * 32]);
}

// What is under way: it happens some turns after it was asked for.
struct Event {
  int turns;
  std::function<void()> happen;
};
inline std::vector<Event> events;

inline void later(std::function<void()> happen) { events.push_back({seed ? static_cast<int>(next_random() % 8) : 2, std::move(happen)}); }
inline bool pass_turn_of_events() {
  const bool any = !events.empty();
  std::vector<Event> due;
  for (std::size_t i = 0; i < events.size();) {
    if (events[i].turns-- > 0) {
      ++i;
      continue;
    }
    due.push_back(std::move(events[i]));
    events.erase(events.begin() + static_cast<std::ptrdiff_t>(i));
  }
  for (Event& event : due) event.happen();
  return any;
}

// The place of a cluster's shared address: the CTA's number above bit 24.
inline unsigned char* place(std::uint32_t address, std::size_t bytes = 1) {
  const std::size_t cta = address >> 24, offset = address & 0xFFFFFF;
  if (cta >= shared.size() || offset + bytes > shared[cta].size()) fail("an address outside shared memory");
  if (alive[cta] == 0) fail("shared memory of a CTA that has ended");
  return shared[cta].data() + offset;
}

// An mbarrier: a phase ends when nothing is pending, neither arrivals nor bytes, and somebody has to wait for it before the next arrival. Its memory
// only holds a mark, which shows who writes over it.
struct Mbarrier {
  int arrivals = 0, pending = 0;
  long bytes = 0, phase = 0;
  bool observed = true;  // somebody has waited for the last phase
  bool remote = false;   // other CTAs have stored what it counts
  std::vector<long> seen;  // by thread: how many phases it knows to have ended

  void arrive(long expected = 0) {
    if (!observed) fail("an arrival at a barrier whose last phase nobody has waited for");
    bytes += expected;
    if (--pending < 0) fail("more arrivals than a barrier has");
    settle();
  }
  void complete(int count) {
    bytes -= count;
    settle();
  }
  void settle() {
    if (std::labs(bytes) >= 1 << 20) fail("more bytes than a barrier counts");
    if (pending > 0 || bytes > 0) return;
    if (bytes < 0) fail("more bytes than a barrier was told to expect");
    ++phase;
    pending = arrivals;
    observed = false;
  }
  void wait(int parity) {
    while ((phase & 1) == parity) sleep_on(phase);
    observed = true;
    seen[current] = phase;
  }
};
constexpr std::uint64_t kMark = 0x62617272696572ull;
inline std::unordered_map<std::uint32_t, Mbarrier> mbarriers;  // by address

inline void make_mbarrier(std::uint32_t address, int arrivals) {
  if (address % 8 != 0) fail("a barrier at an address that is no multiple of 8");
  std::memcpy(place(address, sizeof kMark), &kMark, sizeof kMark);
  Mbarrier& barrier = mbarriers[address] = {};
  barrier.arrivals = barrier.pending = arrivals;
  barrier.seen.assign(block_size * cluster_size, 0);
}
inline Mbarrier& mbarrier(std::uint32_t address) {
  if (std::memcmp(place(address, sizeof kMark), &kMark, sizeof kMark) != 0) fail("a barrier that nobody has made, or somebody has written over");
  return mbarriers.at(address);
}

inline void (*reset)() = nullptr;  // what else begins anew with a cluster

inline void run_cluster(std::size_t shared_bytes) {
  const int count = block_size * cluster_size;
  for (auto& shown : words) shown.assign(count, 0);
  turn.assign(count, 0);
  warps.assign(count / 32, {});
  blocks.assign(cluster_size, {});
  named.assign(cluster_size * 16, {});
  whole_cluster = {};
  shared.assign(cluster_size, std::vector<unsigned char>(shared_bytes, 0xFF));
  mbarriers.clear();
  alive.assign(cluster_size, block_size);
  ended = [] { --alive[rank()]; };
  if (reset) reset();
  between = pass_turn_of_events;
  run_threads(count);
  if (!events.empty()) fail("a cluster has ended while something was still on its way");
  for (const auto& [address, barrier] : mbarriers) {
    if (barrier.bytes != 0) fail("a cluster has ended while a barrier still expects bytes");
  }
}

}  // namespace emulation

#define threadIdx (dim3(emulation::current % emulation::block_size, 0, 0))
#define blockIdx (dim3(emulation::cluster * emulation::cluster_size + emulation::rank(), 0, 0))

// --- the language ---

inline std::size_t __cvta_generic_to_shared(const void* p) {
  return (static_cast<const unsigned char*>(p) - emulation::shared_memory()) | static_cast<std::size_t>(emulation::rank()) << 24;
}
inline void __syncthreads() { emulation::meet(emulation::blocks[emulation::rank()], emulation::block_size); }
inline void __syncwarp() { emulation::meet_warp(); }
template <typename T>
T __shfl_xor_sync(unsigned, T v, int mask) {
  return emulation::exchange(bits_as<std::uint32_t>(v), [=](const std::uint32_t* words) { return bits_as<T>(words[emulation::current % 32 ^ mask]); });
}
inline int __shfl_sync(unsigned, int v, int lane) {
  return emulation::exchange(static_cast<std::uint32_t>(v), [=](const std::uint32_t* words) { return static_cast<int>(words[lane]); });
}
inline std::uint32_t __reduce_max_sync(unsigned, std::uint32_t v) {
  return emulation::exchange(v, [](const std::uint32_t* words) { return *std::max_element(words, words + 32); });
}
inline std::uint32_t __reduce_add_sync(unsigned, std::uint32_t v) {
  return emulation::exchange(v, [](const std::uint32_t* words) { return std::accumulate(words, words + 32, 0u); });
}
inline bool __any_sync(unsigned, bool v) { return __reduce_max_sync(~0u, v) != 0; }
template <typename Number>
Number __ldg(const Number* p) {
  return *p;
}
template <typename Number>
Number __ldcs(const Number* p) {
  return *p;
}
template <typename Number>
Number __ldcg(const Number* p) {
  return *p;
}
template <typename Number>
void __stcs(Number* p, Number v) {
  *p = v;
}
inline void atomicMax(std::uint32_t* to, std::uint32_t v) { *to = max(*to, v); }
inline void atomicMin(std::uint32_t* to, std::uint32_t v) { *to = min(*to, v); }
[[noreturn]] inline void __trap() { emulation::fail("trap"); }

// --- the wrappers of single instructions that the kernels share ---

inline int cluster_rank() { return emulation::rank(); }
inline void cluster_sync() { emulation::meet(emulation::whole_cluster, emulation::block_size * emulation::cluster_size); }
inline void named_barrier(int id, int members) { emulation::meet(emulation::named[emulation::rank() * 16 + id], members); }
inline void barrier_init_done() {}
inline std::uint32_t remote_address(std::uint32_t address, int rank) { return (address & 0xFFFFFF) | static_cast<std::uint32_t>(rank) << 24; }
template <int kRegisters>
void give_registers() {}
template <int kRegisters>
void take_registers() {}
template <int kCount>
void pin(float (&)[kCount]) {}

namespace emulation {

extern const bool bf16_operands;  // the kernel's: bfloat16 instead of fp16
inline float operand(std::uint16_t bits) { return bf16_operands ? __bfloat162float({bits}) : __half2float({bits}); }

// As the tensor core does nearly: products and their sum are exact, and rounded toward zero once an instruction.
inline float toward_zero(double sum) {
  const float nearest = static_cast<float>(sum);
  const int away = (std::fabs(nearest) > std::fabs(sum)) & (std::fabs(nearest) < INFINITY);  // no branch: half of all sums are
  return __uint_as_float(__float_as_uint(nearest) - away);
}

}  // namespace emulation

// --- the host side ---

enum cudaError_t { cudaSuccess = 0, cudaErrorLaunchFailure = 719, cudaErrorNotSupported = 801 };
enum { cudaFuncAttributeMaxDynamicSharedMemorySize, cudaLaunchAttributeClusterDimension, cudaLaunchAttributeProgrammaticStreamSerialization };
using cudaStream_t = void*;
struct cudaLaunchAttribute {
  int id;
  struct {
    struct {
      unsigned x, y, z;
    } clusterDim;
    int programmaticStreamSerializationAllowed;
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

namespace emulation {

inline bool early = false;                      // the kernel starts before the one in front of it has ended
inline std::vector<const void*> made, earlier;  // what this kernel and that one write
template <typename T>
void note_written(T* tensor) {
  made.push_back(tensor);
}
template <typename T>
void note_written(const T&) {}
template <typename T>
void note_written(const T*) {}

}  // namespace emulation

template <typename... Parameters, typename... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...), Arguments... arguments) {
  emulation::block_size = static_cast<int>(config->blockDim.x);
  emulation::grid_size = config->gridDim.x;
  emulation::cluster_size = 1;
  emulation::early = false;
  for (int i = 0; i < config->numAttrs; ++i) {
    const cudaLaunchAttribute& attribute = config->attrs[i];
    if (attribute.id == cudaLaunchAttributeClusterDimension) emulation::cluster_size = static_cast<int>(attribute.val.clusterDim.x);
    if (attribute.id == cudaLaunchAttributeProgrammaticStreamSerialization) emulation::early = attribute.val.programmaticStreamSerializationAllowed;
  }
  emulation::earlier = std::move(emulation::made);
  emulation::made.clear();
  (emulation::note_written(static_cast<Parameters>(arguments)), ...);
  emulation::body = [=] { kernel(arguments...); };
  const int clusters = static_cast<int>(config->gridDim.x) / emulation::cluster_size;
  const bool done = emulation::completes([&] {
    for (emulation::cluster = 0; emulation::cluster < clusters; ++emulation::cluster) emulation::run_cluster(config->dynamicSmemBytes);
  });
  return done ? cudaSuccess : cudaErrorLaunchFailure;
}
