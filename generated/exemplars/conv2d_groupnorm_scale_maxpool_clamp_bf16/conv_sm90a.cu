// conv2d_groupnorm_scale_maxpool_clamp_bf16: the whole chain in one kernel that reads x once; the convolution on tensor
//   cores without im2col
//
//   conv2d(in_channels=8, out_channels=64, kernel_size=(3, 3), stride=(1, 1), padding=(0, 0), dilation=(1, 1),
//     groups=1, bias=True)  # conv
//   group_norm(num_groups=16, eps=1e-05, affine=True)  # group_norm
//   mul(shape=(64, 1, 1), init=ones)  # scale
//   max_pool2d(kernel_size=(4, 4), stride=(4, 4), padding=(0, 0), dilation=(1, 1), ceil_mode=False)  # maxpool
//   clamp(min=0.0, max=1.0)
//   x (128, 8, 128, 128) -> y (128, 64, 31, 31), bf16
//
// Plan for sm_90a on h100:
//   one bf16 product; tiles of 64 channels x 128 pixels
//   a cluster of 2 CTAs takes a sample, a part of its rows each: 2 rounds of 16 strips over 3 warpgroups, one more
//     converts x
//   pooled values before the norm wait in shared memory (126976 bytes) and are written while the next sample is
//     multiplied
//   128 blocks of 512 threads, 212256 bytes of shared memory
//
// Generated from specs/conv2d_groupnorm_scale_maxpool_clamp.yaml; do not edit.
// Again: make generate SPEC=specs/conv2d_groupnorm_scale_maxpool_clamp.yaml PRECISION=bf16

#include <cuda_runtime.h>
#include <cuda_bf16.h>
#include <cstdint>
#include <mutex>

namespace conv_sm90a {
namespace {

constexpr int kBatch = 128;  // samples
constexpr int kInChannels = 8;  // in_channels
constexpr int kHeight = 128;  // rows of x
constexpr int kWidth = 128;  // values of a row of x
constexpr int kInPlane = kHeight * kWidth;  // values of a channel of x
constexpr int kKernelHeight = 3;  // conv2d's kernel_size
constexpr int kKernelWidth = 3;  // conv2d's kernel_size
constexpr int kTaps = kKernelHeight * kKernelWidth;  // filter taps
constexpr int kOutChannels = 64;  // out_channels
constexpr int kOutHeight = 126;  // rows of the convolution's result
constexpr int kOutWidth = 126;  // columns of the convolution's result
constexpr int kWindowHeight = 4;  // max_pool2d's kernel_size and stride
constexpr int kWindowWidth = 4;  // max_pool2d's kernel_size and stride
constexpr int kPooledHeight = 31;  // rows of a channel of y
constexpr int kPooledWidth = 31;  // values of a row of y
constexpr int kPooledPlane = kPooledHeight * kPooledWidth;  // values of a channel of y
constexpr int kGroupChannels = 4;  // 64 channels / 16 groups
constexpr int kMerged = 4;  // channels of a group whose moments meet in a warp
constexpr int kSetsOfGroup = 1;  // kGroupChannels / kMerged
constexpr int kGroupSize = 63504;  // kGroupChannels x kOutHeight x kOutWidth
constexpr int kChannels = 64;  // output channels of a CTA: the rows of a tile
constexpr int kOctets = 1;  // planes of 8 input channels: kInChannels / 8, rounded up
constexpr int kHalves = kOctets * kTaps;  // fragments of 8 along K, in order of planes and taps
constexpr int kPitch = 128;  // pixels of a row in shared memory: kWidth and the padding, to a multiple of 8
constexpr int kTileColumns = 128;  // conv columns of a tile
constexpr int kLastColumns = 126;  // columns of the tile that exist
constexpr int kAccumulators = 64;  // 64 channels x 128 pixels / 128 threads
constexpr int kStrips = 32;  // strips of kWindowHeight conv rows, the last may be short
constexpr int kUnits = 16;  // strips of a part
constexpr int kCluster = 2;  // CTAs of a cluster; they share a sample, one part each
constexpr int kClusters = 64;  // clusters: 128 samples in 2 rounds
constexpr int kItems = 2;  // samples of a cluster, at most
constexpr int kMultiplyGroups = 3;  // multiplying warpgroups, one strip each at a time; one more converts x
constexpr int kThreads = 512;  // 128 x (kMultiplyGroups + 1)
constexpr int kMultiplyRegisters = 152;  // registers of a multiplying thread
constexpr int kConvertRegisters = 56;  // registers of a converting thread
constexpr int kRing = 18;  // rows of x in shared memory: those of kMultiplyGroups strips, and a chunk being converted
constexpr int kRepeats = 2;  // first rows of the ring, repeated behind it so that a tile's rows stay contiguous
constexpr int kChunkRows = 4;  // rows of a chunk, which are converted at once
constexpr int kRawStages = 4;  // chunks in flight from global memory
constexpr int kRawValues = 4096;  // kInChannels x kChunkRows x kWidth
constexpr int kConvertBarrier = 5;  // named barrier of the converting warpgroup
constexpr int kPixelsAtOnce = 2;  // pixels of a chunk that a thread holds at once
constexpr int kChunkPixels = 4;  // pixels of a chunk for each converting thread
constexpr int kPlanePixels = (kRing + kRepeats) * kPitch;  // pixels of a plane
constexpr int kPlanes = 1;  // kOctets
constexpr int kConstantPixels = 128;  // pixels of equal values, by which a constant is added to every column
constexpr int kRowThreads = 32;  // threads that write a row of y together
constexpr int kEntries = 31;  // extremes of a channel in a strip
constexpr int kSlotPitch = 31;  // values from one channel to the next: odd, for the banks
constexpr int kSlotValues = kChannels * kSlotPitch;  // extremes of a strip
constexpr int kStripBarriers = 8;  // strips by which the converter may lag
constexpr int kConstantsAt = 40960;  // offset of the constant pixels: kPlanes x kPlanePixels x 16 bytes
constexpr int kSlotsAt = 43008;  // offset of the slots: kConstantsAt + kConstantPixels x 16
constexpr int kRawAt = 169984;  // offset of the raw rows: kSlotsAt + kUnits x kSlotValues x 4
constexpr int kSharedAt = 202752;  // offset of struct Shared: kRawAt + kRawStages x 8192
constexpr int kSharedBytes = 212256;  // bytes of shared memory
constexpr float kConstant = 1.0f;  // value of the constant pixels
constexpr float kEps = 1.0e-5f;  // group_norm's eps, added to the variance
constexpr float kClampMin = 0.0f;  // clamp's min
constexpr float kClampMax = 1.0f;  // clamp's max

// min(max(v, lo), hi); both comparisons are false for NaN, so NaN goes through.
__device__ __forceinline__ float clamp(float v, float lo, float hi) {
  return v < lo ? lo : (v > hi ? hi : v);
}

// The norm's input, from the producer's value.
__device__ __forceinline__ float prepare_value(float v, float c_conv_bias) {
  v = v + c_conv_bias;  // conv2d's bias
  return v;
}

// The result, from a value before the norm; `v`, the mean and `factor` carry the channel's sign.
__device__ __forceinline__ float finish_value(float v, float mean, float mean_rest, float factor, float offset) {
  v = fmaf(__fsub_rn(v, mean) - mean_rest, factor, offset);
  v = clamp(v, kClampMin, kClampMax);  // clamp(min=0.0, max=1.0)
  return v;
}

// --- instructions: one function each (PTX ISA 9.0, sections 9.7.9 and 9.7.13 to 9.7.16) ---

__device__ __forceinline__ uint32_t shared_address(const void* pointer) { return static_cast<uint32_t>(__cvta_generic_to_shared(pointer)); }

__device__ __forceinline__ void barrier_init(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// Makes new barriers visible to the cluster and to the copy engine.
__device__ __forceinline__ void barrier_init_done() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

__device__ __forceinline__ void arrive(uint32_t barrier) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory"); }

// Arrives, and announces bytes that the barrier's phase waits for.
__device__ __forceinline__ void expect_bytes(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
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

// Overloads for barriers as objects in shared memory.
__device__ __forceinline__ void barrier_init(uint64_t* barrier, int arrivals) { barrier_init(shared_address(barrier), arrivals); }
__device__ __forceinline__ void arrive(uint64_t* barrier) { arrive(shared_address(barrier)); }
__device__ __forceinline__ void expect_bytes(uint64_t* barrier, int bytes) { expect_bytes(shared_address(barrier), bytes); }
__device__ __forceinline__ void wait(uint64_t* barrier, int parity, const char* name) { wait(shared_address(barrier), parity, name); }

__device__ __forceinline__ int cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return static_cast<int>(rank);
}

__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// The address of the same place in CTA `rank` of the cluster.
__device__ __forceinline__ uint32_t remote_address(uint32_t address, int rank) {
  uint32_t remote;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
  return remote;
}
// Stores four numbers and credits their 16 bytes to a barrier; both addresses are of the same CTA.
__device__ __forceinline__ void store_remote(uint32_t to, float a, float b, float c, float d, uint32_t barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], { %1, %2, %3, %4}, [%5];" ::"r"(to), "f"(a), "f"(b), "f"(c), "f"(d),
               "r"(barrier)
               : "memory");
}

// Orders ordinary accesses to shared memory before later ones of the copy engine and the tensor cores.
__device__ __forceinline__ void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

template <int kRegisters>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

__device__ __forceinline__ void named_barrier(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
__device__ __forceinline__ void sync_group(int group) { named_barrier(group + 1, 128); }

// Copies a run of bytes into shared memory and credits them to the barrier; all three are multiples of 16.
__device__ __forceinline__ void copy_run(void* to, const void* from, int bytes, uint64_t* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared_address(to)), "l"(from), "r"(bytes),
               "r"(shared_address(barrier))
               : "memory");
}

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

