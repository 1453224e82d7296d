// gemm_biasadd_hardtanh_mish_groupnorm: linear -> add -> hardtanh -> mish -> group_norm in one kernel: TMA,
//   warp-specialised wgmma, clusters
//
//   linear(in_features=8192, out_features=8192, bias=True)  # gemm
//   add(shape=(8192,), init=randn)  # bias
//   hardtanh(min_val=-1.0, max_val=1.0)  # hardtanh
//   mish()  # mish
//   group_norm(num_groups=256, eps=1e-05, affine=True)  # groupnorm
//   x (1024, 8192) -> y (1024, 8192), fp32
//
// Plan for sm_90a on h100:
//   tiles of 128 channels x 128 samples, 3 stages of 64 k; one warpgroup fetches, 2 multiply
//   clusters of 2 CTAs that share rows of W: fetched once, received by both
//   groups of 32 channels lie in one tile
//   W stays fp32 in memory and is converted on its way into the multiplier's operand registers
//   the tensor core's sums are added to fp32 registers every 256 of K
//   128 blocks of 384 threads, 208992 bytes of shared memory
//
// Generated from specs/gemm_biasadd_hardtanh_mish_groupnorm.yaml; do not edit.
// Again: make generate SPEC=specs/gemm_biasadd_hardtanh_mish_groupnorm.yaml

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
constexpr int kGroupWidth = 32;  // out_features / num_groups
constexpr int kTileChannels = 128;  // channels of a tile: rows of W, operand A
constexpr int kTileSamples = 128;  // samples of a tile: rows of x, operand B
constexpr int kTileK = 64;  // values of K in a stage
constexpr int kSteps = 128;  // ceil(in_features / kTileK)
constexpr int kStages = 3;  // stages of the ring
constexpr int kCluster = 2;  // CTAs that share rows of W
constexpr int kUnitTiles = 1;  // tiles of a unit: a CTA computes them before their groups are complete
constexpr int kSampleBlocks = 4;  // clusters side by side along the batch
constexpr int kUnits = 256;  // units of work; a cluster takes one at a time
constexpr int kGrid = 128;  // CTAs: at most 4 units for each of 64 clusters
constexpr int kThreads = 384;  // one warpgroup that fetches, two that multiply
constexpr int kConsumerWarps = 8;  // multiplying warps, each of which frees a stage once
constexpr int kProducerRegisters = 24;  // registers of a fetching thread
constexpr int kConsumerRegisters = 240;  // registers of a multiplying thread
constexpr int kBlocks = 1;  // blocks of 64 channels in a warpgroup's accumulators
constexpr int kAccumulators = 64;  // registers of a block: 64 x kTileSamples values over 128 threads
constexpr int kPromoteSteps = 4;  // steps between two promotions to fp32 registers: 256 values of K
constexpr int kInFlight = 2;  // pieces of 16 k in multiplication while the next ones are converted
constexpr int kPlaneRowBytes = 64;  // bytes of a plane's row: 16 k of fp32
constexpr int kPlaneBytes = 4096;  // bytes of a plane: 64 rows of W
constexpr int kWeightBlockBytes = 16384;  // bytes of 64 rows of W
constexpr int kWeightPartBytes = 32768;  // bytes of one part of W in a stage
constexpr int kInputPartBytes = 16384;  // bytes of one part of x in a stage
constexpr int kStageBytes = 65536;  // bytes of a stage: all parts of W and x
constexpr int kScratchAt = 196608;  // offset of the scratch memory, behind the stages
constexpr int kScratchBytes = 6144;  // bytes of scratch memory for each warpgroup
constexpr int kStripFloats = 384;  // floats of a strip: three for each sample
constexpr int kStripValues = 16;  // channels of a strip: those of a group that one warp holds in a tile
constexpr int kGroupStrips = 2;  // strips of a group in this CTA
constexpr int kTileGroups = 4;  // groups of a tile
constexpr int kBarriersAt = 208896;  // offset of the barriers: full and empty, of W and of x
constexpr int kSharedBytes = 208992;  // bytes of shared memory
constexpr float kWeightScale = 4096.0f;  // scale that brings W's low parts into the range of halves
constexpr uint32_t kWeightScaleHalves = 0x6c006c00;  // kWeightScale as two halves in a word
constexpr float kSmallestHalf = 1.0f;  // least maximum of a scaled row: a loss of 2^-25 is then 2^-25 of it
constexpr float kFaint = 3.8146973e-6f;  // 2^-6 / kWeightScale: values below lose too many bits
constexpr uint32_t kFaintHalves = 0x24002400;  // 2^-6 as two halves in a word
constexpr float kFaintLimit = 1024.0f;  // in_features / 8: with more such values a row is recomputed
constexpr float kFaintSeen = 1024.0f;  // with more zeros or faint values a row is examined again
constexpr float kEps = 1.0e-5f;  // added to the variance
constexpr float kHardtanhMinVal = -1.0f;  // hardtanh's min_val
constexpr float kHardtanhMaxVal = 1.0f;  // hardtanh's max_val

