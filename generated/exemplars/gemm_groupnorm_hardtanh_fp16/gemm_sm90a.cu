// gemm_groupnorm_hardtanh_fp16: linear -> group_norm -> hardtanh in one kernel: TMA, warp-specialised wgmma, clusters
//
//   linear(in_features=8192, out_features=8192, bias=True)  # gemm
//   group_norm(num_groups=16, eps=1e-05, affine=True)  # group_norm
//   hardtanh(min_val=-2.0, max_val=2.0)  # hardtanh
//   x (1024, 8192) -> y (1024, 8192), fp16
//
// Plan for sm_90a on h100:
//   tiles of 256 channels x 128 samples, 4 stages of 64 k; one warpgroup fetches, 2 multiply
//   clusters of 2 CTAs that share rows of W: fetched once, received by both
//   groups of 512 channels lie in 2 tiles of a CTA, which wait in registers
//   128 blocks of 384 threads, 221248 bytes of shared memory
//
// Generated from specs/default.yaml; do not edit.
// Again: make generate SPEC=specs/default.yaml PRECISION=fp16

#include <cuda.h>
#include <cudaTypedefs.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <mutex>

namespace gemm_sm90a {
namespace {

constexpr int kBatch = 1024;  // rows of x and y
constexpr int kInFeatures = 8192;  // columns of x and W
constexpr int kOutFeatures = 8192;  // rows of W, columns of y
constexpr int kGroupWidth = 512;  // out_features / num_groups
constexpr int kTileChannels = 256;  // channels of a tile: rows of W, operand A
constexpr int kTileSamples = 128;  // samples of a tile: rows of x, operand B
constexpr int kTileK = 64;  // values of K in a stage
constexpr int kSteps = 128;  // ceil(in_features / kTileK)
constexpr int kStages = 4;  // stages of the ring
constexpr int kCluster = 2;  // CTAs that share rows of W
constexpr int kUnitTiles = 2;  // tiles of a unit: a CTA computes them before their groups are complete
constexpr int kSampleBlocks = 4;  // clusters side by side along the batch
constexpr int kUnits = 64;  // units of work; a cluster takes one at a time
constexpr int kGrid = 128;  // CTAs: at most 1 units for each of 64 clusters
constexpr int kThreads = 384;  // one warpgroup that fetches, two that multiply
constexpr int kConsumerWarps = 8;  // multiplying warps, each of which frees a stage once
constexpr int kProducerRegisters = 24;  // registers of a fetching thread
constexpr int kConsumerRegisters = 240;  // registers of a multiplying thread
constexpr int kBlocks = 2;  // blocks of 64 channels in a warpgroup's accumulators
constexpr int kAccumulators = 64;  // registers of a block: 64 x kTileSamples values over 128 threads
constexpr int kRowBytes = 128;  // bytes of a row: kTileK halves
constexpr int kWeightBlockBytes = 8192;  // bytes of 64 rows of W
constexpr int kWeightPartBytes = 32768;  // bytes of one part of W in a stage
constexpr int kInputPartBytes = 16384;  // bytes of one part of x in a stage
constexpr int kStageBytes = 49152;  // bytes of a stage: all parts of W and x
constexpr int kScratchAt = 196608;  // offset of the scratch memory, behind the stages
constexpr int kScratchBytes = 8192;  // bytes of scratch memory for each warpgroup
constexpr int kStoreSamples = 64;  // rows of y in a piece of a store
constexpr int kStoreBytes = 8192;  // bytes of such a piece: 64 channels of 16 bits a row
constexpr int kRowChannels = 128;  // channels of a sample that a thread finishes
constexpr int kPartChannels = 16;  // channels that a thread holds in registers at a time
constexpr int kGroupParts = 8;  // parts of a group in a row
constexpr int kVectors = 3;  // parameters of the epilogue
constexpr int kParametersAt = 215040;  // offset of the parameters of all tiles of a unit
constexpr int kGroupsAt = 212992;  // offset of the moments that the warpgroups exchange
constexpr int kBarriersAt = 221184;  // offset of the barriers: full and empty
constexpr int kSharedBytes = 221248;  // bytes of shared memory
constexpr float kEps = 1.0e-5f;  // added to the variance
constexpr float kHardtanhMinVal = -2.0f;  // hardtanh's min_val
constexpr float kHardtanhMaxVal = 2.0f;  // hardtanh's max_val

// Tensors of the epilogue.
struct Arguments {
  const __half* gemm_bias;
  const __half* group_norm_weight;
  const __half* group_norm_bias;
  __half* y;
};

// --- instructions: one function each (PTX ISA 9.0, sections 9.7.9 and 9.7.13 to 9.7.16) ---

__device__ __forceinline__ uint32_t shared_address(const void* pointer) { return static_cast<uint32_t>(__cvta_generic_to_shared(pointer)); }

__device__ __forceinline__ void barrier_init(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// Makes new barriers visible to the cluster and to the copy engine.
__device__ __forceinline__ void barrier_init_done() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// Arrives, and announces bytes that the barrier's phase waits for.
__device__ __forceinline__ void expect_bytes(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Arrives at the barrier at the same offset in CTA `rank` of the cluster. Without .release: the arrival only says that
// this warp's multiplications have read their operands, and a release at cluster scope would wait for all of memory.
__device__ __forceinline__ void arrive(uint32_t barrier, int rank) {
  asm volatile(
      "{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, %0, %1;\nmbarrier.arrive.shared::cluster.b64 _, [remote];\n}" ::"r"(barrier), "r"(rank)
      : "memory");
}

// Whether the barrier's phase of this parity has ended; the hardware waits a while for it.
__device__ __forceinline__ bool try_wait(uint32_t barrier, int parity) {
  uint32_t done;
  asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
               : "=r"(done)
               : "r"(barrier), "r"(parity)
               : "memory");
  return done;
}
__device__ __forceinline__ void wait(uint32_t barrier, int parity, const char* /* debug builds name it */) {
  while (!try_wait(barrier, parity)) {
  }
}

__device__ __forceinline__ int cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return static_cast<int>(rank);
}

__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Copies a box of the tensor behind `map` to shared memory and credits its bytes to the barrier; values outside the
// tensor read as 0.
__device__ __forceinline__ void copy_box(uint32_t to, const CUtensorMap* map, int c0, int c1, int c2, uint32_t barrier) {
  asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, { %2, %3, %4}], [%5];" ::"r"(to), "l"(map),
               "r"(c0), "r"(c1), "r"(c2), "r"(barrier)
               : "memory");
}

