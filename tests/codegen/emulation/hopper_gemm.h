// The instructions of the Hopper GEMM: boxes of tensors that the copy engine moves, matrices stored transposed, multiplications that run until they are
// waited for. What a thread may not rely on is not there: registers and shared memory that an instruction under way will write hold NaN, an operand is
// read as late as the wait allows, and a stage that somebody still reads may not be filled.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <set>
#include <unordered_map>

#include "hopper.h"
#include "tensor_maps.h"

namespace emulation {

constexpr std::uint32_t kUnit = 1024;  // bytes after which the swizzle repeats; boxes and operands start at multiples

// What a unit of shared memory was last filled for, how many multiplications under way read it, and how many threads have written there by ordinary
// stores which nothing orders before the copy engine yet.
struct Unit {
  std::uint32_t barrier = 0;
  long phase = -1;
  int readers = 0, unfenced = 0;
};
// A multiplication as one thread has issued it.
struct Multiplication {
  float* d;
  std::uint32_t a[4];
  std::uint64_t a_matrix, b_matrix;
  bool from_registers, accumulate;
};
// Accumulators under way: their true values, while the thread's own hold NaN.
struct Sums {
  float values[128];
  int under_way = 0;
};
struct Lane {
  std::vector<Multiplication> issued;
  std::vector<std::size_t> groups;  // how many of `issued` each committed group and those in front of it have
  std::unordered_map<float*, Sums> sums;
  bool fenced = false, waited_for_previous = false;
  std::set<Unit*> unfenced;
  long stores = 0;       // of boxes, which have not read shared memory yet
  const void* shown = nullptr;
};
inline std::vector<Lane> lanes;
inline std::vector<std::vector<Unit>> units;  // by CTA

inline void reset_lanes() {
  lanes.clear();
  lanes.resize(block_size * cluster_size);
  units.assign(cluster_size, std::vector<Unit>(shared[0].size() / kUnit + 1));
}
const bool resets = (reset = reset_lanes, true);

inline Lane& lane() { return lanes[current]; }

// Each unit of [address, address + bytes).
template <typename Act>
void for_units(std::uint32_t address, std::uint32_t bytes, Act act) {
  const std::uint32_t offset = address & 0xFFFFFF;
  for (std::uint32_t i = offset / kUnit; i <= (offset + bytes - 1) / kUnit; ++i) act(units[address >> 24].at(i));
}

inline void check_fenced(const Unit& unit) {
  if (unit.unfenced > 0) fail("the copy engine may overtake an ordinary store");
}

inline void check_filled(std::uint32_t address, std::uint32_t bytes) {
  for_units(address, bytes, [](const Unit& unit) {
    if (unit.phase < 0) fail("an operand that nobody has fetched");
    if (mbarriers.at(unit.barrier).seen[current] <= unit.phase) fail("an operand is read before its barrier was waited for");
  });
}

// An ordinary store, which the copy engine must not overtake.
inline void store(std::uint32_t to, const void* from, std::uint32_t bytes) {
  for_units(to, bytes, [](Unit& unit) {
    if (unit.readers > 0) fail("a stage is written to while it is multiplied");
    unit.unfenced += lane().unfenced.insert(&unit).second;
  });
  std::memcpy(place(to, bytes), from, bytes);
}

inline void copy_box_into(std::uint32_t to, const TensorMap& map, const int (&at)[3], std::uint32_t barrier) {
  if (early && !lane().waited_for_previous && std::count(earlier.begin(), earlier.end(), map.tensor)) {
    fail("a tensor of the kernel in front is read before that has ended");
  }
  const std::uint32_t bytes = map.box_bytes();
  if (to % kUnit != 0 || bytes % kUnit != 0) fail("a box of operands that is no multiple of 1024 bytes, or does not start at one");
  for_units(to, bytes, [&](Unit& unit) {
    if (unit.readers > 0) fail("a stage is filled while it is multiplied");
    check_fenced(unit);
    unit.barrier = barrier, unit.phase = mbarrier(barrier).phase;
  });
  std::memset(place(to, bytes), 0xFF, bytes);
  const std::vector<int> start(at, at + 3);
  later([=] {
    map.fetch(place(to, bytes), to & 0xFFFFFF, start.data());
    mbarrier(barrier).complete(bytes);
  });
}

// Eight values of 16 bits.
inline void widen(const unsigned char* from, float (&to)[8]) {
  const __m128i values = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  if (!bf16_operands) {
    _mm256_storeu_ps(to, _mm256_cvtph_ps(values));
    return;
  }
  std::uint16_t bits[8];
  std::memcpy(bits, &values, sizeof bits);
  for (int i = 0; i < 8; ++i) to[i] = operand(bits[i]);
}

// Bytes of a row of the matrix, which its swizzle covers; whether a matrix may begin at any row.
inline std::uint32_t row_of(std::uint64_t descriptor) { return 256u >> (descriptor >> 62); }
inline bool any_row = false;
inline bool (*is_ordinary)(std::uint32_t) = [](std::uint32_t) { return false; };  // of what a kernel itself has stored, and fenced, before it multiplied

// Whether eight rows of eight columns are 128 bytes that follow each other, and how far the other eight columns are.
inline bool in_pieces(std::uint64_t descriptor) { return descriptor >> 62 == 0; }
inline std::uint32_t lead_of(std::uint64_t descriptor) { return static_cast<std::uint32_t>(descriptor >> 16 & 0x3FFF) << 4; }

// Where a swizzled matrix begins, 16 of its columns chosen, or one of pieces.
inline std::uint32_t matrix_start(std::uint64_t descriptor) {
  const auto start = static_cast<std::uint32_t>(descriptor & 0x3FFF) << 4;
  if (in_pieces(descriptor)) {
    if (!any_row || (descriptor >> 32 & 0x3FFF) << 4 != 128 || lead_of(descriptor) == 0) fail("a descriptor of no matrix of pieces");
    return start;
  }
  const std::uint32_t row = row_of(descriptor);
  if (descriptor >> 62 == 0 || (descriptor >> 32 & 0x3FFF) << 4 != 8 * row || (descriptor >> 49 & 7) != 0 || (!any_row && start % kUnit >= row)) {
    fail("a descriptor of no swizzled matrix");
  }
  return start;
}
inline void matrix_row(std::uint64_t descriptor, int row, float (&to)[16]) {
  const std::uint32_t start = matrix_start(descriptor), bytes = row_of(descriptor);
  float half[8];
  for (int chunk = 0; chunk < 2; ++chunk) {
    if (in_pieces(descriptor)) {
      widen(shared_memory() + start + row * 16 + chunk * lead_of(descriptor), half);
      std::copy(half, half + 8, to + 8 * chunk);
      continue;
    }
    widen(shared_memory() + swizzled_address(start + row * bytes + chunk * 16, swizzle_mask(bytes)), half);
    std::copy(half, half + 8, to + 8 * chunk);
  }
}

using Doubles = double __attribute__((vector_size(32)));

// A warp's 16 rows of one instruction, for all its lanes.
template <int kAccumulators>
void multiply(Lane* warp, std::size_t index) {
  constexpr int kColumns = 2 * kAccumulators;
  static float a[16][16];
  alignas(32) static double b[16][kColumns], sums[16][kColumns];
  const Multiplication& first = warp[0].issued[index];
  for (int i = 0; i < 16; ++i) {
    if (!first.from_registers) {
      matrix_row(first.a_matrix, current / 32 % 4 * 16 + i, a[i]);
      continue;
    }
    for (int k = 0; k < 16; ++k) {
      const std::uint32_t word = warp[i % 8 * 4 + k % 8 / 2].issued[index].a[i / 8 + k / 8 * 2];
      a[i][k] = operand(static_cast<std::uint16_t>(word >> k % 2 * 16));
    }
  }
  for (int column = 0; column < kColumns; ++column) {
    float row[16];
    matrix_row(first.b_matrix, column, row);
    for (int k = 0; k < 16; ++k) b[k][column] = row[k];
  }
  const auto value = [&](int lane, int i) -> float& { return warp[lane].sums.at(warp[lane].issued[index].d).values[i]; };
  for (int lane = 0; lane < 32; ++lane) {
    const float* values = &value(lane, 0);
    for (int i = 0; i < kAccumulators; ++i) sums[lane / 4 + i % 4 / 2 * 8][i / 4 * 8 + lane % 4 * 2 + i % 2] = first.accumulate ? values[i] : 0.0;
  }
  for (int i = 0; i < 16; ++i) {
    for (int column = 0; column < kColumns; column += 16) {
      auto* to = reinterpret_cast<Doubles*>(&sums[i][column]);
      Doubles all[4] = {to[0], to[1], to[2], to[3]};
      for (int k = 0; k < 16; ++k) {
        const auto* from = reinterpret_cast<const Doubles*>(&b[k][column]);
        for (int j = 0; j < 4; ++j) all[j] += static_cast<double>(a[i][k]) * from[j];
      }
      std::copy(all, all + 4, to);
    }
  }
  for (int lane = 0; lane < 32; ++lane) {
    float* values = &value(lane, 0);
    for (int i = 0; i < kAccumulators; ++i) values[i] = toward_zero(sums[lane / 4 + i % 4 / 2 * 8][i / 4 * 8 + lane % 4 * 2 + i % 2]);
  }
}

inline void (*multiply_any)(Lane*, std::size_t) = nullptr;
inline int accumulators = 0;

inline void mark_readers(const Multiplication& issued, int by) {
  const auto cta = static_cast<std::uint32_t>(rank()) << 24;
  const auto mark = [&](std::uint64_t matrix, int rows, int first) {
    if (in_pieces(matrix)) {
      for (int chunk = 0; chunk < 2; ++chunk) {
        const std::uint32_t piece = cta | (matrix_start(matrix) + first * 16 + chunk * lead_of(matrix));
        if (by > 0 && !is_ordinary(piece)) check_filled(piece, rows * 16);
        for_units(piece, rows * 16, [&](Unit& unit) { unit.readers += by; });
      }
      return;
    }
    const std::uint32_t row = row_of(matrix), address = cta | (matrix_start(matrix) / row * row + first * row);
    if (by > 0) check_filled(address, rows * row);
    for_units(address, rows * row, [&](Unit& unit) { unit.readers += by; });
  };
  mark(issued.b_matrix, 2 * accumulators, 0);
  if (!issued.from_registers) mark(issued.a_matrix, 16, current / 32 % 4 * 16);
}

template <int kAccumulators>
void issue(float (&d)[kAccumulators], Multiplication issued) {
  Lane& own = lane();
  if (!own.fenced) fail("a multiplication without a fence in front of its group");
  multiply_any = multiply<kAccumulators>;
  accumulators = kAccumulators;
  issued.d = d;
  Sums& sums = own.sums[d];
  if (sums.under_way++ == 0) {
    std::copy(d, d + kAccumulators, sums.values);
    std::fill(d, d + kAccumulators, NAN);
  }
  own.issued.push_back(issued);
  if (current % 32 == 0) mark_readers(issued, 1);
}

// Does the first multiplications of the warp, as many as its lanes may count on.
inline void finish(std::size_t count) {
  meet_warp(Together::kMultiply);
  if (current % 32 == 0) {
    Lane* warp = &lanes[current];
    for (std::size_t i = 0; i < count; ++i) {
      const Multiplication& first = warp[0].issued[i];
      for (int other = 1; other < 32; ++other) {
        if (warp[other].issued.size() < count) fail("lanes that multiply differently");
        const Multiplication& its = warp[other].issued[i];
        if (its.a_matrix != first.a_matrix || its.b_matrix != first.b_matrix || its.accumulate != first.accumulate) fail("lanes that multiply differently");
      }
      multiply_any(warp, i);
      mark_readers(first, -1);
    }
  }
  meet_warp(Together::kMultiply);
  Lane& own = lane();
  for (std::size_t i = 0; i < count; ++i) {
    float* d = own.issued[i].d;
    const auto sums = own.sums.find(d);
    if (--sums->second.under_way > 0) continue;
    std::copy(sums->second.values, sums->second.values + accumulators, d);
    own.sums.erase(sums);
  }
  own.issued.erase(own.issued.begin(), own.issued.begin() + static_cast<std::ptrdiff_t>(count));
}

inline bool is_nan(std::uint16_t half) { return (half & 0x7FFF) > 0x7C00; }

}  // namespace emulation

