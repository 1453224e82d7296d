// gemm_groupnorm_hardtanh_small: x W^T by three TF32 products of operands split in two, promoted, the whole chain in
//   its epilogue
//
//   linear(in_features=1024, out_features=512, bias=True)  # gemm
//   group_norm(num_groups=8, eps=1e-05, affine=True)  # group_norm
//   hardtanh(min_val=-2.0, max_val=2.0)  # hardtanh
//   x (128, 1024) -> y (128, 512), fp32
//
// Plan for sm_80 on h100:
//   tf32x3, three TF32 products of operands split in two, promoted: the fastest here for h100 at fp32
//   tiles of 16x64: 64 blocks on 132 SMs, 0.007 ms estimated
//   groups of 64 channels lie within a tile, so the whole chain ends in this kernel
//   64 blocks of 256 threads, 81920 bytes of shared memory
//
// Generated from specs/gemm_groupnorm_hardtanh_small.yaml; do not edit.
// Again: make generate SPEC=specs/gemm_groupnorm_hardtanh_small.yaml

#include <cuda_runtime.h>
#include <cstdint>
#include <mutex>

namespace gemm_sm80 {
namespace {

constexpr int kBatch = 128;  // rows of x and y
constexpr int kInFeatures = 1024;  // K: values in a row of x or W
constexpr int kOutFeatures = 512;  // rows of W, columns of y
constexpr int kGroupWidth = 64;  // out_features / num_groups = 512 / 8
constexpr float kEps = 1.0e-5f;  // added to the variance
constexpr int kTileM = 16;  // rows of x in a block's tile
constexpr int kTileN = 64;  // rows of W in a block's tile
constexpr int kTileColumns = 64;  // columns of y that a block writes
constexpr int kTilesM = (kBatch + kTileM - 1) / kTileM;  // batch / tile_m, rounded up: 8
constexpr int kTilesN = (kOutFeatures + kTileColumns - 1) / kTileColumns;  // out_features / tile_columns, rounded up: 8
constexpr int kRaster = 8;  // tiles of x that meet one tile of W before the next
constexpr int kWarpsM = 1;  // warps along the tile's rows
constexpr int kWarpsN = 2;  // warps along the tile's columns
constexpr int kWarpsK = 4;  // layers of warps, each with its own part of K
constexpr int kThreads = 256;  // 32 * warps_m * warps_n * warps_k
constexpr int kBlocksPerSm = 1;  // resident blocks of an SM, which leaves 255 registers a thread
constexpr int kWarpM = 16;  // tile_m / warps_m: rows of a warp's part
constexpr int kWarpN = 32;  // tile_n / warps_n: columns of a warp's part
constexpr int kBlocksM = 1;  // warp_m / 16: multiplies along the rows
constexpr int kBlocksN = 4;  // warp_n / 8: multiplies along the columns
constexpr int kRowBytes = 128;  // bytes of a panel's row
constexpr int kPanelK = 32;  // row_bytes / 4: values of K in a panel
constexpr int kStageK = 128;  // panel_k * warps_k: values of K in a stage, one panel for each layer of warps
constexpr int kStages = 2;  // stages in flight
constexpr int kStageCount = 8;  // in_features / stage_k, rounded up to whole partial sums
constexpr int kCopyRows = 32;  // rows that the block's threads copy at once, 16 bytes each: threads * 16 / row_bytes
constexpr int kStageBytes = 40960;  // (tile_m + tile_n) * row_bytes * warps_k
constexpr int kSharedBytes = 81920;  // bytes of 2 stages, reused by the epilogue
constexpr int kBlocks = kTilesM * kTilesN;  // 64
constexpr int kStagesPerSum = 1;  // K = 32 in one partial sum of a warp
constexpr int kSpan = kGroupWidth;  // neighbouring columns that a team of lanes takes together
constexpr int kVector = 4;  // values of one access: the most that span and out_features allow
constexpr int kTeam = 16;  // lanes in a team
constexpr int kTeams = kThreads / kTeam;  // 16
constexpr int kVectorsPerLane = (kSpan / kVector + kTeam - 1) / kTeam;  // 1
constexpr int kRoundRows = 16;  // rows staged at once, as many as fit into the stages' memory
constexpr int kItemsPerTeam = kRoundRows / kTeams;  // 1
constexpr int kPitch = 72;  // tile_n + 8: floats of a staged row, without bank conflicts
constexpr float kInverseSpan = 1.0f / kSpan;  // factor of the mean and the variance
constexpr float kHardtanhMinVal = -2.0f;  // hardtanh's min_val
constexpr float kHardtanhMaxVal = 2.0f;  // hardtanh's max_val

// Early launch on Hopper: waits for the previous kernel's results, then allows the next kernel to launch.
__device__ __forceinline__ void await_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ uint32_t shared_address(const void* pointer) { return static_cast<uint32_t>(__cvta_generic_to_shared(pointer)); }

// Closes the group of copies that this thread has started.
__device__ __forceinline__ void close_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until all but the newest kPending groups of this thread's copies have arrived.
template <int kPending>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Four 8x8 matrices of 16-bit values: lane l names row l % 8 of matrix l / 8 and receives values 2 (l % 4), +1 of row l
// / 4 of each.
// A matrix of fp32 rows is 8 x 4 values: lane l receives value l % 4 of row l / 4.
__device__ __forceinline__ void load_matrices(uint32_t (&values)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 { %0, %1, %2, %3}, [%4];"
               : "=r"(values[0]), "=r"(values[1]), "=r"(values[2]), "=r"(values[3])
               : "r"(row));
}

// Matrix product: sums (16x8) += a (16x8) b (8x8).
__device__ __forceinline__ void multiply(float (&sums)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 { %0, %1, %2, %3}, { %4, %5, %6, %7}, { %8, %9}, { %0, %1, %2, %3};"
               : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Nearest TF32 number, ties away from zero; infinities and NaN stay unchanged.
__device__ __forceinline__ uint32_t round_tf32(float v) {
  uint32_t rounded;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(rounded) : "f"(v));
  return rounded;
}

// Shared memory holds kStages stages; a stage is kWarpsK panels of x, then kWarpsK panels of W; a panel has kRowBytes
// of K for each row.

// Byte offset of 16-byte piece `piece` of `row` in a panel. The permutation lets 8 neighbouring rows touch every bank
// once.
__device__ __forceinline__ uint32_t panel_offset(int row, int piece) {
  return row * kRowBytes + ((piece ^ (row & 7)) << 4);
}

// Starts the copy of 16 bytes.
__device__ __forceinline__ void copy_piece(uint32_t shared, const float* global) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(shared), "l"(global));
}