// Copies a box to the same offset and barrier in every CTA of the cluster.
__device__ __forceinline__ void copy_box_to_all(uint32_t to, const CUtensorMap* map, int c0, int c1, int c2, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, { %2, %3, %4}], [%5], %6;" ::"r"(to),
      "l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(barrier), "h"(static_cast<uint16_t>((1 << kCluster) - 1))
      : "memory");
}

__device__ __forceinline__ void prefetch_map(const CUtensorMap* map) { asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory"); }

__device__ __forceinline__ void store_box(const CUtensorMap* map, uint32_t from, int c0, int c1) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, { %1, %2}], [%3];\ncp.async.bulk.commit_group;" ::"l"(map), "r"(c0),
               "r"(c1), "r"(from)
               : "memory");
}
// Waits until this thread's stores have read shared memory; returns at once if it has none.
__device__ __forceinline__ void wait_stores_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }

// Orders ordinary accesses to shared memory before later ones of the copy engine and the tensor cores.
__device__ __forceinline__ void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Stores four 8 x 8 matrices of 16-bit values transposed; lane l passes the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void store_transposed(uint32_t to, const uint32_t (&v)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], { %1, %2, %3, %4};" ::"r"(to), "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3]) : "memory");
}

__device__ __forceinline__ uint4 load_words(uint32_t from) {
  uint4 v;
  asm volatile("ld.shared.v4.b32 { %0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(from) : "memory");
  return v;
}
__device__ __forceinline__ void store_words(uint32_t to, const uint4& v) {
  asm volatile("st.shared.v4.b32 [%0], { %1, %2, %3, %4};" ::"r"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

template <int kRegisters>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

__device__ __forceinline__ void named_barrier(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most kPending groups are in flight.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Keeps the compiler from reading accumulators before this point.
template <int kCount>
__device__ __forceinline__ void pin(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// Rows of 64 halves (128 bytes), 128-byte swizzle, 1024 bytes from one group of eight rows to the next. A step of 16
// along K adds 2.
__device__ __forceinline__ uint64_t matrix_descriptor(uint32_t tile) {
  return (1ull << 62) | (static_cast<uint64_t>(1024 >> 4) << 32) | (1ull << 16) | ((tile & 0x3FFFF) >> 4);
}
constexpr int kDescriptorStep = 2;  // 16 halves = 32 bytes, in units of 16

// Matrix product: d (64 x 128, fp32) += a (64 x 16) b (16 x 128), or = if `accumulate` is false. d is in flight until
// wgmma_wait. a, b: matrix descriptors.
__device__ __forceinline__ void wgmma(float (&d)[kAccumulators], uint64_t a, uint64_t b, bool accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
      "}, %64, %65, p, 1, 1, 0, 0;\n}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
        "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
        "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
        "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
        "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]),
        "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),
        "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
        "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
      : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)));
}

// --- pipeline: a ring of stages in shared memory, filled by one thread and read by the consumers ---

struct Shared {
  uint32_t base;
  __device__ uint32_t weight(int stage, int part) const { return base + stage * kStageBytes + part * kWeightPartBytes; }
  __device__ uint32_t input(int stage, int part) const { return base + stage * kStageBytes + 1 * kWeightPartBytes + part * kInputPartBytes; }
  __device__ uint32_t full(int stage) const { return base + kBarriersAt + 8 * stage; }
  __device__ uint32_t empty(int stage) const { return full(kStages + stage); }
};

// A place in the ring. The parity tells this round's fill of a stage from the previous one's.
struct Ring {
  int stage = 0, parity = 0;
  __device__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// --- schedule: clusters take units in turn; consecutive units share rows of W, which then stay in the L2 cache ---

struct Tile {
  int sample, channel;  // first sample and first channel
};

__device__ __forceinline__ Tile tile_of(int unit, int tile, int rank) {
  return {(unit % kSampleBlocks * kCluster + rank) * kTileSamples, (unit / kSampleBlocks * kUnitTiles + tile) * kTileChannels};
}

// Iterator over all k-steps of all tiles of this CTA.
struct Walk {
  int unit = blockIdx.x / kCluster, tile = 0, step = 0;
  __device__ bool inside() const { return unit < kUnits; }
  __device__ void advance() {
    if (++step < kSteps) return;
    step = 0;
    if (++tile < kUnitTiles) return;
    tile = 0;
    unit += gridDim.x / kCluster;
  }
};

__device__ __forceinline__ void fetch_weight(const Shared& shared, const CUtensorMap* map, const Walk& at, int stage, int rank) {
  const int row = tile_of(at.unit, at.tile, rank).channel;
  constexpr int kSlice = kTileChannels / kCluster;  // rows that each CTA fetches for the cluster
  for (int part = 0; part < 1; ++part) {
    copy_box_to_all(shared.weight(stage, part) + rank * kSlice * kRowBytes, map, at.step * kTileK, row + rank * kSlice, part, shared.full(stage));
  }
}

__device__ __forceinline__ void fetch_input(const Shared& shared, const CUtensorMap* map, const Walk& at, int stage, int rank) {
  const int row = tile_of(at.unit, at.tile, rank).sample;
  for (int part = 0; part < 1; ++part) {
    copy_box(shared.input(stage, part), map, at.step * kTileK, row, part, shared.full(stage));
  }
}

// Producer, one thread that keeps the ring full.
__device__ void produce(const Shared& shared, const CUtensorMap* map_weight, const CUtensorMap* map_input, int rank) {
  Ring ring;
  for (Walk at; at.inside(); at.advance(), ring.advance()) {
    wait(shared.empty(ring.stage), ring.parity ^ 1, "empty");  // returns at once in the first round
    expect_bytes(shared.full(ring.stage), kStageBytes);
    fetch_weight(shared, map_weight, at, ring.stage, rank);
    fetch_input(shared, map_input, at, ring.stage, rank);
  }
}

// --- multiply: rows of the accumulators are channels (W is operand A), columns are samples (x is operand B) ---

// A consumer thread's place. Accumulator register 4 j + 2 h + e of block b is channel 64 b + 16 warp + 8 h + lane / 4
// of its warpgroup, sample 8 j + 2 (lane % 4) + e.
struct Consumer {
  int warpgroup, warp, lane;
  __device__ bool issuer() const { return warp == 0 && lane == 0; }  // whether this thread issues copies to y
  __device__ int thread() const { return warp * 32 + lane; }  // index in the warpgroup
};

struct Feed {
  const Shared& shared;
  const Consumer& self;
  Ring ring;
  int reading = -1;  // stage whose multiplications may still be running
  bool lent = false;  // whether that stage holds y's tile for the copy engine

  // Frees the stage: one arrival a warp, in every CTA of the cluster, since all of them fill the stage.
  __device__ __forceinline__ void release() {
    if (lent) {
      wait_stores_read();
      __syncwarp();
      lent = false;
    }
    if (reading >= 0 && self.lane < kCluster) arrive(shared.empty(reading), self.lane);
    reading = -1;
  }
};

// Multiplies one stage, queued as one group; the previous stage may still be running.
__device__ __forceinline__ void multiply_stage(float (&sums)[kBlocks][kAccumulators], Feed& feed, bool accumulate) {
  wait(feed.shared.full(feed.ring.stage), feed.ring.parity, "full");
  const uint64_t weight = matrix_descriptor(feed.shared.weight(feed.ring.stage, 0) + feed.self.warpgroup * kBlocks * kWeightBlockBytes);
  const uint64_t input = matrix_descriptor(feed.shared.input(feed.ring.stage, 0));
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < kTileK / 16; ++k) {
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      const uint64_t a = weight + block * (kWeightBlockBytes >> 4) + k * kDescriptorStep;
      const uint64_t b = input + k * kDescriptorStep;
      wgmma(sums[block], a, b, k > 0 || accumulate);
    }
  }
  wgmma_commit();
  wgmma_wait<1>();
  feed.release();
  feed.reading = feed.ring.stage;
  feed.ring.advance();
}

// The product of one tile. Its last stage stays reserved: y may leave through it.
__device__ __forceinline__ void multiply_tile(float (&sums)[kBlocks][kAccumulators], Feed& feed) {
#pragma unroll 1
  for (int step = 0; step < kSteps; ++step) multiply_stage(sums, feed, step > 0);
  wgmma_wait<0>();
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) pin(sums[block]);
}