// --- barriers ---

inline void barrier_init(std::uint32_t barrier, int arrivals) { emulation::make_mbarrier(barrier, arrivals); }
inline void expect_bytes(std::uint32_t barrier, int bytes) { emulation::mbarrier(barrier).arrive(bytes); }
inline void arrive(std::uint32_t barrier) { emulation::mbarrier(barrier).arrive(); }
inline void arrive(std::uint32_t barrier, int rank) { emulation::mbarrier(remote_address(barrier, rank)).arrive(); }
inline void wait(std::uint32_t barrier, int parity, const char*) {
  if (emulation::mbarrier(barrier).remote) emulation::fail("what other CTAs have stored is not visible after this wait");
  emulation::mbarrier(barrier).wait(parity);
}
inline void wait_cluster(std::uint32_t barrier, int parity, const char*) { emulation::mbarrier(barrier).wait(parity); }
inline void store_remote(std::uint32_t to, float v, std::uint32_t barrier) {
  emulation::mbarrier(barrier).remote = true;
  emulation::later([=] {
    std::memcpy(emulation::place(to, sizeof v), &v, sizeof v);
    emulation::mbarrier(barrier).complete(sizeof v);
  });
}
inline void wait_for_previous_kernel() { emulation::lane().waited_for_previous = true; }

