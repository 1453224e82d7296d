// conv2d_groupnorm_scale_maxpool_clamp_bf16: gradients of everything after torch's conv2d, one group of one sample at a
//   time
//
//   conv2d(in_channels=8, out_channels=64, kernel_size=(3, 3), stride=(1, 1), padding=(0, 0), dilation=(1, 1),
//     groups=1, bias=True)  # conv
//   group_norm(num_groups=16, eps=1e-05, affine=True)  # group_norm
//   mul(shape=(64, 1, 1), init=ones)  # scale
//   max_pool2d(kernel_size=(4, 4), stride=(4, 4), padding=(0, 0), dilation=(1, 1), ceil_mode=False)  # maxpool
//   clamp(min=0.0, max=1.0)
//   x (128, 8, 128, 128) -> y (128, 64, 31, 31), bf16
//
// Plan for cpu on host:
//   a thread takes whole groups of a slab of 32 samples: 64 parts
//   sums over samples are in double precision and in a fixed order, for any number of threads
//   627.7 KB of scratch a thread, on the heap
//
// Generated from specs/conv2d_groupnorm_scale_maxpool_clamp.yaml; do not edit.
// Again: make generate SPEC=specs/conv2d_groupnorm_scale_maxpool_clamp.yaml PRECISION=bf16

#include <cmath>
#include <cstdint>
#include <cstring>
#include <cstdlib>

#include <omp.h>

