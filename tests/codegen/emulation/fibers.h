// The threads of an emulated kernel: each is a fiber, which runs until it waits. One runs at a time, in turns.
#pragma once

#include <ucontext.h>

#include <cstddef>
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
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  bool done = false;
};

constexpr std::size_t kStack = 65536;
constexpr long kPatience = 3000000;  // turns of all threads: a wait that is longer has no end
inline ucontext_t scheduler;
inline std::vector<Thread> threads;
inline int current = 0;
inline std::function<void()> body, ended;  // what a thread does, and what happens when it has returned

inline void yield() { swapcontext(&threads[current].context, &scheduler); }

inline void start() {
  body();
  threads[current].done = true;
  if (ended) ended();
  yield();
}

// Runs `body` in `count` threads to the end of all.
inline void run_threads(int count) {
  threads.resize(count);
  for (Thread& thread : threads) {
    if (!thread.stack) thread.stack.reset(new char[kStack]);
    thread.done = false;
    getcontext(&thread.context);
    thread.context.uc_stack.ss_sp = thread.stack.get();
    thread.context.uc_stack.ss_size = kStack;
    thread.context.uc_link = nullptr;
    makecontext(&thread.context, start, 0);
  }
  long turns = 0;
  for (int left = count; left > 0;) {
    left = 0;
    for (current = 0; current < count; ++current) {
      if (threads[current].done) continue;
      swapcontext(&scheduler, &threads[current].context);
      left += !threads[current].done;
    }
    if (++turns == kPatience) fail("a wait does not end");
  }
}

}  // namespace emulation
