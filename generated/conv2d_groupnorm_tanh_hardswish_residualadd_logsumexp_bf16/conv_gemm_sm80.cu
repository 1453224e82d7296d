// conv2d_groupnorm_tanh_hardswish_residualadd_logsumexp_bf16: windows of pixels times filters by one bf16 product
//
//   conv2d(in_channels=8, out_channels=64, kernel_size=(3, 3), stride=(1, 1), padding=(0, 0), dilation=(1, 1), groups=1, bias=True)  # conv
//   group_norm(num_groups=16, eps=1e-05, affine=True)  # group_norm
//   tanh()  # tanh
//   hardswish()  # hard_swish
//   add(from=conv)
//   logsumexp(dim=1, keepdim=True)
//   x (128, 8, 128, 128) -> y (128, 1, 126, 126), bf16
//
// Plan for sm_80 on h100:
//   the convolution as a product of 2032128 windows of 72 values and 64 filters
//   bf16, one bf16 product: what bf16 allows
//   tiles of 128x64: 15876 blocks on 132 SMs, 0.341 ms estimated with the copies
//   15876 blocks of 128 threads, 49152 bytes of shared memory
//
// Generated from specs/conv2d_groupnorm_tanh_hardswish_residualadd_logsumexp.yaml; do not edit. Again: make generate SPEC=specs/conv2d_groupnorm_tanh_hardswish_residualadd_logsumexp.yaml PRECISION=bf16

#include <cuda_runtime.h>
#include <cuda_bf16.h>
#include <cstdint>