// Starts this thread's copies of one stage of x.
__device__ __forceinline__ void copy_x(uint32_t shared, const float* global) {
  if (threadIdx.x >= kTileM * (kRowBytes / 16)) return;  // there are more threads than pieces
#pragma unroll
  for (int panel = 0; panel < kWarpsK; ++panel) {
#pragma unroll
    for (int row = 0; row < kTileM; row += kCopyRows) {
      const float* values = global + static_cast<int64_t>(row) * kInFeatures + panel * kPanelK;
      copy_piece(shared + (panel * kTileM + row) * kRowBytes, values);
    }
  }
}

// Starts this thread's copies of one stage of W.
__device__ __forceinline__ void copy_w(uint32_t shared, const float* global) {
#pragma unroll
  for (int panel = 0; panel < kWarpsK; ++panel) {
#pragma unroll
    for (int row = 0; row < kTileN; row += kCopyRows) {
      const float* values = global + static_cast<int64_t>(row) * kInFeatures + panel * kPanelK;
      copy_piece(shared + (panel * kTileN + row) * kRowBytes, values);
    }
  }
}

// This thread's place in x, W and shared memory: piece `threadIdx.x % pieces` of every kCopyRows-th row.
struct Source {
  const float* x;
  const float* w;
  uint32_t offset;
};

