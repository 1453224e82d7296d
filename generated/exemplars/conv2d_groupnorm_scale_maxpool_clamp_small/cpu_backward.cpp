// conv2d_groupnorm_scale_maxpool_clamp_small: gradients of everything after torch's conv2d, one group of one sample at
//   a time
//
//   conv2d(in_channels=3, out_channels=16, kernel_size=(3, 3), stride=(1, 1), padding=(0, 0), dilation=(1, 1),
//     groups=1, bias=True)  # conv
//   group_norm(num_groups=8, eps=1e-05, affine=True)  # group_norm
//   mul(shape=(16, 1, 1), init=ones)  # scale
//   max_pool2d(kernel_size=(2, 2), stride=(2, 2), padding=(0, 0), dilation=(1, 1), ceil_mode=False)  # maxpool
//   clamp(min=0.0, max=1.0)
//   x (128, 3, 32, 32) -> y (128, 16, 15, 15), fp32
//
// Plan for cpu on host:
//   a thread takes whole groups of a slab of 16 samples: 64 parts
//   sums over samples are in double precision and in a fixed order, for any number of threads
//   15.82 KB of scratch a thread, on its stack
//
// Generated from specs/conv2d_groupnorm_scale_maxpool_clamp_small.yaml; do not edit.
// Again: make generate SPEC=specs/conv2d_groupnorm_scale_maxpool_clamp_small.yaml

#include <cmath>
#include <cstdint>
#include <cstring>

namespace chain_backward_cpu {
namespace {

constexpr int kBatch = 128;  // batch
constexpr int kChannels = 16;  // channels at the norm
constexpr int kNumGroups = 8;  // group_norm's num_groups
constexpr int kGroupChannels = 2;  // kChannels / kNumGroups
constexpr int kHeight = 30;  // rows behind the convolution
constexpr int kWidth = 30;  // columns behind the convolution
constexpr int kSpatial = 900;  // kHeight * kWidth
constexpr int kGroupSize = 1800;  // kGroupChannels * kSpatial
constexpr double kEps = 1e-05;  // group_norm's eps
constexpr int kPoolKernelHeight = 2;  // max_pool2d's kernel_size
constexpr int kPoolKernelWidth = 2;  // max_pool2d's kernel_size
constexpr int kPoolStrideHeight = 2;  // max_pool2d's stride
constexpr int kPoolStrideWidth = 2;  // max_pool2d's stride
constexpr int kPooledHeight = 15;  // (30 - 2) / 2 + 1
constexpr int kPooledWidth = 15;  // (30 - 2) / 2 + 1
constexpr int kOutputSize = 450;  // values of y from a group
constexpr float kClampMin = 0.0f;  // clamp's min
constexpr float kClampMax = 1.0f;  // clamp's max
constexpr int kPooledSize = 225;  // kPooledHeight * kPooledWidth
constexpr int kSlabs = 8;  // slabs of samples whose sums are formed apart
constexpr int kSlabSamples = 16;  // batch / kSlabs, rounded up
constexpr int kParameters = 3;  // parameters behind the producer

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

// Backward of one group of one sample: recomputes the chain as far as derivatives need it, then goes back.
inline void run_group(const float* t0, const float* group_norm_weight_data, const float* group_norm_bias_data,
    const float* scale_data, const float* grad_y, float* grad_t0, double* sums, int index) {
  alignas(64) float grad[kGroupSize];  // the gradient of the normalised values
  alignas(64) float plane[kSpatial];  // one channel behind the norm
  alignas(64) float plane_grad[kSpatial];  // its gradient
  alignas(64) float pooled[kPooledSize];  // one channel behind a pooling
  alignas(64) std::int32_t winner[kPooledSize];  // place of each pooled value
  const int first = index % kNumGroups * kGroupChannels;  // the group's first channel
  double* const group_norm_weight_sum = sums + first;
  double* const group_norm_bias_sum = sums + 1 * kChannels + first;
  double* const scale_sum = sums + 2 * kChannels + first;

  const float* const value = t0 + std::int64_t{index} * kGroupSize;

  const DoubleMoments group = moments(value, kGroupSize);
  const float mean = static_cast<float>(group.mean);
  const float mean_rest = static_cast<float>(group.mean - mean);
  const float rstd = static_cast<float>(1.0 / std::sqrt(group.m2 / kGroupSize + kEps));

  // Backward to the norm's result. The norm's derivative needs two sums over the group: the gradient, and its product
  // with the normalised value.
  double total = 0.0, total_normal = 0.0;
  const float* incoming = grad_y + std::int64_t{index} * kOutputSize;
  for (int c = 0; c < kGroupChannels; ++c) {
    const float gamma = group_norm_weight_data[first + c];
    const float scale = gamma * rstd;
    const float shift = group_norm_bias_data[first + c];
    const float scale_c = scale_data[first + c];
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
      plane_grad[winner[i]] += after_pool_grad(pooled[i], incoming[i]);
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
  float* const target = grad_t0 + std::int64_t{index} * kGroupSize;
  for (int c = 0; c < kGroupChannels; ++c) {
#pragma omp simd
    for (int i = c * kSpatial; i < (c + 1) * kSpatial; ++i) {
      const float normal = (value[i] - mean - mean_rest) * rstd;
      const float g = rstd * (grad[i] - mean_grad - normal * mean_product);
      target[i] = g;
    }
  }
}

// Gradient of a parameter with one value a channel: the slabs' sums, in their order.
inline void add_up(const double* sums, float* grad) {
  for (int channel = 0; channel < kChannels; ++channel) {
    double total = 0.0;
    for (int slab = 0; slab < kSlabs; ++slab) {
      total += sums[std::int64_t{slab} * kParameters * kChannels + channel];
    }
    grad[channel] = static_cast<float>(total);
  }
}

}  // namespace
}  // namespace chain_backward_cpu

// Computes the gradients of t0, torch's conv2d, and of the parameters behind it, from that of y, on `threads` threads.
// Returns 0, or -1 for a wrong number of threads.
extern "C" int chain_backward_cpu_launch(const float* t0, const float* group_norm_weight_data, const float* group_norm_bias_data,
    const float* scale_data, const float* grad_y, float* grad_t0, float* group_norm_weight_grad,
    float* group_norm_bias_grad, float* scale_grad, double* sums, int threads, void*) {
  using namespace chain_backward_cpu;
  if (threads < 1) return -1;
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
      run_group(t0, group_norm_weight_data, group_norm_bias_data, scale_data, grad_y, grad_t0, slab_sums, sample * kNumGroups + group);
    }
  }
  add_up(sums, group_norm_weight_grad);
  add_up(sums + 1 * kChannels, group_norm_bias_grad);
  add_up(sums + 2 * kChannels, scale_grad);
  return 0;
}
