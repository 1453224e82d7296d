// The threads of an emulated kernel: each is a fiber, which runs until it waits. One runs at a time, in turns. A `seed` changes their order, and
// some of them are held up until the others cannot go on.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <memory>
#include <vector>

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

namespace emulation {

// What a kernel must not do: it ends the launch, whose threads are left where they are.
struct Fault {
  const char* why;
};
[[noreturn]] inline void fail(const char* why) { throw Fault{why}; }

struct Thread {
  std::unique_ptr<char[]> stack;
  void* top = nullptr;  // where it waits
  bool done = false;
  const long* asleep = nullptr;  // it waits until this is no longer `seen`
  long seen = 0;
};

// Leaves the registers that a call must keep on this stack, whose top goes to the first argument, and goes on where the stack of the second was
// left. ucontext's switch would ask the system for the signal mask every time, which takes thirty times as long.
[[gnu::naked, gnu::noipa]] inline void switch_stack(void**, void*) {
  asm("push %rbp; push %rbx; push %r12; push %r13; push %r14; push %r15; mov %rsp, (%rdi)\n"
      "mov %rsi, %rsp; pop %r15; pop %r14; pop %r13; pop %r12; pop %rbx; pop %rbp; ret");
}

constexpr std::size_t kStack = 65536;
constexpr long kPatience = 3000000;  // turns of all threads: a wait that is longer has no end
inline unsigned seed = 0;
inline void* scheduler;
inline std::vector<Thread> threads;
inline int current = 0;
inline std::function<void()> body, ended;  // what a thread does, and what happens when it has returned
inline const char* fault = nullptr;        // of a thread
inline std::function<bool()> between;      // what happens between turns: whether there is anything under way that threads may wait for

inline void yield() { switch_stack(&threads[current].top, scheduler); }

// Until somebody has changed `word`. The thread takes no turns meanwhile.
inline void sleep_on(const long& word) {
  threads[current].asleep = &word;
  threads[current].seen = word;
  yield();
}

inline unsigned next_random() { return (seed = seed * 1664525u + 1013904223u) >> 8; }

inline void start() {
  try {
    body();
    if (ended) ended();
  } catch (const Fault& found) {
    fault = found.why;
  }
  threads[current].done = true;
  yield();
}

// Runs `body` in `count` threads to the end of all. Throws the fault of a thread.
inline void run_threads(int count) {
  fault = nullptr;
  if (static_cast<int>(threads.size()) < count) threads.resize(count);
  for (int i = 0; i < count; ++i) {
    Thread& thread = threads[i];
    if (!thread.stack) thread.stack.reset(new char[kStack]);
    thread.done = false;
    thread.asleep = nullptr;
    // As if `start` had been called: registers of no meaning below its address, and above it one to return to, which it never does. The stacks
    // begin at different places of a page, or all of them would meet in the same lines of the cache.
    const auto end = reinterpret_cast<std::uintptr_t>(thread.stack.get()) + kStack - i % 32 * 128;
    auto* const top = reinterpret_cast<void**>(end / 16 * 16);
    top[-1] = nullptr;
    top[-2] = reinterpret_cast<void*>(&start);
    thread.top = top - 8;
  }
  int left = count;
  int held_from = 0, held_to = 0;
  for (long turns = 0; left > 0; ++turns) {
    const int first = seed ? static_cast<int>(next_random() % count) : 0;
    const bool backward = seed && next_random() % 2;
    if (seed && next_random() % (held_to > 0 ? 1024 : 16) == 0) {
      constexpr int kTogether[] = {1, 32, 128};
      const int together = kTogether[next_random() % 3];
      held_from = static_cast<int>(next_random() % (count / together + 1)) * together;
      held_to = held_to > 0 ? 0 : held_from + together;
    }
    bool ran = false;
    for (int i = 0; i < count; ++i) {
      current = (first + (backward ? count - i : i)) % count;
      Thread& thread = threads[current];
      if (current >= held_from && current < held_to) continue;  // what others must not rely on: that it is as far as they are
      if (thread.done || (thread.asleep && *thread.asleep == thread.seen)) continue;
      thread.asleep = nullptr;
      ran = true;
      switch_stack(&scheduler, thread.top);
      if (fault) throw Fault{fault};
      left -= thread.done;
    }
    const bool coming = (between && between()) || held_to > 0;
    if (!ran) held_from = held_to = 0;
    if ((left > 0 && !ran && !coming) || turns == kPatience) fail("a wait does not end");
  }
}

// Whether `launch` went through; where it did not, what was wrong is told.
template <typename Launch>
bool completes(Launch launch) {
  try {
    launch();
  } catch (const Fault& found) {
    std::fprintf(stderr, "%s\n", found.why);
    return false;
  }
  return true;
}

}  // namespace emulation

// For the tests: another order of threads and of what else has none.
extern "C" [[gnu::used]] inline void emulate_in_order(unsigned seed) { emulation::seed = seed; }