// Tensors of the epilogue.
struct Arguments {
  const float* x;
  const float* gemm_weight;
  const float* x_unscale;
  const float* gemm_bias;
  const float* bias;
  const float* groupnorm_weight;
  const float* groupnorm_bias;
  float* y;
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
__device__ __forceinline__ void arrive(uint32_t barrier) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory"); }

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

template <int kRegisters>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

__device__ __forceinline__ void named_barrier(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }

// Waits until the kernel before this one has finished and its results are visible (programmatic dependent launch).
__device__ __forceinline__ void wait_for_previous_kernel() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

__device__ __forceinline__ float4 load_shared(uint32_t from) {
  float4 v;
  asm volatile("ld.shared.v4.f32 { %0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(from));
  return v;
}

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most kPending groups are in flight.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Rows of 64 halves (128 bytes), 128-byte swizzle, 1024 bytes from one group of eight rows to the next. A step of 16
// along K adds 2.
__device__ __forceinline__ uint64_t matrix_descriptor(uint32_t tile) {
  return (1ull << 62) | (static_cast<uint64_t>(1024 >> 4) << 32) | (1ull << 16) | ((tile & 0x3FFFF) >> 4);
}
constexpr int kDescriptorStep = 2;  // 16 halves = 32 bytes, in units of 16

// Matrix product: d (64 x 128, fp32) += a (64 x 16) b (16 x 128), or = if `accumulate` is false. d is in flight until
// wgmma_wait. a: four registers, b: a matrix descriptor.
__device__ __forceinline__ void wgmma(float (&d)[kAccumulators], const uint32_t (&a)[4], uint64_t b, bool accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
      "}, { %64, %65, %66, %67}, %68, p, 1, 1, 0;\n}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
        "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
        "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
        "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
        "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]),
        "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),
        "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
        "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)));
}

// --- pipeline: a ring of stages in shared memory, filled by two threads and read by the consumers ---

// Operands with rings of their own: W is free once it is in registers, x once it has been multiplied.
enum Operand { kWeight, kInput };

struct Shared {
  uint32_t base;
  __device__ uint32_t weight(int stage, int part) const { return base + stage * kStageBytes + part * kWeightPartBytes; }
  __device__ uint32_t input(int stage, int part) const { return base + stage * kStageBytes + 1 * kWeightPartBytes + part * kInputPartBytes; }
  __device__ uint32_t full(Operand operand, int stage) const { return base + kBarriersAt + 8 * (2 * kStages * operand + stage); }
  __device__ uint32_t empty(Operand operand, int stage) const { return full(operand, kStages + stage); }
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
  // Each CTA fetches one block of 64 rows for both CTAs.
  copy_box_to_all(shared.weight(stage, 0) + rank * kWeightBlockBytes, map, 0, row + rank * 64, at.step * (kTileK / 16), shared.full(kWeight, stage));
}

__device__ __forceinline__ void fetch_input(const Shared& shared, const CUtensorMap* map, const Walk& at, int stage, int rank) {
  const int row = tile_of(at.unit, at.tile, rank).sample;
  for (int part = 0; part < 2; ++part) {
    copy_box(shared.input(stage, part), map, at.step * kTileK, row, part, shared.full(kInput, stage));
  }
}

// Producers, two threads that keep the rings full. W depends on no other kernel: its first stages are fetched before x
// is ready.
__device__ void produce_weight(const Shared& shared, const CUtensorMap* map, int rank) {
  Ring ring;
  for (Walk at; at.inside(); at.advance(), ring.advance()) {
    wait(shared.empty(kWeight, ring.stage), ring.parity ^ 1, "W empty");  // returns at once in the first round
    expect_bytes(shared.full(kWeight, ring.stage), kWeightPartBytes);
    fetch_weight(shared, map, at, ring.stage, rank);
  }
}

__device__ void produce_input(const Shared& shared, const CUtensorMap* map, int rank) {
  wait_for_previous_kernel();
  Ring ring;
  for (Walk at; at.inside(); at.advance(), ring.advance()) {
    wait(shared.empty(kInput, ring.stage), ring.parity ^ 1, "x empty");
    expect_bytes(shared.full(kInput, ring.stage), 2 * kInputPartBytes);
    fetch_input(shared, map, at, ring.stage, rank);
  }
}

// --- multiply: rows of the accumulators are channels (W is operand A), columns are samples (x is operand B) ---

// A consumer thread's place. Accumulator register 4 j + 2 h + e of block b is channel `channel(b, h)`,
// sample 8 j + 2 (lane % 4) + e.
struct Consumer {
  int warpgroup, warp, lane;
  __device__ int channel(int block, int half) const { return (warpgroup * kBlocks + block) * 64 + warp * 16 + half * 8 + lane / 4; }
  __device__ int first_sample() const { return lane % 4 * 2; }
};

struct Feed {
  const Shared& shared;
  const Consumer& self;
  Ring weight, input;
  int reading = -1;  // stage of x whose multiplications may still be running

  // Frees a stage of W: one arrival a warp, in every CTA of the cluster, since all of them fill the stage.
  __device__ __forceinline__ void release_weight(int stage) {
    if (self.lane < kCluster) arrive(shared.empty(kWeight, stage), self.lane);
  }

  // Frees the stage of x: one arrival a warp.
  __device__ __forceinline__ void release() {
    if (reading >= 0 && self.lane == 0) arrive(shared.empty(kInput, reading));
    reading = -1;
  }
};

// A thread's summary of its two rows of W, two halves a word: the largest magnitudes (NaN wins) and the numbers of
// faint values.
struct Seen {
  uint32_t largest[2], faint[2];
};

__device__ __forceinline__ void look_at(Seen& seen, int h, uint32_t halves) {
  asm("{\n.reg .b32 magnitude, below;\n"
      "abs.f16x2 magnitude, %2;\nmax.NaN.f16x2 %0, %0, magnitude;\n"
      "set.lt.f16x2.f16x2 below, magnitude, %3;\nadd.f16x2 %1, %1, below;\n}"
      : "+r"(seen.largest[h]), "+r"(seen.faint[h]) : "r"(halves), "r"(kFaintHalves));
}

// Packs two values, rounded to nearest, into a 32-bit word.
__device__ __forceinline__ uint32_t pack(float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// Splits v * kWeightScale into halves high + low, with an error of 2^-22 of v or 2^-25. The product of a half and the
// scale is exact.
__device__ __forceinline__ void split_pair(float v0, float v1, uint32_t& high, uint32_t& low) {
  const uint32_t scale = kWeightScaleHalves;
  const uint32_t rounded = pack(v0, v1);
  const __half2 scaled = __hmul2(*reinterpret_cast<const __half2*>(&rounded), *reinterpret_cast<const __half2*>(&scale));
  const float2 part = __half22float2(scaled);
  high = *reinterpret_cast<const uint32_t*>(&scaled);
  low = pack(fmaf(v0, kWeightScale, -part.x), fmaf(v1, kWeightScale, -part.y));
}

// A lane's values of 16 rows x 16 k of W: k = 4 (l % 4) .. + 3 of rows l / 4 and l / 4 + 8, 16 bytes each without bank
// conflicts. They serve as the operand's k = 2c, 2c + 1, 2c + 8, 2c + 9 with c = l % 4; x is stored in the matching
// order.
struct Values {
  float4 row[2];
};

// Pipeline of W in registers: the operand's words for each 16 k of a stage, and the values to convert next. A piece is
// split while the previous one is multiplied, and read from shared memory one piece earlier, so that nothing waits.
struct Weights {
  uint32_t high[kTileK / 16][4], low[kTileK / 16][4];
  Values next;
  uint32_t from;  // address of the lane's first values in the stage being read

  __device__ __forceinline__ void read(int piece) {
    next = {load_shared(from + piece * kPlaneBytes), load_shared(from + piece * kPlaneBytes + 8 * kPlaneRowBytes)};
  }
  __device__ __forceinline__ void convert(int piece) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      split_pair(next.row[h].x, next.row[h].y, high[piece][h], low[piece][h]);
      split_pair(next.row[h].z, next.row[h].w, high[piece][2 + h], low[piece][2 + h]);
    }
  }
  __device__ __forceinline__ void look(int piece, Seen& seen) const {
#pragma unroll
    for (int word = 0; word < 4; ++word) look_at(seen, word % 2, high[piece][word]);
  }
  __device__ __forceinline__ void enter_stage(const Feed& feed) {
    wait(feed.shared.full(kWeight, feed.weight.stage), feed.weight.parity, "W full");
    from = feed.shared.weight(feed.weight.stage, 0) + feed.self.warpgroup * kWeightBlockBytes + (feed.self.warp * 16 + feed.self.lane / 4) * kPlaneRowBytes +
           feed.self.lane % 4 * 16;
  }
  // Starts a tile: converts the first piece and reads the second.
  __device__ __forceinline__ void begin(const Feed& feed) {
    enter_stage(feed);
    read(0);
    convert(0);
    read(1);
  }
};

// Multiplies one stage. `more`: another stage of this tile follows; its first pieces are read and converted on the way.
__device__ __forceinline__ void multiply_stage(float (&sums)[kBlocks][kAccumulators], Weights& weights, Feed& feed, bool accumulate, bool more, Seen& seen) {
  constexpr int kPieces = kTileK / 16;
  wait(feed.shared.full(kInput, feed.input.stage), feed.input.parity, "x full");
  const uint64_t input = matrix_descriptor(feed.shared.input(feed.input.stage, 0));
  const int stage = feed.weight.stage;
#pragma unroll
  for (int piece = 0; piece < kPieces; ++piece) {
    const uint64_t input_high = input + piece * kDescriptorStep;
    wgmma_fence();
    const uint64_t input_low = input_high + (kInputPartBytes >> 4);
    wgmma(sums[0], weights.low[piece], input_high, piece > 0 || accumulate);  // corrections first, while the sum is small
    wgmma(sums[0], weights.high[piece], input_low, true);
    wgmma(sums[0], weights.high[piece], input_high, true);
    wgmma_commit();
    weights.look(piece, seen);
    if (piece == kPieces - 1) feed.release_weight(stage);  // all of it is in registers
    if (piece + 1 < kPieces || more) weights.convert((piece + 1) % kPieces);
    if (piece == kPieces - 2) {
      feed.weight.advance();
      if (more) weights.enter_stage(feed);
    }
    if (piece + 2 < kPieces || more) weights.read((piece + 2) % kPieces);
    wgmma_wait<kInFlight>();
    if (piece == kInFlight - 1) feed.release();  // the previous stage
  }
  feed.reading = feed.input.stage;
  feed.input.advance();
}

// Adds `sums` to `total`. Volatile, so that the additions stay between the wait for `sums` and the multiplication that
// overwrites them.
__device__ __forceinline__ void promote(float (&total)[kBlocks][kAccumulators], const float (&sums)[kBlocks][kAccumulators]) {
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
    for (int i = 0; i < kAccumulators; ++i) asm volatile("add.f32 %0, %0, %1;" : "+f"(total[block][i]) : "f"(sums[block][i]));
  }
}