// Address in this CTA's shared memory for descriptors: in units of 16 bytes, without the bits that tell the cluster's
// CTAs apart.
__device__ __forceinline__ uint32_t operand_address(const void* p) { return (shared_address(p) & 0x3FFFF) >> 4; }

// Matrix descriptor of pixels of 8 channels: those from `start` on for the first half of K, those `distance` further
// for the second, in units of 16 bytes. 8 pixels are a core matrix of 128 bytes, so a tile may start at any pixel.
// `distance` must be positive.
__device__ __forceinline__ uint64_t pixels(uint32_t start, uint32_t distance) {
  constexpr uint64_t kNextCore = static_cast<uint64_t>(128 >> 4) << 32;
  return kNextCore | (distance << 16 | start);
}

// Matrix product: d (64 x 128, fp32) += a (64 x 16) b (16 x 128), or = if `accumulate` is false. d is in flight until
// wgmma_wait. a: two registers for each half of its 16 columns, b: a matrix descriptor.
__device__ __forceinline__ void wgmma(float (&d)[kAccumulators], const uint32_t (&first)[2], const uint32_t (&second)[2], uint64_t b, bool accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
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
      : "r"(first[0]), "r"(first[1]), "r"(second[0]), "r"(second[1]), "l"(b), "r"(static_cast<int>(accumulate)));
}

// Packs two values, rounded to nearest, into a 32-bit word.
__device__ __forceinline__ uint32_t pack(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// Unpacks the two values of a 32-bit word.
__device__ __forceinline__ float2 unpack(uint32_t word) {
  return make_float2(__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u));
}

// The sum over the four lanes that hold a row's columns.
__device__ __forceinline__ float quad_sum(float v) {
  v += __shfl_xor_sync(0xffffffffu, v, 1);
  return v + __shfl_xor_sync(0xffffffffu, v, 2);
}

// Mean of the two inner values of the four lanes of a row; NaN is left out.
__device__ __forceinline__ float quad_middle(float v) {
  const float other = __shfl_xor_sync(0xffffffffu, v, 1);
  const float low = fminf(v, other), high = fmaxf(v, other);
  const float lower = fmaxf(low, __shfl_xor_sync(0xffffffffu, low, 2)), upper = fminf(high, __shfl_xor_sync(0xffffffffu, high, 2));
  return 0.5f * lower + 0.5f * upper;
}

// --- the work of a CTA, and its shared memory ---

__device__ __forceinline__ float to_float(__nv_bfloat16 v) { return __bfloat162float(v); }

