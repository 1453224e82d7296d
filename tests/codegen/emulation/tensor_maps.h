// Maps of tensors as the driver makes them, and the boxes that the copy engine moves through them.
#pragma once

#include <cstdint>
#include <cstring>

#include "hopper.h"

enum CUtensorMapDataType { CU_TENSOR_MAP_DATA_TYPE_FLOAT16, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, CU_TENSOR_MAP_DATA_TYPE_FLOAT32 };
enum CUtensorMapSwizzle { CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_SWIZZLE_32B, CU_TENSOR_MAP_SWIZZLE_64B, CU_TENSOR_MAP_SWIZZLE_128B };
enum CUtensorMapInterleave { CU_TENSOR_MAP_INTERLEAVE_NONE };
enum CUtensorMapL2promotion { CU_TENSOR_MAP_L2_PROMOTION_L2_256B };
enum CUtensorMapFloatOOBfill { CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE };
enum CUresult { CUDA_SUCCESS = 0, CUDA_ERROR_INVALID_VALUE = 1 };
using cuuint32_t = std::uint32_t;
using cuuint64_t = std::uint64_t;

namespace emulation {

// The bits from the seventh on that a swizzle adds to those from the fourth on, by its row's bytes.
inline std::uint32_t swizzle_mask(std::uint32_t row) { return row == 128 ? 7 : row == 64 ? 3 : row == 32 ? 1 : 0; }
inline std::uint32_t swizzled_address(std::uint32_t address, std::uint32_t mask) { return address ^ (address >> 7 & mask) << 4; }

// Up to three dimensions, the innermost first; or an im2col map of up to five, whose windows begin in the box between `lower` and `upper`.
struct TensorMap {
  const void* tensor = nullptr;
  int itemsize = 0, rank = 0;
  std::uint32_t swizzle = 0;
  std::uint64_t sizes[5] = {1, 1, 1, 1, 1}, pitches[5] = {};
  std::uint32_t box[3] = {1, 1, 1};
  int lower[3] = {}, upper[3] = {};
  std::uint32_t steps[3] = {1, 1, 1}, channels = 0, pixels = 0;

  std::uint32_t box_bytes() const { return box[0] * box[1] * box[2] * itemsize; }

  // Pieces of at most 16 bytes of the box, as far as they lie inside the tensor: their place there and in the box. `at`: the box's place in shared memory,
  // from which the swizzle counts.
  template <typename Act>
  void for_pieces(std::uint32_t at, const int* start, Act act) const {
    const std::uint32_t items = 16 / itemsize;
    for (std::uint32_t i2 = 0; i2 < box[2]; ++i2) {
      for (std::uint32_t i1 = 0; i1 < box[1]; ++i1) {
        if (start[2] + i2 >= sizes[2] || start[1] + i1 >= sizes[1]) continue;
        for (std::uint32_t i0 = 0; i0 < box[0] && start[0] + i0 < sizes[0]; i0 += items) {
          std::uint32_t address = at + ((i2 * box[1] + i1) * box[0] + i0) * itemsize;
          address = swizzled_address(address, swizzle);
          const std::uint64_t bytes = std::min<std::uint64_t>(items, sizes[0] - start[0] - i0) * itemsize;
          act((start[2] + i2) * pitches[2] + (start[1] + i1) * pitches[1] + (start[0] + i0) * itemsize, address - at, bytes);
        }
      }
    }
  }
  // Outside the tensor lie zeros.
  void fetch(unsigned char* to, std::uint32_t at, const int* start) const {
    std::memset(to, 0, box_bytes());
    for_pieces(at, start, [&](std::uint64_t there, std::uint32_t here, std::uint64_t bytes) {
      std::memcpy(to + here, static_cast<const char*>(tensor) + there, bytes);
    });
  }
  // Of an im2col map: `pixels` pixels from `start` on (channel, then width, height, depth and sample as far as there are), moved by `offsets`.
  void gather(unsigned char* to, std::uint32_t at, const int* start, const int* offsets) const {
    const std::uint32_t row = channels * itemsize;
    std::memset(to, 0, std::size_t{row} * pixels);
    int place[4] = {start[1], start[2], start[3], start[4]};  // the last one counts samples
    const int space = rank - 2;
    for (std::uint32_t pixel = 0; pixel < pixels; ++pixel) {
      std::uint64_t there = static_cast<std::uint64_t>(start[0]) * itemsize;
      bool inside = place[space] >= 0 && static_cast<std::uint64_t>(place[space]) < sizes[rank - 1];
      for (int i = 0; i < space; ++i) {
        const int coordinate = place[i] + offsets[i];
        inside = inside && coordinate >= 0 && static_cast<std::uint64_t>(coordinate) < sizes[1 + i];
        there += static_cast<std::uint64_t>(coordinate) * pitches[1 + i];
      }
      there += static_cast<std::uint64_t>(place[space]) * pitches[rank - 1];
      for (std::uint32_t piece = 0; inside && piece < row; piece += 16) {
        std::memcpy(to + (swizzled_address(at + pixel * row + piece, swizzle) - at), static_cast<const char*>(tensor) + there + piece, 16);
      }
      for (int i = 0; i <= space; ++i) {
        place[i] += i < space ? static_cast<int>(steps[i]) : 1;
        if (i == space || place[i] < static_cast<int>(sizes[1 + i]) + upper[i]) break;
        place[i] = lower[i];
      }
    }
  }
  void store(const unsigned char* from, std::uint32_t at, const int* start) const {
    auto* to = static_cast<char*>(const_cast<void*>(tensor));
    for_pieces(at, start, [&](std::uint64_t there, std::uint32_t here, std::uint64_t bytes) { std::memcpy(to + there, from + here, bytes); });
  }
};

}  // namespace emulation