namespace chain_backward_cpu {
namespace {

constexpr int kBatch = 128;  // batch
constexpr int kChannels = 64;  // channels at the norm
constexpr int kNumGroups = 16;  // group_norm's num_groups
constexpr int kGroupChannels = 4;  // kChannels / kNumGroups
constexpr int kHeight = 126;  // rows behind the convolution
constexpr int kWidth = 126;  // columns behind the convolution
constexpr int kSpatial = 15876;  // kHeight * kWidth
constexpr int kGroupSize = 63504;  // kGroupChannels * kSpatial
constexpr int kPiece = 4096;  // values of a piece for statistics: 16 KB, in the first-level cache
constexpr double kEps = 1e-05;  // group_norm's eps
constexpr int kPoolKernelHeight = 4;  // max_pool2d's kernel_size
constexpr int kPoolKernelWidth = 4;  // max_pool2d's kernel_size
constexpr int kPoolStrideHeight = 4;  // max_pool2d's stride
constexpr int kPoolStrideWidth = 4;  // max_pool2d's stride
constexpr int kPooledHeight = 31;  // (126 - 4) / 4 + 1
constexpr int kPooledWidth = 31;  // (126 - 4) / 4 + 1
constexpr int kOutputSize = 3844;  // values of y from a group
constexpr float kClampMin = 0.0f;  // clamp's min
constexpr float kClampMax = 1.0f;  // clamp's max
constexpr int kPooledSize = 961;  // kPooledHeight * kPooledWidth
constexpr int kSlabs = 4;  // slabs of samples whose sums are formed apart
constexpr int kSlabSamples = 32;  // batch / kSlabs, rounded up
constexpr int kParameters = 3;  // parameters behind the producer
constexpr std::size_t kScratch = 642752;  // bytes a thread needs: 4 * (kGroupSize + kGroupSize + kSpatial + kSpatial + kPooledSize + kPooledSize), in whole cache lines

// bfloat16 to float: the upper half of its bits.
inline float load(std::uint16_t bits) {
  const std::uint32_t wide = std::uint32_t{bits} << 16;
  float v;
  std::memcpy(&v, &wide, sizeof v);
  return v;
}

// Float to the nearest bfloat16, ties to even; NaN stays NaN.
inline std::uint16_t store(float v) {
  std::uint32_t bits;
  std::memcpy(&bits, &v, sizeof bits);
  const std::uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  return static_cast<std::uint16_t>(v == v ? rounded : 0x7FC0u);
}

// 1 inside the bounds and on them, as PyTorch's clamp.
inline float clamp_grad(float v, float lo, float hi) {
  return v >= lo && v <= hi ? 1.0f : 0.0f;
}

// The operators after the norm, up to the pooling.
inline float after_norm(float v, float scale_c) {
  v = v * scale_c;
  return v;
}

// Backward through the operators after the norm: the gradient of v, from the result's gradient g.
inline float after_norm_grad(float v, float g, float scale_c, float& scale_g) {
  scale_g = g * v;
  g = g * scale_c;
  return g;
}

// Backward through the operators after max_pool2d: the gradient of v, from the result's gradient g.
inline float after_pool_grad(float v, float g) {
  g = g * clamp_grad(v, kClampMin, kClampMax);
  return g;
}

struct DoubleMoments {
  double mean;
  double m2;  // sum of squared deviations from the mean
};

// Moments in two passes: the mean of values shifted by one of them, then the deviations. Equal values give exactly
// their value and 0.
inline DoubleMoments moments(const float* value, int count) {
  const double shift = value[0];
  double sum = 0.0;
#pragma omp simd reduction(+ : sum)
  for (int i = 0; i < count; ++i) {
    sum += value[i] - shift;
  }
  const double mean = shift + sum / count;
  double m2 = 0.0;
#pragma omp simd reduction(+ : m2)
  for (int i = 0; i < count; ++i) {
    const double deviation = value[i] - mean;
    m2 += deviation * deviation;
  }
  return {mean, m2};
}

// Moments of the union of two sets (Chan, Golub and LeVeque, 1983).
inline DoubleMoments merge(DoubleMoments a, int count_a, DoubleMoments b, int count_b) {
  const double share_b = static_cast<double>(count_b) / (count_a + count_b);
  const double delta = b.mean - a.mean;
  return {a.mean + delta * share_b, a.m2 + b.m2 + delta * delta * share_b * count_a};
}

// Backward of one group of one sample: recomputes the chain as far as derivatives need it, then goes back.
inline void run_group(const std::uint16_t* t0, const std::uint16_t* group_norm_weight_data,
    const std::uint16_t* group_norm_bias_data, const std::uint16_t* scale_data,
    const std::uint16_t* grad_y, std::uint16_t* grad_t0, double* sums, int index, char* scratch) {
  float* const value = reinterpret_cast<float*>(scratch);  // the group's values before the norm
  float* const grad = reinterpret_cast<float*>(value + kGroupSize);  // the gradient of the normalised values
  float* const plane = reinterpret_cast<float*>(grad + kGroupSize);  // one channel behind the norm
  float* const plane_grad = reinterpret_cast<float*>(plane + kSpatial);  // its gradient
  float* const pooled = reinterpret_cast<float*>(plane_grad + kSpatial);  // one channel behind a pooling
  std::int32_t* const winner = reinterpret_cast<std::int32_t*>(pooled + kPooledSize);  // place of each pooled value
  const int first = index % kNumGroups * kGroupChannels;  // the group's first channel
  double* const group_norm_weight_sum = sums + first;
  double* const group_norm_bias_sum = sums + 1 * kChannels + first;
  double* const scale_sum = sums + 2 * kChannels + first;

  const std::uint16_t* const source = t0 + std::int64_t{index} * kGroupSize;
#pragma omp simd
  for (int i = 0; i < kGroupSize; ++i) {
    value[i] = load(source[i]);
  }

  DoubleMoments group = moments(value, kPiece);
  for (int begin = kPiece; begin < kGroupSize; begin += kPiece) {
    const int count = kGroupSize - begin < kPiece ? kGroupSize - begin : kPiece;
    group = merge(group, begin, moments(value + begin, count), count);
  }
  const float mean = static_cast<float>(group.mean);
  const float mean_rest = static_cast<float>(group.mean - mean);
  const float rstd = static_cast<float>(1.0 / std::sqrt(group.m2 / kGroupSize + kEps));

  // Backward to the norm's result. The norm's derivative needs two sums over the group: the gradient, and its product
  // with the normalised value.
  double total = 0.0, total_normal = 0.0;
  const std::uint16_t* incoming = grad_y + std::int64_t{index} * kOutputSize;
  for (int c = 0; c < kGroupChannels; ++c) {
    const float gamma = load(group_norm_weight_data[first + c]);
    const float scale = gamma * rstd;
    const float shift = load(group_norm_bias_data[first + c]);
    const float scale_c = load(scale_data[first + c]);
    const float* const channel = value + c * kSpatial;
#pragma omp simd
    for (int i = 0; i < kSpatial; ++i) {
      plane[i] = after_norm((channel[i] - mean - mean_rest) * scale + shift, scale_c);
    }
    // max_pool2d: the first largest value of a window gets its gradient; of several NaN the last one, as in PyTorch
    for (int row = 0; row < kPooledHeight; ++row) {
      for (int column = 0; column < kPooledWidth; ++column) {
        float top = 0.0f;
        int at = 0;
        bool empty = true;
        for (int i = 0; i < kPoolKernelHeight; ++i) {
          const int h = row * kPoolStrideHeight + i;
          for (int j = 0; j < kPoolKernelWidth; ++j) {
            const int w = column * kPoolStrideWidth + j;
            const float v = plane[h * kWidth + w];
            if (empty || v > top || v != v) {
              empty = false;
              top = v;
              at = h * kWidth + w;
            }
          }
        }
        const int here = row * kPooledWidth + column;
        winner[here] = at;
        pooled[here] = top;
      }
    }
    std::memset(plane_grad, 0, sizeof(float) * kHeight * kWidth);
    for (int i = 0; i < kPooledSize; ++i) {
      plane_grad[winner[i]] += after_pool_grad(pooled[i], load(incoming[i]));
    }
    incoming += kPooledSize;
    double scale_total = 0.0;
    double group_norm_weight_total = 0.0;
    double group_norm_bias_total = 0.0;
#pragma omp simd reduction(+ : total, total_normal, scale_total, group_norm_weight_total, group_norm_bias_total)
    for (int i = 0; i < kSpatial; ++i) {
      const float normal = (channel[i] - mean - mean_rest) * rstd;
      const float v = (channel[i] - mean - mean_rest) * scale + shift;
      float scale_g;
      const float g = after_norm_grad(v, plane_grad[i], scale_c, scale_g);
      scale_total += scale_g;
      group_norm_weight_total += static_cast<double>(g) * normal;
      group_norm_bias_total += g;
      const float scaled = g * gamma;
      grad[c * kSpatial + i] = scaled;
      total += scaled;
      total_normal += static_cast<double>(scaled) * normal;
    }
    scale_sum[c] += scale_total;
    group_norm_weight_sum[c] += group_norm_weight_total;
    group_norm_bias_sum[c] += group_norm_bias_total;
  }

  // Backward through the norm and the operators before it.
  const float mean_grad = static_cast<float>(total / kGroupSize);
  const float mean_product = static_cast<float>(total_normal / kGroupSize);
  std::uint16_t* const target = grad_t0 + std::int64_t{index} * kGroupSize;
  for (int c = 0; c < kGroupChannels; ++c) {
#pragma omp simd
    for (int i = c * kSpatial; i < (c + 1) * kSpatial; ++i) {
      const float normal = (value[i] - mean - mean_rest) * rstd;
      const float g = rstd * (grad[i] - mean_grad - normal * mean_product);
      target[i] = store(g);
    }
  }
}

// Gradient of a parameter with one value a channel: the slabs' sums, in their order.
inline void add_up(const double* sums, std::uint16_t* grad) {
  for (int channel = 0; channel < kChannels; ++channel) {
    double total = 0.0;
    for (int slab = 0; slab < kSlabs; ++slab) {
      total += sums[std::int64_t{slab} * kParameters * kChannels + channel];
    }
    grad[channel] = store(static_cast<float>(total));
  }
}

}  // namespace
}  // namespace chain_backward_cpu