// min(max(v, lo), hi); NaN goes through.
__device__ __forceinline__ float hardtanh(float v, float lo, float hi) {
  return v < lo ? lo : (v > hi ? hi : v);
}

__device__ __forceinline__ float to_float(__half v) { return __half2float(v); }

__device__ __forceinline__ float parameter(const __half* vector, int channel) {
  return to_float(vector[channel]);
}

// --- values of 16 bits ---

// Packs two values, rounded to nearest, into a 32-bit word.
__device__ __forceinline__ uint32_t pack(float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// Unpacks the two values of a 32-bit word.
__device__ __forceinline__ float2 unpack(uint32_t word) {
  return __half22float2(*reinterpret_cast<const __half2*>(&word));
}

__device__ __forceinline__ void pack_tile(const float (&v)[kBlocks][kAccumulators], uint32_t (&words)[kBlocks][kAccumulators / 2]) {
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
    for (int i = 0; i < kAccumulators / 2; ++i) words[block][i] = pack(v[block][2 * i], v[block][2 * i + 1]);
  }
}

// Place where a piece of a warpgroup's tile is transposed: the first in scratch memory, the others in the stage that
// was read last.
__device__ __forceinline__ uint32_t store_piece(const Feed& feed, int piece) {
  const uint32_t scratch = feed.shared.base + kScratchAt + feed.self.warpgroup * kScratchBytes;
  const uint32_t lent = feed.shared.weight(feed.reading, 0) + feed.self.warpgroup * (kStageBytes / 2);
  return piece == 0 ? scratch : lent + (piece - 1) * kStoreBytes;
}

