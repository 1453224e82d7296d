// conv2d_groupnorm_tanh_hardswish_residualadd_logsumexp: conv2d in one kernel: TMA im2col, warp-specialised wgmma
//
//   conv2d(in_channels=8, out_channels=64, kernel_size=(3, 3), stride=(1, 1), padding=(0, 0), dilation=(1, 1),
//     groups=1, bias=True)  # conv
//   x (128, 8, 128, 128) -> y (128, 64, 126, 126), fp32
//
// Plan for sm_90a on h100:
//   tiles of 64 channels x 256 pixels of a sample; one warpgroup fetches, 2 multiply, with pixels of their own
//   a stage has one tap of 32 channels, gathered by the copy engine (im2col)
//   the tensor core's sums are added to fp32 registers every 16 of K, while the next ones are multiplied
//   131 blocks of 384 threads, 225360 bytes of shared memory
//
// Generated from specs/conv2d_groupnorm_tanh_hardswish_residualadd_logsumexp.yaml; do not edit.
// Again: make generate SPEC=specs/conv2d_groupnorm_tanh_hardswish_residualadd_logsumexp.yaml

#include <cuda.h>
#include <cudaTypedefs.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <mutex>

namespace conv_sm90a {
namespace {

constexpr int kSamples = 128;  // batch
constexpr int kInChannels = 8;  // in_channels
constexpr int kWidth = 128;  // columns of x
constexpr int kInPlane = 16384;  // pixels of a channel of a sample: 128 x 128
constexpr int kHeight = 128;  // rows of x
constexpr int kOutChannels = 64;  // out_channels
constexpr int kFilter = 72;  // values of W from one channel of y to the next
constexpr int kFilterStep = 9;  // values of W from one channel of x to the next
constexpr int kKernelHeight = 3;  // size of W along the height
constexpr int kKernelWidth = 3;  // size of W along the width
constexpr int kLowerHeight = 0;  // first pixel of the first window along the height
constexpr int kLowerWidth = 0;  // first pixel of the first window along the width
constexpr int kUpperHeight = -2;  // from the end of x to the end of the box of windows' first pixels, 126 along the height
constexpr int kOutWidth = 126;  // columns of y
constexpr int kPlane = 15876;  // results of a channel of a sample: 126 x 126
constexpr int kColumns = 126;  // columns of pixels
constexpr int kTileChannels = 64;  // channels of a tile: rows of W, operand A
constexpr int kWarpgroupPixels = 128;  // pixels of a warpgroup
constexpr int kTilePixels = 256;  // pixels of a tile: operand B
constexpr int kSampleTiles = 63;  // tiles of a sample's 15876 pixels
constexpr int kWidePhases = 1;  // a thread has the sums of a tile once
constexpr int kTaps = 3;  // taps
constexpr int kWeightSteps = 3;  // steps of K: a block of channels of a tap each
constexpr int kSteps = 3;  // stages of a tile
constexpr int kUnits = 8064;  // units of work: tiles; a CTA takes one at a time
constexpr int kGrid = 131;  // CTAs: at most 62 units each
constexpr int kThreads = 384;  // one warpgroup that fetches, two that multiply
constexpr int kConsumerWarps = 8;  // multiplying warps, each of which frees a stage once
constexpr int kProducerRegisters = 24;  // registers of a fetching thread
constexpr int kConsumerRegisters = 240;  // registers of a multiplying thread
constexpr int kAccumulators = 64;  // registers of sums: 64 x kWarpgroupPixels values over 128 threads
constexpr int kStages = 5;  // stages of the ring
constexpr int kUnrolled = 3;  // stages that are multiplied without a pause: a divisor of a tile's
constexpr int kRowHalves = 64;  // halves of a row
constexpr int kRowBytes = 128;  // bytes of a row: 32 channels, high halves, then low ones
constexpr int kWeightPartBytes = 8192;  // bytes of W in a stage
constexpr int kInputPartBytes = 32768;  // bytes of x in a stage
constexpr int kInputTapBytes = 32768;  // bytes from the pixels of a tap to those of the next
constexpr int kStageBytes = 40960;  // bytes of a stage
constexpr int kWeightLow = 64;  // bytes from W's high halves to its low ones
constexpr int kInputLow = 64;  // bytes from x's high halves to its low ones
constexpr int kFetchedBytes = 40960;  // bytes that the copy engine brings for a stage
constexpr int kGroups = 2;  // groups of multiplications in a stage: halves of a tap's channels
constexpr int kHalfBytes = 32;  // bytes from a group's channels to those of the other half
constexpr int kWeightTapBytes = 8192;  // bytes of W for a tap
constexpr int kGroupSteps = 1;  // multiplications along K in a group
constexpr int kStagedPitch = 40;  // floats from one channel that a warp has staged to the next: its lanes meet no bank twice
constexpr int kStagedAt = 204800;  // offset of the staged sums, 16 channels x 32 results of each warp
constexpr int kBarriersAt = 225280;  // offset of the barriers: full and empty
constexpr int kSharedBytes = 225360;  // bytes of shared memory
constexpr int kNearForSmall = 64;  // values near the largest that excuse one that loses bits

// Tensors of the epilogue.
struct Arguments {
  const float* x;
  const float* conv_weight;
  const float* x_unscale;
  const uint2* x_counts;
  const float* weight_unscale;
  const float* p_conv_bias;
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

// Copies a box of the tensor behind `map` to shared memory and credits its bytes to the barrier; values outside the
// tensor read as 0.
__device__ __forceinline__ void copy_box(uint32_t to, const CUtensorMap* map, int c0, int c1, int c2, uint32_t barrier) {
  asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, { %2, %3, %4}], [%5];" ::"r"(to), "l"(map),
               "r"(c0), "r"(c1), "r"(c2), "r"(barrier)
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

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most kPending groups are in flight.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Rows of 128 bytes, swizzled over the row, 1024 bytes from one group of eight rows to the next. A step of 16 along K
// adds 2.
__device__ __forceinline__ uint64_t matrix_descriptor(uint32_t tile) {
  return (1ull << 62) | (static_cast<uint64_t>(8 * kRowBytes >> 4) << 32) | (1ull << 16) | ((tile & 0x3FFFF) >> 4);
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

// --- schedule: CTAs take units in turn; consecutive ones share pixels, which then stay in the L2 cache ---

// Offsets of the taps from a window's first pixel: depth | height << 8 | width << 16.
__constant__ const int kOffsets[kTaps] = {0, 256, 512};

struct Tile {
  int sample, pixel, channel;  // first pixel of the sample, and first channel
};

__device__ __forceinline__ Tile tile_of(int unit) {
  return {unit / kSampleTiles, unit % kSampleTiles * kTilePixels, 0};
}

// Where the window of a tile's first pixel begins.
struct Window {
  int w, h;
  __device__ explicit Window(int pixel) {
    const int row = pixel / kColumns;
    w = pixel % kColumns;
    h = row + kLowerHeight;
  }
};

// Copies a tile's pixels to shared memory, from the window's on and row after row of the box that the map
// describes, all moved by a tap's offset; values outside the tensor read as 0.
__device__ __forceinline__ void copy_pixels(uint32_t to, const CUtensorMap* map, int channel, const Window& at, int sample, uint32_t offset, uint32_t barrier) {
  const uint16_t w = offset >> 16, h = offset >> 8 & 255;
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes [%0], [%1, { %2, %3, %4, %5}], [%6], { %7, %8};" ::"r"(to), "l"(map),
      "r"(channel), "r"(at.w), "r"(at.h), "r"(sample), "r"(barrier), "h"(w), "h"(h)
      : "memory");
}

// Fetches a tap of all channels into a stage.
__device__ __forceinline__ void fetch(const Shared& shared, const CUtensorMap* map_weight, const CUtensorMap* map_input, const Tile& at, const Window& window, int tap,
                                      int stage) {
  expect_bytes(shared.full(stage), kFetchedBytes);
  copy_box(shared.weight(stage, 0), map_weight, 0, at.channel, tap, shared.full(stage));
  copy_pixels(shared.input(stage, 0), map_input, 0, window, at.sample, kOffsets[tap], shared.full(stage));
}

// Producer, one thread that keeps the ring full.
__device__ void produce(const Shared& shared, const CUtensorMap* map_weight, const CUtensorMap* map_input) {
  Ring ring;
  for (int unit = blockIdx.x; unit < kUnits; unit += gridDim.x) {
    const Tile at = tile_of(unit);
    const Window window(at.pixel);
    for (int tap = 0; tap < kTaps; ++tap) {
      wait(shared.empty(ring.stage), ring.parity ^ 1, "empty");  // returns at once in the first round
      fetch(shared, map_weight, map_input, at, window, tap, ring.stage);
      ring.advance();
    }
  }
}

// --- multiply: rows of the accumulators are channels (W is operand A), columns are pixels (x is operand B) ---

// A consumer thread's place. Accumulator register 4 j + 2 h + e is channel `channel(h)` of the tile, and of its pixels
// number `first_pixel()` + 8 j + 2 (lane % 4) + e.
struct Consumer {
  int warpgroup, warp, lane;
  __device__ int first_channel() const { return warp * 16; }  // of the warp
  __device__ int channel(int half) const { return first_channel() + half * 8 + lane / 4; }
  __device__ int first_pixel() const { return warpgroup * kWarpgroupPixels; }
};

struct Feed {
  const Shared& shared;
  const Consumer& self;
  Ring ring;
  int reading = -1;  // stage whose multiplications may still be running

