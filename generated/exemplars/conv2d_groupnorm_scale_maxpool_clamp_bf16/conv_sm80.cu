// conv2d_groupnorm_scale_maxpool_clamp_bf16: the convolution on tensor cores without im2col, in one read of x:
//   statistics, and one value of each pooling window
//
//   conv2d(in_channels=8, out_channels=64, kernel_size=(3, 3), stride=(1, 1), padding=(0, 0), dilation=(1, 1),
//     groups=1, bias=True)  # conv
//   group_norm(num_groups=16, eps=1e-05, affine=True)  # group_norm
//   mul(shape=(64, 1, 1), init=ones)  # scale
//   max_pool2d(kernel_size=(4, 4), stride=(4, 4), padding=(0, 0), dilation=(1, 1), ceil_mode=False)  # maxpool
//   clamp(min=0.0, max=1.0)
//   x (128, 8, 128, 128) -> y (128, 64, 31, 31), bf16
//
// Plan for sm_80 on h100:
//   one bf16 product; a warp keeps the weights of 32 channels in registers and multiplies 32 pixels at a time
//   a block takes parts of a sample in turn: 2 of 32 rows of y, 10 rows of x
//   396 blocks of 128 threads, 38464 bytes of shared memory
//
// Generated from specs/conv2d_groupnorm_scale_maxpool_clamp.yaml; do not edit.
// Again: make generate SPEC=specs/conv2d_groupnorm_scale_maxpool_clamp.yaml PRECISION=bf16

#include <cuda_runtime.h>
#include <cuda_bf16.h>
#include <cstdint>
#include <mutex>

namespace conv_sm80 {
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
constexpr int kChannelWarps = 2;  // warps beside each other along the output channels
constexpr int kColumnWarps = 2;  // warps that share a part's units
constexpr int kThreads = 128;  // 32 x kChannelWarps x kColumnWarps
constexpr int kMinBlocks = 3;  // blocks of an SM: 168 registers a thread
constexpr int kRowTiles = 2;  // tiles of 16 output channels, the rows of one instruction
constexpr int kChannels = 64;  // output channels of a block: 16 x kRowTiles x kChannelWarps
constexpr int kOctets = 1;  // planes of 8 input channels: kInChannels / 8, rounded up
constexpr int kHalves = kOctets * kTaps;  // halves of an instruction's K: a filter tap of 8 input channels each
constexpr int kSteps = (kHalves + 1) / 2;  // instructions along K
constexpr int kTileOctets = 4;  // octets of pixels in a tile
constexpr int kTileColumns = 32;  // columns of a tile
constexpr int kUsedColumns = 32;  // columns of a tile that belong to whole windows
constexpr int kColumnTiles = 4;  // tiles beside each other
constexpr int kLastColumns = 30;  // columns of the last tile that exist
constexpr int kStrips = 32;  // strips of a sample: kWindowHeight conv rows each, the last may be short
constexpr int kPartStrips = 2;  // strips of a part, whose rows of x a block holds at once
constexpr int kParts = 16;  // parts of a sample
constexpr int kUnits = 8;  // units of a part: a tile's columns of a strip each
constexpr int kPartRows = 10;  // rows of x of a part: kPartStrips x kWindowHeight + kKernelHeight - 1
constexpr int kPitch = 128;  // pixels of a row in shared memory: kWidth
constexpr int kPartPixels = kPartRows * kPitch;  // pixels of a plane
constexpr int kLoads = 5;  // pixels that a thread has in flight
constexpr int kZeroPixel = 1282;  // index of the zero pixel behind the planes; pads an odd number of taps
constexpr int kPiecePitch = 17;  // values from one channel's to the next's: odd, for the banks
constexpr int kTileWindows = 8;  // pooling windows of a unit
constexpr int kWindowPieces = 2;  // extremes of a window
constexpr int kSharedAt = 20528;  // offset of struct Shared: planes and zero pixel, 16 bytes a pixel
constexpr int kSharedBytes = 38464;  // + struct Shared

// Early launch on Hopper: waits for the previous kernel's results, then allows the next kernel to launch.
__device__ __forceinline__ void await_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ float to_float(__nv_bfloat16 v) { return __bfloat162float(v); }

// --- instructions and numbers ---

// Four 8x8 matrices of 16-bit values: lane l names row l % 8 of matrix l / 8 and receives values 2 (l % 4), +1 of row l
// / 4 of each.
__device__ __forceinline__ void load_matrices(uint32_t (&values)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 { %0, %1, %2, %3}, [%4];"
               : "=r"(values[0]), "=r"(values[1]), "=r"(values[2]), "=r"(values[3])
               : "r"(row));
}

