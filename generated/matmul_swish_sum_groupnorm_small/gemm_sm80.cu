// matmul_swish_sum_groupnorm_small: x W^T by fused multiply-add on the CUDA cores, the whole chain in its epilogue
//
//   linear(in_features=512, out_features=1024, bias=True)  # matmul
//   silu()
//   add(shape=(1024,), init=randn)  # bias
//   group_norm(num_groups=32, eps=1e-05, affine=True)  # group_norm
//   x (128, 512) -> y (128, 1024), fp32
//
// Plan for sm_80 on h100:
//   ffma, fused multiply-add on the CUDA cores: the fastest here for h100 at fp32
//   tiles of 32x32: 128 blocks on 132 SMs, 0.005 ms estimated
//   groups of 32 channels lie within a tile, so the whole chain ends in this kernel
//   128 blocks of 128 threads, 98304 bytes of shared memory
//
// Generated from specs/matmul_swish_sum_groupnorm_small.yaml; do not edit. Again: make generate SPEC=specs/matmul_swish_sum_groupnorm_small.yaml

#include <cuda_runtime.h>
#include <cstdint>
#include <mutex>

namespace gemm_sm80 {
namespace {

constexpr int kBatch = 128;  // rows of x and y
constexpr int kInFeatures = 512;  // K: values in a row of x or W
constexpr int kOutFeatures = 1024;  // rows of W, columns of y
constexpr int kGroupWidth = 32;  // out_features / num_groups = 1024 / 32
constexpr float kEps = 1.0e-5f;  // added to the variance, inside the root
constexpr int kTileM = 32;  // rows of x in a block's tile
constexpr int kTileN = 32;  // rows of W in a block's tile
constexpr int kTileColumns = 32;  // columns of y that a block writes
constexpr int kTilesM = (kBatch + kTileM - 1) / kTileM;  // batch / tile_m, rounded up: 4
constexpr int kTilesN = (kOutFeatures + kTileColumns - 1) / kTileColumns;  // out_features / tile_columns, rounded up: 32
constexpr int kRaster = 4;  // tiles of x that pass by one tile of W before the next
constexpr int kWarpsM = 1;  // warps along the tile's rows
constexpr int kWarpsN = 1;  // warps along the tile's columns
constexpr int kWarpsK = 4;  // layers of warps, each with its own part of K
constexpr int kThreads = 128;  // 32 * warps_m * warps_n * warps_k
constexpr int kBlocksPerSm = 1;  // leaves 255 registers a thread
constexpr int kWarpM = 32;  // tile_m / warps_m: rows of a warp's part
constexpr int kWarpN = 32;  // tile_n / warps_n: columns of a warp's part
constexpr int kRowsPerThread = 4;  // warp_m / 8 lanes
constexpr int kColumnsPerThread = 8;  // warp_n / 4 lanes
constexpr int kRowBytes = 128;  // one row of a panel in shared memory
constexpr int kPanelK = 32;  // row_bytes / 4: values of K in a panel
constexpr int kStageK = 128;  // panel_k * warps_k: values of K in a stage, one panel for each layer of warps
constexpr int kStages = 3;  // stages in flight
constexpr int kStageCount = 4;  // in_features / stage_k, rounded up
constexpr int kCopyRows = 16;  // rows that the block's threads copy at once, 16 bytes each: threads * 16 / row_bytes
constexpr int kStageBytes = 32768;  // (tile_m + tile_n) * row_bytes * warps_k
constexpr int kSharedBytes = 98304;  // 3 stages, reused by the epilogue
constexpr int kBlocks = kTilesM * kTilesN;  // 128
constexpr int kStagesPerSum = 1;  // K = 32 in one partial sum of a warp
constexpr int kSpan = kGroupWidth;  // neighbouring columns that a team of lanes takes together
constexpr int kVector = 4;  // values in one access: the most that span and out_features allow, 16 bytes at most
constexpr int kTeam = 4;  // lanes in a team
constexpr int kTeams = kThreads / kTeam;  // 32
constexpr int kVectorsPerLane = (kSpan / kVector + kTeam - 1) / kTeam;  // 2
constexpr int kRoundRows = 32;  // rows staged at once: what fits into the stages' memory
constexpr int kItemsPerTeam = kRoundRows / kTeams;  // 1
constexpr int kPitch = 36;  // tile_n + 4: a staged row in floats, so that a warp's stores meet no bank twice
constexpr float kInverseSpan = 1.0f / kSpan;  // for the mean and the variance

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

// Shared memory holds kStages stages; a stage is kWarpsK panels of x, then kWarpsK panels of W; a panel has kRowBytes of K for each row.
// Byte offset of 16-byte piece `piece` of `row` in a panel, permuted so that 8 neighbouring rows meet every bank once.
__device__ __forceinline__ uint32_t panel_offset(int row, int piece) {
  return row * kRowBytes + ((piece ^ (row & 7)) << 4);
}

// Starts the copy of 16 bytes.
__device__ __forceinline__ void copy_piece(uint32_t shared, const float* global) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(shared), "l"(global));
}