  // Frees the stage: one arrival a warp.
  __device__ __forceinline__ void release() {
    if (reading >= 0 && self.lane == 0) arrive(shared.empty(reading));
    reading = -1;
  }
};

using Sums = float[kAccumulators];

// Adds `sums` to `total`. Volatile, so that the additions stay between the wait for `sums` and the multiplication that
// overwrites them.
__device__ __forceinline__ void promote(Sums& total, const Sums& sums) {
#pragma unroll
  for (int i = 0; i < kAccumulators; ++i) asm volatile("add.f32 %0, %0, %1;" : "+f"(total[i]) : "f"(sums[i]));
}

// Queues a group of multiplications, from the descriptors on. Corrections first, while the sum is small.
__device__ __forceinline__ void multiply_group(Sums& sums, uint64_t weight, uint64_t input) {
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < kGroupSteps; ++k) {
    const uint64_t a = weight + k * kDescriptorStep, b = input + k * kDescriptorStep;
    wgmma(sums, a + (kWeightLow >> 4), b, k > 0);
    wgmma(sums, a, b + (kInputLow >> 4), true);
  }
#pragma unroll
  for (int k = 0; k < kGroupSteps; ++k) wgmma(sums, weight + k * kDescriptorStep, input + k * kDescriptorStep, true);
  wgmma_commit();
}

// Multiplies kUnrolled stages. The tensor core truncates, so its sums are added to `total` with rounding, those of a
// group while the next one is multiplied. None are in flight at the end: over the back edge of a loop the compiler
// would not tell two groups apart.
__device__ __forceinline__ void multiply_stages(Sums& total, Feed& feed) {
  Sums sums[2];
  uint64_t weight, input;
  asm volatile("" : "+r"(feed.ring.stage));  // else its places in the ring would be known, and all their addresses kept in registers
#pragma unroll
  for (int i = 0; i < kUnrolled * kGroups; ++i) {
    const int group = i % kGroups;
    if (group == 0) {
      wait(feed.shared.full(feed.ring.stage), feed.ring.parity, "full");
      weight = matrix_descriptor(feed.shared.weight(feed.ring.stage, 0));
      input = matrix_descriptor(feed.shared.input(feed.ring.stage, 0) + feed.self.warpgroup * kWarpgroupPixels * kRowBytes);
    }
    const int tap = group / 2, half = group % 2 * kHalfBytes;
    multiply_group(sums[i % 2], weight + (tap * kWeightTapBytes + half >> 4), input + (tap * kInputTapBytes + half >> 4));
    if (i > 0) {
      wgmma_wait<1>();
      if (group == 0) feed.release();  // the stage before
      promote(total, sums[(i - 1) % 2]);
    }
    if (group == kGroups - 1) {
      feed.reading = feed.ring.stage;
      feed.ring.advance();
    }
  }
  wgmma_wait<0>();
  feed.release();
  promote(total, sums[(kUnrolled * kGroups - 1) % 2]);
}

// The sums of one tile over so many stages.
__device__ __forceinline__ void multiply_tile(Sums& total, Feed& feed, int stages) {
#pragma unroll
  for (int i = 0; i < kAccumulators; ++i) total[i] = 0.0f;
#pragma unroll 1
  for (int i = 0; i < stages; i += kUnrolled) multiply_stages(total, feed);
}

__device__ __forceinline__ float parameter(const float* vector, int channel) {
  return vector[channel];
}

// The operators behind the product, for one value.
__device__ __forceinline__ float finish(float v, float c_conv_bias) {
  v = v + c_conv_bias;  // conv2d's bias
  return v;
}

// --- epilogue: a warp turns its sums around in shared memory, so that its lanes finish and store neighbouring results ---

// Finishes a tile and stores it, 32 results of each of a warp's 16 channels at a time.
__device__ __forceinline__ void store_tile(const Sums (&v)[kWidePhases], float* staged, const Arguments& arguments, const Tile& at, const Consumer& self) {
  constexpr int kAtOnce = 8;  // channels that a lane finishes side by side
  constexpr int kRoundSums = 16;  // in a round: 32 pixels of two channels
  const int channel = at.channel + self.first_channel();
  const float c_conv_bias_rows = parameter(arguments.p_conv_bias, channel + self.lane % 16);  // a lane has a channel's
  float* y = arguments.y + (static_cast<size_t>(at.sample) * kOutChannels + channel) * kPlane;
  float* to = staged + self.lane / 4 * kStagedPitch + self.lane % 4 * 2;
#pragma unroll
  for (int first = 0; first < kAccumulators; first += kRoundSums) {
#pragma unroll
    for (int i = 0; i < kRoundSums; i += 4) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        *reinterpret_cast<float2*>(to + 2 * i + h * 8 * kStagedPitch) = make_float2(v[0][first + i + 2 * h], v[0][first + i + 2 * h + 1]);
      }
    }
    __syncwarp();
    const int pixel = at.pixel + self.first_pixel() + 2 * first + self.lane;
#pragma unroll 1
    for (int row = 0; row < 16; row += kAtOnce) {
      float results[kAtOnce];
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        const float c_conv_bias = __shfl_sync(~0u, c_conv_bias_rows, row + k);
        results[k] = finish(staged[(row + k) * kStagedPitch + self.lane], c_conv_bias);
      }
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        if (pixel < kPlane) __stcs(y + static_cast<size_t>(row + k) * kPlane + pixel, results[k]);
      }
    }
    __syncwarp();
  }
}

