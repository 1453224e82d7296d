// gemm_groupnorm_min_biasadd_bf16: broadcast to another shape, then add
//
//   linear(in_features=8192, out_features=8192, bias=True)  # gemm
//   group_norm(num_groups=512, eps=1e-05, affine=True)  # group_norm
//   min(dim=1, keepdim=True)
//   add(shape=(1, 8192, 1, 1), init=randn)  # bias
//   x (1024, 8192) -> y (1, 8192, 1024, 1), bf16
//
// Plan for sm_80 on h100:
//   4096 blocks of 256 threads, 0 bytes of shared memory
//
// Generated from specs/gemm_groupnorm_min_biasadd.yaml; do not edit. Again: make generate SPEC=specs/gemm_groupnorm_min_biasadd.yaml PRECISION=bf16

#include <cuda_runtime.h>
#include <cuda_bf16.h>
#include <cstdint>

namespace broadcast_sm80 {
namespace {

constexpr int kWidth = 8;  // results of a thread: neighbours
constexpr int kThreads = 256;  // threads of a block
constexpr int kBlocks = 4096;  // outputs / (kThreads x kWidth)

__device__ __forceinline__ float to_float(__nv_bfloat16 v) { return __bfloat162float(v); }

// Two values, rounded to nearest, in a 32-bit word.
__device__ __forceinline__ uint32_t pack(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

__device__ __forceinline__ void store(__nv_bfloat16* to, const float (&v)[8]) {
  *reinterpret_cast<uint4*>(to) = make_uint4(pack(v[0], v[1]), pack(v[2], v[3]), pack(v[4], v[5]), pack(v[6], v[7]));
}

// On Hopper a kernel may be launched while the one before it ends. From here on that one's results are there, and the next may be launched.
__device__ __forceinline__ void await_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// What follows, for the result in place `index`.
__device__ __forceinline__ float follow(float v, int index, const __nv_bfloat16* p_bias) {
  const float c_bias = to_float(p_bias[index / 1024]);
  v = v + c_bias;  // add(shape=(1, 8192, 1, 1), init=randn)
  return v;
}

// A thread gives kWidth neighbouring results; each finds its value and its parameters.
__global__ void __launch_bounds__(kThreads) spread(
    const float* __restrict__ input,
    const __nv_bfloat16* __restrict__ p_bias,
    __nv_bfloat16* __restrict__ output) {
  await_previous_kernel();
  const int first = (blockIdx.x * kThreads + threadIdx.x) * kWidth;
  float v[kWidth];
#pragma unroll
  for (int e = 0; e < kWidth; ++e) {
    const int index = first + e;
    v[e] = follow(input[index % 1024], index, p_bias);
  }
  store(output + first, v);
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
}  // namespace broadcast_sm80

extern "C" int broadcast_sm80_launch(
    const float* input,
    const __nv_bfloat16* p_bias,
    __nv_bfloat16* output,
    int device,
    cudaStream_t stream) {
  using namespace broadcast_sm80;
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
  return cudaLaunchKernelEx(&config, spread, input, p_bias, output);
}
