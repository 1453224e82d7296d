// conv2d_add_scale_sigmoid_groupnorm_bf16: copies x and W to where the channels of a pixel, or of a filter's tap, are neighbours
//
//   conv2d(in_channels=8, out_channels=32, kernel_size=(3, 3), stride=(1, 1), padding=(0, 0), dilation=(1, 1), groups=1, bias=True)  # conv
//   add(shape=(32, 1, 1), init=randn)  # bias
//   mul(shape=(32, 1, 1), init=randn)  # scale
//   sigmoid()
//   group_norm(num_groups=8, eps=1e-05, affine=True)  # group_norm
//   x (128, 8, 256, 256) -> y (128, 32, 254, 254), bf16
//
// Plan for sm_80 on h100:
//   32770 blocks of 256 threads, 0 bytes of shared memory
//
// Generated from specs/conv2d_add_scale_sigmoid_groupnorm.yaml; do not edit. Again: make generate SPEC=specs/conv2d_add_scale_sigmoid_groupnorm.yaml PRECISION=bf16

#include <cuda_runtime.h>
#include <cuda_bf16.h>
#include <cstdint>

namespace channels_last_sm80 {
namespace {

constexpr int kInChannels = 8;  // in_channels
constexpr int kGroupChannels = 8;  // in_channels: what a filter meets
constexpr int kPlane = 65536;  // pixels of a sample: 256 x 256
constexpr int kPixels = 128 * kPlane;  // of all samples
constexpr int kTaps = 9;  // of a filter
constexpr int kOutChannels = 32;  // filters
constexpr int kPieceValues = 8;  // channels in a piece of 16 bytes
constexpr int kGroupPieces = 1;  // pieces of a group's channels, rounded up
constexpr int kPixelPieces = kGroupPieces;  // pieces of a pixel
constexpr int kPieceLanes = 1;  // pieces that a warp takes of each of its pixels
constexpr int kPieceWarps = (kPixelPieces + kPieceLanes - 1) / kPieceLanes;  // warps that share pixels
constexpr int kThreads = 256;  // threads of a block
constexpr int kPixelBlocks = 32768;  // blocks that copy x
constexpr int kBlocks = 32770;  // the others copy W

// On Hopper a kernel may be launched while the one before it ends. From here on that one's results are there, and the next may be launched.
__device__ __forceinline__ void await_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The bits of kPieceValues values, `stride` apart.
__device__ __forceinline__ uint4 gather(const __nv_bfloat16* from, int64_t stride) {
  const uint16_t* values = reinterpret_cast<const uint16_t*>(from);
  uint16_t v[kPieceValues];
#pragma unroll
  for (int e = 0; e < kPieceValues; ++e) v[e] = __ldg(values + e * stride);
  return make_uint4(v[0] | uint32_t{v[1]} << 16, v[2] | uint32_t{v[3]} << 16, v[4] | uint32_t{v[5]} << 16, v[6] | uint32_t{v[7]} << 16);
}

// A warp takes kPieceLanes pieces, of kPieceValues channels each, of 32 / kPieceLanes neighbouring pixels: reads and writes fill sectors of 32 bytes.
__device__ __forceinline__ void copy_pixels(int warp, const __nv_bfloat16* __restrict__ x, __nv_bfloat16* __restrict__ pixels) {
  constexpr int kPixelLanes = 32 / kPieceLanes;
  const int lane = threadIdx.x % 32;
  const int piece = warp % kPieceWarps * kPieceLanes + lane / kPixelLanes;
  const int pixel = warp / kPieceWarps * kPixelLanes + lane % kPixelLanes;
  if (piece >= kPixelPieces || pixel >= kPixels) return;
  const int channel = piece * kPieceValues;
  const __nv_bfloat16* from = x + (static_cast<int64_t>(pixel / kPlane) * kInChannels + channel) * kPlane + pixel % kPlane;
  reinterpret_cast<uint4*>(pixels)[static_cast<int64_t>(pixel) * kPixelPieces + piece] = gather(from, kPlane);
}

// A thread takes a piece of one tap of one filter.
__device__ __forceinline__ void copy_weights(int item, const __nv_bfloat16* __restrict__ p_conv_weight, __nv_bfloat16* __restrict__ weight_rows) {
  if (item >= kOutChannels * kGroupPieces * kTaps) return;
  const int tap = item % kTaps;
  const int piece = item / kTaps % kGroupPieces;
  const int filter = item / (kTaps * kGroupPieces);
  const __nv_bfloat16* from = p_conv_weight + (static_cast<int64_t>(filter) * kGroupChannels + piece * kPieceValues) * kTaps + tap;
  reinterpret_cast<uint4*>(weight_rows)[(static_cast<int64_t>(filter) * kTaps + tap) * kGroupPieces + piece] = gather(from, kTaps);
}

// The first kPixelBlocks blocks copy x, the others W.
__global__ void __launch_bounds__(kThreads) channels_last(const __nv_bfloat16* __restrict__ x, const __nv_bfloat16* __restrict__ p_conv_weight, __nv_bfloat16* __restrict__ pixels,
                                                          __nv_bfloat16* __restrict__ weight_rows) {
  await_previous_kernel();
  if (blockIdx.x < kPixelBlocks) {
    copy_pixels(blockIdx.x * (kThreads / 32) + threadIdx.x / 32, x, pixels);
  } else {
    copy_weights((blockIdx.x - kPixelBlocks) * kThreads + threadIdx.x, p_conv_weight, weight_rows);
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
}  // namespace channels_last_sm80

extern "C" int channels_last_sm80_launch(
    const __nv_bfloat16* x,
    const __nv_bfloat16* p_conv_weight,
    __nv_bfloat16* pixels,
    __nv_bfloat16* weight_rows,
    int device,
    cudaStream_t stream) {
  using namespace channels_last_sm80;
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
  return cudaLaunchKernelEx(&config, channels_last, x, p_conv_weight, pixels, weight_rows);
}