// --- the copy engine ---

inline void prefetch_map(const CUtensorMap*) {}
inline void copy_box(std::uint32_t to, const CUtensorMap* map, int c0, int c1, int c2, std::uint32_t barrier) {
  emulation::copy_box_into(to, *map, {c0, c1, c2}, barrier);
}
inline void copy_box_to_all(std::uint32_t to, const CUtensorMap* map, int c0, int c1, int c2, std::uint32_t barrier) {
  for (int cta = 0; cta < emulation::cluster_size; ++cta) {
    emulation::copy_box_into(remote_address(to, cta), *map, {c0, c1, c2}, remote_address(barrier, cta));
  }
}
inline void store_box(const CUtensorMap* map, std::uint32_t from, int c0, int c1) {
  const std::uint32_t bytes = map->box_bytes();
  if (from % emulation::kUnit != 0) emulation::fail("a box of results that does not start at a multiple of 1024 bytes");
  emulation::for_units(from, bytes, emulation::check_fenced);
  ++emulation::lane().stores;
  const int by = emulation::current;
  const CUtensorMap copied = *map;
  emulation::later([=] {
    const int start[3] = {c0, c1, 0};
    copied.store(emulation::place(from, bytes), from & 0xFFFFFF, start);
    --emulation::lanes[by].stores;
  });
}
inline void wait_stores_read() {
  while (emulation::lane().stores > 0) emulation::sleep_on(emulation::lane().stores);
}
inline void fence_async() {
  for (emulation::Unit* unit : emulation::lane().unfenced) --unit->unfenced;
  emulation::lane().unfenced.clear();
}