// Matrix product: sums (16x8) += a (16x16) b (16x8).
__device__ __forceinline__ void multiply(float (&sums)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 { %0, %1, %2, %3}, { %4, %5, %6, %7}, { %8, %9}, { %0, %1, %2, %3};"
               : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Joins two operands in a word, the first in the lower half.
__device__ __forceinline__ uint32_t pack(uint16_t low, uint16_t high) { return low | static_cast<uint32_t>(high) << 16; }

// Scale for values whose squares exceed fp32's range. Statistics are then formed of the values times kShrink, a power
// of two: a sum of squares above 2^128 becomes one above 2^-32, and every sum of squares stays below 2^128.
constexpr float kShrink = 8.271806125530277e-25f;  // 2^-80
constexpr float kGrow = 1.2089258196146292e24f;    // 2^80

// Moments of a set of values: count, mean (`mean` plus its rounding error `mean_rest`), and the sum m2 of squared
// differences from the mean.
// A negative m2 belongs to the values times kShrink: the sum of the values themselves exceeds fp32's range.
struct Moments {
  float count;
  float mean;
  float mean_rest;
  float m2;
};

// Moments of the union of two sets (Chan, Golub and LeVeque, 1983). The share's error, two units in the last place,
// only scales a difference of means. For an empty `a` the share is exactly 1.
__device__ __forceinline__ Moments merge_alike(const Moments& a, const Moments& b) {
  const float count = a.count + b.count;
  const float share = a.count == 0.0f ? 1.0f : __fdividef(b.count, count);
  const float delta = __fsub_rn(b.mean, a.mean);
  const float delta_rest = b.mean_rest - a.mean_rest;
  const float mean = fmaf(delta, share, a.mean);
  const float between = (delta + delta_rest) * (a.count * share) * (delta + delta_rest);
  return {count, mean, a.mean_rest + fmaf(delta_rest, share, fmaf(delta, share, __fsub_rn(a.mean, mean))), a.m2 + b.m2 + between};
}

__device__ __forceinline__ Moments shrunk(const Moments& v) {
  return {v.count, v.mean * kShrink, v.mean_rest * kShrink, v.m2 < 0.0f ? -v.m2 : v.m2 * kShrink * kShrink};
}

// Merge for values of any magnitude.
__device__ __forceinline__ Moments merge(const Moments& a, const Moments& b) {
  Moments both = merge_alike(a, b);
  if (a.m2 < 0.0f || b.m2 < 0.0f || !(both.m2 < INFINITY)) {
    both = merge_alike(shrunk(a), shrunk(b));
    both = {both.count, both.mean * kGrow, both.mean_rest * kGrow, -both.m2};
  }
  return both;
}

// --- shared memory: x's planes (8 channels of 16 bits a pixel), then struct Shared ---

// Factors that turn a channel's accumulators into the norm's input times the channel's sign: pooling then keeps the
// largest value.
struct Channel {
  float sign;  // -1 where the operators after the norm decrease, else 1
  float origin;  // bias, with the sign
};

struct Shared {
  Moments moments[kUnits][kChannels];
  Channel channels[kChannels];
  float extremes[kThreads / 32][16 * kRowTiles * kPiecePitch];  // extremes of a warp's unit
};
static_assert(kSharedAt + sizeof(Shared) <= kSharedBytes, "the plan reserves too little shared memory");

extern __shared__ __align__(128) unsigned char memory[];
__device__ __forceinline__ Shared& shared() { return *reinterpret_cast<Shared*>(memory + kSharedAt); }

// --- x: a part's rows, converted from planes of one channel to pixels of 8 channels ---

// Values of pixel `pixel` in a part that starts at row `first_row`; zeros outside x.
__device__ __forceinline__ void load_pixel(uint16_t (&v)[8], const uint16_t* __restrict__ image, int first_row, int pixel) {
  const int place = pixel;
  const int row = first_row + place / kPitch;
  const int column = place % kPitch;
  const bool there = row < kHeight;
  const uint16_t* from = image + row * kWidth + column;
#pragma unroll
  for (int e = 0; e < 8; ++e) v[e] = there ? from[e * kInPlane] : uint16_t{0};
}

// Loads the part's rows.
__device__ __forceinline__ void bring_rows(const uint16_t* __restrict__ image, int first_row) {
  uint4* planes = reinterpret_cast<uint4*>(memory);
#pragma unroll 1
  for (int first = threadIdx.x; first < kPartPixels; first += kLoads * kThreads) {
    uint16_t v[kLoads][8];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) load_pixel(v[i], image, first_row, first + i * kThreads);
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int pixel = first + i * kThreads;
      const int to = pixel;
      planes[to] = make_uint4(pack(v[i][0], v[i][1]), pack(v[i][2], v[i][3]), pack(v[i][4], v[i][5]), pack(v[i][6], v[i][7]));
    }
  }
}

