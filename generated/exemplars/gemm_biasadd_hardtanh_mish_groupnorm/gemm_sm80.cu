// gemm_biasadd_hardtanh_mish_groupnorm: x W^T by three fp16 products of scaled operands split in two, promoted, the
//   whole chain in its epilogue
//
//   linear(in_features=8192, out_features=8192, bias=True)  # gemm
//   add(shape=(8192,), init=randn)  # bias
//   hardtanh(min_val=-1.0, max_val=1.0)  # hardtanh
//   mish()  # mish
//   group_norm(num_groups=256, eps=1e-05, affine=True)  # groupnorm
//   x (1024, 8192) -> y (1024, 8192), fp32
//
// Plan for sm_80 on h100:
//   fp16x3, three fp16 products of scaled operands split in two, promoted: the fastest here for h100 at fp32
//   tiles of 128x128: 512 blocks on 132 SMs, 1.300 ms estimated
//   groups of 32 channels lie within a tile, so the whole chain ends in this kernel
//   512 blocks of 256 threads, 65536 bytes of shared memory
//
// Generated from specs/gemm_biasadd_hardtanh_mish_groupnorm.yaml; do not edit.
// Again: make generate SPEC=specs/gemm_biasadd_hardtanh_mish_groupnorm.yaml

#include <cuda_runtime.h>
#include <cuda_fp16.h>
#include <cstdint>
#include <mutex>