// Starts this thread's copies of one stage of x.
__device__ __forceinline__ void copy_x(uint32_t shared, const float* global) {
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

// Where this thread reads x and W and writes shared memory: piece `threadIdx.x % pieces` of every kCopyRows-th row.
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

// Blocks that run at the same time share tiles: kRaster tiles of x pass by one tile of W before the next tile of W comes.
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

// A warp's lanes stand 8 by 4: lane l owns every 8th row from l / 4 on and every 4th column from l % 4 on of the warp's part, so that the
// rows which a warp reads at once are neighbours and meet every bank once.
__device__ __forceinline__ float4 load_four(uint32_t address) {
  float4 v;
  asm volatile("ld.shared.v4.f32 { %0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(address));
  return v;
}

// One stage of a thread's product, four of K at a time. Unrolled further, the loads ahead would take more registers than there are.
__device__ __forceinline__ void multiply_stage(float (&sums)[kRowsPerThread][kColumnsPerThread], uint32_t x_panel, uint32_t w_panel,
                                               const WarpPlace& warp) {
  const int lane = threadIdx.x % 32;
#pragma unroll 2
  for (int piece = 0; piece < kRowBytes / 16; ++piece) {
    float4 x[kRowsPerThread];
#pragma unroll
    for (int i = 0; i < kRowsPerThread; ++i) x[i] = load_four(x_panel + panel_offset(warp.row + i * 8 + lane / 4, piece));
#pragma unroll
    for (int j = 0; j < kColumnsPerThread; ++j) {
      const float4 w = load_four(w_panel + panel_offset(warp.column + j * 4 + lane % 4, piece));
#pragma unroll
      for (int i = 0; i < kRowsPerThread; ++i) sums[i][j] = fmaf(x[i].x, w.x, sums[i][j]);
#pragma unroll
      for (int i = 0; i < kRowsPerThread; ++i) sums[i][j] = fmaf(x[i].y, w.y, sums[i][j]);
#pragma unroll
      for (int i = 0; i < kRowsPerThread; ++i) sums[i][j] = fmaf(x[i].z, w.z, sums[i][j]);
#pragma unroll
      for (int i = 0; i < kRowsPerThread; ++i) sums[i][j] = fmaf(x[i].w, w.w, sums[i][j]);
    }
  }
}

// The product of a tile: partial sums of kStagesPerSum stages, each added to `sums`, which keeps the error of long sums down.
// kStages - 1 stages of copies are under way meanwhile.
__device__ __forceinline__ void multiply_tile(float (&sums)[kRowsPerThread][kColumnsPerThread], uint32_t shared, Source source,
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
    float partial[kRowsPerThread][kColumnsPerThread] = {};
#pragma unroll 1
    for (int stage = first; stage < min(first + kStagesPerSum, kStageCount); ++stage) {
      wait_copies<kStages - 2>();
      __syncthreads();  // the stage has arrived, and the one before it has been read by all
      if (stage + kStages - 1 < kStageCount) copy_stage(shared + write * kStageBytes, source);
      close_copies();
      multiply_stage(partial, x_panel + read * kStageBytes, w_panel + read * kStageBytes, warp);
      read = read + 1 == kStages ? 0 : read + 1;
      write = write + 1 == kStages ? 0 : write + 1;
    }
#pragma unroll
    for (int i = 0; i < kRowsPerThread; ++i) {
#pragma unroll
      for (int j = 0; j < kColumnsPerThread; ++j) sums[i][j] += partial[i][j];
    }
  }
  wait_copies<0>();
}

// Writes a thread's sums to their places in the staged tile.
__device__ __forceinline__ void stage_sums(float* staged, const float (&sums)[kRowsPerThread][kColumnsPerThread], int row, int column) {
  const int lane = threadIdx.x % 32;
  float* corner = staged + (row + lane / 4) * kPitch + column + lane % 4;
#pragma unroll
  for (int i = 0; i < kRowsPerThread; ++i) {
#pragma unroll
    for (int j = 0; j < kColumnsPerThread; ++j) corner[i * 8 * kPitch + j * 4] = sums[i][j];
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

// a / b for b >= 1, error at most 3 units; 0 for b > 2^126 on a GPU, whose fast division this is.
__device__ __forceinline__ float divide(float a, float b) {
  return __fdividef(a, b);
}

// e^v, error at most 3 units; results below 2^-126 may be 0.
__device__ __forceinline__ float exponential(float v) {
  return expf(v);
}

// v * sigmoid(v), error at most 5 units; results below 2^-119 may be 0.
__device__ __forceinline__ float silu(float v) {
  return divide(v, 1.0f + exponential(-v));
}

// Sum over kTeam lanes, of one number or of two; all of them receive the same bits.
__device__ __forceinline__ float lane_sum(float v) {
#pragma unroll
  for (int offset = kTeam / 2; offset > 0; offset /= 2) v += __shfl_xor_sync(0xffffffffu, v, offset);
  return v;
}

__device__ __forceinline__ float2 lane_sum(float2 v) { return make_float2(lane_sum(v.x), lane_sum(v.y)); }

// Squares may exceed fp32's range where values do not. What is formed of such values is formed of them times kShrink, a power of two: a sum of
// squares above 2^128 is then above 2^-32, and one of any values stays below 2^128.
constexpr float kShrink = 8.271806125530277e-25f;  // 2^-80
constexpr float kGrow = 1.2089258196146292e24f;    // 2^80

// Finishes kRoundRows staged rows of the tile. A team of lanes takes kSpan neighbouring columns of a row into registers
// (a group of the norm), forms their mean and m2 in two passes, normalises and stores.
__device__ __forceinline__ void finish_rows(
    const float* staged,
    int first_row,
    int first_column,
    const float* __restrict__ p_matmul_bias,
    const float* __restrict__ p_bias,
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
      float c_matmul_bias[kVector];
      load(p_matmul_bias + channel, c_matmul_bias);
      float c_bias[kVector];
      load(p_bias + channel, c_bias);
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
      for (int e = 0; e < kVector; ++e) {
        float v = values[j][e] + c_matmul_bias[e];
        v = silu(v);  // silu()
        v = v + c_bias[e];  // add(shape=(1024,), init=randn)
        values[j][e] = v;
      }
    }

    // Differences from one value first, so that a constant group's mean is exact; then from that mean: their own mean corrects it.
    const float shift = __shfl_sync(0xffffffffu, values[0][0], 0, kTeam);
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < kVectorsPerLane; ++j) {
#pragma unroll
      for (int e = 0; e < kVector; ++e) sum += __fsub_rn(values[j][e], shift);
    }
    float mean = fmaf(lane_sum(sum), kInverseSpan, shift);
    float2 sums = make_float2(0.0f, 0.0f);  // of differences, of their squares
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
    if (__any_sync(0xffffffffu, beyond)) {  // the same of values kShrink times as large
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
        values[j][e] = v;
      }
      store(y + static_cast<int64_t>(first_row + row) * kOutFeatures + channel, values[j]);
    }
  }
}