// --- weights: fragments in registers for the whole kernel ---

// Output channel in row lane / 4 + 8 h of this warp's fragment m, counted from the block's first.
__device__ __forceinline__ int row_of(int m, int h) {
  return threadIdx.x / 32 % kChannelWarps * 16 * kRowTiles + m * 16 + h * 8 + threadIdx.x % 32 / 4;
}

// Loads the weights through shared memory, whose planes are still unused. Register i of a fragment holds two
// neighbouring input channels, by the
// lane's place in its quad, of row i % 2 and half 2 step + i / 2 of K.
__device__ __forceinline__ void load_weights(uint32_t (&high)[kRowTiles][kSteps][4], const __nv_bfloat16* __restrict__ weight) {
  constexpr int kChannelValues = kInChannels * kTaps;
  const uint16_t* from = reinterpret_cast<const uint16_t*>(weight);
  uint16_t* staged = reinterpret_cast<uint16_t*>(memory);
  for (int i = threadIdx.x; i < kChannels * kChannelValues; i += kThreads) staged[i] = from[i];
  __syncthreads();
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = row_of(m, h);
      const int channel = threadIdx.x % 4 * 2;  // first of two channels in the plane
      auto value = [&](int half, int next) {
        const int in = half / kTaps * 8 + channel + next;
        return half < kHalves ? staged[row * kChannelValues + in * kTaps + half % kTaps] : uint16_t{0};
      };
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          high[m][step][2 * i + h] = pack(value(2 * step + i, 0), value(2 * step + i, 1));
        }
      }
    }
  }
  __syncthreads();
}

// Fills the block's Channel entries, one a thread.
__device__ __forceinline__ void load_channels(
    const __nv_bfloat16* __restrict__ p_conv_bias,
    const __nv_bfloat16* __restrict__ p_gamma,
    const __nv_bfloat16* __restrict__ p_scale) {
  if (threadIdx.x >= kChannels) return;
  Channel& own = shared().channels[threadIdx.x];
  const int channel = static_cast<int>(threadIdx.x);
  const float c_gamma = to_float(p_gamma[channel]);
  const float c_scale = to_float(p_scale[channel]);
  own.sign = copysignf(1.0f, c_gamma) * copysignf(1.0f, c_scale);
  own.origin = own.sign * to_float(p_conv_bias[channel]);
}

// --- a tile: 16 kRowTiles channels x 8 kTileOctets pixels; a lane holds 2 of 8 columns of 2 channels a fragment ---

using Tile = float[kRowTiles][kTileOctets][4];  // [fragment][octet][2 columns of rows lane / 4 and lane / 4 + 8]

// Offset of the pixels of half `half` of K from the tile's first pixel.
__device__ __forceinline__ constexpr int offset_of(int half) {
  return half % kTaps / kKernelWidth * kPitch + half % kTaps % kKernelWidth;
}

// Loads the right operands of instruction `step`, 8 pixels in two halves of K each, for two octets by one ldmatrix.
// Lanes 8 to 15 and 24 to 31
// pass the pixels of the second half. An odd number of taps is padded by the zero pixel.
__device__ __forceinline__ void load_pixels(uint32_t (&pixels)[kTileOctets][2], uint32_t tile, int step) {
  constexpr int kNextOctets = 16;  // distance from two octets to the next two
  const uint32_t second = threadIdx.x / 8 % 2;
#pragma unroll
  for (int j = 0; j < kTileOctets; j += 2) {
    uint32_t from = tile + (offset_of(2 * step) + j / 2 * kNextOctets) * 16;
    if (2 * step + 1 < kHalves) {
      from += second * ((offset_of(2 * step + 1) - offset_of(2 * step)) * 16);
    } else {
      from = second ? static_cast<uint32_t>(__cvta_generic_to_shared(memory)) + kZeroPixel * 16 : from;
    }
    uint32_t octets[4];
    load_matrices(octets, from);
    pixels[j][0] = octets[0], pixels[j][1] = octets[1], pixels[j + 1][0] = octets[2], pixels[j + 1][1] = octets[3];
  }
}