namespace gemm_sm80 {
namespace {

constexpr int kBatch = 1024;  // rows of x and y
constexpr int kInFeatures = 8192;  // K: values in a row of x or W
constexpr int kOutFeatures = 8192;  // rows of W, columns of y
constexpr int kGroupWidth = 32;  // out_features / num_groups = 8192 / 256
constexpr float kEps = 1.0e-5f;  // added to the variance
constexpr int kTileM = 128;  // rows of x in a block's tile
constexpr int kTileN = 128;  // rows of W in a block's tile
constexpr int kTileColumns = 128;  // columns of y that a block writes
constexpr int kTilesM = (kBatch + kTileM - 1) / kTileM;  // batch / tile_m, rounded up: 8
constexpr int kTilesN = (kOutFeatures + kTileColumns - 1) / kTileColumns;  // out_features / tile_columns, rounded up: 64
constexpr int kRaster = 8;  // tiles of x that meet one tile of W before the next
constexpr int kWarpsN = 4;  // warps along the tile's columns
constexpr int kThreads = 256;  // 32 * warps_m * warps_n
constexpr int kBlocksPerSm = 1;  // resident blocks of an SM, which leaves 255 registers a thread
constexpr int kWarpM = 64;  // tile_m / warps_m: rows of a warp's part
constexpr int kWarpN = 32;  // tile_n / warps_n: columns of a warp's part
constexpr int kBlocksM = 4;  // warp_m / 16: multiplies along the rows
constexpr int kBlocksN = 4;  // warp_n / 8: multiplies along the columns
constexpr int kRowBytes = 64;  // bytes of a panel's row, 16-bit parts
constexpr int kStageK = 32;  // panel_k: values of K in a stage, one panel
constexpr int kStageCount = 256;  // in_features / stage_k, rounded up to whole partial sums
constexpr int kCopyRows = 64;  // rows that the block's threads copy at once, 16 bytes each: threads * 16 / row_bytes
constexpr int kStageBytes = 32768;  // (tile_m + tile_n) * row_bytes * 2 parts
constexpr int kSharedBytes = 65536;  // bytes of 2 stages, reused by the epilogue
constexpr int kBlocks = kTilesM * kTilesN;  // 512
constexpr int kStagesPerSum = 2;  // K = 64 in one partial sum of a warp
constexpr int kSpan = kGroupWidth;  // neighbouring columns that a team of lanes takes together
constexpr int kSpans = kTileColumns / kSpan;  // 4
constexpr int kVector = 4;  // values of one access: the most that span and out_features allow
constexpr int kTeam = 2;  // lanes in a team
constexpr int kTeams = kThreads / kTeam;  // 128
constexpr int kVectorsPerLane = (kSpan / kVector + kTeam - 1) / kTeam;  // 4
constexpr int kRoundRows = 64;  // rows staged at once, as many as fit into the stages' memory
constexpr int kItemsPerTeam = kRoundRows * kSpans / kTeams;  // 2
constexpr int kPitch = 136;  // tile_n + 8: floats of a staged row, without bank conflicts
constexpr int kRounds = kTileM / kRoundRows;  // 2
constexpr float kInverseSpan = 1.0f / kSpan;  // factor of the mean and the variance
constexpr float kHardtanhMinVal = -1.0f;  // hardtanh's min_val
constexpr float kHardtanhMaxVal = 1.0f;  // hardtanh's max_val

// Early launch on Hopper: waits for the previous kernel's results, then allows the next kernel to launch.
__device__ __forceinline__ void await_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Four 8x8 matrices of 16-bit values: lane l names row l % 8 of matrix l / 8 and receives values 2 (l % 4), +1 of row l
// / 4 of each.
__device__ __forceinline__ void load_matrices(uint32_t (&values)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 { %0, %1, %2, %3}, [%4];"
               : "=r"(values[0]), "=r"(values[1]), "=r"(values[2]), "=r"(values[3])
               : "r"(row));
}

// Matrix product: sums (16x8) += a (16x16) b (16x8).
__device__ __forceinline__ void multiply(float (&sums)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 { %0, %1, %2, %3}, { %4, %5, %6, %7}, { %8, %9}, { %0, %1, %2, %3};"
               : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Packs two values, rounded to nearest, as a pair of fp16.
__device__ __forceinline__ uint32_t pack_parts(float a, float b) {
  uint32_t pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(b), "f"(a));
  return pair;
}

// Split scale * (a, b) = high + low, to about 22 bits.
__device__ __forceinline__ void split(float a, float b, float scale, uint32_t& high, uint32_t& low) {
  high = pack_parts(a * scale, b * scale);
  const float2 leading = __half22float2(*reinterpret_cast<const __half2*>(&high));
  low = pack_parts(fmaf(a, scale, -leading.x), fmaf(b, scale, -leading.y));
}

// Shared memory holds two stages; a stage is a panel each of x's leading parts, x's remainders, W's leading parts and
// W's remainders.

// Byte offset of 16-byte piece `piece` of `row` in a panel. The permutation lets 8 neighbouring rows touch every bank
// once.
__device__ __forceinline__ uint32_t panel_offset(int row, int piece) {
  return row * kRowBytes + ((piece ^ ((row >> 1) & 3)) << 4);
}

constexpr int kPieceK = 8;  // values in 16 bytes of parts
constexpr int kPiecesX = kTileM / kCopyRows;  // pieces of x that a thread carries in a stage
constexpr int kPieces = kPiecesX + kTileN / kCopyRows;  // pieces of x and of W
constexpr uint32_t kPanelsX = kTileM * kRowBytes;  // bytes of one part of x in a stage
constexpr uint32_t kPanelsW = kTileN * kRowBytes;  // bytes of one part of W in a stage

// This thread's place in x, W and shared memory: piece `threadIdx.x % 4` of every kCopyRows-th row.
struct Source {
  const float* x;
  const float* w;
  uint32_t offset;
};

__device__ __forceinline__ int piece_row() { return threadIdx.x / (kRowBytes / 16); }

__device__ __forceinline__ Source source_of(const float* x, const float* w, int first_row, int first_column) {
  const int row = piece_row();
  const int piece = threadIdx.x % (kRowBytes / 16);
  const int k = piece * kPieceK;
  return {x + static_cast<int64_t>(first_row + row) * kInFeatures + k, w + static_cast<int64_t>(first_column + row) * kInFeatures + k,
          panel_offset(row, piece)};
}

// Reads the values of one piece of a row.
__device__ __forceinline__ void read_values(float (&piece)[kPieceK], const float* global) {
#pragma unroll
  for (int i = 0; i < kPieceK; i += 4) {
    const float4 t = __ldg(reinterpret_cast<const float4*>(global + i));
    piece[i + 0] = t.x;
    piece[i + 1] = t.y;
    piece[i + 2] = t.z;
    piece[i + 3] = t.w;
  }
}

// Reads piece `i` of this thread, 0 <= i < kPieces, of the source's stage.
__device__ __forceinline__ void read_piece(float (&piece)[kPieceK], const Source& source, int i) {
  if (i < kPiecesX) {
    const int row = i * kCopyRows;
    read_values(piece, source.x + static_cast<int64_t>(row) * kInFeatures);
  } else {
    const int row = (i - kPiecesX) * kCopyRows;
    read_values(piece, source.w + static_cast<int64_t>(row) * kInFeatures);
  }
}

// Steps to the next stage, if there is one. Reading the last stage again costs less than a branch around every piece.
__device__ __forceinline__ void advance(Source& source, bool more) {
  source.x += more ? kStageK : 0;
  source.w += more ? kStageK : 0;
}

// Powers of two that bring the rows of this thread's pieces into fp16's range; NaN for a row that fp16 parts cannot
// hold.
struct Scales {
  float x[kTileM / kCopyRows];
  float w[kTileN / kCopyRows];
};

__device__ __forceinline__ Scales load_scales(const float* row_scales, int first_row, int first_column) {
  Scales scales;
#pragma unroll
  for (int i = 0; i < kTileM / kCopyRows; ++i) {
    const int row = first_row + piece_row() + i * kCopyRows;
    scales.x[i] = row_scales[row];
  }
#pragma unroll
  for (int i = 0; i < kTileN / kCopyRows; ++i) {
    const int column = first_column + piece_row() + i * kCopyRows;
    scales.w[i] = row_scales[kBatch + column];
  }
  return scales;
}

// Splits this thread's piece `i` and writes leading parts and remainders to the stage at `shared`.
__device__ __forceinline__ void write_piece(uint32_t shared, const float (&piece)[kPieceK], const Scales& scales, int i) {
  const float scale = i < kPiecesX ? scales.x[i] : scales.w[i - kPiecesX];
  const uint32_t high_part = shared + (i < kPiecesX ? i * kCopyRows * kRowBytes : 2 * kPanelsX + (i - kPiecesX) * kCopyRows * kRowBytes);
  const uint32_t low_part = high_part + (i < kPiecesX ? kPanelsX : kPanelsW);
  uint32_t high[4];
  uint32_t low[4];
#pragma unroll
  for (int pair = 0; pair < 4; ++pair) split(piece[2 * pair], piece[2 * pair + 1], scale, high[pair], low[pair]);
  asm volatile("st.shared.v4.b32 [%0], { %1, %2, %3, %4};" ::"r"(high_part), "r"(high[0]), "r"(high[1]), "r"(high[2]), "r"(high[3]) : "memory");
  asm volatile("st.shared.v4.b32 [%0], { %1, %2, %3, %4};" ::"r"(low_part), "r"(low[0]), "r"(low[1]), "r"(low[2]), "r"(low[3]) : "memory");
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
  int row;
  int column;
};

__device__ __forceinline__ WarpPlace warp_place() {
  const int warp = threadIdx.x / 32;
  return {warp / kWarpsN * kWarpM, warp % kWarpsN * kWarpN};
}

// Shared-memory row and 16-byte piece that this lane passes to load_matrices. The four matrices of 16 rows of x (a left
// fragment) are (rows 0-7, piece 0), (8-15, 0), (0-7, 1), (8-15, 1); those of 16 rows of W are (0-7, 0), (0-7, 1),
// (8-15, 0), (8-15, 1).
__device__ __forceinline__ int left_row() { return threadIdx.x % 16; }
__device__ __forceinline__ int left_piece() { return threadIdx.x / 16 % 2; }
__device__ __forceinline__ int right_row() { return threadIdx.x % 8 + threadIdx.x / 16 % 2 * 8; }
__device__ __forceinline__ int right_piece() { return threadIdx.x / 8 % 2; }

// One stage of a warp's product. In every step of 16 of K the corrections come before the product of the leading parts,
// while the sums are small. Between multiplications a thread writes its pieces of the next stage and reads those of the
// stage after it: the tensor cores stay busy.
__device__ __forceinline__ void multiply_stage(float (&sums)[kBlocksM][kBlocksN][4], uint32_t x_panel, uint32_t w_panel, const WarpPlace& warp,
                                               float (&pieces)[kPieces][kPieceK], const Source& source, uint32_t next_stage, const Scales& scales) {
  constexpr int kSteps = kRowBytes / 32;
  constexpr int kSlots = kSteps * kBlocksM;
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    uint32_t w[2][kBlocksN][2];
#pragma unroll
    for (int part = 0; part < 2; ++part) {
#pragma unroll
      for (int n = 0; n < kBlocksN; n += 2) {
        uint32_t pair[4];
        load_matrices(pair, w_panel + part * kPanelsW + panel_offset(warp.column + n * 8 + right_row(), step * 2 + right_piece()));
        w[part][n][0] = pair[0];
        w[part][n][1] = pair[1];
        w[part][n + 1][0] = pair[2];
        w[part][n + 1][1] = pair[3];
      }
    }
#pragma unroll
    for (int m = 0; m < kBlocksM; ++m) {
      uint32_t x[2][4];
#pragma unroll
      for (int part = 0; part < 2; ++part) {
        load_matrices(x[part], x_panel + part * kPanelsX + panel_offset(warp.row + m * 16 + left_row(), step * 2 + left_piece()));
      }
#pragma unroll
      for (int n = 0; n < kBlocksN; ++n) multiply(sums[m][n], x[1], w[0][n]);
#pragma unroll
      for (int n = 0; n < kBlocksN; ++n) multiply(sums[m][n], x[0], w[1][n]);
#pragma unroll
      for (int n = 0; n < kBlocksN; ++n) multiply(sums[m][n], x[0], w[0][n]);
      const int slot = step * kBlocksM + m;
#pragma unroll
      for (int i = slot * kPieces / kSlots; i < (slot + 1) * kPieces / kSlots; ++i) {
        write_piece(next_stage, pieces[i], scales, i);
        read_piece(pieces[i], source, i);
      }
    }
  }
}