// The product of one tile. The tensor core truncates, so its sums are added to `total` with rounding every
// kPromoteSteps steps.
// Both warpgroups do this at the same k: equal rows of W give equal sums, so that a constant group stays constant.
__device__ __forceinline__ void multiply_tile(float (&total)[kBlocks][kAccumulators], Feed& feed, Seen& seen) {
  float sums[kBlocks][kAccumulators];
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
    for (int i = 0; i < kAccumulators; ++i) total[block][i] = 0.0f;
  }
  Weights weights;
  weights.begin(feed);
  int chunk = min(kPromoteSteps, kSteps);
  for (int step = 0; step < kSteps; step += chunk, chunk = min(kPromoteSteps, kSteps - step)) {
#pragma unroll 1
    for (int i = 0; i < chunk; ++i) multiply_stage(sums, weights, feed, i > 0, step + i + 1 < kSteps, seen);
    wgmma_wait<0>();
    feed.release();
    promote(total, sums);
  }
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

__device__ __forceinline__ float parameter(const float* vector, int channel) {
  return vector[channel];
}

// --- guard: finds values that scaled halves cannot carry and recomputes their sums in fp32 ---

__device__ __forceinline__ const float* weight_row(const Arguments& arguments, int channel) {
  return arguments.gemm_weight + static_cast<size_t>(channel) * kInFeatures;
}