// Product of one step: acc += weights x pixels.
__device__ __forceinline__ void multiply_step(Tile& acc, const uint32_t (&weights)[kRowTiles][kSteps][4], int step, const uint32_t (&pixels)[kTileOctets][2]) {
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int j = 0; j < kTileOctets; ++j) multiply(acc[m][j], weights[m][step], pixels[j]);
  }
}

// Product of a tile: acc = weights x pixels; `tile` is the address of this lane's pixel.
__device__ __forceinline__ void multiply_tile(Tile& acc, uint32_t tile, const uint32_t (&high)[kRowTiles][kSteps][4]) {
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int j = 0; j < kTileOctets; ++j) acc[m][j][0] = acc[m][j][1] = acc[m][j][2] = acc[m][j][3] = 0.0f;
  }
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    uint32_t pixels[kTileOctets][2];
    load_pixels(pixels, tile, step);
    multiply_step(acc, high, step, pixels);
  }
}

// Turns accumulators into the norm's input times the channel's sign.
__device__ __forceinline__ void transform_tile(Tile& acc, const Channel* channels) {
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const Channel own = channels[row_of(m, h)];
#pragma unroll
      for (int j = 0; j < kTileOctets; ++j) {
#pragma unroll
        for (int next = 0; next < 2; ++next) {
          float& v = acc[m][j][2 * h + next];
          v = fmaf(v, own.sign, own.origin);
        }
      }
    }
  }
}

// --- a unit: statistics and extremes of a tile's columns in the rows of a strip ---

constexpr int kSureColumns = kUsedColumns < kLastColumns ? kUsedColumns : kLastColumns;  // columns of every tile

// Whether column 8 j + 2 (lane % 4) + next of a tile exists; `columns` of them do.
__device__ __forceinline__ bool exists(int j, int next, int columns) {
  return 8 * j + 8 <= kSureColumns || 8 * j + static_cast<int>(threadIdx.x) % 4 * 2 + next < columns;
}

// Sum over the four lanes that share a channel; all of them receive the same bits.
__device__ __forceinline__ float quad_sum(float v) {
  v += __shfl_xor_sync(0xffffffffu, v, 1);
  return v + __shfl_xor_sync(0xffffffffu, v, 2);
}

// A lane's summary of a unit: the largest values of its columns, and sums of differences from a reference that its quad
// shares.
struct Seen {
  float extremes[kRowTiles][2][kTileColumns / 8];
  float reference[kRowTiles][2], sum[kRowTiles][2], square[kRowTiles][2];
};

// Octets of the first row that exist in every tile: a power of two, so that the mean of equal values is exact.
constexpr int kSureOctets = 2;

// Reference value: the mean of 8 kSureOctets values of a channel. Differences of n values from it lose at most as much
// as values with 1 + n / (8 kSureOctets) times their spread would.
__device__ __forceinline__ float reference_of(const float (&fragments)[kTileOctets][4], int h) {
  float sums[kSureOctets];
#pragma unroll
  for (int j = 0; j < kSureOctets; ++j) sums[j] = fragments[j][2 * h] + fragments[j][2 * h + 1];
#pragma unroll
  for (int step = kSureOctets / 2; step > 0; step /= 2) {
#pragma unroll
    for (int j = 0; j < step; ++j) sums[j] += sums[j + step];
  }
  return quad_sum(sums[0]) * (0.125f / kSureOctets);
}

__device__ __forceinline__ void start_unit(Seen& seen, const Tile& acc) {
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (float& extreme : seen.extremes[m][h]) extreme = -INFINITY;
      seen.reference[m][h] = reference_of(acc[m], h);
      seen.sum[m][h] = seen.square[m][h] = 0.0f;
    }
  }
}