namespace conv_gemm_sm80 {
namespace {

constexpr int kHeight = 128;  // rows of x
constexpr int kWidth = 128;  // columns of x
constexpr int kKernelWidth = 3;  // of the filter, 3 x 3
constexpr int kOutChannels = 64;  // out_channels
constexpr int kGroupOutChannels = 64;  // out_channels
constexpr int kOutWidth = 126;  // columns of the convolution's result
constexpr int kOutPlane = 15876;  // results of a channel and sample: 126 x 126
constexpr int kResults = 128 * kOutPlane;  // windows of all samples: 2032128
constexpr int kPieceValues = 8;  // channels in a piece of 16 bytes
constexpr int kGroupPieces = 1;  // pieces of a pixel that a filter meets: 8 channels
constexpr int kPixelPieces = kGroupPieces;  // pieces of a pixel
constexpr int kInFeatures = 72;  // K: taps * kGroupPieces * kPieceValues, values of a window and of a filter
constexpr int kTileM = 128;  // windows of a block's tile
constexpr int kTileN = 64;  // filters of a block's tile
constexpr int kTilesM = (kResults + kTileM - 1) / kTileM;  // results / tile_m, rounded up: 15876
constexpr int kTilesN = (kGroupOutChannels + kTileN - 1) / kTileN;  // channels / tile_n, rounded up: 1
constexpr int kRaster = 16;  // tiles of windows that pass by one tile of W before the next
constexpr int kWarpsN = 2;  // warps along the tile's columns
constexpr int kThreads = 128;  // 32 * warps_m * warps_n
constexpr int kBlocksPerSm = 2;  // leaves 255 registers a thread
constexpr int kWarpM = 64;  // tile_m / warps_m: rows of a warp's part
constexpr int kWarpN = 32;  // tile_n / warps_n: columns of a warp's part
constexpr int kBlocksM = 4;  // warp_m / 16: multiplies along the rows
constexpr int kBlocksN = 4;  // warp_n / 8: multiplies along the columns
constexpr int kRowBytes = 64;  // one row of a panel in shared memory
constexpr int kStageK = 32;  // panel_k: values of K in a stage, one panel
constexpr int kStages = 4;  // stages in flight
constexpr int kStageCount = 3;  // K / stage_k, rounded up
constexpr int kCopyRows = 32;  // rows that the block's threads copy at once, 16 bytes each: threads * 16 / row_bytes
constexpr int kWindows = (kTileM + kCopyRows - 1) / kCopyRows;  // of which a thread copies its piece: 4
constexpr int kStageBytes = 12288;  // (tile_m + tile_n) * row_bytes
constexpr int kSharedBytes = 49152;  // 4 stages, reused by the staged tile
constexpr int kBlocks = kTilesM * kTilesN;  // 15876
constexpr int kRoundRows = 128;  // results of each channel staged at once: what fits into the stages' memory
constexpr int kPitch = 132;  // round_rows + 4: a staged channel in floats, so that a warp's stores meet no bank twice
constexpr int kVector = 4;  // results of one store: the most that a channel's plane allows, 16 bytes at most

// On Hopper a kernel may be launched while the one before it ends. From here on that one's results are there, and the next may be launched.
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

// Four 8x8 matrices of 16-bit values: lane l names row l % 8 of matrix l / 8 and receives values 2 (l % 4), +1 of row l / 4 of each.
__device__ __forceinline__ void load_matrices(uint32_t (&values)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 { %0, %1, %2, %3}, [%4];"
               : "=r"(values[0]), "=r"(values[1]), "=r"(values[2]), "=r"(values[3])
               : "r"(row));
}

// sums (16x8) += a (16x16) b (16x8)
__device__ __forceinline__ void multiply(float (&sums)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 { %0, %1, %2, %3}, { %4, %5, %6, %7}, { %8, %9}, { %0, %1, %2, %3};"
               : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

struct TilePlace {
  int first_row;
  int first_column;
};

// Blocks that run at the same time share tiles: kRaster tiles of windows pass by one tile of W before the next tile of W comes.
__device__ __forceinline__ TilePlace place_of(int block) {
  const int tile = block;
  const int band = tile / (kRaster * kTilesN);
  const int within = tile % (kRaster * kTilesN);
  const int height = min(kRaster, kTilesM - band * kRaster);  // the last band is lower
  return {(band * kRaster + within % height) * kTileM, within / height * kTileN};
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

// Shared memory holds kStages stages; a stage is a panel of windows, then a panel of W; a panel has kRowBytes of K for each row.
// Byte offset of 16-byte piece `piece` of `row` in a panel, permuted so that 8 neighbouring rows meet every bank once.
__device__ __forceinline__ uint32_t panel_offset(int row, int piece) {
  return row * kRowBytes + ((piece ^ ((row >> 1) & 3)) << 4);
}

// Starts the copy of 16 bytes, or of 16 zero bytes where the operand has ended.
__device__ __forceinline__ void copy_piece(uint32_t shared, const __nv_bfloat16* global, int values_left) {
  const int bytes = values_left > 0 ? 16 : 0;
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(bytes));
}

// Starts this thread's copies of one stage of W.
__device__ __forceinline__ void copy_w(uint32_t shared, const __nv_bfloat16* global, int k_left) {
#pragma unroll
  for (int row = 0; row < kTileN; row += kCopyRows) {
    const __nv_bfloat16* values = global + static_cast<int64_t>(row) * kInFeatures;
    copy_piece(shared + row * kRowBytes, values, k_left);
  }
}

// Where this thread reads pixels and W and writes shared memory: piece `threadIdx.x % pieces` of every kCopyRows-th row. A row is the window of one result.
struct Source {
  const __nv_bfloat16* pixels;
  const __nv_bfloat16* w;
  uint32_t offset;
  int piece;              // of a window, this thread's next
  int window[kWindows];   // the piece of x at which a window begins
  int k_left;  // values of K from this thread's piece on
};

__device__ __forceinline__ Source source_of(const __nv_bfloat16* pixels, const __nv_bfloat16* w, const TilePlace& tile) {
  constexpr int kPieces = kRowBytes / 16;
  const int row = threadIdx.x / kPieces;
  const int piece = threadIdx.x % kPieces;
  Source source;
  source.pixels = pixels;
  source.piece = piece;
  source.w = w + static_cast<int64_t>(tile.first_column + row) * kInFeatures + source.piece * kPieceValues;
  source.offset = panel_offset(row, piece);
#pragma unroll
  for (int i = 0; i < kWindows; ++i) {
    const int result = tile.first_row + row + i * kCopyRows;
    const int place = result % kOutPlane;
    const int top = place / kOutWidth;
    const int left = place % kOutWidth;
    source.window[i] = ((result / kOutPlane * kHeight + top) * kWidth + left) * kPixelPieces;
  }
  source.k_left = kInFeatures - source.piece * kPieceValues;
  return source;
}

// How far a piece of a window lies from the window's first: the filter's tap and the octet or quartet of channels.
struct Step {
  int down;    // rows of x
  int across;  // columns
  int pieces;
};

__device__ __forceinline__ Step step_to(int piece) {
  const int tap = piece / kGroupPieces;
  const int down = tap / kKernelWidth;
  const int across = tap % kKernelWidth;
  return {down, across, (down * kWidth + across) * kPixelPieces + piece % kGroupPieces};
}

// Starts this thread's copies of one stage of windows.
__device__ __forceinline__ void copy_windows(uint32_t shared, const Source& source) {
  const int piece = source.piece;
  const Step step = step_to(piece);
#pragma unroll
  for (int i = 0; i < kWindows; ++i) {
    const __nv_bfloat16* values = source.pixels + static_cast<int64_t>(source.window[i] + step.pieces) * kPieceValues;
    copy_piece(shared + i * kCopyRows * kRowBytes, values, piece < kInFeatures / kPieceValues ? kPieceValues : 0);
  }
}

// Starts the copies of the source's next stage into the stage at `shared` and steps on.
__device__ __forceinline__ void copy_stage(uint32_t shared, Source& source) {
  copy_windows(shared + source.offset, source);
  copy_w(shared + kTileM * kRowBytes + source.offset, source.w, source.k_left);
  source.piece += kStageK / kPieceValues;
  source.w += kStageK;
  source.k_left -= kStageK;
}

// The shared-memory row and 16-byte piece that this lane names to load_matrices: for 16 rows of x (a fragment of the left operand) the
// matrices are (rows 0-7, piece 0), (8-15, 0), (0-7, 1), (8-15, 1); for 16 rows of W they are (0-7, 0), (0-7, 1), (8-15, 0), (8-15, 1).
__device__ __forceinline__ int left_row() { return threadIdx.x % 16; }
__device__ __forceinline__ int left_piece() { return threadIdx.x / 16 % 2; }
__device__ __forceinline__ int right_row() { return threadIdx.x % 8 + threadIdx.x / 16 % 2 * 8; }
__device__ __forceinline__ int right_piece() { return threadIdx.x / 8 % 2; }

// One step's operands of a warp: 16 of K, 32 bytes of each row.
struct Fragments {
  uint32_t x[kBlocksM][4];
  uint32_t w[kBlocksN][2];
};

__device__ __forceinline__ void load_fragments(Fragments& fragments, uint32_t x_panel, uint32_t w_panel, const WarpPlace& warp, int step) {
#pragma unroll
  for (int m = 0; m < kBlocksM; ++m) {
    load_matrices(fragments.x[m], x_panel + panel_offset(warp.row + m * 16 + left_row(), step * 2 + left_piece()));
  }
#pragma unroll
  for (int n = 0; n < kBlocksN; n += 2) {
    uint32_t pair[4];
    load_matrices(pair, w_panel + panel_offset(warp.column + n * 8 + right_row(), step * 2 + right_piece()));
    fragments.w[n][0] = pair[0];
    fragments.w[n][1] = pair[1];
    fragments.w[n + 1][0] = pair[2];
    fragments.w[n + 1][1] = pair[3];
  }
}

__device__ __forceinline__ void multiply_fragments(float (&sums)[kBlocksM][kBlocksN][4], Fragments& fragments) {
#pragma unroll
  for (int m = 0; m < kBlocksM; ++m) {
#pragma unroll
    for (int n = 0; n < kBlocksN; ++n) multiply(sums[m][n], fragments.x[m], fragments.w[n]);
  }
}

// The product of a tile, in the warps' accumulators. While a step is multiplied the next step's fragments are loaded, across stages too,
// and kStages - 1 stages of copies are under way.
__device__ __forceinline__ void multiply_tile(float (&sums)[kBlocksM][kBlocksN][4], uint32_t shared, Source source, const WarpPlace& warp) {
  constexpr int kSteps = kRowBytes / 32;
  const uint32_t x_panel = shared;
  const uint32_t w_panel = shared + kTileM * kRowBytes;
#pragma unroll
  for (int stage = 0; stage < kStages - 1; ++stage) {
    if (stage < kStageCount) copy_stage(shared + stage * kStageBytes, source);
    close_copies();
  }
  wait_copies<kStages - 2>();
  __syncthreads();

  Fragments fragments[2];
  load_fragments(fragments[0], x_panel, w_panel, warp, 0);
  int read = 0;
  int write = kStages - 1;
#pragma unroll 1
  for (int stage = 0; stage < kStageCount; ++stage) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      if (step == kSteps - 1) {  // the next fragments come from the next stage
        read = read + 1 == kStages ? 0 : read + 1;
        wait_copies<kStages - 2>();
        __syncthreads();
      }
      load_fragments(fragments[(step + 1) % 2], x_panel + read * kStageBytes, w_panel + read * kStageBytes, warp, (step + 1) % kSteps);
      if (step == 0) {  // the stage written now was last read before the barrier above
        if (stage + kStages - 1 < kStageCount) copy_stage(shared + write * kStageBytes, source);
        close_copies();
        write = write + 1 == kStages ? 0 : write + 1;
      }
      multiply_fragments(sums, fragments[step % 2]);
    }
  }
  wait_copies<0>();
}