__device__ __forceinline__ const float* input_row(const Arguments& arguments, int sample) {
  return arguments.x + static_cast<size_t>(sample) * kInFeatures;
}

// The sum over the four lanes that hold a row's columns.
__device__ __forceinline__ float quad_sum(float v) {
  v += __shfl_xor_sync(0xffffffffu, v, 1);
  return v + __shfl_xor_sync(0xffffffffu, v, 2);
}

// Maximum over the same four lanes.
__device__ __forceinline__ float quad_max(float v) {
  v = fmaxf(v, __shfl_xor_sync(~0u, v, 1));
  return fmaxf(v, __shfl_xor_sync(~0u, v, 2));
}

__device__ __forceinline__ float2 pair_of(uint32_t halves) { return __half22float2(*reinterpret_cast<const __half2*>(&halves)); }

// Whether a row of W leaves the range in which its split is exact enough: by its largest value, or by the number of
// values that lose bits. Zeros lose none; only a pass over the row tells them from faint values.
__device__ __forceinline__ bool outside_window(const Seen& seen, int h, const float* row, int lane) {
  const float2 largest = pair_of(seen.largest[h]), faint = pair_of(seen.faint[h]);
  const bool holds = quad_max(largest.x <= 65504.0f && largest.y <= 65504.0f ? 0.0f : 1.0f) == 0.0f;  // finite and in range
  const float magnitude = quad_max(fmaxf(largest.x, largest.y));
  const bool doubtful = quad_sum(faint.x + faint.y) > kFaintSeen;
  float count = 0.0f;
  for (int k = lane % 4 * 4; doubtful && k < kInFeatures; k += 16) {
    const float4 w = *reinterpret_cast<const float4*>(row + k);
    count += w.x != 0.0f && fabsf(w.x) < kFaint ? 1.0f : 0.0f;
    count += w.y != 0.0f && fabsf(w.y) < kFaint ? 1.0f : 0.0f;
    count += w.z != 0.0f && fabsf(w.z) < kFaint ? 1.0f : 0.0f;
    count += w.w != 0.0f && fabsf(w.w) < kFaint ? 1.0f : 0.0f;
  }
  count = quad_sum(count);
  if (magnitude == 0.0f) return count > 0.0f;
  return !holds || magnitude < kSmallestHalf || count > kFaintLimit;
}

