// conv2d_groupnorm_tanh_hardswish_residualadd_logsumexp: the convolution on tensor cores without im2col, in one read of
//   x: statistics, and one value of each pooling window
//
//   conv2d(in_channels=8, out_channels=64, kernel_size=(3, 3), stride=(1, 1), padding=(0, 0), dilation=(1, 1),
//     groups=1, bias=True)  # conv
//   group_norm(num_groups=16, eps=1e-05, affine=True)  # group_norm
//   tanh()  # tanh
//   hardswish()  # hard_swish
//   add(from=conv)
//   logsumexp(dim=1, keepdim=True)
//   x (128, 8, 128, 128) -> y (128, 1, 126, 126), fp32
//
// Plan for sm_80 on h100:
//   three fp16 products of scaled operands split in two; a warp keeps the weights of 32 channels in registers and
//     multiplies 32 pixels at a time
//   a block takes parts of a sample in turn: 6 of 126 rows of y, 8 rows of x
//   264 blocks of 128 threads, 75424 bytes of shared memory
//
// Generated from specs/conv2d_groupnorm_tanh_hardswish_residualadd_logsumexp.yaml; do not edit.
// Again: make generate SPEC=specs/conv2d_groupnorm_tanh_hardswish_residualadd_logsumexp.yaml

#include <cuda_runtime.h>
#include <cuda_fp16.h>
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
constexpr int kWindowHeight = 1;  // no pooling
constexpr int kWindowWidth = 1;  // no pooling
constexpr int kPooledHeight = 126;  // rows of a channel of y
constexpr int kPooledWidth = 126;  // values of a row of y
constexpr int kPooledPlane = kPooledHeight * kPooledWidth;  // values of a channel of y
constexpr int kChannelWarps = 2;  // warps beside each other along the output channels
constexpr int kColumnWarps = 2;  // warps that share a part's units
constexpr int kThreads = 128;  // 32 x kChannelWarps x kColumnWarps
constexpr int kMinBlocks = 2;  // blocks of an SM: 255 registers a thread
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
constexpr int kStrips = 126;  // strips of a sample: kWindowHeight conv rows each, the last may be short
constexpr int kPartStrips = 6;  // strips of a part, whose rows of x a block holds at once
constexpr int kParts = 21;  // parts of a sample
constexpr int kUnits = 24;  // units of a part: a tile's columns of a strip each
constexpr int kPartRows = 8;  // rows of x of a part: kPartStrips x kWindowHeight + kKernelHeight - 1
constexpr int kPitch = 128;  // pixels of a row in shared memory: kWidth
constexpr int kPartPixels = kPartRows * kPitch;  // pixels of a plane
constexpr int kPlanePixels = 1026;  // kPartPixels + 2 that the last tile reads and drops
constexpr int kLoads = 4;  // pixels that a thread has in flight
constexpr int kLowPlanes = kOctets * kPlanePixels;  // first plane of the low parts, behind the high ones
constexpr int kZeroPixel = 2052;  // index of the zero pixel behind the planes; pads an odd number of taps
constexpr int kPiecePitch = 33;  // values from one channel's to the next's: odd, for the banks
constexpr int kTileWindows = 32;  // pooling windows of a unit
constexpr int kWindowPieces = 1;  // extremes of a window
constexpr int kSharedAt = 32848;  // offset of struct Shared: planes and zero pixel, 16 bytes a pixel
constexpr int kSharedBytes = 75424;  // + struct Shared
constexpr float kFirstScale = 64.0f;  // first scale of x before its conversion to fp16, if it suits the part
constexpr float kLargestFirst = 1023.0f;  // largest |x|: kFirstScale times it is below fp16's 65504
constexpr float kSmallestFirst = 0.00390625f;  // least maximum of a part, for fp16's range
constexpr int kTargetExponent = 14;  // exponent to which other scales bring the largest value: [2^14, 2^15)
constexpr int kLargestExponent = 48;  // exponent range of a part's maximum; parts beyond are multiplied in fp32
constexpr float kFaint = 0.015625f;  // 2^-6: scaled values below lose too many bits
constexpr int kFaintLimit = kInChannels * kPartPixels / 8;  // faint values that a part may have without its own scale
constexpr int kFaintWeights = kInChannels * kTaps / 8;  // faint weights that a channel may have without fp32

// Early launch on Hopper: waits for the previous kernel's results, then allows the next kernel to launch.
__device__ __forceinline__ void await_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

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
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 { %0, %1, %2, %3}, { %4, %5, %6, %7}, { %8, %9}, { %0, %1, %2, %3};"
               : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Packs two values, rounded to nearest, into a word of operands, the first in the lower half.