// --- guard: results of operands that scaled halves cannot carry are computed again in fp32 ---

// One result: a sum over channels for each tap, then over taps.
__device__ __forceinline__ float exact_sum(const float* x, const float* weight, int h, int w) {
  float sum = 0.0f;
  for (int kh = 0; kh < kKernelHeight; ++kh) {
    const int xh = h + kLowerHeight + kh;
    if (xh < 0 || xh >= kHeight) continue;
    for (int kw = 0; kw < kKernelWidth; ++kw) {
      const int xw = w + kLowerWidth + kw;
      if (xw < 0 || xw >= kWidth) continue;
      const float* pixel = x + xh * kWidth + xw;
      const float* tap = weight + kh * kKernelWidth + kw;
      float partial = 0.0f;
      for (int c = 0; c < kInChannels; ++c) partial = fmaf(pixel[static_cast<size_t>(c) * kInPlane], tap[static_cast<size_t>(c) * kFilterStep], partial);
      sum += partial;
    }
  }
  return sum;
}

// Computes this thread's results of a channel again and stores them: correct for every value, far slower.
__device__ void store_exact(const Arguments& arguments, const Tile& at, const Consumer& self, int half) {
  const int channel = at.channel + self.channel(half);
  const float c_conv_bias = arguments.p_conv_bias[channel];
  const float* x = arguments.x + static_cast<size_t>(at.sample) * kInChannels * kInPlane;
  const float* weight = arguments.conv_weight + static_cast<size_t>(channel) * kFilter;
  float* y = arguments.y + (static_cast<size_t>(at.sample) * kOutChannels + channel) * kPlane;
#pragma unroll 1
  for (int i = 0; i < kAccumulators / 2 * kWidePhases; ++i) {
    const int pixel = at.pixel + self.first_pixel() + self.lane % 4 * 2 + i / 2 * 8 + i % 2;
    if (pixel >= kPlane) break;
    const float sum = exact_sum(x, weight, pixel / kOutWidth, pixel % kOutWidth);
    y[pixel] = finish(sum, c_conv_bias);
  }
}