__device__ __forceinline__ Source source_of(const float* x, const float* w, int first_row, int first_column) {
  constexpr int kPieces = kRowBytes / 16;
  const int row = threadIdx.x / kPieces;
  const int piece = threadIdx.x % kPieces;
  const int k = piece * (16 / static_cast<int>(sizeof(float)));
  return {x + static_cast<int64_t>(first_row + row) * kInFeatures + k, w + static_cast<int64_t>(first_column + row) * kInFeatures + k,
          panel_offset(row, piece)};
}

// Starts the copies of the source's next stage into the stage at `shared` and steps on.
__device__ __forceinline__ void copy_stage(uint32_t shared, Source& source) {
  copy_x(shared + source.offset, source.x);
  copy_w(shared + kWarpsK * kTileM * kRowBytes + source.offset, source.w);
  source.x += kStageK;
  source.w += kStageK;
}

struct TilePlace {
  int first_row;
  int first_column;
};

// Raster order: kRaster tiles of x meet one tile of W before the next tile of W, so that concurrent blocks share tiles
// in the L2 cache.
__device__ __forceinline__ TilePlace place_of(int block) {
  const int group = block / (kRaster * kTilesN);
  const int within = block % (kRaster * kTilesN);
  return {(group * kRaster + within % kRaster) * kTileM, within / kRaster * kTileColumns};
}

// The part of a tile that a warp multiplies.
struct WarpPlace {
  int layer;
  int row;
  int column;
};

__device__ __forceinline__ WarpPlace warp_place() {
  const int warp = threadIdx.x / 32;
  return {warp / (kWarpsM * kWarpsN), warp / kWarpsN % kWarpsM * kWarpM, warp % kWarpsN * kWarpN};
}

// Shared-memory row and 16-byte piece that this lane passes to load_matrices. The four matrices of 16 rows of x (a left
// fragment) are (rows 0-7, piece 0), (8-15, 0), (0-7, 1), (8-15, 1); those of 16 rows of W are (0-7, 0), (0-7, 1),
// (8-15, 0), (8-15, 1).
__device__ __forceinline__ int left_row() { return threadIdx.x % 16; }
__device__ __forceinline__ int left_piece() { return threadIdx.x / 16 % 2; }
__device__ __forceinline__ int right_row() { return threadIdx.x % 8 + threadIdx.x / 16 % 2 * 8; }
__device__ __forceinline__ int right_piece() { return threadIdx.x / 8 % 2; }

// Split v = high + low, to about 22 bits. Infinity or NaN spoils both parts, and the sums then show it.
__device__ __forceinline__ void split(float v, uint32_t& high, uint32_t& low) {
  high = round_tf32(v);
  low = round_tf32(v - __uint_as_float(high));
}

// Fragment of 16 rows of x and 8 values of K from `piece` on, split: x[0] leading parts, x[1] remainders.
__device__ __forceinline__ void load_left(uint32_t (&x)[2][4], uint32_t panel, int row, int piece) {
  uint32_t raw[4];
  load_matrices(raw, panel + panel_offset(row + left_row(), piece + left_piece()));
#pragma unroll
  for (int i = 0; i < 4; ++i) split(__uint_as_float(raw[i]), x[0][i], x[1][i]);
}

// Fragments of 16 rows of W and 8 values of K: two right operands.
__device__ __forceinline__ void load_right(uint32_t (&first)[2][2], uint32_t (&second)[2][2], uint32_t panel, int row, int piece) {
  uint32_t raw[4];
  load_matrices(raw, panel + panel_offset(row + right_row(), piece + right_piece()));
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    split(__uint_as_float(raw[i]), first[0][i], first[1][i]);
    split(__uint_as_float(raw[2 + i]), second[0][i], second[1][i]);
  }
}