__device__ __forceinline__ uint32_t pack(float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}
__device__ __forceinline__ float2 unpack(uint32_t word) { return __half22float2(*reinterpret_cast<const __half2*>(&word)); }

// Exponent of a positive number, and the power 2^e, whose inverse is exact.
__device__ __forceinline__ int exponent_of(float v) { return static_cast<int>(__float_as_uint(v) >> 23) - 127; }
__device__ __forceinline__ float power_of_two(int e) { return __uint_as_float(static_cast<uint32_t>(127 + e) << 23); }
__device__ __forceinline__ float inverse_power(float power) { return __uint_as_float(0x7f000000u - __float_as_uint(power)); }

// Whether a scale can bring values with this largest magnitude into fp16's range. Infinity is out of range. NaN is
// never the largest, and as an operand it gives NaN anyway.
__device__ __forceinline__ bool fits_scales(float largest) { return largest == 0.0f || abs(exponent_of(largest)) <= kLargestExponent; }

// Whether a scaled value loses more to fp16's range than the precision allows. If many do, one far value has set the
// scale; that value may meet only zeros, and the values that decide the result would be lost.
__device__ __forceinline__ bool is_faint(float scaled) { return scaled != 0.0f && fabsf(scaled) < kFaint; }

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
  float scale;  // inverse of the weights' scale, with the sign
  float origin;  // bias, with the sign
};

struct Shared {
  Moments moments[kUnits][kChannels];
  Channel channels[kChannels];
  float extremes[kThreads / 32][16 * kRowTiles * kPiecePitch];  // extremes of a warp's unit
  uint32_t largest[2][kThreads / 32];  // bits of each warp's largest |x|, at the first and second attempt
  uint32_t faint[2][kThreads / 32];  // number of faint values that each warp has loaded
};
static_assert(kSharedAt + sizeof(Shared) <= kSharedBytes, "the plan reserves too little shared memory");

extern __shared__ __align__(128) unsigned char memory[];
__device__ __forceinline__ Shared& shared() { return *reinterpret_cast<Shared*>(memory + kSharedAt); }

// --- x: a part's rows, converted from planes of one channel to pixels of 8 channels ---

// Values of pixel `pixel` in a part that starts at row `first_row`.
__device__ __forceinline__ void load_pixel(float (&v)[8], const float* __restrict__ image, int first_row, int pixel) {
  const int place = pixel;
  const int row = first_row + place / kPitch;
  const int column = place % kPitch;
  const float* from = image + row * kWidth + column;
#pragma unroll
  for (int e = 0; e < 8; ++e) v[e] = from[e * kInPlane];
}

// A thread's summary of a part: the largest |x|, and the number of nonzero values that operands cannot carry.
struct Brought {
  float largest;
  uint32_t faint;
};

// Loads the part's rows, multiplied by `scale`.
__device__ __forceinline__ Brought bring_rows(const float* __restrict__ image, int first_row, float scale) {
  uint4* planes = reinterpret_cast<uint4*>(memory);
  Brought own = {0.0f, 0u};
#pragma unroll 1
  for (int first = threadIdx.x; first < kPartPixels; first += kLoads * kThreads) {
    float v[kLoads][8];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) load_pixel(v[i], image, first_row, first + i * kThreads);
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int pixel = first + i * kThreads;
      const int to = pixel;
      uint32_t high[4], low[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        own.largest = fmaxf(own.largest, fmaxf(fabsf(v[i][2 * e]), fabsf(v[i][2 * e + 1])));
        const float first_value = v[i][2 * e] * scale, second_value = v[i][2 * e + 1] * scale;
        own.faint += is_faint(first_value) + is_faint(second_value);
        high[e] = pack(first_value, second_value);
        const float2 rounded = unpack(high[e]);
        low[e] = pack(first_value - rounded.x, second_value - rounded.y);
      }
      planes[to] = make_uint4(high[0], high[1], high[2], high[3]);
      planes[kLowPlanes + to] = make_uint4(low[0], low[1], low[2], low[3]);
    }
  }
  return own;
}

// Block-wide summary, in two halves with a __syncthreads() between. `attempt` keeps the numbers of different scales
// apart.
__device__ __forceinline__ void note(Shared& s, Brought own, int attempt) {
  const uint32_t largest = __reduce_max_sync(0xffffffffu, __float_as_uint(own.largest));
  const uint32_t faint = __reduce_add_sync(0xffffffffu, own.faint);
  if (threadIdx.x % 32 == 0) {
    s.largest[attempt][threadIdx.x / 32] = largest;
    s.faint[attempt][threadIdx.x / 32] = faint;
  }
}
__device__ __forceinline__ Brought noted(const Shared& s, int attempt) {
  uint32_t largest = s.largest[attempt][0];
  uint32_t faint = s.faint[attempt][0];
#pragma unroll
  for (int i = 1; i < kThreads / 32; ++i) {
    largest = max(largest, s.largest[attempt][i]);
    faint += s.faint[attempt][i];
  }
  return {__uint_as_float(largest), faint};
}