// The product of a tile. During each stage the next one is split into the other half of shared memory and the one after
// that is read. Tensor cores truncate when they add, so a partial sum covers kStagesPerSum stages at most and is then
// added to `sums` with rounding.
__device__ __forceinline__ void multiply_tile(float (&sums)[kBlocksM][kBlocksN][4], uint32_t shared, Source source,
                                              const WarpPlace& warp, const Scales& scales) {
  const uint32_t x_panel = shared;
  const uint32_t w_panel = shared + 2 * kPanelsX;
  const uint32_t own = shared + source.offset;
  float pieces[kPieces][kPieceK];
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    read_piece(pieces[i], source, i);
    write_piece(own, pieces[i], scales, i);
  }
  advance(source, 1 < kStageCount);
#pragma unroll
  for (int i = 0; i < kPieces; ++i) read_piece(pieces[i], source, i);
  __syncthreads();

  uint32_t read = 0;
#pragma unroll 1
  for (int first = 0; first < kStageCount; first += kStagesPerSum) {
    float partial[kBlocksM][kBlocksN][4] = {};
#pragma unroll
    for (int stage = first; stage < first + kStagesPerSum; ++stage) {
      advance(source, stage + 2 < kStageCount);
      multiply_stage(partial, x_panel + read, w_panel + read, warp, pieces, source, own + (read ^ kStageBytes), scales);
      read ^= kStageBytes;
      __syncthreads();  // the next stage is written; all threads have read this one
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

// Exact inverse of a power of two between 2^-126 and 2^126.
__device__ __forceinline__ float inverse_power(float scale) { return __uint_as_float(0x7f000000u - __float_as_uint(scale)); }

// Removes the scales from the sums. The smaller inverse comes first: the product of both may exceed fp32's range.
__device__ __forceinline__ void undo_scales(float (&sums)[kBlocksM][kBlocksN][4], const float* row_scales, int first_row, int first_column) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int m = 0; m < kBlocksM; ++m) {
#pragma unroll
    for (int n = 0; n < kBlocksN; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int row = first_row + m * 16 + e / 2 * 8 + lane / 4;
        const int column = first_column + n * 8 + lane % 4 * 2 + e % 2;
        const float x_inverse = inverse_power(row_scales[row]);
        const float w_inverse = inverse_power(row_scales[kBatch + column]);
        sums[m][n][e] = sums[m][n][e] * fminf(x_inverse, w_inverse) * fmaxf(x_inverse, w_inverse);
      }
    }
  }
}