// One stage of a warp's product: in every step the corrections come before the product of the leading parts, while the
// sums are small.
__device__ __forceinline__ void multiply_stage(float (&sums)[kBlocksM][kBlocksN][4], uint32_t x_panel, uint32_t w_panel,
                                               const WarpPlace& warp) {
  constexpr int kStepBytes = 32;  // 8 of K
#pragma unroll
  for (int step = 0; step < kRowBytes / kStepBytes; ++step) {
    const int piece = step * kStepBytes / 16;
    uint32_t w[kBlocksN][2][2];
#pragma unroll
    for (int n = 0; n < kBlocksN; n += 2) {
      load_right(w[n], w[n + 1], w_panel, warp.column + n * 8, piece);
    }
#pragma unroll
    for (int m = 0; m < kBlocksM; ++m) {
      uint32_t x[2][4];
      load_left(x, x_panel, warp.row + m * 16, piece);
#pragma unroll
      for (int n = 0; n < kBlocksN; ++n) multiply(sums[m][n], x[1], w[n][0]);
#pragma unroll
      for (int n = 0; n < kBlocksN; ++n) multiply(sums[m][n], x[0], w[n][1]);
#pragma unroll
      for (int n = 0; n < kBlocksN; ++n) multiply(sums[m][n], x[0], w[n][0]);
    }
  }
}

// The product of a tile. Tensor cores truncate when they add, so a partial sum covers kStagesPerSum stages at most and
// is then added to `sums` with rounding. Meanwhile kStages - 1 stages are being copied.
__device__ __forceinline__ void multiply_tile(float (&sums)[kBlocksM][kBlocksN][4], uint32_t shared, Source source,
                                              const WarpPlace& warp) {
  const uint32_t x_panel = shared + warp.layer * kTileM * kRowBytes;
  const uint32_t w_panel = shared + kWarpsK * kTileM * kRowBytes + warp.layer * kTileN * kRowBytes;
#pragma unroll
  for (int stage = 0; stage < kStages - 1; ++stage) {
    if (stage < kStageCount) copy_stage(shared + stage * kStageBytes, source);
    close_copies();
  }
  int read = 0;
  int write = kStages - 1;
#pragma unroll 1
  for (int first = 0; first < kStageCount; first += kStagesPerSum) {
    float partial[kBlocksM][kBlocksN][4] = {};
#pragma unroll
    for (int stage = 0; stage < kStagesPerSum; ++stage) {
      wait_copies<kStages - 2>();
      __syncthreads();  // this stage has arrived; all threads have read the previous one
      if (first + stage + kStages - 1 < kStageCount) copy_stage(shared + write * kStageBytes, source);
      close_copies();
      multiply_stage(partial, x_panel + read * kStageBytes, w_panel + read * kStageBytes, warp);
      read = read + 1 == kStages ? 0 : read + 1;
      write = write + 1 == kStages ? 0 : write + 1;
    }
#pragma unroll
    for (int m = 0; m < kBlocksM; ++m) {
#pragma unroll
      for (int n = 0; n < kBlocksN; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) sums[m][n][e] += partial[m][n][e];
      }
    }
  }
  wait_copies<0>();
}

// Whether any of a thread's sums is infinite or NaN: 0 * v is 0 for every other v. Very small sums count too.
// An operand that is infinite, NaN or rounds to infinity shows in each of its sums.
// An operand near fp32's smallest number, whose second part is lost, leaves a small sum.
__device__ __forceinline__ bool beyond_parts(const float (&sums)[kBlocksM][kBlocksN][4]) {
  float zero = 0.0f;
  bool faint = false;
#pragma unroll
  for (int m = 0; m < kBlocksM; ++m) {
#pragma unroll
    for (int n = 0; n < kBlocksN; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float sum = sums[m][n][e];
        zero = fmaf(sum, 0.0f, zero);
        faint |= sum != 0.0f && fabsf(sum) < 8.271806125530277e-25f;  // 2^-80
      }
    }
  }
  return zero != 0.0f || faint;  // NaN differs from every number
}

// Recomputes the sums by fp32 multiply-adds from global memory: slow, and correct for all fp32 operands.
__device__ __forceinline__ void recompute(float (&sums)[kBlocksM][kBlocksN][4], const float* __restrict__ x, const float* __restrict__ w,
                                          int first_row, int first_column, int layer) {
  constexpr int kPartialK = 128;
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int m = 0; m < kBlocksM; ++m) {
#pragma unroll
    for (int n = 0; n < kBlocksN; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) sums[m][n][e] = 0.0f;
    }
  }