__device__ __forceinline__ float dot(float4 a, float4 b) { return fmaf(a.x, b.x, fmaf(a.y, b.y, fmaf(a.z, b.z, a.w * b.w))); }

// Recomputes a warp's sums from x and W in fp32, two channels and two samples a lane at a time: correct for every
// value, a hundred times slower.
__device__ __forceinline__ void recompute(float (&v)[kBlocks][kAccumulators], const Arguments& arguments, const Tile& tile, const Consumer& self) {
  constexpr int kPartialK = 128;  // length of a partial sum, for PyTorch's accuracy
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) {
    const float* weights[2] = {weight_row(arguments, tile.channel + self.channel(block, 0)), weight_row(arguments, tile.channel + self.channel(block, 1))};
#pragma unroll
    for (int i = 0; i < kAccumulators; i += 4) {
      const int sample = tile.sample + 2 * i + self.first_sample();
      const float* inputs[2] = {input_row(arguments, sample), input_row(arguments, sample + 1)};
      float sums[4] = {};
#pragma unroll 1
      for (int first = 0; first < kInFeatures; first += kPartialK) {
        float partial[4] = {};
#pragma unroll 1
        for (int k = first; k < min(first + kPartialK, kInFeatures); k += 4) {
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            partial[e] += dot(*reinterpret_cast<const float4*>(weights[e / 2] + k), *reinterpret_cast<const float4*>(inputs[e % 2] + k));
          }
        }
#pragma unroll
        for (int e = 0; e < 4; ++e) sums[e] += partial[e];
      }
#pragma unroll
      for (int e = 0; e < 4; ++e) v[block][i + e] = sums[e];
    }
  }
}

// Removes the operands' scales from the sums. NaN scales and rows of W outside the range lead to `recompute`.
__device__ __forceinline__ void unscale(float (&v)[kBlocks][kAccumulators], const Arguments& arguments, const Tile& tile,
                                        const Consumer& self, const Seen& seen) {
  bool unfit = false;
#pragma unroll
  for (int j = 0; j < kTileSamples / 8; ++j) {
    const float2 scale = *reinterpret_cast<const float2*>(arguments.x_unscale + tile.sample + 8 * j + self.first_sample());
    unfit |= scale.x != scale.x || scale.y != scale.y;
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        v[block][4 * j + 2 * h] *= scale.x;
        v[block][4 * j + 2 * h + 1] *= scale.y;
      }
    }
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    unfit |= outside_window(seen, h, weight_row(arguments, tile.channel + self.channel(0, h)), self.lane);
  }
  if (__any_sync(~0u, unfit)) recompute(v, arguments, tile, self);
}

// --- statistics: merged by Chan's formula in a fixed order; exact for equal values ---

// Scale for values whose squares exceed fp32's range. Statistics are then formed of the values times kShrink, a power
// of two: a sum of squares above 2^128 becomes one above 2^-32, and every sum of squares stays below 2^128.
constexpr float kShrink = 8.271806125530277e-25f;  // 2^-80
constexpr float kGrow = 1.2089258196146292e24f;    // 2^80

// Moments of a set of values whose count the compiler knows: the mean (`mean` plus its rounding error `mean_rest`), and
// the sum m2 of squared differences from it.
// A negative m2 belongs to the values times kShrink: the sum of the values themselves exceeds fp32's range.

struct UncountedMoments {
  float mean, mean_rest, m2;
};

// Moments of the union of two sets by Chan's formula. Only differences of means are rounded, and those are as small as
// the spread: all values keep their bits, even beside a far mean or value. __fsub_rn prevents a fusion with the product
// that made an operand: the value kept is the rounded one.
__device__ __forceinline__ UncountedMoments merge(const UncountedMoments& a, float count, const UncountedMoments& b, float other_count) {
  const float share = other_count / (count + other_count);
  const float d = __fsub_rn(b.mean, a.mean), d_rest = b.mean_rest - a.mean_rest, all = d + d_rest;
  const float mean = fmaf(d, share, a.mean);
  return {mean, a.mean_rest + fmaf(d_rest, share, fmaf(d, share, __fsub_rn(a.mean, mean))), (a.m2 + b.m2) + all * all * (count * share)};
}