// Tensors in torch's layout.
struct Arguments {
  const __nv_bfloat16* x;
  const __nv_bfloat16* weight;
  const __nv_bfloat16* p_conv_bias;
  const __nv_bfloat16* p_gamma;
  const __nv_bfloat16* p_beta;
  const __nv_bfloat16* p_scale;
  __nv_bfloat16* y;
};

// Moments of a set of values: count, mean (`mean` plus its rounding error `mean_rest`), and the sum m2 of squared
// differences from the mean.
struct Moments {
  float count;
  float mean;
  float mean_rest;
  float m2;
};

// Coefficients of the norm and the affine operators after it: fmaf((v - mean) - mean_rest, factor, offset).
struct alignas(16) Coefficients {
  float mean, mean_rest, factor, offset;
};

// A multiplying warpgroup's data of one of its 64 rows.
struct alignas(16) Channel {
  float sign;     // -1 where the operators after the norm decrease, else 1
  float unscale;  // factor from accumulators to the convolution's values
  float c_conv_bias;
};

// Shared memory behind x's operand planes, the constant pixels and the slots of extremes.
struct Shared {
  Channel channels[kMultiplyGroups][64];
  Coefficients coefficients[kMultiplyGroups][kChannels];
  Moments moments[2][kChannels / kMerged][kCluster][kMultiplyGroups];  // of the current sample and the previous one
  uint64_t row_ready[kRing];
  uint64_t strip_done[kStripBarriers];
  uint64_t moments_ready[2];
  uint64_t raw_ready[kRawStages];
  uint32_t limit[kItems];  // bits of infinity, or 0 if a group's squares exceed fp32's range
};
static_assert(kSharedAt + sizeof(Shared) <= kSharedBytes, "the plan reserves too little shared memory");

// A CTA's part of a sample: conv rows from `first_row` on in `strips` strips, of which `pooled` give a row of y.
struct Part {
  int first_row, rows, strips, pooled;
  __device__ __forceinline__ int input_rows() const { return rows + kKernelHeight - 1; }
  __device__ __forceinline__ int strip_rows(int strip) const { return max(0, min(kWindowHeight, rows - strip * kWindowHeight)); }
  // Rows that the end of a strip frees: those above the next strip, or all after the last.
  __device__ __forceinline__ int freed_rows(int strip) const { return strip + 1 < strips ? kWindowHeight : input_rows() - strip * kWindowHeight; }
};

// Part of a CTA: the CTAs of a cluster rotate, since parts differ in length.
__device__ __forceinline__ Part part_of(int rank, int item) {
  const int first = (rank + item) % kCluster * kUnits;
  return {first * kWindowHeight, min(kOutHeight - first * kWindowHeight, kUnits * kWindowHeight), min(kStrips - first, kUnits),
          max(0, min(kPooledHeight - first, kUnits))};
}

struct Work {
  int rank, sample, step, items, channel;  // rank in the cluster, first sample, step, number of samples, first channel

  __device__ __forceinline__ Work() {
    rank = cluster_rank();
    const int cluster = static_cast<int>(blockIdx.x) / kCluster;
    sample = cluster;
    step = kClusters;
    channel = 0;
    items = (kBatch - 1 - sample) / step + 1;
  }
  __device__ __forceinline__ Part part(int item) const { return part_of(rank, item); }
  __device__ __forceinline__ int64_t sample_of(int item) const { return sample + item * step; }
};

extern __shared__ __align__(128) unsigned char memory[];
__device__ __forceinline__ Shared& shared() { return *reinterpret_cast<Shared*>(memory + kSharedAt); }
__device__ __forceinline__ float* slot_of(int strip) { return reinterpret_cast<float*>(memory + kSlotsAt) + strip * kSlotValues; }

// --- the converting warpgroup: turns rows of x into planes of 8 channels a pixel ---

// A chunk of rows of one sample, from `row` of the CTA's part on.
struct Chunk {
  int item, row;

  __device__ __forceinline__ bool exists(const Work& work) const { return item < work.items; }
  __device__ __forceinline__ int rows(const Work& work) const { return min(kChunkRows, work.part(item).input_rows() - row); }
  __device__ __forceinline__ int top(const Work& work) const { return work.part(item).first_row + row; }  // row of x
  __device__ __forceinline__ Chunk next(const Work& work) const {
    return row + kChunkRows < work.part(item).input_rows() ? Chunk{item, row + kChunkRows} : Chunk{item + 1, 0};
  }
};

// Stores 8 channels of a pixel in the planes, unchanged.
__device__ __forceinline__ void store_pixel(const uint16_t (&v)[8], int slot, int column) {
  uint4* to = reinterpret_cast<uint4*>(memory) + slot * kPitch + column;
  uint32_t high[4];
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    high[c] = v[2 * c] | static_cast<uint32_t>(v[2 * c + 1]) << 16;
  }
  to[0] = make_uint4(high[0], high[1], high[2], high[3]);
  if (slot < kRepeats) {
    to[kRing * kPitch] = make_uint4(high[0], high[1], high[2], high[3]);
  }
}

// Slot of the ring that lies `rows` rows behind `slot`; a chunk is shorter than the ring.
__device__ __forceinline__ int slot_behind(int slot, int rows) {
  const int next = slot + rows;
  return next < kRing ? next : next - kRing;
}

__device__ __forceinline__ uint16_t* raw_stage(int stage) { return reinterpret_cast<uint16_t*>(memory + kRawAt) + stage * kRawValues; }

// Starts the copies of a chunk, one a channel; each converting warp issues every fourth, since issuing takes long.
__device__ __forceinline__ void fetch_chunk(const __nv_bfloat16* x, const Work& work, const Chunk& chunk, int stage) {
  if (threadIdx.x % 32 != 0) return;
  const int warp = threadIdx.x % 128 / 32;
  const int top = chunk.top(work);
  constexpr int first = 0;
  const int rows = chunk.rows(work);
  const int bytes = rows * kWidth * static_cast<int>(sizeof(__nv_bfloat16));
  uint64_t* ready = &shared().raw_ready[stage];
  if (warp == 0) expect_bytes(ready, kInChannels * bytes);
  const __nv_bfloat16* from = x + work.sample_of(chunk.item) * kInChannels * kInPlane + (top + first) * kWidth;
  uint16_t* to = raw_stage(stage) + first * kWidth;
  for (int c = warp; c < kInChannels; c += 4) copy_run(to + c * kChunkRows * kWidth, from + c * kInPlane, bytes, ready);
}