// --- weights: fragments in registers for the whole kernel ---

// Output channel in row lane / 4 + 8 h of this warp's fragment m, counted from the block's first.
__device__ __forceinline__ int row_of(int m, int h) {
  return threadIdx.x / 32 % kChannelWarps * 16 * kRowTiles + m * 16 + h * 8 + threadIdx.x % 32 / 4;
}

// Loads the weights through shared memory, whose planes are still unused. Register i of a fragment holds two
// neighbouring input channels, by the lane's place in its quad, of row i % 2 and half 2 step + i / 2 of K. Returns
// whether the weights have scales; otherwise x is multiplied in fp32.
__device__ __forceinline__ bool load_weights(
    uint32_t (&high)[kRowTiles][kSteps][4],
    uint32_t (&low)[kRowTiles][kSteps][4],
    const float* __restrict__ weight) {
  constexpr int kChannelValues = kInChannels * kTaps;
  float* staged = reinterpret_cast<float*>(memory);
  for (int i = threadIdx.x; i < kChannels * kChannelValues; i += kThreads) staged[i] = weight[i];
  __syncthreads();
  bool fits = true;
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = row_of(m, h);
      const int channel = threadIdx.x % 4 * 2;  // first of two channels in the plane
      auto value = [&](int half, int next) {
        const int in = half / kTaps * 8 + channel + next;
        return half < kHalves ? staged[row * kChannelValues + in * kTaps + half % kTaps] : float{0};
      };
      float largest = 0.0f;
#pragma unroll
      for (int half = 0; half < kHalves; ++half) largest = fmaxf(largest, fmaxf(fabsf(value(half, 0)), fabsf(value(half, 1))));
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
      fits = fits && exponent_of(largest) <= kLargestExponent;
      const float scale = power_of_two(kTargetExponent - min(max(exponent_of(largest), -kLargestExponent), kLargestExponent));
      int faint = 0;
#pragma unroll
      for (int half = 0; half < kHalves; ++half) faint += is_faint(value(half, 0) * scale) + is_faint(value(half, 1) * scale);
      faint += __shfl_xor_sync(0xffffffffu, faint, 1);
      faint += __shfl_xor_sync(0xffffffffu, faint, 2);
      fits = fits && faint <= kFaintWeights;
      if (threadIdx.x % 4 == 0 && threadIdx.x < 32 * kChannelWarps) shared().channels[row].scale = inverse_power(scale);
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float first = value(2 * step + i, 0) * scale, second = value(2 * step + i, 1) * scale;
          high[m][step][2 * i + h] = pack(first, second);
          const float2 rounded = unpack(high[m][step][2 * i + h]);
          low[m][step][2 * i + h] = pack(first - rounded.x, second - rounded.y);
        }
      }
    }
  }
  return __syncthreads_and(fits);
}

// Fills the block's Channel entries, one a thread.
__device__ __forceinline__ void load_channels(const float* __restrict__ p_conv_bias) {
  if (threadIdx.x >= kChannels) return;
  Channel& own = shared().channels[threadIdx.x];
  const int channel = static_cast<int>(threadIdx.x);
  own.sign = 1.0f;
  own.scale *= own.sign;
  own.origin = own.sign * p_conv_bias[channel];
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

// Product of a tile: acc = weights x pixels; `tile` is the address of this lane's pixel. Corrections come first: the
// tensor core truncates, and loses less while the sum is small.
__device__ __forceinline__ void multiply_tile(
    Tile& acc,
    uint32_t tile,
    const uint32_t (&high)[kRowTiles][kSteps][4],
    const uint32_t (&low)[kRowTiles][kSteps][4]) {
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int j = 0; j < kTileOctets; ++j) acc[m][j][0] = acc[m][j][1] = acc[m][j][2] = acc[m][j][3] = 0.0f;
  }
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    uint32_t pixels[kTileOctets][2];
    load_pixels(pixels, tile, step);
    multiply_step(acc, low, step, pixels);
    load_pixels(pixels, tile + kLowPlanes * 16, step);
    multiply_step(acc, high, step, pixels);
  }
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    uint32_t pixels[kTileOctets][2];
    load_pixels(pixels, tile, step);
    multiply_step(acc, high, step, pixels);
  }
}