__device__ __forceinline__ bool beyond_range(const UncountedMoments& m) { return !(m.m2 < INFINITY); }
__device__ __forceinline__ UncountedMoments shrunk(const UncountedMoments& m) { return {m.mean * kShrink, m.mean_rest * kShrink, m.m2 < 0.0f ? -m.m2 : m.m2 * kShrink * kShrink}; }
__device__ __forceinline__ UncountedMoments grown(const UncountedMoments& m) { return {m.mean * kGrow, m.mean_rest * kGrow, -m.m2}; }

// Merge for values of any magnitude.
__device__ __forceinline__ UncountedMoments join(const UncountedMoments& a, float count, const UncountedMoments& b, float other_count) {
  const UncountedMoments both = merge(a, count, b, other_count);
  if (a.m2 >= 0.0f && b.m2 >= 0.0f && !beyond_range(both)) return both;
  return grown(merge(shrunk(a), count, shrunk(b), other_count));
}

// Coefficients of the normalised value (v - mean) * rstd + offset; `offset` accounts for the mean's rounding error.
struct Normaliser {
  float mean, rstd, offset;
};

__device__ __forceinline__ Normaliser normaliser(const UncountedMoments& group) {
  const float rstd = group.m2 < 0.0f ? kShrink / sqrtf(-group.m2 * (1.0f / kGroupWidth)) : 1.0f / sqrtf(group.m2 * (1.0f / kGroupWidth) + kEps);
  return {group.mean, rstd, -group.mean_rest * rstd};
}

// Moments of two values; kShrunk: of the values times kShrink.
template <bool kShrunk>
__device__ __forceinline__ UncountedMoments of_two(float a, float b) {
  if (kShrunk) a *= kShrink, b *= kShrink;
  const float d = __fsub_rn(b, a), mean = fmaf(d, 0.5f, a);
  return {mean, fmaf(d, 0.5f, __fsub_rn(a, mean)), 0.5f * d * d};
}

// Planes of three numbers for kTileSamples samples in shared memory: a strip's moments, or a group's normaliser.
__device__ __forceinline__ UncountedMoments load_moments(const float* from) { return {from[0], from[kTileSamples], from[2 * kTileSamples]}; }
__device__ __forceinline__ void store_moments(float* to, const UncountedMoments& m) { to[0] = m.mean, to[kTileSamples] = m.mean_rest, to[2 * kTileSamples] = m.m2; }
__device__ __forceinline__ void store_normaliser(float* to, const Normaliser& n) { to[0] = n.mean, to[kTileSamples] = n.rstd, to[2 * kTileSamples] = n.offset; }

// Exchange between two lanes that differ in `bit`, each with moments of `count` values for two samples: the lane with
// the bit takes the second sample.
__device__ __forceinline__ UncountedMoments share_out(const UncountedMoments& first, const UncountedMoments& second, int lane, int bit, int count) {
  const bool upper = lane & bit;
  const UncountedMoments own = upper ? second : first, given = upper ? first : second;
  const UncountedMoments got = {__shfl_xor_sync(~0u, given.mean, bit), __shfl_xor_sync(~0u, given.mean_rest, bit), __shfl_xor_sync(~0u, given.m2, bit)};
  return merge(own, count, got, count);
}

// Moments of this thread's channels of a strip, for sample `c` of its 8.
template <bool kShrunk>
__device__ __forceinline__ UncountedMoments thread_moments(const float (&v)[kBlocks][kAccumulators], int block, int samples, int c) {
  const int at = 16 * samples + 4 * (c / 2) + c % 2;
  return of_two<kShrunk>(v[block][at], v[block][at + 2]);
}

// Moments of a warp's strip of kStripValues channels, for 32 samples. Lanes exchange halves of their samples until each
// has one, given by `strip_sample`.
template <bool kShrunk>
__device__ __forceinline__ UncountedMoments strip_statistics_of(const float (&v)[kBlocks][kAccumulators], int block, int samples, int lane) {
  UncountedMoments all[4];
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    all[c] = share_out(thread_moments<kShrunk>(v, block, samples, c), thread_moments<kShrunk>(v, block, samples, c + 4), lane, 16, 2);
  }
#pragma unroll
  for (int kept = 2, bit = 8, count = 4; kept; kept /= 2, bit /= 2, count *= 2) {
#pragma unroll
    for (int c = 0; c < kept; ++c) all[c] = share_out(all[c], all[c + kept], lane, bit, count);
  }
  return all[0];
}

__device__ __forceinline__ UncountedMoments strip_statistics(const float (&v)[kBlocks][kAccumulators], int block, int samples, int lane) {
  UncountedMoments own = strip_statistics_of<false>(v, block, samples, lane);
  if (__any_sync(~0u, beyond_range(own))) {
    const UncountedMoments small = strip_statistics_of<true>(v, block, samples, lane);
    if (beyond_range(own)) own = grown(small);
  }
  return own;
}

