// Enough of CUDA to run an emitted kernel on a CPU, one block after the other: each thread of a block is a fiber, which runs until it waits for
// its warp or its block. Shared memory is static memory. Nothing here is fast, and data races between threads show only as wrong order.
#pragma once

#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
struct float2 {
  float x, y;
};

enum cudaError_t { cudaSuccess = 0 };
using cudaStream_t = void*;
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  std::size_t dynamicSmemBytes;
  cudaStream_t stream;
};
inline cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
inline cudaError_t cudaSetDevice(int) { return cudaSuccess; }

namespace emulation {

struct Barrier {
  int members = 0, arrived = 0;
  long generation = 0;
};

struct Thread {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  dim3 index;
  bool done = false;
};

inline ucontext_t scheduler;
inline std::vector<Thread> threads;
inline std::vector<Barrier> warps;
inline Barrier block;
inline int current = 0;
inline dim3 block_index, block_size;
inline float lanes[1024];
inline std::function<void()> body;

inline void yield() { swapcontext(&threads[current].context, &scheduler); }

inline void release(Barrier& barrier) {
  barrier.arrived = 0;
  ++barrier.generation;
}

inline void wait(Barrier& barrier) {
  const long generation = barrier.generation;
  if (++barrier.arrived == barrier.members) {
    release(barrier);
    return;
  }
  while (barrier.generation == generation) yield();
}

// A thread that has returned is waited for no longer.
inline void leave(Barrier& barrier) {
  if (--barrier.members > 0 && barrier.arrived == barrier.members) release(barrier);
}

inline void start() {
  body();
  threads[current].done = true;
  leave(warps[current / 32]);
  leave(block);
  yield();
}

inline void run_block() {
  const int count = static_cast<int>(block_size.x * block_size.y * block_size.z);
  threads.resize(count);
  warps.assign((count + 31) / 32, Barrier{});
  block = Barrier{};
  block.members = count;
  for (int i = 0; i < count; ++i) {
    Thread& thread = threads[i];
    if (!thread.stack) thread.stack.reset(new char[65536]);
    thread.index = dim3(i % block_size.x, i / block_size.x % block_size.y, i / block_size.x / block_size.y);
    thread.done = false;
    ++warps[i / 32].members;
    getcontext(&thread.context);
    thread.context.uc_stack.ss_sp = thread.stack.get();
    thread.context.uc_stack.ss_size = 65536;
    thread.context.uc_link = nullptr;
    makecontext(&thread.context, start, 0);
  }
  for (int left = count; left > 0;) {
    left = 0;
    for (current = 0; current < count; ++current) {
      if (threads[current].done) continue;
      swapcontext(&scheduler, &threads[current].context);
      left += !threads[current].done;
    }
  }
}

}  // namespace emulation

#define threadIdx (emulation::threads[emulation::current].index)
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

template <typename... Parameters, typename... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...), Arguments... arguments) {
  emulation::block_size = config->blockDim;
  emulation::body = [=] { kernel(arguments...); };
  for (unsigned y = 0; y < config->gridDim.y; ++y) {
    for (unsigned x = 0; x < config->gridDim.x; ++x) {
      emulation::block_index = dim3(x, y);
      emulation::run_block();
    }
  }
  return cudaSuccess;
}

inline float rsqrtf(float v) { return 1.0f / std::sqrt(v); }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fdividef(float a, float b) { return a / b; }