// Converts a stage into the ring; the chunk's first row is row `stream` of all rows that this CTA converts.
__device__ __forceinline__ void convert_chunk(const Work& work, const Chunk& chunk, int stage, int stream) {
  const int rows = chunk.rows(work);
  const int first_slot = stream % kRing;
  const uint16_t* from = raw_stage(stage);
#pragma unroll 1
  for (int first = 0; first < kChunkPixels; first += kPixelsAtOnce) {
    uint16_t v[kPixelsAtOnce][8];  // all loads precede the first store, so that their latencies overlap
#pragma unroll
    for (int i = 0; i < kPixelsAtOnce; ++i) {
      const int pixel = threadIdx.x % 128 + (first + i) * 128;
#pragma unroll
      for (int c = 0; c < 8; ++c) {
        v[i][c] = from[c * kChunkRows * kWidth + pixel];
      }
    }
#pragma unroll
    for (int i = 0; i < kPixelsAtOnce; ++i) {
      const int pixel = threadIdx.x % 128 + (first + i) * 128;
      const int row = pixel / kWidth;
      if (row < rows) store_pixel(v[i], slot_behind(first_slot, row), pixel % kWidth);
    }
  }
}

// Free room in the ring, as the multiplying warpgroups report finished strips.
struct Room {
  int freed = 0, done = 0, item = 0, strip = 0;  // freed rows; finished strips; sample and strip to wait for next

  __device__ __forceinline__ void wait_for(int rows, const Work& work) {
    while (rows > freed + kRing) {
      wait(&shared().strip_done[done % kStripBarriers], done / kStripBarriers & 1, "strip done");
      const Part part = work.part(item);
      freed += part.freed_rows(strip);
      ++done;
      if (++strip == part.strips) {
        strip = 0;
        ++item;
      }
    }
  }
};

// Converts all rows that this CTA's strips read, in order, as the ring has room.
__device__ __forceinline__ void convert_rows(const __nv_bfloat16* x, const Work& work) {
  Shared& s = shared();
  const int lane = threadIdx.x % 32;
  Room room;
  int stream = 0;  // rows converted
  Chunk ahead = {0, 0};
  for (int stage = 0; stage < kRawStages && ahead.exists(work); ++stage, ahead = ahead.next(work)) {
    fetch_chunk(x, work, ahead, stage);
  }
  int stage = 0, phase = 0;
  for (Chunk chunk = {0, 0}; chunk.exists(work);) {
    const int rows = chunk.rows(work);
    const Chunk next = chunk.next(work);
    room.wait_for(stream + rows, work);
    wait(&s.raw_ready[stage], phase, "raw rows ready");
    convert_chunk(work, chunk, stage, stream);
    fence_async();
    __syncwarp();
    if (lane < rows) arrive(&s.row_ready[slot_behind(stream % kRing, lane)]);  // one lane a row

    named_barrier(kConvertBarrier, 128);  // all threads have read the stage
    if (ahead.exists(work)) {
      fetch_chunk(x, work, ahead, stage);
      ahead = ahead.next(work);
    }
    if (++stage == kRawStages) {
      stage = 0;
      phase ^= 1;
    }
    stream += rows;
    chunk = next;
  }
}

// --- weights: fragments of 8 along K, in registers for the whole kernel ---

// A lane's rows of the fragment: row lane / 4 of its warp's 16, and 8 further down.
__device__ __forceinline__ int row_of(int h) { return threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4 + 8 * h; }

__device__ __forceinline__ void load_weights(const Arguments& a, const Work& work, Channel* channels,
                                             uint32_t (&high)[kHalves][2]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int index = row_of(h);
    const int channel = index;
    const float c_gamma = to_float(a.p_gamma[channel]);
    const float c_scale = to_float(a.p_scale[channel]);
    Channel own;
    own.sign = copysignf(1.0f, c_gamma) * copysignf(1.0f, c_scale);
    own.c_conv_bias = to_float(a.p_conv_bias[channel]);

    // Each register of a fragment holds two neighbouring input channels of one output channel.
    const __nv_bfloat16* from = a.weight + (channel * kInChannels + lane % 4 * 2) * kTaps;
    float values[kHalves][2];
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
#pragma unroll
      for (int next = 0; next < 2; ++next) {
        const int at = half / kTaps * 8 + next;
        values[half][next] = to_float(from[at * kTaps + half % kTaps]);
      }
    }
    own.unscale = 1.0f;
    const float factor = own.sign;
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      const float first = values[half][0] * factor;
      const float second = values[half][1] * factor;
      high[half][h] = pack(first, second);
    }
    if (lane % 4 == 0) channels[row_of(h)] = own;
  }
}

// --- statistics ---

// Scale for values whose squares exceed fp32's range. Statistics are then formed of the values times kShrink, a power
// of two: a sum of squares above 2^128 becomes one above 2^-32, and every sum of squares stays below 2^128.
constexpr float kShrink = 8.271806125530277e-25f;  // 2^-80
constexpr float kGrow = 1.2089258196146292e24f;    // 2^80

// Adds `v` to `sum` and the rounding error to `rest`: otherwise many equal small terms after a large one would all be
// rounded the same way.
__device__ __forceinline__ void accumulate(float& sum, float& rest, float v) {
  const float next = __fadd_rn(sum, v);
  const float part = __fsub_rn(next, sum);
  rest += __fsub_rn(sum, __fsub_rn(next, part)) + __fsub_rn(v, part);
  sum = next;
}
// Sum and rest as one number; an infinite sum has no rest.
__device__ __forceinline__ float whole(float sum, float rest) { return isinf(sum) ? sum : sum + rest; }

