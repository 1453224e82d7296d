// gemm_biasadd_hardtanh_mish_groupnorm: a power of two for each row of x and W that brings its largest value to [2^14,
//   2^15); NaN where fp16 parts cannot hold the row
//
//   linear(in_features=8192, out_features=8192, bias=True)  # gemm
//   add(shape=(8192,), init=randn)  # bias
//   hardtanh(min_val=-1.0, max_val=1.0)  # hardtanh
//   mish()  # mish
//   group_norm(num_groups=256, eps=1e-05, affine=True)  # groupnorm
//   x (1024, 8192) -> y (1024, 8192), fp32
//
// Plan for sm_80 on h100:
//   9216 blocks of 256 threads, 0 bytes of shared memory
//
// Generated from specs/gemm_biasadd_hardtanh_mish_groupnorm.yaml; do not edit.
// Again: make generate SPEC=specs/gemm_biasadd_hardtanh_mish_groupnorm.yaml

#include <cuda_runtime.h>
#include <cstdint>

namespace row_scale_sm80 {
namespace {

constexpr int kBatch = 1024;  // rows of x
constexpr int kInFeatures = 8192;  // values in a row of x or W
constexpr int kBlocks = 9216;  // batch + out_features: one block a row of x, then of W
constexpr int kThreads = 256;  // threads of a block
constexpr int kVector = 4;  // values of one load: the most that in_features allows
constexpr int kVectors = 2048;  // in_features / vector
constexpr int kSmallLimit = 8;  // in_features / 1024, at least 4: with more small values a row is refused
constexpr int kNearLimit = 512;  // in_features / 16, at least 256: near values that excuse small ones
constexpr int kVectorsPerThread = (kVectors + kThreads - 1) / kThreads;  // 8

// Early launch on Hopper: waits for the previous kernel's results, then allows the next kernel to launch.
__device__ __forceinline__ void await_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ void load(const float* from, float (&v)[4]) {
  const float4 t = *reinterpret_cast<const float4*>(from);
  v[0] = t.x;
  v[1] = t.y;
  v[2] = t.z;
  v[3] = t.w;
}

// Block-wide maximum of one number from each thread.
__device__ __forceinline__ uint32_t block_max(uint32_t v) {
  __shared__ uint32_t partial[kThreads / 32];
  v = __reduce_max_sync(0xffffffffu, v);
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = v;
  __syncthreads();
  const int lane = threadIdx.x % 32;
  return __reduce_max_sync(0xffffffffu, lane < kThreads / 32 ? partial[lane] : 0u);
}

// Numbers of values in a row near its largest, and of values too small to be split exactly.
struct Counts {
  uint32_t near;
  uint32_t small;
};

// Block-wide sum of one pair from each thread.
__device__ __forceinline__ Counts block_sum(Counts v) {
  __shared__ Counts partial[kThreads / 32];
  v = {__reduce_add_sync(0xffffffffu, v.near), __reduce_add_sync(0xffffffffu, v.small)};
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = v;
  __syncthreads();
  const int lane = threadIdx.x % 32;
  v = lane < kThreads / 32 ? partial[lane] : Counts{0u, 0u};
  return {__reduce_add_sync(0xffffffffu, v.near), __reduce_add_sync(0xffffffffu, v.small)};
}

// The power of two that brings the magnitude with these bits to [2^14, 2^15), at most 2^126; 1 for zero. 2^14 has
// exponent field 141.
__device__ __forceinline__ float scale_for(uint32_t largest) {
  return largest == 0 ? 1.0f : __uint_as_float(min(141 + 127 - (largest >> 23), 127u + 126u) << 23);
}

// Counts a scaled value. The largest value of a row is below 2^15, and near values are 2^4 or more. A value below 1/4
// loses up to 2^-25 in two fp16 parts, whatever its size: fp16's smallest step cuts into their 22 bits. Zeros lose
// nothing.
__device__ __forceinline__ void count(Counts& counts, float v, float scale) {
  const float magnitude = fabsf(v) * scale;
  counts.near += magnitude >= 16.0f;
  counts.small += v != 0.0f && magnitude < 0.25f;
}

// Whether a row may be split. Small values are harmless beside many near ones: a loss is 2^-29 of a near value, 1/32 of
// fp32's own rounding of that value's product. It shows only if the small values meet larger factors than all near
// values together. A row with small values and few near ones is refused: if those few met zeros, only the losses would
// remain.
__device__ __forceinline__ bool splits(const Counts& counts) {
  return counts.small == 0 || (counts.small <= kSmallLimit && counts.near >= kNearLimit);
}

// Finds the scale of each row of x and W: a block reads one row, keeps it in registers and writes its power of two. NaN
// marks a row with an infinity or a NaN, or with small values that fp16 parts would lose.
__global__ void __launch_bounds__(kThreads) row_scale(
    const float* __restrict__ x,
    const float* __restrict__ p_gemm_weight,
    float* __restrict__ row_scales) {
  await_previous_kernel();
  const int row = blockIdx.x;
  const float* values = row < kBatch ? x + static_cast<int64_t>(row) * kInFeatures
                                     : p_gemm_weight + static_cast<int64_t>(row - kBatch) * kInFeatures;
  float held[kVectorsPerThread][kVector];
#pragma unroll
  for (int i = 0; i < kVectorsPerThread; ++i) {
    const int vector = threadIdx.x + i * kThreads;
    load(values + vector * kVector, held[i]);
  }

  uint32_t largest = 0;  // bits of the largest magnitude; as integers, infinity and NaN exceed all numbers
#pragma unroll
  for (int i = 0; i < kVectorsPerThread; ++i) {
#pragma unroll
    for (int e = 0; e < kVector; ++e) largest = max(largest, __float_as_uint(held[i][e]) & 0x7fffffffu);
  }
  largest = block_max(largest);
  const float scale = scale_for(largest);

  Counts counts = {0u, 0u};
#pragma unroll
  for (int i = 0; i < kVectorsPerThread; ++i) {
#pragma unroll
    for (int e = 0; e < kVector; ++e) count(counts, held[i][e], scale);
  }
  counts = block_sum(counts);
  if (threadIdx.x == 0) {
    const bool usable = largest < 0x7f800000u && splits(counts);
    row_scales[row] = usable ? scale : __uint_as_float(0x7fffffffu);
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
}  // namespace row_scale_sm80

extern "C" int row_scale_sm80_launch(const float* x, const float* p_gemm_weight, float* row_scales, int device, cudaStream_t stream) {
  using namespace row_scale_sm80;
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
  return cudaLaunchKernelEx(&config, row_scale, x, p_gemm_weight, row_scales);
}