__device__ __forceinline__ int strip_sample(int samples, int lane) { return 32 * samples + 8 * (lane / 8) + lane % 4 * 2 + lane / 4 % 2; }

// Writes the moments of a warp's strips to its warpgroup's part of shared memory.
__device__ __forceinline__ void write_strips(const float (&v)[kBlocks][kAccumulators], float* strips, const Consumer& self) {
#pragma unroll
  for (int block = 0; block < kBlocks; block += 1) {
    float* strip = strips + self.warp * kStripFloats;
#pragma unroll
    for (int samples = 0; samples < kTileSamples / 32; ++samples) {
      store_moments(strip + strip_sample(samples, self.lane), strip_statistics(v, block, samples, self.lane));
    }
  }
}

// Merges the strips of a warpgroup's group for one sample.
__device__ __forceinline__ UncountedMoments merge_strips(const float* strips, int group, int sample) {
  const float* first = strips + group * kGroupStrips * kStripFloats + sample;
  UncountedMoments all = load_moments(first);
#pragma unroll
  for (int i = 1; i < kGroupStrips; ++i) all = join(all, i * kStripValues, load_moments(first + i * kStripFloats), kStripValues);
  return all;
}

// --- epilogue ---

// Operators between the product and the norm.
__device__ __forceinline__ void before_norm(float (&v)[kBlocks][kAccumulators], const Arguments& arguments, const Tile& tile, const Consumer& self) {
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) {
    const int channel = tile.channel + self.channel(block, 0);
    const float gemm_bias_c[2] = {parameter(arguments.gemm_bias, channel), parameter(arguments.gemm_bias, channel + 8)};
    const float bias_c[2] = {parameter(arguments.bias, channel), parameter(arguments.bias, channel + 8)};
#pragma unroll
    for (int i = 0; i < kAccumulators; ++i) {
      const int h = i / 2 % 2;
      float& value = v[block][i];
      value = value + gemm_bias_c[h];
      value = value + bias_c[h];
      value = hardtanh(value, kHardtanhMinVal, kHardtanhMaxVal);
      value = mish(value);
    }
  }
}

// The norm and the operators after it.
__device__ __forceinline__ void norm_and_after(float (&v)[kBlocks][kAccumulators], const Arguments& arguments,
                                               const float* groups, const Tile& tile, const Consumer& self) {
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) {
    const int channel = tile.channel + self.channel(block, 0);
    const float groupnorm_weight_c[2] = {parameter(arguments.groupnorm_weight, channel), parameter(arguments.groupnorm_weight, channel + 8)};
    const float groupnorm_bias_c[2] = {parameter(arguments.groupnorm_bias, channel), parameter(arguments.groupnorm_bias, channel + 8)};
    const float* group = groups + (block * 64 + self.warp * 16) / kGroupWidth * (kGroupStrips * kStripFloats) + self.first_sample();
#pragma unroll
    for (int j = 0; j < kTileSamples / 8; ++j) {
      // Normalisers of two samples.
      const float2 mean = *reinterpret_cast<const float2*>(group + 8 * j);
      const float2 rstd = *reinterpret_cast<const float2*>(group + 8 * j + kTileSamples);
      const float2 offset = *reinterpret_cast<const float2*>(group + 8 * j + 2 * kTileSamples);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int h = i / 2;
        float& value = v[block][4 * j + i];
        value = fmaf(__fsub_rn(value, i % 2 ? mean.y : mean.x), i % 2 ? rstd.y : rstd.x, i % 2 ? offset.y : offset.x);
        value = value * groupnorm_weight_c[h] + groupnorm_bias_c[h];
      }
    }
  }
}

// Stores a tile: eight lanes write 32 consecutive bytes of a sample, whole sectors.
__device__ __forceinline__ void store_tile(const float (&v)[kBlocks][kAccumulators], const Arguments& arguments, const Tile& tile, const Consumer& self) {
  const int sample = tile.sample + self.first_sample();
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) {
    const int channel = tile.channel + self.channel(block, 0);
    float* to = arguments.y + static_cast<size_t>(sample) * kOutFeatures + channel;
#pragma unroll
    for (int i = 0; i < kAccumulators; i += 4) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float* row = to + static_cast<size_t>(2 * i + e) * kOutFeatures;
        __stcs(row, v[block][i + e]);
        __stcs(row + 8, v[block][i + 2 + e]);
      }
    }
  }
}

// --- the kernel: warpgroup 0 fetches, warpgroups 1 and 2 multiply, normalise and store ---