// Rounds the tile to 16 bits and transposes it in shared memory, swizzled for y's map, in pieces of 64 channels x
// kStoreSamples samples.
// `words`: the tile's values, two in a word.
__device__ __forceinline__ void turn_tile(const uint32_t (&words)[kBlocks][kAccumulators / 2], const Feed& feed) {
  constexpr int kPieces = kTileSamples / kStoreSamples;  // pieces of one block
  const Consumer& self = feed.self;
  const int row = self.lane / 16 * 8 + self.lane % 8, chunk = self.warp * 2 + self.lane / 8 % 2;  // chunks of 16 bytes
  const uint32_t within = row * kRowBytes + ((chunk ^ row % 8) << 4);
  if (self.issuer()) wait_stores_read();
  named_barrier(1, 2 * 128);  // the lent stage is read, and the pieces' last contents have left
#pragma unroll
  for (int piece = 0; piece < kBlocks * kPieces; ++piece) {
    const uint32_t to = store_piece(feed, piece) + within;
#pragma unroll
    for (int j = 0; j < kStoreSamples / 8; j += 2) {
      const uint32_t* s = words[piece / kPieces] + piece % kPieces * (kStoreSamples / 4) + 2 * j;
      store_transposed(to + 8 * j * kRowBytes, {s[0], s[1], s[2], s[3]});
    }
  }
}

