// gemm_groupnorm_min_biasadd: back through: broadcast to another shape, then add
//
//   linear(in_features=8192, out_features=8192, bias=True)  # gemm
//   group_norm(num_groups=512, eps=1e-05, affine=True)  # group_norm
//   min(dim=1, keepdim=True)
//   add(shape=(1, 8192, 1, 1), init=randn)  # bias
//   x (1024, 8192) -> y (1, 8192, 1024, 1), fp32
//
// Plan for sm_80 on h100:
//   sums over results have an order of their own: the same bits on every run
//   256 blocks of 256 threads, 0 bytes of shared memory
//
// Generated from specs/gemm_groupnorm_min_biasadd.yaml; do not edit. Again: make generate SPEC=specs/gemm_groupnorm_min_biasadd.yaml

#include <cuda_runtime.h>
#include <cstdint>

namespace broadcast_backward_sm80 {
namespace {

constexpr int kSumThreads = 256;  // threads of a block that forms sums

// Back through what follows: the gradient of v for that of the result, g.
__device__ __forceinline__ float follow_grad(float g, float& bias_g) {
  bias_g = g;
  return g;
}

// Knuth's sum of two: the new sum and its rounding error are exact together.
__device__ __forceinline__ void add(float2& own, float v) {
  const float sum = own.x + v;
  const float added = sum - own.x;
  own.y += (own.x - (sum - added)) + (v - added);
  own.x = sum;
}

// An infinite sum has no rounding error.
__device__ __forceinline__ float total(float2 own) { return fabsf(own.x) == INFINITY ? own.x : own.x + own.y; }

// Joins the sums of the threads of a block that share an element, in a fixed order; those of the first row have them.
template <int kAcross>
__device__ __forceinline__ void join_rows(float2& own) {
  __shared__ float2 partial[kSumThreads];
  const int place = static_cast<int>(threadIdx.y * kAcross + threadIdx.x);
  partial[place] = own;
#pragma unroll
  for (int half = kSumThreads / kAcross / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.y < half) {
      const float2 other = partial[place + half * kAcross];
      add(own, other.x);
      own.y += other.y;
      partial[place] = own;
    }
  }
}

// The gradient of the input: for each of 1024 elements the sum over the 8192 results that it meets, in 8 parts.
__global__ void __launch_bounds__(kSumThreads) sum_input(const float* __restrict__ grad_result, float2* __restrict__ sums) {
  const int element = static_cast<int>(blockIdx.x * 32 + threadIdx.x);
  const int end = (static_cast<int>(blockIdx.y) + 1) * 1024;
  float2 own = make_float2(0.0f, 0.0f);
  for (int repeat = static_cast<int>(blockIdx.y) * 1024 + static_cast<int>(threadIdx.y); repeat < end; repeat += kSumThreads / 32) {
    const int index = repeat * 1024 + element;
    float bias_g;
    const float g = follow_grad(grad_result[index], bias_g);
    add(own, g);
  }
  join_rows<32>(own);
  if (threadIdx.y == 0) sums[static_cast<int>(blockIdx.y) * 1024 + element] = own;
}

// Its parts, added up in their order.
__global__ void __launch_bounds__(kSumThreads) sum_input_parts(const float2* __restrict__ sums, float* __restrict__ target) {
  const int element = static_cast<int>(blockIdx.x * kSumThreads + threadIdx.x);
  if (element >= 1024) return;
  float2 own = sums[element];
  for (int part = 1; part < 8; ++part) {
    const float2 other = sums[part * 1024 + element];
    add(own, other.x);
    own.y += other.y;
  }
  target[element] = total(own);
}

// That of bias: for each of 8192 elements the sum over the 1024 results that it meets.
__global__ void __launch_bounds__(kSumThreads) bias_sum(const float* __restrict__ grad_result, float* __restrict__ target) {
  const int element = static_cast<int>(blockIdx.x);
  float2 own = make_float2(0.0f, 0.0f);
  for (int repeat = static_cast<int>(threadIdx.y); repeat < 1024; repeat += kSumThreads) {
    const int index = element * 1024 + repeat;
    float bias_g;
    follow_grad(grad_result[index], bias_g);
    add(own, bias_g);
  }
  join_rows<1>(own);
  if (threadIdx.y == 0) target[element] = total(own);
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
}  // namespace broadcast_backward_sm80

// Back through: broadcast to another shape, then add.
extern "C" int broadcast_backward_sm80_launch(
    const float* grad_result,
    float* grad_input,
    float* bias_grad,
    float2* sums,
    int device,
    cudaStream_t stream) {
  using namespace broadcast_backward_sm80;
  const DeviceScope scope(device);
  if (scope.error != cudaSuccess) return scope.error;
  cudaLaunchConfig_t config = {};
  config.stream = stream;
  cudaError_t error = cudaSuccess;
  config.gridDim = dim3(32, 8);
  config.blockDim = dim3(32, kSumThreads / 32);
  if (error == cudaSuccess) error = cudaLaunchKernelEx(&config, sum_input, grad_result, sums);
  config.gridDim = (1024 + kSumThreads - 1) / kSumThreads;
  config.blockDim = kSumThreads;
  if (error == cudaSuccess) error = cudaLaunchKernelEx(&config, sum_input_parts, sums, grad_input);
  config.gridDim = dim3(8192, 1);
  config.blockDim = dim3(1, kSumThreads);
  if (error == cudaSuccess) error = cudaLaunchKernelEx(&config, bias_sum, grad_result, bias_grad);
  return error;
}