__global__ void __launch_bounds__(kThreads, kBlocksPerSm) gemm(
    const float* __restrict__ x,
    const float* __restrict__ p_matmul_weight,
    const float* __restrict__ p_matmul_bias,
    const float* __restrict__ p_bias,
    const float* __restrict__ p_gamma,
    const float* __restrict__ p_beta,
    float* __restrict__ y) {
  await_previous_kernel();
  extern __shared__ __align__(128) unsigned char shared[];
  const TilePlace tile = place_of(blockIdx.x);
  const WarpPlace warp = warp_place();

  float sums[kRowsPerThread][kColumnsPerThread] = {};
  multiply_tile(sums, shared_address(shared), source_of(x, p_matmul_weight, tile.first_row, tile.first_column), warp);

  float* staged = reinterpret_cast<float*>(shared);
  __syncthreads();
  stage_sums(staged + warp.layer * kRoundRows * kPitch, sums, warp.row, warp.column);
  __syncthreads();
  finish_rows(staged, tile.first_row, tile.first_column, p_matmul_bias, p_bias, p_gamma, p_beta, y);
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

// More than 48 KB of shared memory must be asked for, once on each device.
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
    const float* p_matmul_weight,
    const float* p_matmul_bias,
    const float* p_bias,
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
  return cudaLaunchKernelEx(&config, gemm, x, p_matmul_weight, p_matmul_bias, p_bias, p_gamma, p_beta, y);
}