// Recomputes the tile by fp32 multiply-adds from global memory: slow, and correct for all values. `row` and `column`
// are the tile's first conv position.
__device__ __forceinline__ void exact_tile(Tile& acc, const float* __restrict__ image, const float* __restrict__ weight, int row, int column) {
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int j = 0; j < kTileOctets; ++j) acc[m][j][0] = acc[m][j][1] = acc[m][j][2] = acc[m][j][3] = 0.0f;
  }
#pragma unroll 1
  for (int k = 0; k < kInChannels * kTaps; ++k) {
    const float* plane = image + k / kTaps * kInPlane;
    const int top = row + k % kTaps / kKernelWidth;
    const int left = column + k % kTaps % kKernelWidth + threadIdx.x % 4 * 2;
    float w[kRowTiles][2];
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int channel = row_of(m, h);
        w[m][h] = weight[channel * kInChannels * kTaps + k];
      }
    }
#pragma unroll
    for (int j = 0; j < kTileOctets; ++j) {
      const int at_row = top;
#pragma unroll
      for (int next = 0; next < 2; ++next) {
        const int at_column = left + j * 8 + next;
        const float v = at_column < kWidth ? plane[at_row * kWidth + at_column] : 0.0f;
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
          for (int h = 0; h < 2; ++h) acc[m][j][2 * h + next] = fmaf(v, w[m][h], acc[m][j][2 * h + next]);
        }
      }
    }
  }
}

// Turns accumulators into the norm's input times the channel's sign. `unscale` is the inverse of x's scale.
__device__ __forceinline__ void transform_tile(Tile& acc, const Channel* channels, bool exact, float unscale) {
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const Channel own = channels[row_of(m, h)];
      const float scale = exact ? own.sign : own.scale * unscale;
#pragma unroll
      for (int j = 0; j < kTileOctets; ++j) {
#pragma unroll
        for (int next = 0; next < 2; ++next) {
          float& v = acc[m][j][2 * h + next];
          v = fmaf(v, scale, own.origin);
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
  float extremes[kRowTiles][2][kTileColumns / 4];
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
        float* extremes = &seen.extremes[m][h][j * 2];
        extremes[0] = fmaxf(extremes[0], first);
        extremes[1] = fmaxf(extremes[1], second);
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
      for (int j = 0; j < kTileColumns / 4; ++j) own[j / 2 * 8 + lane % 4 * 2 + j % 2] = seen.extremes[m][h][j];
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
    const float* __restrict__ x,
    const float* __restrict__ weight,
    const float* __restrict__ p_conv_bias,
    float* __restrict__ kept,
    float4* __restrict__ statistics) {
  await_previous_kernel();
  Shared& s = shared();
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0);
  const int lane = threadIdx.x % 32;
  const int pixel = lane / 16 * 8 + lane % 8;  // pixel of a tile's first two octets that this lane passes to ldmatrix
  uint32_t high[kRowTiles][kSteps][4];
  uint32_t low[kRowTiles][kSteps][4];
  const bool weights_fit = load_weights(high, low, weight);
  if (threadIdx.x == 0) reinterpret_cast<uint4*>(memory)[kZeroPixel] = make_uint4(0u, 0u, 0u, 0u);
  load_channels(p_conv_bias);

  for (int item = blockIdx.x; item < kBatch * kParts; item += gridDim.x) {
    const int sample = item / kParts;
    const int part = item % kParts;
    const int strips = min(kPartStrips, kStrips - part * kPartStrips);
    const int first_row = part * kPartStrips * kWindowHeight;
    const float* image = x + int64_t{sample} * kInChannels * kInPlane;

    float scale = kFirstScale;
    note(s, bring_rows(image, first_row, scale), 0);
    __syncthreads();
    const Brought part_of_x = noted(s, 0);
    const float largest = part_of_x.largest;
    bool exact = !weights_fit || !fits_scales(largest);
    if (!exact && largest != 0.0f && (largest > kLargestFirst || largest < kSmallestFirst || part_of_x.faint > kFaintLimit)) {
      scale = power_of_two(kTargetExponent - exponent_of(largest));
      note(s, bring_rows(image, first_row, scale), 1);
      __syncthreads();
      exact = noted(s, 1).faint > kFaintLimit;
    }
    const float unscale = inverse_power(scale);

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
          if (exact) {
            exact_tile(acc, image, weight, first_row + strip * kWindowHeight + row, column);
          } else {
            multiply_tile(acc, tile, high, low);
          }
          transform_tile(acc, s.channels, exact, unscale);
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
    const float* x,
    const float* weight,
    const float* p_conv_bias,
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
  return cudaLaunchKernelEx(&config, conv, x, weight, p_conv_bias, kept, statistics);
}