#pragma unroll 1
  for (int first = 0; first < kInFeatures; first += kPartialK) {
    float partial[kBlocksM][kBlocksN][4] = {};
#pragma unroll 1
    for (int k = first + layer; k < min(first + kPartialK, kInFeatures); k += kWarpsK) {
      float w_values[kBlocksN][2];
#pragma unroll
      for (int n = 0; n < kBlocksN; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int column = first_column + n * 8 + lane % 4 * 2 + e;
          w_values[n][e] = w[static_cast<int64_t>(column) * kInFeatures + k];
        }
      }
#pragma unroll
      for (int m = 0; m < kBlocksM; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int row = first_row + m * 16 + half * 8 + lane / 4;
          const float x_value = x[static_cast<int64_t>(row) * kInFeatures + k];
#pragma unroll
          for (int n = 0; n < kBlocksN; ++n) {
#pragma unroll
            for (int e = 0; e < 2; ++e) partial[m][n][half * 2 + e] = fmaf(x_value, w_values[n][e], partial[m][n][half * 2 + e]);
          }
        }
      }
    }
#pragma unroll
    for (int m = 0; m < kBlocksM; ++m) {
#pragma unroll
      for (int n = 0; n < kBlocksN; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) sums[m][n][e] += partial[m][n][e];
      }
    }
  }
}

// Writes a warp's sums to its rows and columns of the staged tile. Lane l holds rows l / 4 and l / 4 + 8, columns 2 (l
// % 4) and the next.
__device__ __forceinline__ void stage_sums(float* staged, const float (&sums)[kBlocksM][kBlocksN][4], int row, int column) {
  const int lane = threadIdx.x % 32;
  float* corner = staged + (row + lane / 4) * kPitch + column + lane % 4 * 2;
#pragma unroll
  for (int m = 0; m < kBlocksM; ++m) {
#pragma unroll
    for (int n = 0; n < kBlocksN; ++n) {
      *reinterpret_cast<float2*>(corner + m * 16 * kPitch + n * 8) = make_float2(sums[m][n][0], sums[m][n][1]);
      *reinterpret_cast<float2*>(corner + (m * 16 + 8) * kPitch + n * 8) = make_float2(sums[m][n][2], sums[m][n][3]);
    }
  }
}

// 4 neighbouring staged sums.
__device__ __forceinline__ void load_staged(const float* from, float* values) {
  const float4 t = *reinterpret_cast<const float4*>(from);
  values[0] = t.x;
  values[1] = t.y;
  values[2] = t.z;
  values[3] = t.w;
}

__device__ __forceinline__ void load(const float* from, float (&v)[4]) {
  const float4 t = *reinterpret_cast<const float4*>(from);
  v[0] = t.x;
  v[1] = t.y;
  v[2] = t.z;
  v[3] = t.w;
}

__device__ __forceinline__ void store(float* to, const float (&v)[4]) {
  *reinterpret_cast<float4*>(to) = make_float4(v[0], v[1], v[2], v[3]);
}

// min(max(v, lo), hi); NaN goes through.
__device__ __forceinline__ float hardtanh(float v, float lo, float hi) {
  return v < lo ? lo : (v > hi ? hi : v);
}

// Sum over kTeam lanes, of one number or of two; all of them receive the same bits.
__device__ __forceinline__ float lane_sum(float v) {
#pragma unroll
  for (int offset = kTeam / 2; offset > 0; offset /= 2) v += __shfl_xor_sync(0xffffffffu, v, offset);
  return v;
}

__device__ __forceinline__ float2 lane_sum(float2 v) { return make_float2(lane_sum(v.x), lane_sum(v.y)); }

// Scale for values whose squares exceed fp32's range. Statistics are then formed of the values times kShrink, a power
// of two: a sum of squares above 2^128 becomes one above 2^-32, and every sum of squares stays below 2^128.
constexpr float kShrink = 8.271806125530277e-25f;  // 2^-80
constexpr float kGrow = 1.2089258196146292e24f;    // 2^80

