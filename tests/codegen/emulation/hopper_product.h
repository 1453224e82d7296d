// What the convolution as a product needs beyond the GEMM: pixels that the copy engine gathers (im2col), operands that begin at any row, and the kernels that
// split x and W.
#pragma once

#include "hopper_gemm.h"

namespace emulation {

// Where no copy ever wrote, a kernel's own zeros lie.
const bool shifts = (any_row = true, is_ordinary = [](std::uint32_t address) { return units[address >> 24].at((address & 0xFFFFFF) / kUnit).phase < 0; }, true);

template <typename Window>
auto depth_of(const Window& at, int) -> decltype(at.d) {
  return at.d;
}
template <typename Window>
int depth_of(const Window&, long) {
  return 0;
}

}  // namespace emulation

template <typename Window>
void copy_pixels(std::uint32_t to, const CUtensorMap* map, int channel, const Window& at, int sample, std::uint32_t offset, std::uint32_t barrier) {
  using namespace emulation;
  const std::uint32_t bytes = map->channels * 2 * map->pixels;
  if (to % kUnit != 0) fail("pixels that do not start at a multiple of 1024 bytes");
  for_units(to, bytes, [&](Unit& unit) {
    if (unit.readers > 0) fail("a stage is filled while it is multiplied");
    unit.barrier = barrier, unit.phase = mbarrier(barrier).phase;
  });
  std::memset(place(to, bytes), 0xFF, bytes);
  const bool deep = map->rank == 5;
  const std::vector<int> start = deep ? std::vector<int>{channel, at.w, at.h, depth_of(at, 0), sample} : std::vector<int>{channel, at.w, at.h, sample, 0};
  const std::vector<int> offsets = {static_cast<int>(offset >> 16), static_cast<int>(offset >> 8 & 255), static_cast<int>(offset & 255)};
  for (int i = 0; i < map->rank - 2; ++i) {
    const int from = start[1 + i] - map->lower[i];
    if (from < 0 || from % static_cast<int>(map->steps[i]) != 0 || start[1 + i] >= static_cast<int>(map->sizes[1 + i]) + map->upper[i]) fail("a window that begins outside the map's box");
  }
  const CUtensorMap copied = *map;
  later([=] {
    copied.gather(place(to, bytes), to & 0xFFFFFF, start.data(), offsets.data());
    mbarrier(barrier).complete(static_cast<int>(bytes));
  });
}

inline void copy_run(std::uint32_t to, const void* from, int bytes, std::uint32_t barrier) {
  using namespace emulation;
  if (to % 16 != 0 || reinterpret_cast<std::uintptr_t>(from) % 16 != 0 || bytes % 16 != 0) fail("a run that is not aligned");
  for_units(to, bytes, [&](Unit& unit) {
    if (unit.readers > 0) fail("a stage is filled while it is multiplied");
    check_fenced(unit);
    unit.barrier = barrier, unit.phase = mbarrier(barrier).phase;
  });
  std::memset(place(to, bytes), 0xFF, bytes);
  later([=] {
    std::memcpy(place(to, bytes), from, bytes);
    mbarrier(barrier).complete(bytes);
  });
}

inline float __shfl_sync(unsigned, float v, int lane) { return bits_as<float>(__shfl_sync(~0u, bits_as<int>(v), lane)); }
inline std::uint32_t atomicAdd(std::uint32_t* to, std::uint32_t v) {
  const std::uint32_t before = *to;
  *to += v;
  return before;
}
inline unsigned short __half_as_ushort(__half v) { return v.bits; }
inline std::uint32_t __byte_perm(std::uint32_t low, std::uint32_t high, std::uint32_t places) {
  const std::uint64_t both = static_cast<std::uint64_t>(high) << 32 | low;
  std::uint32_t found = 0;
  for (int i = 0; i < 4; ++i) found |= static_cast<std::uint32_t>(both >> 8 * (places >> 4 * i & 7) & 255) << 8 * i;
  return found;
}
