// gemm_biasadd_hardtanh_mish_groupnorm_tf32: x rounded to halves, rows scaled by powers of two
//
//   linear(in_features=8192, out_features=8192, bias=True)  # gemm
//   add(shape=(8192,), init=randn)  # bias
//   hardtanh(min_val=-1.0, max_val=1.0)  # hardtanh
//   mish()  # mish
//   group_norm(num_groups=256, eps=1e-05, affine=True)  # groupnorm
//   x (1024, 8192) -> y (1024, 8192), tf32
//
// Plan for sm_90a on h100:
//   one block a row: largest value, scale, split
//   1024 blocks of 256 threads, 0 bytes of shared memory
//
// Generated from specs/gemm_biasadd_hardtanh_mish_groupnorm.yaml; do not edit.
// Again: make generate SPEC=specs/gemm_biasadd_hardtanh_mish_groupnorm.yaml PRECISION=tf32

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace split_x_sm90a {
namespace {

constexpr int kColumns = 8192;  // in_features
constexpr int kBlocks = 1024;  // blocks, one a row
constexpr int kThreads = 256;  // threads of a block
constexpr int kPieces = 8;  // pieces of 4 values in a thread's registers
constexpr int kTopExponent = 14;  // exponent of a scaled row's largest value, which lies in [2^14, 2^15)
constexpr int kLargestShift = 114;  // largest exponent of a scale: its inverse must be a normal float
constexpr int kSmallestExponent = -101;  // kTopExponent - kLargestShift - 1: rows below cannot be scaled up
constexpr float kSmall = 6.1035156e-5f;  // 2^-14: scaled values below lose bits
constexpr int kSmallLimit = 8;  // in_features / 1024, at least 4: with more such values a row is refused
constexpr int kNearLimit = 512;  // in_features / 16, at least 256: near values that excuse small ones

// Packs two values, rounded to nearest, into a 32-bit word.
__device__ __forceinline__ uint32_t pack(float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// Reorders a row as the multiplication reads W: of every 16 values, words 0 to 3 hold k = 4c, 4c + 1 and words 4 to 7
// hold k = 4c + 2, 4c + 3 of lane c. Neighbouring lanes swap a word, so that each writes two words in a row. Returns
// their place.
__device__ __forceinline__ int reorder(uint32_t (&pair)[2], int piece) {
  const bool odd = piece % 2;
  const uint32_t other = __shfl_xor_sync(~0u, odd ? pair[0] : pair[1], 1);
  (odd ? pair[0] : pair[1]) = other;
  return piece / 4 * 8 + (odd ? 4 : 0) + piece % 4 / 2 * 2;
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

// Counts a value in two fields of 16 bits: scaled values of 16 or more are near the row's largest, those below kSmall
// lose bits.
__device__ __forceinline__ uint32_t count_of(float v, float scale) {
  const float scaled = fabsf(v) * scale;
  return (scaled >= 16.0f ? 0x10000u : 0u) + (v != 0.0f && scaled < kSmall ? 1u : 0u);
}

__device__ __forceinline__ uint32_t block_count(uint32_t count) {
  __shared__ uint32_t warps[kThreads / 32];
  count = __reduce_add_sync(~0u, count);
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = count;
  __syncthreads();
  return __reduce_add_sync(~0u, threadIdx.x % 32 < kThreads / 32 ? warps[threadIdx.x % 32] : 0u);
}

// Scales one row a block so that its largest magnitude is near 2^kTopExponent, then rounds it.
__global__ void __launch_bounds__(kThreads)
split(const float* __restrict__ from, __half* __restrict__ to, float* __restrict__ unscale) {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");  // the multiplication may begin to fetch W
  const int row = blockIdx.x;
  float4 v[kPieces];
  uint32_t magnitude = 0;
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    const int piece = i * kThreads + threadIdx.x;
    v[i] = __ldcs(reinterpret_cast<const float4*>(from + static_cast<size_t>(row) * kColumns) + piece);
    magnitude = max(magnitude, max(max(__float_as_uint(v[i].x) & 0x7fffffffu, __float_as_uint(v[i].y) & 0x7fffffffu),
                                   max(__float_as_uint(v[i].z) & 0x7fffffffu, __float_as_uint(v[i].w) & 0x7fffffffu)));
  }
  magnitude = block_largest(magnitude);

  const int exponent = static_cast<int>(magnitude >> 23) - 127;
  const int shift = magnitude == 0 ? 0 : min(kTopExponent - exponent, kLargestShift);
  const float scale = power_of_two(shift);

  // Small values are harmless beside many near ones: a loss is 2^-29 of a near value and shows only if small values
  // meet larger factors than all near ones together. Beside few near ones it may dominate: those may meet zeros.
  uint32_t count = 0;
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    count += count_of(v[i].x, scale);
    count += count_of(v[i].y, scale);
    count += count_of(v[i].z, scale);
    count += count_of(v[i].w, scale);
  }
  count = block_count(count);
  if (threadIdx.x == 0) {
    // NaN makes the multiplication use fp32: the row has an infinity or NaN, is too small to be scaled, or would lose
    // bits.
    const uint32_t near = count >> 16, small = count & 0xffffu;
    const bool keeps = small == 0 || (small <= kSmallLimit && near >= kNearLimit);
    const bool fits = keeps && magnitude < 0x7f800000u && (magnitude == 0 || exponent > kSmallestExponent);
    unscale[row] = fits ? power_of_two(-shift) : __uint_as_float(0x7fffffffu);
  }
  uint32_t* words = reinterpret_cast<uint32_t*>(to + static_cast<size_t>(row) * kColumns);
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    const int piece = i * kThreads + threadIdx.x;
    uint32_t high[2] = {pack(v[i].x * scale, v[i].y * scale), pack(v[i].z * scale, v[i].w * scale)};
    const int at = reorder(high, piece);
    *reinterpret_cast<uint2*>(words + at) = make_uint2(high[0], high[1]);
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

constexpr int kMisaligned = -1;  // error code beside cudaError_t (positive): a pointer is no multiple of 16 bytes

}  // namespace
}  // namespace split_x_sm90a

extern "C" int split_x_sm90a_launch(const float* from, __half* to, float* unscale, int device, cudaStream_t stream) {
  using namespace split_x_sm90a;
  const DeviceScope scope(device);
  if (scope.error != cudaSuccess) return scope.error;
  if (reinterpret_cast<uintptr_t>(from) % 16 != 0 || reinterpret_cast<uintptr_t>(to) % 16 != 0) return kMisaligned;
  cudaLaunchConfig_t config = {};
  config.gridDim = kBlocks;
  config.blockDim = kThreads;
  config.stream = stream;
  return cudaLaunchKernelEx(&config, split, from, to, unscale);
}
