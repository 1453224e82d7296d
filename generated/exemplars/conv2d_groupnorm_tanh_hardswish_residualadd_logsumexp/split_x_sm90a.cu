// conv2d_groupnorm_tanh_hardswish_residualadd_logsumexp: x split into two halves a value, the channels of a pixel side
//   by side, samples scaled by powers of two
//
//   conv2d(in_channels=8, out_channels=64, kernel_size=(3, 3), stride=(1, 1), padding=(0, 0), dilation=(1, 1),
//     groups=1, bias=True)  # conv
//   x (128, 8, 128, 128) -> y (128, 64, 126, 126), fp32
//
// Plan for sm_90a on h100:
//   16128 blocks of 256 threads, 16928 bytes of shared memory
//
// Generated from specs/conv2d_groupnorm_tanh_hardswish_residualadd_logsumexp.yaml; do not edit.
// Again: make generate SPEC=specs/conv2d_groupnorm_tanh_hardswish_residualadd_logsumexp.yaml

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace split_x_sm90a {
namespace {

constexpr int kInChannels = 8;  // in_channels
constexpr int kWidth = 128;  // columns of x
constexpr int kInPlane = 16384;  // pixels of a channel of a sample: 128 x 128
constexpr int kLowerWidth = 0;  // column of the first result's first tap
constexpr int kFolded = 3;  // taps along the width, which become channels
constexpr int kChannels = 24;  // in_channels * folded
constexpr int kColumns = 126;  // columns of pixels, one for each result
constexpr int kPixels = 16128;  // pixels of a sample as they are gathered
constexpr int kSlices = 32;  // slices of a sample, each with its largest value
constexpr int kThreads = 256;  // threads of a block
constexpr int kBlockPixels = 128;  // pixels of a block
constexpr int kPixelBlocks = 126;  // blocks side by side along a sample's pixels
constexpr int kBlock = 32;  // channels of a block
constexpr int kBlocks = 16128;  // blocks of threads
constexpr int kChannelBlocks = 1;  // blocks of channels of x
constexpr int kPieces = 8;  // pieces of eight halves of a pixel in a block
constexpr int kTopExponent = 14;  // exponent of a scaled sample's largest value, which lies in [2^14, 2^15)
constexpr int kLargestShift = 114;  // largest exponent of a scale: its inverse must be a normal float
constexpr int kSmallestExponent = -101;  // kTopExponent - kLargestShift - 1: samples below cannot be scaled up
constexpr int kLargestExponent = 96;  // from here on, unscaled sums could leave fp32's range
constexpr float kSmall = 0.25f;  // 2^-2: scaled values below lose bits

// Early launch on Hopper: waits for the previous kernel's results, then allows the next kernel to launch.
__device__ __forceinline__ void await_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ float power_of_two(int exponent) { return __uint_as_float(static_cast<uint32_t>(exponent + 127) << 23); }

// The exponent of a sample's scale, from its largest magnitude.
__device__ __forceinline__ int shift_of(uint32_t magnitude) { return magnitude == 0 ? 0 : min(kTopExponent - (static_cast<int>(magnitude >> 23) - 127), kLargestShift); }

// What removes the scale from sums. NaN makes the convolution use fp32: the sample has an infinity or NaN, is too
// small to be scaled, or so large that sums could leave fp32's range before W's scale or x's is removed too.
__device__ __forceinline__ float unscale_of(uint32_t magnitude, int shift) {
  const int exponent = static_cast<int>(magnitude >> 23) - 127;
  return magnitude == 0 || (exponent > kSmallestExponent && exponent < kLargestExponent) ? power_of_two(-shift) : __uint_as_float(0x7fffffffu);
}

// Counts a value in two fields of 16 bits: scaled values of 16 or more are near the row's largest, those below kSmall
// lose bits.
__device__ __forceinline__ uint32_t count_of(float v, float scale) {
  const float scaled = fabsf(v) * scale;
  return (scaled >= 16.0f ? 0x10000u : 0u) + (v != 0.0f && scaled < kSmall ? 1u : 0u);
}

// Splits a value into high | low << 16, halves whose sum errs by 2^-22 of it or 2^-25.
__device__ __forceinline__ uint32_t split_word(float v) {
  const __half high = __float2half_rn(v), low = __float2half_rn(v - __half2float(high));
  return __half_as_ushort(high) | static_cast<uint32_t>(__half_as_ushort(low)) << 16;
}

// Turns kBlockPixels pixels of a block of channels around, so that a pixel's channels are neighbours: their high
// halves, then their low ones. Reads fill rows of pixels, writes whole steps of them.
__global__ void __launch_bounds__(kThreads) split(const float* __restrict__ x, const uint32_t* __restrict__ x_largest, uint4* __restrict__ x_split,
                                                  float* __restrict__ x_unscale, uint2* __restrict__ x_counts) {
  __shared__ uint32_t words[kBlockPixels * (kBlock + 1)];  // a row a pixel, high | low << 16; the odd pitch keeps a warp's columns in banks of their own
  __shared__ uint32_t counts[kThreads / 32];
  await_previous_kernel();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  constexpr int block = 0;
  const int place = blockIdx.x;
  const int sample = place / kPixelBlocks, first = place % kPixelBlocks * kBlockPixels;
  uint32_t magnitude = 0;
  for (int i = lane; i < kSlices; i += 32) magnitude = max(magnitude, x_largest[sample * kSlices + i]);
  magnitude = __reduce_max_sync(~0u, magnitude);
  const int shift = shift_of(magnitude);
  const float scale = power_of_two(shift);

  // A value of channel c' is that of channel c' / kFolded at a window's tap c' % kFolded.
  const float* from = x + static_cast<size_t>(sample) * kInChannels * kInPlane;
  int columns[kBlockPixels / 32];  // of the first tap of a pixel's window
  const float* rows[kBlockPixels / 32];
#pragma unroll
  for (int j = 0; j < kBlockPixels / 32; ++j) {
    const int pixel = first + j * 32 + lane;
    columns[j] = pixel < kPixels ? pixel % kColumns + kLowerWidth : kWidth;
    rows[j] = from + pixel / kColumns * kWidth;
  }
  float v[kBlock / 8][kBlockPixels / 32];
#pragma unroll
  for (int i = 0; i < kBlock / 8; ++i) {
    const int channel = block * kBlock + i * 8 + warp, tap = channel % kFolded;
#pragma unroll
    for (int j = 0; j < kBlockPixels / 32; ++j) {
      const int column = columns[j] + tap;
      const bool inside = channel < kChannels && column >= 0 && column < kWidth;
      v[i][j] = inside ? __ldg(rows[j] + static_cast<size_t>(channel / kFolded) * kInPlane + column) : 0.0f;
    }
  }
  uint32_t count = 0;
#pragma unroll
  for (int i = 0; i < kBlock / 8; ++i) {
#pragma unroll
    for (int j = 0; j < kBlockPixels / 32; ++j) {
      count += count_of(v[i][j], scale);
      words[(j * 32 + lane) * (kBlock + 1) + i * 8 + warp] = split_word(v[i][j] * scale);
    }
  }
  count = __reduce_add_sync(~0u, count);
  if (lane == 0) counts[warp] = count;
  __syncthreads();
  if (warp == 0) {
    count = __reduce_add_sync(~0u, lane < kThreads / 32 ? counts[lane] : 0u);
    if (lane == 0 && count >> 16) atomicAdd(&x_counts[sample].x, count >> 16);
    if (lane == 1 && count & 0xffffu) atomicAdd(&x_counts[sample].y, count & 0xffffu);
    if (lane == 2 && first == 0 && block == 0) x_unscale[sample] = unscale_of(magnitude, shift);
  }

  uint4* to = x_split + ((static_cast<size_t>(sample) * kPixels + first) * kChannelBlocks + block) * kPieces;
  for (int i = threadIdx.x; i < kBlockPixels * kPieces; i += kThreads) {
    const int pixel = i / kPieces, piece = i % kPieces;
    if (pixel >= kPixels - first) break;
    const uint32_t* row = words + pixel * (kBlock + 1) + piece % (kBlock / 8) * 8;
    const uint32_t part = piece < kBlock / 8 ? 0x5410 : 0x7632;  // the lower halves of two words, or the upper ones
    to[static_cast<size_t>(pixel) * kChannelBlocks * kPieces + piece] =
        make_uint4(__byte_perm(row[0], row[1], part), __byte_perm(row[2], row[3], part), __byte_perm(row[4], row[5], part), __byte_perm(row[6], row[7], part));
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

}  // namespace
}  // namespace split_x_sm90a

extern "C" int split_x_sm90a_launch(
    const float* x,
    const uint32_t* x_largest,
    uint4* x_split,
    float* x_unscale,
    uint2* x_counts,
    int device,
    cudaStream_t stream) {
  using namespace split_x_sm90a;
  const DeviceScope scope(device);
  if (scope.error != cudaSuccess) return scope.error;
  cudaLaunchConfig_t config = {};
  config.gridDim = kBlocks;
  config.blockDim = kThreads;
  config.stream = stream;
#ifdef __CUDA_ARCH_LIST__
  constexpr int architectures[] = {__CUDA_ARCH_LIST__};
  cudaLaunchAttribute early = {};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &early;
  config.numAttrs = architectures[0] >= 900 ? 1 : 0;
#endif
  return cudaLaunchKernelEx(&config, split, x, x_largest, x_split, x_unscale, x_counts);
}