// Hands the pieces to the copy engine, which stores them while the next tile is multiplied.
__device__ __forceinline__ void send_tile(const CUtensorMap* map_y, Feed& feed, const Tile& tile) {
  constexpr int kPieces = kTileSamples / kStoreSamples;
  const Consumer& self = feed.self;
  fence_async();
  named_barrier(2 + self.warpgroup, 128);
  if (self.issuer()) {
    for (int piece = 0; piece < kBlocks * kPieces; ++piece) {
      const int channel = tile.channel + (self.warpgroup * kBlocks + piece / kPieces) * 64;
      store_box(map_y, store_piece(feed, piece), channel, tile.sample + piece % kPieces * kStoreSamples);
    }
  }
  feed.lent = true;
}

// --- rows: the tile transposed in shared memory; a thread takes kRowChannels channels of one sample ---

// Parameters in shared memory, as floats: kVectors of kTileChannels for each tile of a unit. A warpgroup reads and
// writes its half.
struct Parameters {
  float own[kUnitTiles][kVectors];
};

// A thread's part of a unit's parameters: one channel of each tile.
__device__ __forceinline__ Parameters fetch_parameters(const Arguments& arguments, int unit, const Consumer& self) {
  Parameters parameters = {};
  if (unit >= kUnits) return parameters;
#pragma unroll
  for (int tile = 0; tile < kUnitTiles; ++tile) {
    const int channel = tile_of(unit, tile, cluster_rank()).channel + self.warpgroup * kRowChannels + self.thread();
    parameters.own[tile][0] = parameter(arguments.gemm_bias, channel);
    parameters.own[tile][1] = parameter(arguments.group_norm_weight, channel);
    parameters.own[tile][2] = parameter(arguments.group_norm_bias, channel);
  }
  return parameters;
}

__device__ __forceinline__ void keep_parameters(float* vectors, const Parameters& parameters, const Consumer& self) {
#pragma unroll
  for (int i = 0; i < kUnitTiles * kVectors; ++i) vectors[i * kTileChannels + self.thread()] = parameters.own[i / kVectors][i % kVectors];
  named_barrier(2 + self.warpgroup, 128);
}

// Parameters of four channels.
struct Quad {
  float of[4];
  __device__ float operator[](int i) const { return of[i]; }
};

__device__ __forceinline__ Quad load_quad(const float* from) {
  const float4 q = *reinterpret_cast<const float4*>(from);
  return { {q.x, q.y, q.z, q.w} };
}

__device__ __forceinline__ void add_bias(float (&v)[kBlocks][kAccumulators], const float* vectors, const Consumer& self) {
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) {
    const float* bias = vectors + block * 64 + self.warp * 16 + self.lane / 4;
    const float of[2] = {bias[0], bias[8]};
#pragma unroll
    for (int i = 0; i < kAccumulators; ++i) v[block][i] += of[i / 2 % 2];
  }
}

// This thread's row: 16-byte chunks of 8 channels, swizzled within 128 bytes, of 64 channels each.
struct Row {
  uint32_t first, step;
  int swizzle;
  __device__ explicit Row(const Feed& feed) {
    const int sample = feed.self.thread();
    const uint32_t within = sample % kStoreSamples * kRowBytes;
    first = store_piece(feed, sample / kStoreSamples) + within;
    step = store_piece(feed, kTileSamples / kStoreSamples + sample / kStoreSamples) + within - first;
    swizzle = sample % 8;
  }
  __device__ uint32_t chunk(int i) const { return first + i / 8 * step + ((i % 8 ^ swizzle) << 4); }
};

// Values of one part of a row, kPartChannels of them. Loops over parts are not unrolled: the compiler would load more
// than registers hold.
using Values = float[kPartChannels];