// Moments of the union of many sets (Chan, Golub and LeVeque, 1983), merged in storage order: the same bits on every
// run. Distances from the first mean correct the union's mean, so that one far set costs the others nothing; equal
// means stay exact.
__device__ __forceinline__ Moments merge_sets(const Moments* sets, int count) {
  int first = 0;
  while (first + 1 < count && sets[first].count == 0.0f) ++first;
  const float origin = sets[first].mean;
  float total = 0.0f, moment = 0.0f;
  for (int i = first; i < count; ++i) {
    total += sets[i].count;
    if (sets[i].count != 0.0f) moment = fmaf(sets[i].count, __fsub_rn(sets[i].mean, origin), moment);
  }
  const float mean = origin + moment / total;
  float left = 0.0f, m2 = 0.0f, m2_rest = 0.0f;
  for (int i = first; i < count; ++i) {
    if (sets[i].count == 0.0f) continue;
    const float delta = __fsub_rn(sets[i].mean, mean) + sets[i].mean_rest;
    left = fmaf(sets[i].count, delta, left);
    accumulate(m2, m2_rest, fmaf(sets[i].count * delta, delta, sets[i].m2));
  }
  const float mean_rest = left / total;
  return {total, mean, mean_rest, fmaf(-mean_rest, left, whole(m2, m2_rest))};
}

// Inverse standard deviation of a group. A negative m2 belongs to the values times kShrink.
__device__ __forceinline__ float rstd_of(const Moments& group) {
  return group.m2 < 0.0f ? kShrink / sqrtf(-group.m2 * (1.0f / kGroupSize)) : 1.0f / sqrtf(group.m2 * (1.0f / kGroupSize) + kEps);
}

// A channel's coefficients, from the statistics of its group.
__device__ __forceinline__ Coefficients coefficients_of(const Moments& group, int channel, const Arguments& a) {
  const float c_gamma = to_float(a.p_gamma[channel]);
  const float c_beta = to_float(a.p_beta[channel]);
  const float c_scale = to_float(a.p_scale[channel]);
  const float sign = copysignf(1.0f, c_gamma) * copysignf(1.0f, c_scale);
  float factor = rstd_of(group);
  float offset = 0.0f;
  factor *= c_gamma;
  offset = c_beta;
  factor *= c_scale;  // mul(shape=(64, 1, 1), init=ones)
  offset *= c_scale;
  return {sign * group.mean, sign * group.mean_rest, sign * factor, offset};
}

// A lane's running sums of one sample, for each of its two channels, relative to a shift near the mean.
struct Tally {
  float values;  // values of a channel in the four lanes that share it
  float shift[2], sum[2], square[2];
};

// Moments of the union of two sets by Chan's formula: `count` values, of which b's are `share`. Only differences of
// means are rounded, and those are as small as the spread.
__device__ __forceinline__ Moments merge(const Moments& a, const Moments& b, float count, float share) {
  const float delta = __fsub_rn(b.mean, a.mean);
  const float delta_rest = b.mean_rest - a.mean_rest;
  const float both = delta + delta_rest;
  const float mean = fmaf(delta, share, a.mean);
  return {count, mean, a.mean_rest + fmaf(delta_rest, share, fmaf(delta, share, __fsub_rn(a.mean, mean))), a.m2 + b.m2 + both * (a.count * share) * both};
}

// Moments of the union of two sets; an empty `b` changes nothing.
__device__ __forceinline__ Moments merge(const Moments& a, const Moments& b) {
  const float count = a.count + b.count;
  return merge(a, b, count, a.count == 0.0f ? 1.0f : __fdividef(b.count, count));
}

// Merges the moments of kLanes lanes in their order, by distances kFirst, 2 kFirst and so on; all lanes receive the
// same bits.
template <int kFirst, int kLanes>
__device__ __forceinline__ Moments lane_merge(Moments own) {
#pragma unroll
  for (int bit = kFirst; bit < kLanes; bit *= 2) {
    const Moments other = {__shfl_xor_sync(0xffffffffu, own.count, bit), __shfl_xor_sync(0xffffffffu, own.mean, bit),
                           __shfl_xor_sync(0xffffffffu, own.mean_rest, bit), __shfl_xor_sync(0xffffffffu, own.m2, bit)};
    own = threadIdx.x & bit ? merge(other, own) : merge(own, other);
  }
  return own;
}

// --- one tile: multiply, then statistics and extremes from the accumulators ---

constexpr int kTileOctets = kTileColumns / 8;  // groups of 8 columns; a lane holds two, of two channels

// Whether column 8 j + 2 (lane % 4) + next exists in a tile with `columns` columns.
__device__ __forceinline__ bool exists(int j, int next, int columns) {
  return 8 * j + 8 <= kLastColumns || 8 * j + static_cast<int>(threadIdx.x) % 4 * 2 + next < columns;
}

// Product of a tile: acc = weights x pixels from `tile` on, an address in units of 16 bytes.
__device__ __forceinline__ void multiply_tile(float (&acc)[kAccumulators], uint32_t tile, const uint32_t (&high)[kHalves][2], const uint32_t (&shift)[2]) {
  const uint32_t constants = operand_address(memory + kConstantsAt);
  wgmma_fence();
  wgmma(acc, high[0], high[1], pixels(tile, 1), false);  // high 0,0, high 0,1
  wgmma(acc, high[2], high[3], pixels(tile + 2, 126), true);  // high 0,2, high 1,0
  wgmma(acc, high[4], high[5], pixels(tile + 129, 1), true);  // high 1,1, high 1,2
  wgmma(acc, high[6], high[7], pixels(tile + 256, 1), true);  // high 2,0, high 2,1
  wgmma(acc, high[8], shift, pixels(tile + 258, constants - (tile + 258)), true);  // high 2,2, shift
  wgmma_commit();
  wgmma_wait<0>();
  pin(acc);
}

// Finds the shift of a sample's values in this warpgroup, for each of a lane's channels: a number near the mean of its
// first tile. The outer two of the four lanes' means are left out, so that one far value does not set it.
__device__ __forceinline__ void find_shift(const float (&acc)[kAccumulators], int columns, Tally& tally, uint32_t (&shift)[2]) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float sum = 0.0f;
    int count = 0;
