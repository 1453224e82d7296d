// Enough of CUDA to run an emitted kernel on a CPU, one block after the other: each thread of a block is a fiber, which runs until it waits for
// its warp or its block. Shared memory is static memory, but for that whose size the launch names. Nothing here is fast, and data races between threads
// show only as wrong order.
#pragma once

#include <cstdint>
#include <vector>

#include "fibers.h"
#include "numbers.h"
#include "shared_memory.h"

#define __device__
#define __global__
#define __constant__
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)
#define __shared__ static

enum cudaError_t { cudaSuccess = 0, cudaErrorLaunchFailure = 719 };
using cudaStream_t = void*;
enum { cudaLaunchAttributeProgrammaticStreamSerialization };
struct cudaLaunchAttribute {
  int id;
  struct {
    int programmaticStreamSerializationAllowed;
  } val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  std::size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  unsigned numAttrs;
};
inline cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
inline cudaError_t cudaSetDevice(int) { return cudaSuccess; }

namespace emulation {

struct Barrier {
  int members = 0, arrived = 0;
  long generation = 0;
};

inline std::vector<Barrier> warps;
inline Barrier block;
inline dim3 block_index, block_size, grid_size;
inline float lanes[1024];

inline dim3 thread_index() {
  return dim3(current % block_size.x, current / block_size.x % block_size.y, current / block_size.x / block_size.y);
}

inline void release(Barrier& barrier) {
  barrier.arrived = 0;
  ++barrier.generation;
}

inline void wait(Barrier& barrier) {
  if (++barrier.arrived == barrier.members) {
    release(barrier);
    return;
  }
  sleep_on(barrier.generation);
}

// A thread that has returned is waited for no longer.
inline void leave(Barrier& barrier) {
  if (--barrier.members > 0 && barrier.arrived == barrier.members) release(barrier);
}

inline void run_block() {
  const int count = static_cast<int>(block_size.x * block_size.y * block_size.z);
  warps.assign((count + 31) / 32, Barrier{});
  for (int i = 0; i < count; ++i) ++warps[i / 32].members;
  block = Barrier{};
  block.members = count;
  ended = [] {
    copies_end();
    leave(warps[current / 32]);
    leave(block);
  };
  shared_begins();
  run_threads(count);
  shared_ends();
}

}  // namespace emulation

#define threadIdx (emulation::thread_index())
#define blockIdx (emulation::block_index)

inline void __syncthreads() { emulation::wait(emulation::block); }
inline void __syncwarp() { emulation::wait(emulation::warps[emulation::current / 32]); }
inline float __shfl_xor_sync(unsigned, float v, int offset) {
  emulation::lanes[emulation::current] = v;
  __syncwarp();
  const float other = emulation::lanes[emulation::current ^ offset];
  __syncwarp();
  return other;
}
inline bool __any_sync(unsigned, bool v) {
  float any = v;
  for (int offset = 16; offset > 0; offset /= 2) any += __shfl_xor_sync(0xffffffffu, any, offset);
  return any > 0.0f;
}

template <typename... Parameters, typename... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...), Arguments... arguments) {
  emulation::block_size = config->blockDim;
  emulation::grid_size = config->gridDim;
  emulation::shared_bytes = config->dynamicSmemBytes;
  emulation::body = [=] { kernel(arguments...); };
  const dim3 blocks = config->gridDim;
  const bool done = emulation::completes([&] {
    for (unsigned i = 0; i < blocks.x * blocks.y; ++i) {
      const unsigned block = emulation::seed ? blocks.x * blocks.y - 1 - i : i;
      emulation::block_index = dim3(block % blocks.x, block / blocks.x);
      emulation::run_block();
    }
  });
  return done ? cudaSuccess : cudaErrorLaunchFailure;
}