__device__ __forceinline__ void load_part(Values& v, const Row& row, int part) {
#pragma unroll
  for (int i = 0; i < kPartChannels / 8; ++i) {
    const uint4 words = load_words(row.chunk(part * (kPartChannels / 8) + i));
    const float2 pair0 = unpack(words.x);
    v[8 * i + 0] = pair0.x, v[8 * i + 1] = pair0.y;
    const float2 pair1 = unpack(words.y);
    v[8 * i + 2] = pair1.x, v[8 * i + 3] = pair1.y;
    const float2 pair2 = unpack(words.z);
    v[8 * i + 4] = pair2.x, v[8 * i + 5] = pair2.y;
    const float2 pair3 = unpack(words.w);
    v[8 * i + 6] = pair3.x, v[8 * i + 7] = pair3.y;
  }
}

__device__ __forceinline__ void store_part(const Values& v, const Row& row, int part) {
#pragma unroll
  for (int i = 0; i < kPartChannels / 8; ++i) {
    const float* s = v + 8 * i;
    store_words(row.chunk(part * (kPartChannels / 8) + i), make_uint4(pack(s[0], s[1]), pack(s[2], s[3]), pack(s[4], s[5]), pack(s[6], s[7])));
  }
}

// Moments of a row's values: mean and sum of squared differences from it. Two passes keep the bits of all values, even
// beside a far mean or value.
struct RowMoments {
  float mean, m2;
};

// Pairwise sum: exact for equal values, since doubling loses no bits.
__device__ __forceinline__ float sum(const Values& v) {
  float sums[2 * kPartChannels - 1];
#pragma unroll
  for (int i = 0; i < kPartChannels; ++i) sums[i] = v[i];
#pragma unroll
  for (int i = 0; i < kPartChannels - 1; ++i) sums[kPartChannels + i] = sums[2 * i] + sums[2 * i + 1];
  return sums[2 * kPartChannels - 2];
}

__device__ __forceinline__ RowMoments moments(const Values& v) {
  const float mean = sum(v) * (1.0f / kPartChannels);
  float squares[4] = {};
#pragma unroll
  for (int i = 0; i < kPartChannels; ++i) {
    const float d = __fsub_rn(v[i], mean);
    squares[i % 4] = fmaf(d, d, squares[i % 4]);
  }
  return {mean, (squares[0] + squares[1]) + (squares[2] + squares[3])};
}

// Moments of the union of two sets by Chan's formula; the second is `share` of it. Exact for equal values.
__device__ __forceinline__ RowMoments merge(const RowMoments& a, float count, const RowMoments& b, float share) {
  const float d = __fsub_rn(b.mean, a.mean);
  return {fmaf(d, share, a.mean), a.m2 + b.m2 + d * d * (count * share)};
}

// Merges both warpgroups' moments of a group and sample, in the warpgroups' order.
__device__ __forceinline__ RowMoments merge_warpgroups(const RowMoments& own, float2* places, float count, const Consumer& self) {
  places[self.warpgroup * kTileSamples + self.thread()] = make_float2(own.mean, own.m2);
  named_barrier(1, 2 * 128);
  const float2 first = places[self.thread()], second = places[kTileSamples + self.thread()];
  return merge({first.x, first.y}, count, {second.x, second.y}, 0.5f);
}

// The norm and the operators after it.
__device__ __forceinline__ void norm_and_after(Values& v, const RowMoments& group, const float* vectors) {
  const float rstd = rsqrtf(group.m2 * (1.0f / kGroupWidth) + kEps);  // error of at most 2 units of 2^-23
#pragma unroll
  for (int quad = 0; quad < kPartChannels; quad += 4) {
    const Quad group_norm_weight_c = load_quad(vectors + 1 * kTileChannels + quad);
    const Quad group_norm_bias_c = load_quad(vectors + 2 * kTileChannels + quad);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      float& value = v[quad + e];
      value = __fsub_rn(value, group.mean) * rstd;
      value = value * group_norm_weight_c[e] + group_norm_bias_c[e];
      value = hardtanh(value, kHardtanhMinVal, kHardtanhMaxVal);
    }
  }
}

// Moments of a group's values in this row: kGroupParts parts from `first` on.
__device__ __forceinline__ RowMoments group_moments(const Row& row, int first) {
  RowMoments all = {};
#pragma unroll 1
  for (int i = 0; i < kGroupParts; ++i) {
    Values v;
    load_part(v, row, first + i);
    const RowMoments part = moments(v);
    all = i == 0 ? part : merge(all, i * kPartChannels, part, __fdividef(1.0f, i + 1.0f));
  }
  return all;
}