#pragma unroll
    for (int i = h * 2; i < kAccumulators; i += 4) {
      const int j = i / 4 % kTileOctets;
      sum += exists(j, 0, columns) ? acc[i] : 0.0f;
      sum += exists(j, 1, columns) ? acc[i + 1] : 0.0f;
      count += exists(j, 0, columns) + exists(j, 1, columns);
    }
    const float mean = quad_middle(sum / count);  // NaN for a lane without values; the comparisons ignore it
    // From now on the tensor cores subtract the shift, as two leading parts times the constant pixels. The noted shift
    // is exactly that.
    const float first = unpack(pack(mean * (-1.0f / kConstant), 0.0f)).x;
    const uint32_t parts = pack(first, fmaf(mean, -1.0f / kConstant, -first));
    tally.shift[h] = (unpack(parts).x + unpack(parts).y) * -kConstant;
    shift[h] = threadIdx.x % 4 == 0 ? parts : 0u;
  }
}

// Number of extremes in a lane: two neighbouring columns share one.
constexpr int kLaneExtremes = kTileOctets;

__device__ __forceinline__ void take_tile(const float (&acc)[kAccumulators], int columns, float (&extremes)[kLaneExtremes][2], Tally& tally) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float sum = 0.0f, even = 0.0f, odd = 0.0f;  // sums of the tile alone: short sums lose less
#pragma unroll
    for (int i = h * 2; i < kAccumulators; i += 4) {
      const int j = i / 4 % kTileOctets;
      extremes[j][h] = fmaxf(extremes[j][h], fmaxf(acc[i], acc[i + 1]));
      const float first = exists(j, 0, columns) ? acc[i] : 0.0f;
      const float second = exists(j, 1, columns) ? acc[i + 1] : 0.0f;
      sum += first + second;
      even = fmaf(first, first, even);
      odd = fmaf(second, second, odd);
    }
    tally.sum[h] += sum;
    tally.square[h] += even + odd;
  }
  tally.values += min(kTileColumns, columns);
}

// Conversion of a value relative to the shift into the norm's input times the channel's sign: fmaf(v, scale, origin).
struct Restore {
  float scale, origin;
  __device__ __forceinline__ Restore(const Channel& channel, float shift) {
    scale = channel.unscale;
    origin = fmaf(shift, channel.unscale, channel.sign * channel.c_conv_bias);
  }
  __device__ __forceinline__ float operator()(float v) const { return fmaf(v, scale, origin); }
};

// Stores a strip's extremes in its slot. Neighbouring lanes exchange one channel each, to combine four columns.
__device__ __forceinline__ void store_extremes(float* slot, const float (&extremes)[kLaneExtremes][2], const Channel* channels, const Tally& tally) {
  const int quad = threadIdx.x % 4;
  const int h = quad % 2;
  const int channel = row_of(h);
  const Restore restore(channels[channel], h ? tally.shift[1] : tally.shift[0]);
#pragma unroll
  for (int j = 0; j < kTileOctets; ++j) {
    const float other = __shfl_xor_sync(0xffffffffu, h ? extremes[j][0] : extremes[j][1], 1);
    const float best = fmaxf(h ? extremes[j][1] : extremes[j][0], other);
    const int entry = 2 * j + quad / 2;
    if (entry < kEntries) slot[channel * kSlotPitch + entry] = restore(best);
  }
}

// --- end of a sample: publish its moments, merge them, write its rows ---

// Publishes this warpgroup's moments of a sample to every CTA of the cluster, itself included.
__device__ __forceinline__ void publish_moments(const Channel* channels, const Tally& tally, const Work& work, int item, int group) {
  Shared& s = shared();
  Moments both[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int channel = row_of(h);
    const float sum = quad_sum(tally.sum[h]);
    const float square = quad_sum(tally.square[h]);
    const float mean = tally.values > 0.0f ? sum / tally.values : 0.0f;
    const float m2 = fmaf(-sum, mean, square);
    const Restore restore(channels[channel], tally.shift[h]);
    Moments own = {tally.values, channels[channel].sign * restore(mean), 0.0f, (m2 < 0.0f ? 0.0f : m2) * restore.scale * restore.scale};
    own = lane_merge<4, 4 * kMerged>(own);
    both[h] = own;
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int channel = row_of(h);
    const Moments& own = both[h];
    const int set = channel / kMerged;
    // The lanes that share a set divide the CTAs among them.
    const int to = threadIdx.x % (4 * kMerged);
    if (to < kCluster) {
      store_remote(remote_address(shared_address(&s.moments[item % 2][set][work.rank][group]), to), own.count, own.mean, own.mean_rest, own.m2,
                   remote_address(shared_address(&s.moments_ready[item % 2]), to));
    }
  }
  if (threadIdx.x == 0) expect_bytes(&s.moments_ready[item % 2], static_cast<int>(sizeof(s.moments[0])));
}

// Marks a sample for recomputation if a group's squares exceed fp32's range.
__device__ __forceinline__ void note_limit(const Moments& group, uint32_t* noted) {
  if (!(group.m2 < INFINITY)) *noted = 0u;
}

// Merges a sample's moments; each warpgroup does so for itself when it first needs the result.
__device__ __forceinline__ void finish_statistics(const Work& work, int item, int group, const Arguments& a) {
  Shared& s = shared();
  wait(&s.moments_ready[item % 2], item / 2 & 1, "moments ready");
  const int channel = threadIdx.x % 128;
  if (channel < kChannels) {
    const Moments total = merge_sets(&s.moments[item % 2][channel / kGroupChannels * kSetsOfGroup][0][0], kSetsOfGroup * kCluster * kMultiplyGroups);
    note_limit(total, &s.limit[item]);
    s.coefficients[group][channel] = coefficients_of(total, channel, a);
  }
  sync_group(group);
}

// Normalises a strip's extremes and writes them as a row of y; `y` points at the CTA's first channel.
__device__ __forceinline__ void write_row(__nv_bfloat16* y, const float* slot, const Coefficients* coefficients) {
  constexpr int kAtOnce = 128 / kRowThreads;  // channels at once
  const int first = threadIdx.x % 128 / kRowThreads;
  for (int column = threadIdx.x % kRowThreads; column < kPooledWidth; column += kRowThreads) {
#pragma unroll 16
    for (int i = 0; i < kChannels / kAtOnce; ++i) {
      const int channel = i * kAtOnce + first;
      const Coefficients c = coefficients[channel];
      const float v = slot[channel * kSlotPitch + column];
      y[channel * kPooledPlane + column] = __float2bfloat16_rn(finish_value(v, c.mean, c.mean_rest, c.factor, c.offset));
    }
  }
}