// --- ordinary loads and stores ---

inline float4 load_shared(std::uint32_t from) {
  emulation::check_filled(from, 16);
  return bits_as<float4>(*reinterpret_cast<const float4*>(emulation::place(from, 16)));
}
inline uint4 load_words(std::uint32_t from) { return *reinterpret_cast<const uint4*>(emulation::place(from, 16)); }
inline void store_words(std::uint32_t to, const uint4& v) { emulation::store(to, &v, sizeof v); }
// A lane's words hold rows 2 (lane % 4) and the next of column lane / 4 of each matrix, as it is stored.
inline void store_transposed(std::uint32_t to, const std::uint32_t (&v)[4]) {
  if (to % 16 != 0) emulation::fail("a row of a matrix that does not start at a multiple of 16 bytes");
  emulation::lane().shown = v;
  emulation::meet_warp(emulation::Together::kStore);
  const int lane = emulation::current % 32, row = lane % 8;
  const emulation::Lane* warp = &emulation::lanes[emulation::current - lane];
  std::uint16_t values[8];
  for (int column = 0; column < 8; ++column) {
    const auto* words = static_cast<const std::uint32_t*>(warp[4 * column + row / 2].shown);
    values[column] = static_cast<std::uint16_t>(words[lane / 8] >> row % 2 * 16);
  }
  emulation::store(to, values, sizeof values);
  emulation::meet_warp(emulation::Together::kStore);
}

// --- the tensor core ---

inline void wgmma_fence() { emulation::lane().fenced = true; }
inline void wgmma_commit() {
  emulation::lane().groups.push_back(emulation::lane().issued.size());
  emulation::lane().fenced = false;
}
template <int kPending>
void wgmma_wait() {
  auto& groups = emulation::lane().groups;
  if (static_cast<int>(groups.size()) <= kPending) return;
  const std::size_t over = groups.size() - kPending, count = groups[over - 1];
  groups.erase(groups.begin(), groups.begin() + static_cast<std::ptrdiff_t>(over));
  for (std::size_t& group : groups) group -= count;
  emulation::finish(count);
}
template <int kAccumulators>
void wgmma(float (&d)[kAccumulators], const std::uint32_t (&a)[4], std::uint64_t b, bool accumulate) {
  emulation::issue(d, {nullptr, {a[0], a[1], a[2], a[3]}, 0, b, true, accumulate});
}
template <int kAccumulators>
void wgmma(float (&d)[kAccumulators], std::uint64_t a, std::uint64_t b, bool accumulate) {
  emulation::issue(d, {nullptr, {}, a, b, false, accumulate});
}

// abs.f16x2, max.NaN.f16x2, set.lt.f16x2.f16x2 and add.f16x2.
inline void look_at_halves(std::uint32_t& largest, std::uint32_t& faint, std::uint32_t halves, std::uint32_t limits) {
  std::uint32_t greatest = 0, counts = 0;
  for (int shift = 0; shift < 32; shift += 16) {
    const auto half = [=](std::uint32_t word) { return static_cast<std::uint16_t>(word >> shift); };
    const std::uint16_t magnitude = half(halves) & 0x7FFF, last = half(largest);
    const bool nan = emulation::is_nan(magnitude) || emulation::is_nan(last);
    const bool larger = __half2float({magnitude}) > __half2float({last});
    greatest |= static_cast<std::uint32_t>(nan ? 0x7FFF : larger ? magnitude : last) << shift;
    const bool below = __half2float({magnitude}) < __half2float({half(limits)});
    counts |= static_cast<std::uint32_t>(__float2half_rn(__half2float({half(faint)}) + (below ? 1.0f : 0.0f)).bits) << shift;
  }
  largest = greatest, faint = counts;
}
