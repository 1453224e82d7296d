// gemm_groupnorm_hardtanh: a power of two for each row of x and W that brings its largest value to [2^14, 2^15); NaN where fp16 parts cannot hold the row
//
//   linear(in_features=8192, out_features=8192, bias=True)  # gemm
//   group_norm(num_groups=16, eps=1e-05, affine=True)  # group_norm
//   hardtanh(min_val=-2.0, max_val=2.0)  # hardtanh
//   x (1024, 8192) -> y (1024, 8192), fp32
//
// Plan for sm_80 on a100:
//   9216 blocks of 256 threads, 0 bytes of shared memory
//
// Generated from specs/default.yaml; do not edit. Again: make generate SPEC=specs/default.yaml

#include <cuda_runtime.h>
#include <cstdint>

namespace row_scale_sm80 {
namespace {

constexpr int kBatch = 1024;  // rows of x
constexpr int kInFeatures = 8192;  // values in a row of x or W
constexpr int kBlocks = 9216;  // batch + out_features: one block for each row of x, then of W
constexpr int kThreads = 256;  // each block
constexpr int kVector = 4;  // values in one load: the most that in_features allows, 16 bytes at most
constexpr int kVectors = 2048;  // in_features / vector
constexpr int kSmallLimit = 8;  // in_features / 1024, at least 4: more values too small to split and the row is given up
constexpr int kVectorsPerThread = (kVectors + kThreads - 1) / kThreads;  // 8

__device__ __forceinline__ void load(const float* from, float (&v)[4]) {
  const float4 t = *reinterpret_cast<const float4*>(from);
  v[0] = t.x;
  v[1] = t.y;
  v[2] = t.z;
  v[3] = t.w;
}

// The largest value, and the sum, of one number from each thread.
__device__ __forceinline__ uint32_t block_max(uint32_t v) {
  __shared__ uint32_t partial[kThreads / 32];
  v = __reduce_max_sync(0xffffffffu, v);
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = v;
  __syncthreads();
  const int lane = threadIdx.x % 32;
  return __reduce_max_sync(0xffffffffu, lane < kThreads / 32 ? partial[lane] : 0u);
}

__device__ __forceinline__ uint32_t block_sum(uint32_t v) {
  __shared__ uint32_t partial[kThreads / 32];
  v = __reduce_add_sync(0xffffffffu, v);
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = v;
  __syncthreads();
  const int lane = threadIdx.x % 32;
  return __reduce_add_sync(0xffffffffu, lane < kThreads / 32 ? partial[lane] : 0u);
}

// The power of two that brings the magnitude with these bits to [2^14, 2^15), at most 2^126; 1 for zero. 2^14 has exponent field 141.
__device__ __forceinline__ float scale_for(uint32_t largest) {
  return largest == 0 ? 1.0f : __uint_as_float(min(141 + 127 - (largest >> 23), 127u + 126u) << 23);
}

// Below a quarter after scaling, fp16's smallest step cuts into the 22 bits that two parts should keep.
__device__ __forceinline__ uint32_t is_small(float v, float scale) { return v != 0.0f && fabsf(v) * scale < 0.25f; }

// One block reads one row of x or W, keeps it in registers and writes its scale: NaN where the row holds an infinity, a NaN or too many small values.
__global__ void __launch_bounds__(kThreads)
row_scale(const float* __restrict__ x, const float* __restrict__ gemm_weight, float* __restrict__ row_scales) {
  const int row = blockIdx.x;
  const float* values = row < kBatch ? x + static_cast<int64_t>(row) * kInFeatures
                                     : gemm_weight + static_cast<int64_t>(row - kBatch) * kInFeatures;
  float held[kVectorsPerThread][kVector];
#pragma unroll
  for (int i = 0; i < kVectorsPerThread; ++i) {
    const int vector = threadIdx.x + i * kThreads;
    load(values + vector * kVector, held[i]);
  }

  uint32_t largest = 0;  // magnitudes compare as integers, infinity and NaN above all numbers
#pragma unroll
  for (int i = 0; i < kVectorsPerThread; ++i) {
#pragma unroll
    for (int e = 0; e < kVector; ++e) largest = max(largest, __float_as_uint(held[i][e]) & 0x7fffffffu);
  }
  largest = block_max(largest);
  const float scale = scale_for(largest);

  uint32_t small = 0;
#pragma unroll
  for (int i = 0; i < kVectorsPerThread; ++i) {
#pragma unroll
    for (int e = 0; e < kVector; ++e) small += is_small(held[i][e], scale);
  }
  small = block_sum(small);
  if (threadIdx.x == 0) {
    const bool usable = largest < 0x7f800000u && small <= kSmallLimit;
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

extern "C" int row_scale_sm80_launch(const float* x, const float* gemm_weight, float* row_scales, int device, cudaStream_t stream) {
  using namespace row_scale_sm80;
  const DeviceScope scope(device);
  if (scope.error != cudaSuccess) return scope.error;
  cudaLaunchConfig_t config = {};
  config.gridDim = kBlocks;
  config.blockDim = kThreads;
  config.stream = stream;
  return cudaLaunchKernelEx(&config, row_scale, x, gemm_weight, row_scales);
}
