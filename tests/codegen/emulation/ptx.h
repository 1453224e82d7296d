// PTX instructions of sm_80 as functions of their names and operands, in the order of the instruction's text.
#pragma once

#include "chains.h"

// Blocks that took the way out of a split that cannot hold its operands: the only ones that ask whether any of their threads says so.
inline int blocks_in_fp32 = 0;
inline bool __syncthreads_or(bool v) {
  const bool any = !__syncthreads_and(!v);
  if (emulation::current == 0) blocks_in_fp32 += any;
  return any;
}
inline std::uint32_t __reduce_add_sync(unsigned, std::uint32_t v) {
  return emulation::reduce(v, [](std::uint32_t a, std::uint32_t b) { return a + b; });
}
template <typename Number>
Number __ldg(const Number* p) {
  return *p;
}
inline std::uint32_t __funnelshift_r(std::uint32_t low, std::uint32_t high, std::uint32_t bits) {
  return static_cast<std::uint32_t>((std::uint64_t{high} << 32 | low) >> (bits & 31));
}
inline std::uint32_t __cvta_generic_to_shared(const void* p) {
  return static_cast<std::uint32_t>(static_cast<const unsigned char*>(p) - emulation::shared_memory());
}

// For the tests: what copies may read from now on (nothing forgets all that was said), and the count above.
extern "C" [[gnu::used]] inline void emulated_readable(const void* begin, std::size_t bytes) {
  if (begin) emulation::readable.emplace_back(reinterpret_cast<std::uintptr_t>(begin), bytes);
  else emulation::readable.clear();
}
extern "C" [[gnu::used]] inline int emulated_blocks_in_fp32() { return std::exchange(blocks_in_fp32, 0); }

namespace ptx {

using Word = std::uint32_t;

inline void cp_async_commit_group() { emulation::close_copies(); }
inline void cp_async_wait_group(int pending) { emulation::await_copies(pending); }
inline void cp_async_ca_shared_global(Word to, const void* from, int bytes, int used) {
  if (bytes != 4 && bytes != 8 && bytes != 16) emulation::fail("a copy of a size that there is not");
  emulation::start_copy(to, from, bytes, used);
}
inline void cp_async_ca_shared_global(Word to, const void* from, int bytes) { cp_async_ca_shared_global(to, from, bytes, bytes); }
inline void cp_async_cg_shared_global_L2_128B(Word to, const void* from, int bytes, int used) {
  if (bytes != 16) emulation::fail("a copy of a size that there is not");
  emulation::start_copy(to, from, bytes, used);
}
inline void cp_async_cg_shared_global_L2_128B(Word to, const void* from, int bytes) { cp_async_cg_shared_global_L2_128B(to, from, bytes, bytes); }

inline void st_shared_b32(Word to, Word v) { std::memcpy(emulation::shared_place(to, sizeof v), &v, sizeof v); }
inline void st_shared_v4_b32(Word to, Word a, Word b, Word c, Word d) {
  const Word words[4] = {a, b, c, d};
  std::memcpy(emulation::shared_place(to, sizeof words), words, sizeof words);
}
inline void ld_shared_v4_f32(float& a, float& b, float& c, float& d, Word from) {
  float values[4];
  std::memcpy(values, emulation::shared_place(from, sizeof values), sizeof values);
  a = values[0], b = values[1], c = values[2], d = values[3];
}
inline void ldmatrix_sync_aligned_m8n8_x4_shared_b16(Word& a, Word& b, Word& c, Word& d, Word row) {
  Word values[4];
  emulation::shared_place(row, 16);
  emulation::load_matrices(values, row, emulation::shared_memory());
  a = values[0], b = values[1], c = values[2], d = values[3];
}

// The sums are read and written.
template <emulation::Operand kOperand>
void multiply(float& a, float& b, float& c, float& d, Word a0, Word a1, Word a2, Word a3, Word b0, Word b1, float& e, float& f, float& g, float& h) {
  if (&a != &e || &b != &f || &c != &g || &d != &h) emulation::fail("sums that are not added to");
  emulation::multiply<kOperand>({{&a, &b, &c, &d}, {a0, a1, a2, a3}, {b0, b1}});
}
template <typename... Operands>
void mma_sync_aligned_m16n8k8_row_col_f32_tf32_tf32_f32(Operands&&... operands) {
  multiply<emulation::Operand::kTf32>(operands...);
}
template <typename... Operands>
void mma_sync_aligned_m16n8k16_row_col_f32_f16_f16_f32(Operands&&... operands) {
  multiply<emulation::Operand::kFp16>(operands...);
}
template <typename... Operands>
void mma_sync_aligned_m16n8k16_row_col_f32_bf16_bf16_f32(Operands&&... operands) {
  multiply<emulation::Operand::kBf16>(operands...);
}

// To nearest, ties away from zero.
inline void cvt_rna_tf32_f32(Word& to, float v) {
  const Word bits = __float_as_uint(v);
  to = v != v ? 0x7FFFFFFFu : std::isinf(v) ? bits : (bits + 0x1000u) & 0xFFFFE000u;
}
inline void cvt_rn_f16x2_f32(Word& to, float high, float low) { to = Word{__float2half_rn(high).bits} << 16 | __float2half_rn(low).bits; }
inline void cvt_rn_bf16x2_f32(Word& to, float high, float low) { to = Word{__float2bfloat16_rn(high).bits} << 16 | __float2bfloat16_rn(low).bits; }

}  // namespace ptx
