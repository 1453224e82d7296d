// conv2d_groupnorm_tanh_hardswish_residualadd_logsumexp: finds the largest magnitude of every sample of x
//
//   conv2d(in_channels=8, out_channels=64, kernel_size=(3, 3), stride=(1, 1), padding=(0, 0), dilation=(1, 1),
//     groups=1, bias=True)  # conv
//   x (128, 8, 128, 128) -> y (128, 64, 126, 126), fp32
//
// Plan for sm_90a on h100:
//   4096 blocks of 256 threads, 0 bytes of shared memory
//
// Generated from specs/conv2d_groupnorm_tanh_hardswish_residualadd_logsumexp.yaml; do not edit.
// Again: make generate SPEC=specs/conv2d_groupnorm_tanh_hardswish_residualadd_logsumexp.yaml

#include <cuda_runtime.h>

#include <cstdint>

namespace measure_sm90a {
namespace {

constexpr int kSlices = 32;  // blocks that share a sample
constexpr int kThreads = 256;  // threads of a block
constexpr int kPieces = 32768;  // pieces of four of a sample
constexpr int kBlocks = 4096;  // batch * slices

// Early launch on Hopper: waits for the previous kernel's results, then allows the next kernel to launch.
__device__ __forceinline__ void await_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Largest magnitude in the block, as bits of a float: they order like integers, with infinities and NaN on top.
__device__ __forceinline__ uint32_t block_largest(uint32_t magnitude) {
  __shared__ uint32_t warps[kThreads / 32];
  const uint32_t largest = __reduce_max_sync(~0u, magnitude);
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = largest;
  __syncthreads();
  return __reduce_max_sync(~0u, warps[threadIdx.x % (kThreads / 32)]);
}

// Finds the largest magnitude of a slice of a sample, and clears the sample's counts for the kernel that splits x.
__global__ void __launch_bounds__(kThreads) measure(const float* __restrict__ x, uint32_t* __restrict__ x_largest, uint2* __restrict__ x_counts) {
  await_previous_kernel();
  const int sample = blockIdx.x / kSlices, slice = blockIdx.x % kSlices;
  if (slice == 0 && threadIdx.x == 0) x_counts[sample] = make_uint2(0, 0);
  const float4* from = reinterpret_cast<const float4*>(x) + static_cast<size_t>(sample) * kPieces;
  uint32_t magnitude = 0;
#pragma unroll 4
  for (int i = slice * kThreads + threadIdx.x; i < kPieces; i += kSlices * kThreads) {
    const float4 v = __ldg(from + i);
    magnitude = max(magnitude, max(max(__float_as_uint(v.x) & 0x7fffffffu, __float_as_uint(v.y) & 0x7fffffffu),
                                   max(__float_as_uint(v.z) & 0x7fffffffu, __float_as_uint(v.w) & 0x7fffffffu)));
  }
  magnitude = block_largest(magnitude);
  if (threadIdx.x == 0) x_largest[blockIdx.x] = magnitude;
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
}  // namespace measure_sm90a

extern "C" int measure_sm90a_launch(const float* x, uint32_t* x_largest, uint2* x_counts, int device, cudaStream_t stream) {
  using namespace measure_sm90a;
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
  return cudaLaunchKernelEx(&config, measure, x, x_largest, x_counts);
}