__device__ __forceinline__ void normalise_group(const Row& row, int first, const RowMoments& group, const float* vectors) {
#pragma unroll 1
  for (int i = 0; i < kGroupParts; ++i) {
    Values v;
    load_part(v, row, first + i);
    norm_and_after(v, group, vectors + (first + i) * kPartChannels);
    store_part(v, row, first + i);
  }
}

// --- the kernel: warpgroup 0 fetches, warpgroups 1 and 2 multiply, normalise and store ---

__device__ void consume(const Shared& shared, unsigned char* memory, const Arguments& arguments, const CUtensorMap* map_y) {
  const int thread = threadIdx.x - 128;
  Consumer self = {thread / 128, thread / 32 % 4, thread % 32};
  Feed feed{shared, self};
  float* vectors = reinterpret_cast<float*>(memory + kParametersAt) + self.warpgroup * kRowChannels;
  keep_parameters(vectors, fetch_parameters(arguments, blockIdx.x / kCluster, self), self);
  float2* places = reinterpret_cast<float2*>(memory + kGroupsAt);

  for (int unit = blockIdx.x / kCluster; unit < kUnits; unit += gridDim.x / kCluster) {
    float v[kBlocks][kAccumulators];
    uint32_t waiting[kBlocks][kAccumulators / 2], words[kBlocks][kAccumulators / 2];  // `waiting`: the deferred tile
    multiply_tile(v, feed);
    // Keeps the epilogue's address arithmetic below this point: the multiplication needs the registers.
    asm volatile("" : "+r"(self.warpgroup), "+r"(self.warp), "+r"(self.lane));
    add_bias(v, vectors, self);
    pack_tile(v, waiting);
    turn_tile(waiting, feed);
    named_barrier(2 + self.warpgroup, 128);  // the warpgroup's part of the tile is complete

    Row row(feed);
    const RowMoments earlier = group_moments(row, 0);
    fence_async();
    __syncwarp();  // one lane releases the stage for all
    feed.release();

    multiply_tile(v, feed);
    // Keeps the epilogue's address arithmetic below this point: the multiplication needs the registers.
    asm volatile("" : "+r"(self.warpgroup), "+r"(self.warp), "+r"(self.lane));
    add_bias(v, vectors + kVectors * kTileChannels, self);
    pack_tile(v, words);
    turn_tile(words, feed);
    named_barrier(2 + self.warpgroup, 128);  // the warpgroup's part of the tile is complete

    row = Row(feed);
    const RowMoments own = merge(earlier, kRowChannels, group_moments(row, 0), 0.5f);
    const RowMoments group = merge_warpgroups(own, places, kUnitTiles * kRowChannels, self);
    normalise_group(row, 0, group, vectors + kVectors * kTileChannels);
    send_tile(map_y, feed, tile_of(unit, 1, cluster_rank()));

    const Parameters next = fetch_parameters(arguments, unit + gridDim.x / kCluster, self);
    turn_tile(waiting, feed);
    named_barrier(2 + self.warpgroup, 128);
    normalise_group(row, 0, group, vectors);
    send_tile(map_y, feed, tile_of(unit, 0, cluster_rank()));
    keep_parameters(vectors, next, self);
  }
  wait_stores_read();
}

__global__ void __launch_bounds__(kThreads, 1)
gemm(const __grid_constant__ CUtensorMap map_weight, const __grid_constant__ CUtensorMap map_input,
     const __grid_constant__ CUtensorMap map_y,
     const __grid_constant__ Arguments arguments) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const Shared shared{shared_address(memory)};

  if (threadIdx.x == 0) {
    prefetch_map(&map_weight);
    prefetch_map(&map_input);
    for (int stage = 0; stage < kStages; ++stage) {
      barrier_init(shared.full(stage), 1);
      barrier_init(shared.empty(stage), kCluster * kConsumerWarps);
    }
    barrier_init_done();
  }
  cluster_sync();

  if (threadIdx.x < 128) {
    give_registers<kProducerRegisters>();
    if (threadIdx.x == 0) produce(shared, &map_weight, &map_input, cluster_rank());
  } else {
    take_registers<kConsumerRegisters>();
    consume(shared, memory, arguments, &map_y);
  }
  __syncwarp();
  cluster_sync();  // another CTA may write to this one's shared memory until here
}