__device__ __forceinline__ void take_tile(Seen& seen, const Tile& acc, int columns) {
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int j = 0; j < kTileOctets; ++j) {
        const float first = acc[m][j][2 * h], second = acc[m][j][2 * h + 1];
        float& extreme = seen.extremes[m][h][j];
        extreme = fmaxf(extreme, fmaxf(first, second));
        const float d0 = exists(j, 0, columns) ? __fsub_rn(first, seen.reference[m][h]) : 0.0f;
        const float d1 = exists(j, 1, columns) ? __fsub_rn(second, seen.reference[m][h]) : 0.0f;
        seen.sum[m][h] += d0 + d1;
        seen.square[m][h] = fmaf(d1, d1, fmaf(d0, d0, seen.square[m][h]));
      }
    }
  }
}

__device__ __forceinline__ void shrink(Tile& acc) {
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int j = 0; j < kTileOctets; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) acc[m][j][i] *= kShrink;
    }
  }
}

// Moments of a unit of `count` values a channel, without the channel's sign. `times` is 1, or kShrink if the values
// were multiplied by it; then only moments that exceeded fp32's range are replaced. Returns whether any of the warp's
// exceed it.
__device__ __forceinline__ bool store_moments(Moments* moments, const Channel* channels, const Seen& seen, float count, float times) {
  bool beyond = false;
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float sum = quad_sum(seen.sum[m][h]);
      const float square = quad_sum(seen.square[m][h]);
      const float from_reference = sum / count;
      const float mean = seen.reference[m][h] + from_reference;
      const float rest = from_reference - __fsub_rn(mean, seen.reference[m][h]);
      const int row = row_of(m, h);
      const float sign = channels[row].sign;
      const float m2 = fmaf(-from_reference, sum, square);
      beyond |= !(m2 < INFINITY);
      if (threadIdx.x % 4 == 0 && times == 1.0f) {
        moments[row] = {count, sign * mean, sign * rest, m2};
      } else if (threadIdx.x % 4 == 0 && !(moments[row].m2 < INFINITY)) {
        moments[row] = {count, sign * mean * kGrow, sign * rest * kGrow, -m2};
      }
    }
  }
  return __any_sync(0xffffffffu, beyond);
}

// Combines a unit's extremes in shared memory and stores one value of each window, without the channel's sign. `kept`
// points at the unit's sample and row of y; `first_window` is its first column there.
__device__ __forceinline__ void store_extremes(float* __restrict__ kept, float* scratch, const Channel* channels, const Seen& seen, int first_window) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float* own = scratch + (m * 16 + h * 8 + lane / 4) * kPiecePitch;
#pragma unroll
      for (int j = 0; j < kTileColumns / 8; ++j) own[j * 4 + lane % 4] = seen.extremes[m][h][j];
    }
  }
  __syncwarp();
  const int first_row = row_of(0, 0) - lane / 4;
  for (int i = lane; i < 16 * kRowTiles * kTileWindows; i += 32) {
    const int row = i / kTileWindows;
    const int window = i % kTileWindows;
    const float* pieces = scratch + row * kPiecePitch + window * kWindowPieces;
    float best = pieces[0];
#pragma unroll
    for (int p = 1; p < kWindowPieces; ++p) best = fmaxf(best, pieces[p]);
    const int channel = first_row + row;
    if (first_window + window < kPooledWidth) {
      kept[channel * kPooledPlane + first_window + window] = channels[channel].sign * best;
    }
  }
  __syncwarp();
}

// --- the kernel ---