// Writes a warp's sums to the staged tile, in which each channel has a row. Lane l holds results l / 4 and l / 4 + 8 of channels 2 (l % 4) and the next.
__device__ __forceinline__ void stage_planes(float* staged, const float (&sums)[kBlocksM][kBlocksN][4], int row, int column) {
  const int lane = threadIdx.x % 32;
  float* corner = staged + (column + lane % 4 * 2) * kPitch + row + lane / 4;
#pragma unroll
  for (int m = 0; m < kBlocksM; ++m) {
#pragma unroll
    for (int n = 0; n < kBlocksN; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) corner[(n * 8 + e % 2) * kPitch + m * 16 + e / 2 * 8] = sums[m][n][e];
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

// Two values, rounded to nearest, in a 32-bit word.
__device__ __forceinline__ uint32_t pack(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

__device__ __forceinline__ void store(__nv_bfloat16* to, const float (&v)[4]) {
  *reinterpret_cast<uint2*>(to) = make_uint2(pack(v[0], v[1]), pack(v[2], v[3]));
}

// Stores kRoundRows results of each staged channel from `first_row` on. A thread takes kVector neighbours of every kStoreChannels-th channel.
__device__ __forceinline__ void store_planes(const float* staged, const TilePlace& tile, int first_row, __nv_bfloat16* __restrict__ y) {
  constexpr int kRowVectors = kRoundRows / kVector;
  constexpr int kStoreChannels = kThreads / kRowVectors;
  const int row = threadIdx.x % kRowVectors * kVector;
  const int result = first_row + row;
  const int first_channel = tile.first_column;
  __nv_bfloat16* plane = y + (static_cast<int64_t>(result / kOutPlane) * kOutChannels + first_channel) * kOutPlane + result % kOutPlane;
#pragma unroll 4
  for (int column = threadIdx.x / kRowVectors; column < kTileN; column += kStoreChannels) {
    float values[kVector];
    const float* source = staged + column * kPitch + row;
#pragma unroll
    for (int e = 0; e < kVector; e += 4) load_staged(source + e, &values[e]);
    store(plane + static_cast<int64_t>(column) * kOutPlane, values);
  }
}

__global__ void __launch_bounds__(kThreads, kBlocksPerSm) conv_gemm(
    const __nv_bfloat16* __restrict__ pixels,
    const __nv_bfloat16* __restrict__ weight_rows,
    __nv_bfloat16* __restrict__ y) {
  await_previous_kernel();
  extern __shared__ __align__(128) unsigned char shared[];
  const TilePlace tile = place_of(blockIdx.x);
  const WarpPlace warp = warp_place();

  float sums[kBlocksM][kBlocksN][4] = {};
  multiply_tile(sums, shared_address(shared), source_of(pixels, weight_rows, tile), warp);

  float* staged = reinterpret_cast<float*>(shared);
  __syncthreads();
  stage_planes(staged, sums, warp.row, warp.column);
  __syncthreads();
  store_planes(staged, tile, tile.first_row, y);
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

}  // namespace
}  // namespace conv_gemm_sm80

extern "C" int conv_gemm_sm80_launch(
    const __nv_bfloat16* pixels,
    const __nv_bfloat16* weight_rows,
    __nv_bfloat16* y,
    int device,
    cudaStream_t stream) {
  using namespace conv_gemm_sm80;
  const DeviceScope scope(device);
  if (scope.error != cudaSuccess) return scope.error;
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
  return cudaLaunchKernelEx(&config, conv_gemm, pixels, weight_rows, y);
}