// Whether any of a thread's sums is infinite or NaN: 0 * v is 0 for every other v.
// An operand that is infinite, NaN or rounds to infinity and a scale that is NaN shows in each of its sums.
__device__ __forceinline__ bool beyond_parts(const float (&sums)[kBlocksM][kBlocksN][4]) {
  float zero = 0.0f;
#pragma unroll
  for (int m = 0; m < kBlocksM; ++m) {
#pragma unroll
    for (int n = 0; n < kBlocksN; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) zero = fmaf(sums[m][n][e], 0.0f, zero);
    }
  }
  return zero != 0.0f;  // NaN differs from every number
}

// Recomputes the sums by fp32 multiply-adds from global memory: slow, and correct for all fp32 operands.
__device__ __forceinline__ void recompute(float (&sums)[kBlocksM][kBlocksN][4], const float* __restrict__ x, const float* __restrict__ w,
                                          int first_row, int first_column) {
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
    for (int k = first; k < min(first + kPartialK, kInFeatures); ++k) {
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

// e^v, error at most 3 units; results below 2^-126 may be 0.
__device__ __forceinline__ float exponential(float v) {
  return expf(v);
}

// a / b for b >= 1, error at most 1.1 units; may be 0 for b > 2^126.
__device__ __forceinline__ float divide(float a, float b) {
  const float fast = __fdividef(a, b);  // error at most 3 units
  const float rest = fmaf(-b, fast, a);  // exact; NaN where a or b is infinite, and fast is right
  return rest == rest ? fmaf(rest, __fdividef(1.0f, b), fast) : fast;
}

// v tanh(log(1 + e^v)) with n = e^v (e^v + 2): v n / (n + 2) below 0, where it is small, error at most 8 units; v - 2 v
// / (n + 2) above, error at most 4; v itself from 20 on.
__device__ __forceinline__ float mish(float v) {
  const float c = v > 20.0f ? 20.0f : v;
  const float e = exponential(c);
  const float n = e * (e + 2.0f);
  const float q = divide(v < 0.0f ? n : 2.0f, n + 2.0f);
  return v < 0.0f ? v * q : v - c * q;
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
    const float* __restrict__ p_bias,
    const float* __restrict__ p_gamma,
    const float* __restrict__ p_beta,
    float* __restrict__ y) {
  const int team = threadIdx.x / kTeam;
  const int lane = threadIdx.x % kTeam;
#pragma unroll 1
  for (int i = 0; i < kItemsPerTeam; ++i) {
    const int item = team + i * kTeams;
    const int row = item / kSpans;
    float values[kVectorsPerLane][kVector];
#pragma unroll
    for (int j = 0; j < kVectorsPerLane; ++j) {
      const int column = item % kSpans * kSpan + (lane + j * kTeam) * kVector;
      const int channel = first_column + column;
      float c_gemm_bias[kVector];
      load(p_gemm_bias + channel, c_gemm_bias);
      float c_bias[kVector];
      load(p_bias + channel, c_bias);
      const float* source = staged + row * kPitch + column;
#pragma unroll
      for (int e = 0; e < kVector; e += 4) load_staged(source + e, &values[j][e]);
#pragma unroll
      for (int e = 0; e < kVector; ++e) {
        float v = values[j][e] + c_gemm_bias[e];
        v = v + c_bias[e];  // add(shape=(8192,), init=randn)
        v = hardtanh(v, kHardtanhMinVal, kHardtanhMaxVal);  // hardtanh(min_val=-1.0, max_val=1.0)
        v = mish(v);  // mish()
        values[j][e] = v;
      }
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
      const int column = item % kSpans * kSpan + (lane + j * kTeam) * kVector;
      const int channel = first_column + column;
      float c_gamma[kVector];
      load(p_gamma + channel, c_gamma);
      float c_beta[kVector];
      load(p_beta + channel, c_beta);
#pragma unroll
      for (int e = 0; e < kVector; ++e) {
        float v = (__fsub_rn(values[j][e], mean) - mean_rest) * rstd;
        v = fmaf(v, c_gamma[e], c_beta[e]);
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
    const float* __restrict__ p_bias,
    const float* __restrict__ p_gamma,
    const float* __restrict__ p_beta,
    const float* __restrict__ row_scales,
    float* __restrict__ y) {
  await_previous_kernel();
  extern __shared__ __align__(128) unsigned char shared[];
  const TilePlace tile = place_of(blockIdx.x);
  const WarpPlace warp = warp_place();
  const uint32_t stages = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  const int first_row = tile.first_row + warp.row;
  const int first_column = tile.first_column + warp.column;

  float sums[kBlocksM][kBlocksN][4] = {};
  const Source source = source_of(x, p_gemm_weight, tile.first_row, tile.first_column);
  multiply_tile(sums, stages, source, warp, load_scales(row_scales, tile.first_row, tile.first_column));
  undo_scales(sums, row_scales, first_row, first_column);
  if (__syncthreads_or(beyond_parts(sums))) recompute(sums, x, p_gemm_weight, first_row, first_column);

  float* staged = reinterpret_cast<float*>(shared);
  for (int round = 0; round < kRounds; ++round) {
    __syncthreads();
    const int row = warp.row - round * kRoundRows;
    if (row >= 0 && row < kRoundRows) stage_sums(staged, sums, row, warp.column);
    __syncthreads();
    finish_rows(staged, tile.first_row + round * kRoundRows, tile.first_column, p_gemm_bias, p_bias, p_gamma, p_beta, y);
  }
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
    const float* p_bias,
    const float* p_gamma,
    const float* p_beta,
    const float* row_scales,
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
  return cudaLaunchKernelEx(&config, gemm, x, p_gemm_weight, p_gemm_bias, p_bias, p_gamma, p_beta, row_scales, y);
}