using CUtensorMap = emulation::TensorMap;
using PFN_cuTensorMapEncodeTiled_v12000 = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*,
                                                       const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                                                       CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

// Refuses what the driver refuses of the maps that the kernels ask for.
inline CUresult encode_tiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* tensor, const cuuint64_t* sizes, const cuuint64_t* pitches,
                             const cuuint32_t* box, const cuuint32_t* steps, CUtensorMapInterleave, CUtensorMapSwizzle swizzle, CUtensorMapL2promotion,
                             CUtensorMapFloatOOBfill) {
  *map = {};
  map->tensor = tensor, map->rank = static_cast<int>(rank), map->swizzle = (1u << swizzle) - 1;
  map->itemsize = type == CU_TENSOR_MAP_DATA_TYPE_FLOAT32 ? 4 : 2;
  bool right = rank >= 1 && rank <= 3 && reinterpret_cast<std::uintptr_t>(tensor) % 16 == 0;
  for (cuuint32_t i = 0; i < rank && right; ++i) {
    map->sizes[i] = sizes[i], map->box[i] = box[i];
    right = sizes[i] > 0 && sizes[i] <= 1ull << 32 && box[i] > 0 && box[i] <= 256 && steps[i] == 1;
    if (i > 0) {
      map->pitches[i] = pitches[i - 1];
      right = right && pitches[i - 1] % 16 == 0 && pitches[i - 1] < 1ull << 40;
    }
  }
  const cuuint32_t row = box[0] * map->itemsize;
  return right && row % 16 == 0 && (swizzle == CU_TENSOR_MAP_SWIZZLE_NONE || row <= 16u << swizzle) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

using PFN_cuTensorMapEncodeIm2col_v12000 = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*, const int*,
                                                        const int*, cuuint32_t, cuuint32_t, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                                                        CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

inline CUresult encode_im2col(CUtensorMap* map, CUtensorMapDataType, cuuint32_t rank, void* tensor, const cuuint64_t* sizes, const cuuint64_t* pitches,
                              const int* lower, const int* upper, cuuint32_t channels, cuuint32_t pixels, const cuuint32_t* steps, CUtensorMapInterleave,
                              CUtensorMapSwizzle swizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  *map = {};
  map->tensor = tensor, map->rank = static_cast<int>(rank), map->itemsize = 2, map->swizzle = (1u << swizzle) - 1;
  map->channels = channels, map->pixels = pixels;
  const int corner = rank == 5 ? 16 : 128;
  bool right = (rank == 4 || rank == 5) && reinterpret_cast<std::uintptr_t>(tensor) % 16 == 0 && pixels <= 1024 && channels <= 256 && channels * 2 == 16u << swizzle;
  for (cuuint32_t i = 0; i < rank && right; ++i) {
    map->sizes[i] = sizes[i];
    if (i > 0) map->pitches[i] = pitches[i - 1], right = pitches[i - 1] % 16 == 0;
    if (i > 0 && i + 1 < rank) {
      map->lower[i - 1] = lower[i - 1], map->upper[i - 1] = upper[i - 1], map->steps[i - 1] = steps[i];
      right = right && steps[i] >= 1 && steps[i] <= 8 && lower[i - 1] >= -corner && lower[i - 1] < corner && upper[i - 1] >= -corner && upper[i - 1] < corner;
    }
  }
  return right ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

enum cudaDriverEntryPointQueryResult { cudaDriverEntryPointSuccess };
enum { cudaEnableDefault };
inline cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, int, cudaDriverEntryPointQueryResult* found) {
  *found = cudaDriverEntryPointSuccess;
  *function = std::strcmp(name, "cuTensorMapEncodeTiled") == 0 ? reinterpret_cast<void*>(&encode_tiled) : reinterpret_cast<void*>(&encode_im2col);
  return cudaSuccess;
}
