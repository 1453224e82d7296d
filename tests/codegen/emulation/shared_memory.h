// Shared memory whose size a launch names, and copies into it that are under way: a block's, beside its threads.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "fibers.h"

namespace emulation {

struct alignas(128) Line {
  unsigned char bytes[128];
};
inline std::size_t shared_bytes = 0;
inline std::vector<Line> shared_lines;                                // the last one is beyond the memory that was asked for
inline std::vector<std::pair<std::uintptr_t, std::size_t>> readable;  // where copies may read, where anything is said about it

inline unsigned char* shared_memory() { return shared_lines.data()->bytes; }
inline unsigned char* shared_start = nullptr;  // the same, for what is declared outside of functions

// `bytes` bytes at an address of shared memory, which `bytes` divides.
inline unsigned char* shared_place(std::uint32_t address, std::uint32_t bytes) {
  if (address % bytes != 0) fail("an address of shared memory that is not aligned");
  if (address + bytes > shared_bytes) fail("an address beyond the shared memory that was asked for");
  return shared_memory() + address;
}

// A copy of `used` bytes and zeros behind them, `bytes` in all, in its thread's group of that number.
struct Copy {
  std::uint32_t to;
  const void* from;
  int bytes, used, group;
};

// A thread's copies under way, and the number of the group that is open.
struct Copies {
  std::vector<Copy> left;
  int open = 0;
};
inline std::array<Copies, 1024> copies;

// What a copy writes is unusable from its start on, and there when its thread has waited for it: the device may write at any time in between.
inline void start_copy(std::uint32_t to, const void* from, int bytes, int used) {
  const auto source = reinterpret_cast<std::uintptr_t>(from);
  if (used < 0 || used > bytes || source % bytes != 0) fail("a copy that is not aligned, or of more than it has");
  bool known = used == 0 || readable.empty();
  for (const auto& [begin, size] : readable) known = known || (source >= begin && source + used <= begin + size);
  if (!known) fail("a copy from beyond its tensor");
  std::memset(shared_place(to, bytes), 0xFF, bytes);
  copies[current].left.push_back({to, from, bytes, used, copies[current].open});
}

inline void close_copies() { ++copies[current].open; }

// Waits until no more than `pending` closed groups are under way.
inline void await_copies(int pending) {
  Copies& own = copies[current];
  auto copy = own.left.begin();
  for (; copy != own.left.end() && copy->group < own.open - pending; ++copy) {
    unsigned char* const to = shared_place(copy->to, copy->bytes);
    std::memset(to, 0, copy->bytes);
    std::memcpy(to, copy->from, copy->used);
  }
  own.left.erase(own.left.begin(), copy);
}

// Shared memory starts as NaN: whoever reads what nobody wrote shows it.
inline void shared_begins() {
  shared_lines.resize((shared_bytes + sizeof(Line) - 1) / sizeof(Line) + 1);
  shared_start = shared_memory();
  std::memset(shared_start, 0xFF, shared_lines.size() * sizeof(Line));
  for (Copies& own : copies) own.left.clear(), own.open = 0;
}

inline void shared_ends() {
  const unsigned char* const end = shared_memory() + shared_lines.size() * sizeof(Line);
  for (const unsigned char* at = shared_memory() + shared_bytes; at != end; ++at) {
    if (*at != 0xFF) fail("a store beyond the shared memory that was asked for");
  }
}

// At a thread's end. A copy that nobody waits for might still write where something else lies by then.
inline void copies_end() {
  if (!copies[current].left.empty()) fail("a copy that nobody waited for");
}

}  // namespace emulation