// Whether the halves of a sample keep enough bits: few of its values are so small that they lose some, beside those
// near the largest.
__device__ __forceinline__ bool keeps_bits(uint2 count) { return count.y <= count.x / kNearForSmall; }

// Removes the operands' scales from sums.
__device__ __forceinline__ void unscale(Sums& v, float scale_x, const float (&scale_weight)[2]) {
#pragma unroll
  for (int i = 0; i < kAccumulators; ++i) v[i] = v[i] * scale_x * scale_weight[i / 2 % 2];
}

// --- the kernel: warpgroup 0 fetches, warpgroups 1 and 2 multiply and store ---

__device__ void consume(const Shared& shared, unsigned char* memory, const Arguments& arguments) {
  const int thread = threadIdx.x - 128;
  Consumer self = {thread / 128, thread / 32 % 4, thread % 32};
  Feed feed{shared, self};
  float* staged = reinterpret_cast<float*>(memory + kStagedAt) + thread / 32 * 16 * kStagedPitch;  // of the warp

  for (int unit = blockIdx.x; unit < kUnits; unit += gridDim.x) {
    Sums v[kWidePhases];
    multiply_tile(v[0], feed, kSteps);
    // Keeps the epilogue's address arithmetic below this point: the multiplication needs the registers.
    asm volatile("" : "+r"(self.warpgroup), "+r"(self.warp), "+r"(self.lane));
    const Tile at = tile_of(unit);
    const float scale_x = arguments.x_unscale[at.sample];
    const float scale_weight[2] = {parameter(arguments.weight_unscale, at.channel + self.channel(0)), parameter(arguments.weight_unscale, at.channel + self.channel(1))};
    unscale(v[0], scale_x, scale_weight);
    store_tile(v, staged, arguments, at, self);
    const bool unfit = scale_x != scale_x || !keeps_bits(arguments.x_counts[at.sample]);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (unfit || scale_weight[half] != scale_weight[half]) store_exact(arguments, at, self, half);
    }
  }
}

