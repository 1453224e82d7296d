// conv2d_groupnorm_tanh_hardswish_residualadd_logsumexp: W split into two halves a value, step by step, filters scaled
//   by powers of two
//
//   conv2d(in_channels=8, out_channels=64, kernel_size=(3, 3), stride=(1, 1), padding=(0, 0), dilation=(1, 1),
//     groups=1, bias=True)  # conv
//   x (128, 8, 128, 128) -> y (128, 64, 126, 126), fp32
//
// Plan for sm_90a on h100:
//   64 blocks of 256 threads, 0 bytes of shared memory
//
// Generated from specs/conv2d_groupnorm_tanh_hardswish_residualadd_logsumexp.yaml; do not edit.
// Again: make generate SPEC=specs/conv2d_groupnorm_tanh_hardswish_residualadd_logsumexp.yaml

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace split_weight_sm90a {
namespace {

constexpr int kInChannels = 8;  // in_channels
constexpr int kOutChannels = 64;  // out_channels
constexpr int kFilter = 72;  // values of W from one channel of y to the next
constexpr int kFilterStep = 9;  // values of W from one channel of x to the next
constexpr int kFolded = 3;  // taps along the width, which become channels
constexpr int kChannels = 24;  // in_channels * folded
constexpr int kTaps = 9;  // taps of a filter
constexpr int kTapSteps = 3;  // taps in the order of their steps
constexpr int kBlock = 32;  // channels of a step
constexpr int kChannelBlocks = 1;  // blocks of channels of x
constexpr int kThreads = 256;  // threads of a block
constexpr int kBlocks = 64;  // blocks, one a channel of y
constexpr int kTopExponent = 14;  // exponent of a scaled filter's largest value, which lies in [2^14, 2^15)
constexpr int kLargestShift = 114;  // largest exponent of a scale: its inverse must be a normal float
constexpr int kSmallestExponent = -101;  // kTopExponent - kLargestShift - 1: filters below cannot be scaled up
constexpr int kLargestExponent = 96;  // from here on, unscaled sums could leave fp32's range
constexpr float kSmall = 0.25f;  // 2^-2: scaled values below lose bits
constexpr int kNearForSmall = 64;  // values near the largest that excuse one that loses bits

// The taps in the order of their steps.
__constant__ const int kOrder[kTapSteps] = {0, 3, 6};

// Early launch on Hopper: waits for the previous kernel's results, then allows the next kernel to launch.
__device__ __forceinline__ void await_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ float power_of_two(int exponent) { return __uint_as_float(static_cast<uint32_t>(exponent + 127) << 23); }

// Largest magnitude in the block, as bits of a float: they order like integers, with infinities and NaN on top.
__device__ __forceinline__ uint32_t block_largest(uint32_t magnitude) {
  __shared__ uint32_t warps[kThreads / 32];
  const uint32_t largest = __reduce_max_sync(~0u, magnitude);
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = largest;
  __syncthreads();
  return __reduce_max_sync(~0u, warps[threadIdx.x % (kThreads / 32)]);
}

// The exponent of a filter's scale, from its largest magnitude.
__device__ __forceinline__ int shift_of(uint32_t magnitude) { return magnitude == 0 ? 0 : min(kTopExponent - (static_cast<int>(magnitude >> 23) - 127), kLargestShift); }

// What removes the scale from sums. NaN makes the convolution use fp32: the filter has an infinity or NaN, is too
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

// Scales and splits the filter of one channel of y, and writes it step by step: the high halves of a block of channels
// of x, then the low ones.
__global__ void __launch_bounds__(kThreads) split_filters(const float* __restrict__ conv_weight, uint32_t* __restrict__ weight_split, float* __restrict__ weight_unscale) {
  __shared__ uint32_t counts[2];
  await_previous_kernel();
  const int channel = blockIdx.x;
  const float* from = conv_weight + static_cast<size_t>(channel) * kFilter;
  if (threadIdx.x < 2) counts[threadIdx.x] = 0;
  uint32_t magnitude = 0;
  for (int i = threadIdx.x; i < kInChannels * kTaps; i += kThreads) {
    magnitude = max(magnitude, __float_as_uint(from[static_cast<size_t>(i / kTaps) * kFilterStep + i % kTaps]) & 0x7fffffffu);
  }
  magnitude = block_largest(magnitude);
  const int shift = shift_of(magnitude);
  const float scale = power_of_two(shift);

  uint32_t near = 0, small = 0;
  for (int i = threadIdx.x; i < kTapSteps * kChannelBlocks * (kBlock / 2); i += kThreads) {
    const int step = i / (kBlock / 2), pair = i % (kBlock / 2);
    const int tap = kOrder[step / kChannelBlocks], c = step % kChannelBlocks * kBlock + 2 * pair;
    uint32_t word[2];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int along = (c + e) % kFolded;
      const float v = c + e < kChannels ? from[static_cast<size_t>((c + e) / kFolded) * kFilterStep + tap + along] : 0.0f;
      const uint32_t count = count_of(v, scale);
      near += count >> 16, small += count & 0xffffu;
      word[e] = split_word(v * scale);
    }
    uint32_t* to = weight_split + (static_cast<size_t>(step) * kOutChannels + channel) * kBlock + pair;
    to[0] = __byte_perm(word[0], word[1], 0x5410);
    to[kBlock / 2] = __byte_perm(word[0], word[1], 0x7632);
  }
  near = __reduce_add_sync(~0u, near), small = __reduce_add_sync(~0u, small);
  if (threadIdx.x % 32 == 0) atomicAdd(&counts[0], near), atomicAdd(&counts[1], small);
  __syncthreads();
  if (threadIdx.x == 0) weight_unscale[channel] = counts[1] <= counts[0] / kNearForSmall ? unscale_of(magnitude, shift) : __uint_as_float(0x7fffffffu);
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
}  // namespace split_weight_sm90a

extern "C" int split_weight_sm90a_launch(
    const float* conv_weight,
    uint32_t* weight_split,
    float* weight_unscale,
    int device,
    cudaStream_t stream) {
  using namespace split_weight_sm90a;
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
  return cudaLaunchKernelEx(&config, split_filters, conv_weight, weight_split, weight_unscale);
}