__device__ void consume(const Shared& shared, unsigned char* memory, const Arguments& arguments) {
  const int thread = threadIdx.x - 128;
  Consumer self = {thread / 128, thread / 32 % 4, thread % 32};
  Feed feed{shared, self};
  float* strips = reinterpret_cast<float*>(memory + kScratchAt + self.warpgroup * kScratchBytes);
  float* groups = strips;  // a group's normaliser takes the place of its first strip
  wait_for_previous_kernel();

  for (int unit = blockIdx.x / kCluster; unit < kUnits; unit += gridDim.x / kCluster) {
    float v[kBlocks][kAccumulators];
    for (int tile = 0; tile < kUnitTiles; ++tile) {
      Seen seen = {};
      multiply_tile(v, feed, seen);
      // Keeps the epilogue's address arithmetic below this point: the multiplication needs the registers.
      asm volatile("" : "+r"(self.warpgroup), "+r"(self.warp), "+r"(self.lane));
      const Tile at = tile_of(unit, tile, cluster_rank());
      unscale(v, arguments, at, self, seen);
      before_norm(v, arguments, at, self);
      named_barrier(2 + self.warpgroup, 128);  // all threads have read the last unit's normalisers
      write_strips(v, strips, self);
    }

    named_barrier(2 + self.warpgroup, 128);  // all strips of the warpgroup are complete
    constexpr int kItems = kTileGroups / 2 * kTileSamples;  // (group, sample) pairs of a warpgroup, one a thread at a time
    for (int item = thread % 128; item < kItems; item += 128) {
      const int group = item / kTileSamples, sample = item % kTileSamples;
      store_normaliser(groups + group * kGroupStrips * kStripFloats + sample, normaliser(merge_strips(strips, group, sample)));
    }
    named_barrier(2 + self.warpgroup, 128);

    const Tile at = tile_of(unit, 0, cluster_rank());
    norm_and_after(v, arguments, groups, at, self);
    store_tile(v, arguments, at, self);
  }
}

__global__ void __launch_bounds__(kThreads, 1)
gemm(const __grid_constant__ CUtensorMap map_weight, const __grid_constant__ CUtensorMap map_input,
     const __grid_constant__ Arguments arguments) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const Shared shared{shared_address(memory)};

  if (threadIdx.x == 0) {
    prefetch_map(&map_weight);
    prefetch_map(&map_input);
    for (int stage = 0; stage < kStages; ++stage) {
      barrier_init(shared.full(kWeight, stage), 1);
      barrier_init(shared.full(kInput, stage), 1);
      barrier_init(shared.empty(kWeight, stage), kCluster * kConsumerWarps);
      barrier_init(shared.empty(kInput, stage), kConsumerWarps);
    }
    barrier_init_done();
  }
  cluster_sync();

  if (threadIdx.x < 128) {
    give_registers<kProducerRegisters>();
    if (threadIdx.x == 0) produce_weight(shared, &map_weight, cluster_rank());
    if (threadIdx.x == 32) produce_input(shared, &map_input, cluster_rank());
  } else {
    take_registers<kConsumerRegisters>();
    consume(shared, memory, arguments);
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
    const float* x,
    const float* gemm_weight,
    const __half* x_split,
    const float* x_unscale,
    const float* gemm_bias,
    const float* bias,
    const float* groupnorm_weight,
    const float* groupnorm_bias,
    float* y,
    int device, cudaStream_t stream) {
  using namespace gemm_sm90a;
  const DeviceScope scope(device);
  if (scope.error != cudaSuccess) return scope.error;
  const void* const read_wide[] = {x, gemm_weight};  // tensors that threads read 16 bytes at a time
  for (const void* tensor : read_wide) {
    if (reinterpret_cast<uintptr_t>(tensor) % 16 != 0) return kMisaligned;
  }

  CUtensorMap map_weight, map_input;
  // W as planes of 16 k: a box of {16, 64, 4} becomes four planes of 64 rows of 64 bytes.
  const Box weight_box = {CU_TENSOR_MAP_DATA_TYPE_FLOAT32, CU_TENSOR_MAP_SWIZZLE_NONE,         3,
                          {16, kOutFeatures, kInFeatures / 16}, {kInFeatures * 4ull, 64},          {16, 64, kTileK / 16}};
  const Box input_box = {CU_TENSOR_MAP_DATA_TYPE_FLOAT16, CU_TENSOR_MAP_SWIZZLE_128B, 3, {kInFeatures, kBatch, 2},
                         {kInFeatures * 2ull, kInFeatures * 2ull * kBatch}, {kTileK, kTileSamples, 1}};
  if (const int error = encode(&map_weight, gemm_weight, weight_box)) return error;
  if (const int error = encode(&map_input, x_split, input_box)) return error;

  cudaLaunchAttribute attributes[2];
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim = {kCluster, 1, 1};
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;  // launch while the split of x runs
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = kGrid;
  config.blockDim = kThreads;
  config.dynamicSmemBytes = kSharedBytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = 2;
  if (const int error = prepare(device, config)) return error;
  const Arguments arguments = {x, gemm_weight, x_unscale, gemm_bias, bias, groupnorm_weight, groupnorm_bias, y};
  return cudaLaunchKernelEx(&config, gemm, map_weight, map_input, arguments);
}