// Finishes kRoundRows staged rows of the tile. A team of lanes takes kSpan neighbouring columns of a row into registers
// (a group of the norm), forms their mean and m2 in two passes, normalises and stores.
__device__ __forceinline__ void finish_rows(
    const float* staged,
    int first_row,
    int first_column,
    const float* __restrict__ p_gemm_bias,
    const float* __restrict__ p_gamma,
    const float* __restrict__ p_beta,
    float* __restrict__ y) {
  const int team = threadIdx.x / kTeam;
  const int lane = threadIdx.x % kTeam;
#pragma unroll 2
  for (int i = 0; i < kItemsPerTeam; ++i) {
    const int row = team + i * kTeams;
    float values[kVectorsPerLane][kVector];
#pragma unroll
    for (int j = 0; j < kVectorsPerLane; ++j) {
      const int column = (lane + j * kTeam) * kVector;
      const int channel = first_column + column;
      float c_gemm_bias[kVector];
      load(p_gemm_bias + channel, c_gemm_bias);
      const float* source = staged + row * kPitch + column;
#pragma unroll
      for (int e = 0; e < kVector; e += 4) load_staged(source + e, &values[j][e]);
#pragma unroll
      for (int layer = 1; layer < kWarpsK; ++layer) {
        float more[kVector];
#pragma unroll
        for (int e = 0; e < kVector; e += 4) load_staged(source + layer * kRoundRows * kPitch + e, &more[e]);
#pragma unroll
        for (int e = 0; e < kVector; ++e) values[j][e] += more[e];
      }
#pragma unroll
      for (int e = 0; e < kVector; ++e) values[j][e] += c_gemm_bias[e];
    }

    // First pass: differences from one value, so that a constant group's mean is exact. Second pass: differences from
    // that mean; their mean corrects it.
    const float shift = __shfl_sync(0xffffffffu, values[0][0], 0, kTeam);
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < kVectorsPerLane; ++j) {
#pragma unroll
      for (int e = 0; e < kVector; ++e) sum += __fsub_rn(values[j][e], shift);
    }
    float mean = fmaf(lane_sum(sum), kInverseSpan, shift);
    float2 sums = make_float2(0.0f, 0.0f);  // sums of differences and of their squares
#pragma unroll
    for (int j = 0; j < kVectorsPerLane; ++j) {
#pragma unroll
      for (int e = 0; e < kVector; ++e) {
        const float difference = __fsub_rn(values[j][e], mean);
        sums.x += difference;
        sums.y = fmaf(difference, difference, sums.y);
      }
    }
    sums = lane_sum(sums);
    float mean_rest = sums.x * kInverseSpan;
    const float m2 = fmaf(-mean_rest, sums.x, sums.y);
    float rstd = rsqrtf(m2 * kInverseSpan + kEps);
    const bool beyond = !(m2 < INFINITY);
    if (__any_sync(0xffffffffu, beyond)) {  // repeated with the values times kShrink
      const float shrunk_shift = shift * kShrink;
      float sum = 0.0f;
#pragma unroll
      for (int j = 0; j < kVectorsPerLane; ++j) {
#pragma unroll
        for (int e = 0; e < kVector; ++e) sum += fmaf(values[j][e], kShrink, -shrunk_shift);
      }
      const float shrunk_mean = fmaf(lane_sum(sum), kInverseSpan, shrunk_shift);
      float2 sums = make_float2(0.0f, 0.0f);
#pragma unroll
      for (int j = 0; j < kVectorsPerLane; ++j) {
#pragma unroll
        for (int e = 0; e < kVector; ++e) {
          const float difference = fmaf(values[j][e], kShrink, -shrunk_mean);
          sums.x += difference;
          sums.y = fmaf(difference, difference, sums.y);
        }
      }
      sums = lane_sum(sums);
      if (beyond) {
        const float shrunk_rest = sums.x * kInverseSpan;
        mean = shrunk_mean * kGrow;
        mean_rest = shrunk_rest * kGrow;
        rstd = rsqrtf(fmaf(-shrunk_rest, sums.x, sums.y) * kInverseSpan) * kShrink;
      }
    }
#pragma unroll
    for (int j = 0; j < kVectorsPerLane; ++j) {
      const int column = (lane + j * kTeam) * kVector;
      const int channel = first_column + column;
      float c_gamma[kVector];
      load(p_gamma + channel, c_gamma);
      float c_beta[kVector];
      load(p_beta + channel, c_beta);
#pragma unroll
      for (int e = 0; e < kVector; ++e) {
        float v = (__fsub_rn(values[j][e], mean) - mean_rest) * rstd;
        v = fmaf(v, c_gamma[e], c_beta[e]);
        v = hardtanh(v, kHardtanhMinVal, kHardtanhMaxVal);  // hardtanh(min_val=-2.0, max_val=2.0)
        values[j][e] = v;
      }
      store(y + static_cast<int64_t>(first_row + row) * kOutFeatures + channel, values[j]);
    }
  }
}