// --- fallback for samples beyond fp32's range when squared: the chain by fp32 multiply-adds ---

constexpr int kMultiplyThreads = kMultiplyGroups * 128;
constexpr int kExactBarrier = kMultiplyGroups + 1;
static_assert(kMultiplyThreads * sizeof(Moments) <= kSharedAt, "the threads' moments take the place of planes and slots");

// The norm's input at one place, from the sample `image` and the channel's `weight`.
__device__ __forceinline__ float exact_value(const __nv_bfloat16* image, const __nv_bfloat16* weight, int row, int column, float c_conv_bias) {
  float v = 0.0f;
#pragma unroll 1
  for (int c = 0; c < kInChannels; ++c) {
#pragma unroll 1
    for (int tap = 0; tap < kTaps; ++tap) {
      const int at_row = row + tap / kKernelWidth;
      const int at_column = column + tap % kKernelWidth;
      v = fmaf(to_float(image[c * kInPlane + at_row * kWidth + at_column]), to_float(weight[c * kTaps + tap]), v);
    }
  }
  return prepare_value(v, c_conv_bias);
}

// Recomputes a sample; the multiplying threads of the cluster share its groups.
__device__ __forceinline__ void exact_sample(const Arguments& a, const Work& work, int64_t sample) {
  Moments* scratch = reinterpret_cast<Moments*>(memory);  // reuses the operand planes, which are no longer needed
  const __nv_bfloat16* image = a.x + sample * kInChannels * kInPlane;
#pragma unroll 1
  for (int group = work.rank; group < kChannels / kGroupChannels; group += kCluster) {
    const int first_channel = group * kGroupChannels;
    Moments total;
#pragma unroll 1
    for (float times = 1.0f;; times = kShrink) {  // repeated with kShrink if squares exceed fp32's range
      Moments own = {0.0f, 0.0f, 0.0f, 0.0f};
      float m2_rest = 0.0f;
#pragma unroll 1
      for (int i = threadIdx.x; i < kGroupSize; i += kMultiplyThreads) {
        const int channel = first_channel + i / (kOutHeight * kOutWidth);
        const int place = i % (kOutHeight * kOutWidth);
        const float v = times * exact_value(image, a.weight + channel * kInChannels * kTaps, place / kOutWidth, place % kOutWidth, to_float(a.p_conv_bias[channel]));
        own.count += 1.0f;
        const float delta = __fsub_rn(v, own.mean) - own.mean_rest;
        const float step = delta / own.count;
        const float mean = __fadd_rn(own.mean, step);
        own.mean_rest += __fsub_rn(step, __fsub_rn(mean, own.mean));
        own.mean = mean;
        accumulate(own.m2, m2_rest, delta * (__fsub_rn(v, mean) - own.mean_rest));
      }
      own.m2 = whole(own.m2, m2_rest);
      named_barrier(kExactBarrier, kMultiplyThreads);
      scratch[threadIdx.x] = own;
      named_barrier(kExactBarrier, kMultiplyThreads);
      total = merge_sets(scratch, kMultiplyThreads);
      if (times != 1.0f) total = {total.count, total.mean * kGrow, total.mean_rest * kGrow, -total.m2};
      if (times != 1.0f || total.m2 < INFINITY) break;
    }
#pragma unroll 1
    for (int i = threadIdx.x; i < kGroupChannels * kPooledPlane; i += kMultiplyThreads) {
      const int channel = first_channel + i / kPooledPlane;
      const int place = i % kPooledPlane;
      const float c_gamma = to_float(a.p_gamma[channel]);
      const float c_scale = to_float(a.p_scale[channel]);
      const float sign = copysignf(1.0f, c_gamma) * copysignf(1.0f, c_scale);
      float best = -INFINITY;
#pragma unroll 1
      for (int w = 0; w < kWindowHeight * kWindowWidth; ++w) {
        const int row = place / kPooledWidth * kWindowHeight + w / kWindowWidth;
        const int column = place % kPooledWidth * kWindowWidth + w % kWindowWidth;
        best = fmaxf(best, sign * exact_value(image, a.weight + channel * kInChannels * kTaps, row, column, to_float(a.p_conv_bias[channel])));
      }
      const Coefficients c = coefficients_of(total, channel, a);
      a.y[(sample * kOutChannels + channel) * kPooledPlane + place] =
          __float2bfloat16_rn(finish_value(best, c.mean, c.mean_rest, c.factor, c.offset));
    }
  }
}

// --- the kernel ---