// --- host ---

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

// Error codes beside cudaError_t (positive) and 1000000 + CUresult.
constexpr int kMisaligned = -1;       // a pointer is no multiple of 16 bytes
constexpr int kNoClusters = -2;       // the device cannot hold a cluster of this kernel
constexpr int kDriverError = 1000000;

// Finds cuTensorMapEncodeTiled through the runtime, so that nothing links to the driver.
PFN_cuTensorMapEncodeTiled_v12000 tensor_map_encoder() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found;
  if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found) != cudaSuccess) return nullptr;
  return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(function);
}

struct Box {
  CUtensorMapDataType type;
  CUtensorMapSwizzle swizzle;
  cuuint32_t rank;
  cuuint64_t sizes[3], pitches[2];  // elements; bytes
  cuuint32_t box[3];                // elements
};

int encode(CUtensorMap* map, const void* tensor, const Box& b) {
  static const PFN_cuTensorMapEncodeTiled_v12000 encoder = tensor_map_encoder();
  if (encoder == nullptr) return cudaErrorNotSupported;
  if (reinterpret_cast<uintptr_t>(tensor) % 16 != 0) return kMisaligned;
  const cuuint32_t every[3] = {1, 1, 1};
  const CUresult result = encoder(map, b.type, b.rank, const_cast<void*>(tensor), b.sizes, b.pitches, b.box, every, CU_TENSOR_MAP_INTERLEAVE_NONE,
                                  b.swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? 0 : kDriverError + result;
}

// Sets the shared-memory limit and checks that a cluster fits, once on each device.
int prepare(int device, const cudaLaunchConfig_t& config) {
  constexpr int kDevices = 64;
  static std::mutex lock;
  static bool ready[kDevices] = {};
  const std::lock_guard<std::mutex> guard(lock);
  if (device < kDevices && ready[device]) return 0;
  cudaError_t error = cudaFuncSetAttribute(gemm, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  if (error != cudaSuccess) return error;
  int clusters = 0;
  error = cudaOccupancyMaxActiveClusters(&clusters, gemm, &config);
  if (error != cudaSuccess) return error;
  if (clusters < 1) return kNoClusters;
  if (device < kDevices) ready[device] = true;
  return 0;
}

}  // namespace
}  // namespace gemm_sm90a

extern "C" int gemm_sm90a_launch(
    const __half* x,
    const __half* gemm_weight,
    const __half* gemm_bias,
    const __half* group_norm_weight,
    const __half* group_norm_bias,
    __half* y,
    int device, cudaStream_t stream) {
  using namespace gemm_sm90a;
  const DeviceScope scope(device);
  if (scope.error != cudaSuccess) return scope.error;

  CUtensorMap map_weight, map_input, map_y;
  const Box weight_box = {CU_TENSOR_MAP_DATA_TYPE_FLOAT16, CU_TENSOR_MAP_SWIZZLE_128B, 3, {kInFeatures, kOutFeatures, 1},
                          {kInFeatures * 2ull, kInFeatures * 2ull * kOutFeatures}, {kTileK, kTileChannels / kCluster, 1}};
  const Box input_box = {CU_TENSOR_MAP_DATA_TYPE_FLOAT16, CU_TENSOR_MAP_SWIZZLE_128B, 3, {kInFeatures, kBatch, 1},
                         {kInFeatures * 2ull, kInFeatures * 2ull * kBatch}, {kTileK, kTileSamples, 1}};
  if (const int error = encode(&map_weight, gemm_weight, weight_box)) return error;
  if (const int error = encode(&map_input, x, input_box)) return error;
  const Box y_box = {CU_TENSOR_MAP_DATA_TYPE_FLOAT16, CU_TENSOR_MAP_SWIZZLE_128B, 2, {kOutFeatures, kBatch}, {kOutFeatures * 2ull}, {64, kStoreSamples}};
  if (const int error = encode(&map_y, y, y_box)) return error;

  cudaLaunchAttribute attributes[2];
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim = {kCluster, 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = kGrid;
  config.blockDim = kThreads;
  config.dynamicSmemBytes = kSharedBytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = 1;
  if (const int error = prepare(device, config)) return error;
  const Arguments arguments = {gemm_bias, group_norm_weight, group_norm_bias, y};
  return cudaLaunchKernelEx(&config, gemm, map_weight, map_input, map_y, arguments);
}