// Computes the gradients of t0, torch's conv2d, and of the parameters behind it, from that of y, on `threads` threads.
// Returns 0, or -1 for a wrong number of threads, -2 if memory is short.
extern "C" int chain_backward_cpu_launch(const std::uint16_t* t0, const std::uint16_t* group_norm_weight_data,
    const std::uint16_t* group_norm_bias_data, const std::uint16_t* scale_data,
    const std::uint16_t* grad_y, std::uint16_t* grad_t0, std::uint16_t* group_norm_weight_grad,
    std::uint16_t* group_norm_bias_grad, std::uint16_t* scale_grad, double* sums, int threads, void*) {
  using namespace chain_backward_cpu;
  if (threads < 1) return -1;
  char* const scratch = static_cast<char*>(std::malloc(kScratch * threads));
  if (scratch == nullptr) return -2;
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int part = 0; part < kSlabs * kNumGroups; ++part) {
    const int slab = part / kNumGroups, group = part % kNumGroups;
    double* const slab_sums = sums + std::int64_t{slab} * kParameters * kChannels;
    for (int parameter = 0; parameter < kParameters; ++parameter) {
      for (int c = 0; c < kGroupChannels; ++c) {
        slab_sums[parameter * kChannels + group * kGroupChannels + c] = 0.0;
      }
    }
    for (int sample = slab * kSlabSamples; sample < (slab + 1) * kSlabSamples && sample < kBatch; ++sample) {
      run_group(t0, group_norm_weight_data, group_norm_bias_data, scale_data, grad_y, grad_t0, slab_sums, sample * kNumGroups + group, scratch + kScratch * omp_get_thread_num());
    }
  }
  add_up(sums, group_norm_weight_grad);
  add_up(sums + 1 * kChannels, group_norm_bias_grad);
  add_up(sums + 2 * kChannels, scale_grad);
  std::free(scratch);
  return 0;
}