// Work of a multiplying warpgroup: every kMultiplyGroups-th strip of its CTA's parts, sample after sample. Before it
// stores a strip's extremes in their slot, it writes out the previous sample's row that the slot holds.
__device__ __forceinline__ void multiply_strips(int group, const Work& work, const Arguments& a) {
  Shared& s = shared();
  uint32_t high[kHalves][2];
  const Channel* channels = s.channels[group];
  load_weights(a, work, s.channels[group], high);
  sync_group(group);
  auto row_of_y = [&](int item, int strip) {
    const int row = work.part(item).first_row / kWindowHeight + strip;
    return a.y + (work.sample_of(item) * kOutChannels) * kPooledPlane + row * kPooledWidth;
  };

  int stream = 0, strips = 0;  // rows of x and strips of all earlier samples
  for (int item = 0; item < work.items; ++item) {
    const Part part = work.part(item);
    const int waiting = item > 0 ? work.part(item - 1).pooled : 0;  // rows of the previous sample still to be written
    bool merged = item == 0;
    Tally tally = {};
    uint32_t shift[2] = {0u, 0u};
    const int turn = item * kUnits % kMultiplyGroups;
    for (int strip = (group + kMultiplyGroups - turn) % kMultiplyGroups; strip < kUnits; strip += kMultiplyGroups) {
      const int rows = part.strip_rows(strip);
      const int top = strip * kWindowHeight;
      constexpr int columns = kOutWidth;
      float extremes[kLaneExtremes][2];
#pragma unroll
      for (int i = 0; i < kLaneExtremes; ++i) extremes[i][0] = extremes[i][1] = -INFINITY;
      for (int row = 0; row < rows; ++row) {
        const int first = stream + top + row;  // the tile's first row of x
        const int last = first + kKernelHeight - 1;
        const uint32_t tile = operand_address(memory) + first % kRing * kPitch;
        wait(&s.row_ready[last % kRing], last / kRing & 1, "row ready");
        float acc[kAccumulators];
        multiply_tile(acc, tile, high, shift);
        if (tally.values == 0.0f) {
          find_shift(acc, columns, tally, shift);
          multiply_tile(acc, tile, high, shift);  // repeated with the shift: equal values stay equal
        }
        take_tile(acc, columns, extremes, tally);
      }
      if (rows == 0) {  // the part has no such strip; rows are still waited for in order
        const int last = stream + part.input_rows() - 1;
        wait(&s.row_ready[last % kRing], last / kRing & 1, "row ready");
      } else {
        // Tiles wait for their last rows only, but every phase of a barrier must be waited for before the next begins.
        for (int row = threadIdx.x % 32; row < part.freed_rows(strip); row += 32) {
          const int freed = stream + top + row;
          wait(&s.row_ready[freed % kRing], freed / kRing & 1, "row ready");
        }
        __syncwarp();
        if (threadIdx.x % 32 == 0) arrive(&s.strip_done[(strips + strip) % kStripBarriers]);
      }
      // The previous sample is complete in every warpgroup: from here on its slots may be read and reused.
      if (!merged) finish_statistics(work, item - 1, group, a);
      merged = true;
      if (strip < waiting) {
        write_row(row_of_y(item - 1, strip), slot_of(strip), s.coefficients[group]);
        sync_group(group);
      }
      if (strip < part.pooled) store_extremes(slot_of(strip), extremes, channels, tally);
    }
    // Needed even if this warpgroup had no strip: it frees the moments' place.
    if (!merged) finish_statistics(work, item - 1, group, a);
    publish_moments(channels, tally, work, item, group);
    stream += part.input_rows();
    strips += part.strips;
  }

  const int last = work.items - 1;
  finish_statistics(work, last, group, a);
  for (int strip = group; strip < work.part(last).pooled; strip += kMultiplyGroups) {
    write_row(row_of_y(last, strip), slot_of(strip), s.coefficients[group]);
  }
}

__global__ void __cluster_dims__(kCluster) __launch_bounds__(kThreads, 1) conv(const __grid_constant__ Arguments a) {
  Shared& s = shared();
  const Work work;

  // Initialisation: zeros in the planes, of which the padding stays, constant pixels, and barriers.
  uint4* pixels_of = reinterpret_cast<uint4*>(memory);
  for (int i = threadIdx.x; i < kPlanes * kPlanePixels; i += kThreads) pixels_of[i] = make_uint4(0u, 0u, 0u, 0u);
  const uint32_t pair = pack(kConstant, kConstant);
  for (int i = threadIdx.x; i < kConstantPixels; i += kThreads) pixels_of[kConstantsAt / 16 + i] = make_uint4(pair, pair, pair, pair);
  for (int i = threadIdx.x; i < kItems; i += kThreads) s.limit[i] = 0x7f800000u;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kRing; ++i) barrier_init(&s.row_ready[i], 4);             // arrivals of the converting warps
    for (int i = 0; i < kStripBarriers; ++i) barrier_init(&s.strip_done[i], 4);   // arrivals of a multiplying warpgroup
    for (int i = 0; i < kRawStages; ++i) barrier_init(&s.raw_ready[i], 1);
    for (int i = 0; i < 2; ++i) barrier_init(&s.moments_ready[i], 1);
    barrier_init_done();
  }
  fence_async();
  cluster_sync();

  const int group = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 128, 0);
  if (group == kMultiplyGroups) {
    give_registers<kConvertRegisters>();
    convert_rows(a.x, work);
    cluster_sync();  // other CTAs may write to this one's shared memory until here
  } else {
    take_registers<kMultiplyRegisters>();
    multiply_strips(group, work, a);
    cluster_sync();
    for (int item = 0; item < work.items; ++item) {
      if (s.limit[item] == 0u) exact_sample(a, work, work.sample_of(item));
    }
  }
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

// Error codes beside cudaError_t (positive).
constexpr int kMisaligned = -1;  // x is no multiple of 16 bytes
constexpr int kNoClusters = -2;  // the device cannot hold a cluster of this kernel

// Sets the shared-memory limit and checks that a cluster fits, once on each device.
int prepare(int device, const cudaLaunchConfig_t& config) {
  constexpr int kDevices = 64;
  static std::mutex lock;
  static bool ready[kDevices] = {};
  const std::lock_guard<std::mutex> guard(lock);
  if (device < kDevices && ready[device]) return 0;
  cudaError_t error = cudaFuncSetAttribute(conv, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  if (error != cudaSuccess) return error;
  int fitting = 0;
  error = cudaOccupancyMaxActiveClusters(&fitting, conv, &config);
  if (error != cudaSuccess) return error;
  if (fitting < 1) return kNoClusters;
  if (device < kDevices) ready[device] = true;
  return 0;
}

}  // namespace
}  // namespace conv_sm90a

extern "C" int conv_sm90a_launch(const __nv_bfloat16* x, const __nv_bfloat16* weight, const __nv_bfloat16* p_conv_bias, const __nv_bfloat16* p_gamma,
    const __nv_bfloat16* p_beta, const __nv_bfloat16* p_scale, __nv_bfloat16* y,
    int device, cudaStream_t stream) {
  using namespace conv_sm90a;
  const DeviceScope scope(device);
  if (scope.error != cudaSuccess) return scope.error;

  if (reinterpret_cast<uintptr_t>(x) % 16 != 0) return kMisaligned;

  cudaLaunchConfig_t config = {};
  config.gridDim = kClusters * kCluster;
  config.blockDim = kThreads;
  config.dynamicSmemBytes = kSharedBytes;
  config.stream = stream;
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {kCluster, 1, 1};
  config.attrs = &attribute;
  config.numAttrs = 1;
  if (const int error = prepare(device, config)) return error;
  return cudaLaunchKernelEx(&config, conv, Arguments{x, weight, p_conv_bias, p_gamma, p_beta, p_scale, y});
}