// A block takes parts in turn: it loads their rows of x, its warps compute their units, and the units' moments are
// merged.
__global__ void __launch_bounds__(kThreads, kMinBlocks) conv(
    const __nv_bfloat16* __restrict__ x,
    const __nv_bfloat16* __restrict__ weight,
    const __nv_bfloat16* __restrict__ p_conv_bias,
    const __nv_bfloat16* __restrict__ p_gamma,
    const __nv_bfloat16* __restrict__ p_scale,
    float* __restrict__ kept,
    float4* __restrict__ statistics) {
  await_previous_kernel();
  Shared& s = shared();
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0);
  const int lane = threadIdx.x % 32;
  const int pixel = lane / 16 * 8 + lane % 8;  // pixel of a tile's first two octets that this lane passes to ldmatrix
  uint32_t high[kRowTiles][kSteps][4];
  load_weights(high, weight);
  if (threadIdx.x == 0) reinterpret_cast<uint4*>(memory)[kZeroPixel] = make_uint4(0u, 0u, 0u, 0u);
  load_channels(p_conv_bias, p_gamma, p_scale);

  for (int item = blockIdx.x; item < kBatch * kParts; item += gridDim.x) {
    const int sample = item / kParts;
    const int part = item % kParts;
    const int strips = min(kPartStrips, kStrips - part * kPartStrips);
    const int first_row = part * kPartStrips * kWindowHeight;
    const uint16_t* image = reinterpret_cast<const uint16_t*>(x) + int64_t{sample} * kInChannels * kInPlane;

    bring_rows(image, first_row);
    __syncthreads();

    const int units = strips * kColumnTiles;
    for (int unit = warp / kChannelWarps; unit < units; unit += kColumnWarps) {
      const int strip = unit / kColumnTiles;
      const int column = unit % kColumnTiles * kUsedColumns;
      const int rows = min(kWindowHeight, kOutHeight - first_row - strip * kWindowHeight);
      const int columns = min(kUsedColumns, kOutWidth - column);
      // If squares exceed fp32's range, the unit's moments are recomputed with the values times kShrink.
#pragma unroll 1
      for (float times = 1.0f;; times = kShrink) {
        uint32_t tile = static_cast<uint32_t>(__cvta_generic_to_shared(memory)) + (strip * kWindowHeight * kPitch + column + pixel) * 16;
        Seen seen;
#pragma unroll 1
        for (int row = 0; row < rows; ++row, tile += kPitch * 16) {
          Tile acc;
          multiply_tile(acc, tile, high);
          transform_tile(acc, s.channels);
          if (times != 1.0f) shrink(acc);
          if (row == 0) start_unit(seen, acc);
          take_tile(seen, acc, columns);
        }
        const bool beyond = store_moments(s.moments[unit], s.channels, seen, static_cast<float>(rows * columns), times);
        if (times != 1.0f) break;
        const int pooled_row = part * kPartStrips + strip;
        if (pooled_row < kPooledHeight) {
          float* to = kept + (int64_t{sample} * kOutChannels) * kPooledPlane + pooled_row * kPooledWidth;
          store_extremes(to, s.extremes[warp], s.channels, seen, column / kWindowWidth);
        }
        if (!beyond) break;
      }
    }
    __syncthreads();

    if (threadIdx.x < kChannels) {
      Moments own = {0.0f, 0.0f, 0.0f, 0.0f};
      for (int unit = 0; unit < units; ++unit) own = merge(own, s.moments[unit][threadIdx.x]);
      const int64_t channel = int64_t{sample} * kOutChannels + threadIdx.x;
      statistics[channel * kParts + part] = make_float4(own.count, own.mean, own.mean_rest, own.m2);
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

constexpr int kDoesNotFit = -2;  // error code beside cudaError_t (positive): no block fits on an SM

// Sets the shared-memory limit and counts concurrent blocks, once on each device.
int prepare(int device, int& blocks) {
  constexpr int kDevices = 64;
  static std::mutex lock;
  static int known[kDevices] = {};
  const std::lock_guard<std::mutex> guard(lock);
  if (device < kDevices && known[device] > 0) {
    blocks = known[device];
    return 0;
  }
  cudaError_t error = cudaFuncSetAttribute(conv, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  if (error != cudaSuccess) return error;
  int sms = 0, fitting = 0;
  error = cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device);
  if (error != cudaSuccess) return error;
  error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&fitting, conv, kThreads, kSharedBytes);
  if (error != cudaSuccess) return error;
  if (fitting < 1) return kDoesNotFit;
  blocks = sms * fitting;
  if (device < kDevices) known[device] = blocks;
  return 0;
}

}  // namespace
}  // namespace conv_sm80

extern "C" int conv_sm80_launch(
    const __nv_bfloat16* x,
    const __nv_bfloat16* weight,
    const __nv_bfloat16* p_conv_bias,
    const __nv_bfloat16* p_gamma,
    const __nv_bfloat16* p_scale,
    float* kept,
    float4* statistics,
    int device,
    cudaStream_t stream) {
  using namespace conv_sm80;
  const DeviceScope scope(device);
  if (scope.error != cudaSuccess) return scope.error;
  int blocks = 0;
  if (const int error = prepare(device, blocks)) return error;
  cudaLaunchConfig_t config = {};
  config.gridDim = (blocks < kBatch * kParts ? blocks : kBatch * kParts);
  config.blockDim = kThreads;
  config.dynamicSmemBytes = kSharedBytes;
  config.stream = stream;
  return cudaLaunchKernelEx(&config, conv, x, weight, p_conv_bias, p_gamma, p_scale, kept, statistics);
}