__global__ void __launch_bounds__(kThreads, 1)
conv(const __grid_constant__ CUtensorMap map_weight, const __grid_constant__ CUtensorMap map_input, const __grid_constant__ Arguments arguments) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const Shared shared{shared_address(memory)};

  if (threadIdx.x == 0) {
    prefetch_map(&map_weight);
    prefetch_map(&map_input);
    for (int stage = 0; stage < kStages; ++stage) {
      barrier_init(shared.full(stage), 1);
      barrier_init(shared.empty(stage), kConsumerWarps);
    }
    barrier_init_done();
  }
  __syncthreads();

  if (threadIdx.x < 128) {
    give_registers<kProducerRegisters>();
    if (threadIdx.x == 0) produce(shared, &map_weight, &map_input);
  } else {
    take_registers<kConsumerRegisters>();
    consume(shared, memory, arguments);
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

// Error codes beside cudaError_t (positive) and 1000000 + CUresult.
constexpr int kMisaligned = -1;  // a pointer is no multiple of 16 bytes
constexpr int kDriverError = 1000000;

// Finds a function of the driver through the runtime, so that nothing links to it.
template <class Function>
Function driver_function(const char* name) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found;
  if (cudaGetDriverEntryPointByVersion(name, &function, 12000, cudaEnableDefault, &found) != cudaSuccess) return nullptr;
  return reinterpret_cast<Function>(function);
}

