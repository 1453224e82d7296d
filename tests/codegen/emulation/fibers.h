// The threads of an emulated kernel: each is a fiber, which runs until it waits. One runs at a time, in turns.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <vector>

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

namespace emulation {

[[noreturn]] inline void fail(const char* why) {
  std::fprintf(stderr, "%s\n", why);
  std::_Exit(3);
}

struct Thread {
  std::unique_ptr<char[]> stack;
  void* top = nullptr;  // where it waits
  bool done = false;
};

// Leaves the registers that a call must keep on this stack, whose top goes to the first argument, and goes on where the stack of the second was
// left. ucontext's switch would ask the system for the signal mask every time, which takes thirty times as long.
[[gnu::naked, gnu::noipa]] inline void switch_stack(void**, void*) {
  asm("push %rbp; push %rbx; push %r12; push %r13; push %r14; push %r15; mov %rsp, (%rdi)\n"
      "mov %rsi, %rsp; pop %r15; pop %r14; pop %r13; pop %r12; pop %rbx; pop %rbp; ret");
}

constexpr std::size_t kStack = 65536;
constexpr long kPatience = 3000000;  // turns of all threads: a wait that is longer has no end
inline void* scheduler;
inline std::vector<Thread> threads;
inline int current = 0;
inline std::function<void()> body, ended;  // what a thread does, and what happens when it has returned

inline void yield() { switch_stack(&threads[current].top, scheduler); }

inline void start() {
  body();
  threads[current].done = true;
  if (ended) ended();
  yield();
}

// Runs `body` in `count` threads to the end of all.
inline void run_threads(int count) {
  threads.resize(count);
  for (int i = 0; i < count; ++i) {
    Thread& thread = threads[i];
    if (!thread.stack) thread.stack.reset(new char[kStack]);
    thread.done = false;
    // As if `start` had been called: registers of no meaning below its address, and above it one to return to, which it never does. The stacks
    // begin at different places of a page, or all of them would meet in the same lines of the cache.
    const auto end = reinterpret_cast<std::uintptr_t>(thread.stack.get()) + kStack - i % 32 * 128;
    auto* const top = reinterpret_cast<void**>(end / 16 * 16);
    top[-1] = nullptr;
    top[-2] = reinterpret_cast<void*>(&start);
    thread.top = top - 8;
  }
  long turns = 0;
  for (int left = count; left > 0;) {
    left = 0;
    for (current = 0; current < count; ++current) {
      if (threads[current].done) continue;
      switch_stack(&scheduler, threads[current].top);
      left += !threads[current].done;
    }
    if (++turns == kPatience) fail("a wait does not end");
  }
}

}  // namespace emulation