__global__ void __launch_bounds__(kThreads, kBlocksPerSm) gemm(
    const float* __restrict__ x,
    const float* __restrict__ p_gemm_weight,
    const float* __restrict__ p_gemm_bias,
    const float* __restrict__ p_gamma,
    const float* __restrict__ p_beta,
    float* __restrict__ y) {
  await_previous_kernel();
  extern __shared__ __align__(128) unsigned char shared[];
  const TilePlace tile = place_of(blockIdx.x);
  const WarpPlace warp = warp_place();
  const int first_row = tile.first_row + warp.row;
  const int first_column = tile.first_column + warp.column;

  float sums[kBlocksM][kBlocksN][4] = {};
  const Source source = source_of(x, p_gemm_weight, tile.first_row, tile.first_column);
  multiply_tile(sums, shared_address(shared), source, warp);
  if (__syncthreads_or(beyond_parts(sums))) recompute(sums, x, p_gemm_weight, first_row, first_column, warp.layer);

  float* staged = reinterpret_cast<float*>(shared);
  __syncthreads();
  stage_sums(staged + warp.layer * kRoundRows * kPitch, sums, warp.row, warp.column);
  __syncthreads();
  finish_rows(staged, tile.first_row, tile.first_column, p_gemm_bias, p_gamma, p_beta, y);
}

// Makes `device` current and gives the caller's device back at the end of the scope.
struct DeviceScope {
  int previous = -1;
  cudaError_t error;
  explicit DeviceScope(int device) {
    error = cudaGetDevice(&previous);
    if (error != cudaSuccess || previous == device) {
      previous = -1;
    } else {
      error = cudaSetDevice(device);
    }
  }
  ~DeviceScope() {
    if (previous >= 0) cudaSetDevice(previous);
  }
};

// Raises the shared-memory limit above 48 KB, once on each device.
cudaError_t allow_shared_memory(int device) {
  constexpr int kDevices = 64;
  static std::mutex lock;
  static bool allowed[kDevices] = {};
  const std::lock_guard<std::mutex> guard(lock);
  if (device < kDevices && allowed[device]) return cudaSuccess;
  const cudaError_t error = cudaFuncSetAttribute(gemm, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  if (error == cudaSuccess && device < kDevices) allowed[device] = true;
  return error;
}

}  // namespace
}  // namespace gemm_sm80

extern "C" int gemm_sm80_launch(
    const float* x,
    const float* p_gemm_weight,
    const float* p_gemm_bias,
    const float* p_gamma,
    const float* p_beta,
    float* y,
    int device,
    cudaStream_t stream) {
  using namespace gemm_sm80;
  const DeviceScope scope(device);
  if (scope.error != cudaSuccess) return scope.error;
  const cudaError_t allowed = allow_shared_memory(device);
  if (allowed != cudaSuccess) return allowed;
  cudaLaunchConfig_t config = {};
  config.gridDim = kBlocks;
  config.blockDim = kThreads;
  config.dynamicSmemBytes = kSharedBytes;
  config.stream = stream;
#ifdef __CUDA_ARCH_LIST__
  constexpr int architectures[] = {__CUDA_ARCH_LIST__};
  cudaLaunchAttribute early = {};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &early;
  config.numAttrs = architectures[0] >= 900 ? 1 : 0;
#endif
  return cudaLaunchKernelEx(&config, gemm, x, p_gemm_weight, p_gemm_bias, p_gamma, p_beta, y);
}