constexpr CUtensorMapDataType kType = CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
constexpr CUtensorMapSwizzle kSwizzle = CU_TENSOR_MAP_SWIZZLE_128B;
constexpr cuuint64_t kStepHalves = 1 * kRowHalves;  // of a channel, or a pixel, in a step

// W: the halves of a step of each channel, step after step.
int encode_weight(CUtensorMap* map, const void* tensor) {
  static const auto encode = driver_function<PFN_cuTensorMapEncodeTiled_v12000>("cuTensorMapEncodeTiled");
  if (encode == nullptr) return cudaErrorNotSupported;
  const cuuint64_t sizes[3] = {kStepHalves, kOutChannels, kWeightSteps}, pitches[2] = {kStepHalves * 2, kStepHalves * 2 * kOutChannels};
  const cuuint32_t box[3] = {kRowHalves, kTileChannels, 1}, every[3] = {1, 1, 1};
  const CUresult result = encode(map, kType, 3, const_cast<void*>(tensor), sizes, pitches, box, every, CU_TENSOR_MAP_INTERLEAVE_NONE, kSwizzle,
                                 CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? 0 : kDriverError + result;
}

// x: pixels of all channels. The first pixel of every window lies in a box, given by its corners: their distances from
// those of x.
int encode_input(CUtensorMap* map, const void* tensor) {
  static const auto encode = driver_function<PFN_cuTensorMapEncodeIm2col_v12000>("cuTensorMapEncodeIm2col");
  if (encode == nullptr) return cudaErrorNotSupported;
  constexpr cuuint64_t kPixelBytes = kStepHalves * 2, kRowBytesX = kPixelBytes * kColumns;
  const cuuint64_t sizes[4] = {kPixelBytes / 2, kColumns, kHeight, kSamples}, pitches[3] = {kPixelBytes, kRowBytesX, kRowBytesX * kHeight};
  const int lower[2] = {0, kLowerHeight}, upper[2] = {0, kUpperHeight};
  const cuuint32_t strides[4] = {1, 1, 1, 1};
  const CUresult result = encode(map, kType, 4, const_cast<void*>(tensor), sizes, pitches, lower, upper, kRowHalves, kTilePixels, strides,
                                 CU_TENSOR_MAP_INTERLEAVE_NONE, kSwizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? 0 : kDriverError + result;
}

// Raises the shared-memory limit above 48 KB, once on each device.
cudaError_t allow_shared_memory(int device) {
  constexpr int kDevices = 64;
  static std::mutex lock;
  static bool allowed[kDevices] = {};
  const std::lock_guard<std::mutex> guard(lock);
  if (device < kDevices && allowed[device]) return cudaSuccess;
  const cudaError_t error = cudaFuncSetAttribute(conv, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  if (error == cudaSuccess && device < kDevices) allowed[device] = true;
  return error;
}

}  // namespace
}  // namespace conv_sm90a

extern "C" int conv_sm90a_launch(
    const float* x,
    const float* conv_weight,
    const __half* x_split,
    const __half* weight_split,
    const float* x_unscale,
    const uint2* x_counts,
    const float* weight_unscale,
    const float* p_conv_bias,
    float* y,
    int device, cudaStream_t stream) {
  using namespace conv_sm90a;
  const DeviceScope scope(device);
  if (scope.error != cudaSuccess) return scope.error;
  const void* const wide[] = {x_split, weight_split};  // tensors that are accessed 16 bytes at a time, or fewer
  for (const void* tensor : wide) {
    if (reinterpret_cast<uintptr_t>(tensor) % 16 != 0) return kMisaligned;
  }
  CUtensorMap map_weight, map_input;
  if (const int error = encode_weight(&map_weight, weight_split)) return error;
  if (const int error = encode_input(&map_input, x_split)) return error;
  if (const cudaError_t error = allow_shared_memory(device)) return error;

  cudaLaunchConfig_t config = {};
  config.gridDim = kGrid;
  config.blockDim = kThreads;
  config.dynamicSmemBytes = kSharedBytes;
  config.stream = stream;
  const Arguments arguments = {x, conv_weight, x_unscale, x_counts, weight_unscale, p_conv_bias, y};
  return cudaLaunchKernelEx(&config, conv, map_weight, map_input, arguments);
}
