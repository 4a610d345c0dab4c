// Tensor memory accelerator: maps of (batch, row, head, column) tensors, whose tiles lie in shared
// memory as panels of 64 columns with the 128-byte swizzle.
#pragma once

#include <cuda.h>

#include <algorithm>
#include <cstdint>
#include <string>

#include "common/launch.h"
#include "common/macros.h"
#include "params.h"
#include "sm90/ptx.h"
#include "sm90/tensor_map_encoder.h"

namespace anyflash::sm90 {

inline constexpr int kPanelColumns = 64;

// What a map describes, and the box that a copy moves. Extents of 0 become 1: then nothing is
// copied.
struct TensorMapShape {
  DType dtype;  // of 16 bits
  int columns;
  int64_t rows;
  int heads;
  int64_t batch;
  int box_rows;
};

// Of Q; with other columns, of whatever has a row for each of its rows.
inline TensorMapShape query_shape(const Attention& a, DType dtype, int box_rows) {
  const bool packed = a.cu_seqlens_q != nullptr;
  TensorMapShape shape{};
  shape.dtype = dtype;
  shape.columns = a.head_dim;
  shape.rows = packed ? a.total_q : a.seqlen_q;
  shape.heads = a.heads;
  shape.batch = packed ? 1 : a.batch;
  shape.box_rows = box_rows;
  return shape;
}
// Of K; with other columns, of V.
inline TensorMapShape key_shape(const Attention& a, DType dtype, int box_rows) {
  TensorMapShape shape = query_shape(a, dtype, box_rows);
  shape.rows = a.cu_seqlens_k != nullptr ? a.total_k : a.seqlen_k;
  shape.heads = a.heads_k;
  return shape;
}

// Strides in elements; of axes that have one element, any.
inline CUtensorMap make_tensor_map(const void* data, const Strides& stride,
                                   const TensorMapShape& shape) {
  constexpr int kRank = 4;
  constexpr cuuint64_t kElementBytes = 2;
  const auto extent = [](int64_t n) { return static_cast<cuuint64_t>(std::max<int64_t>(n, 1)); };
  const cuuint64_t extents[kRank] = {extent(shape.columns), extent(shape.rows), extent(shape.heads),
                                     extent(shape.batch)};
  const auto bytes = [](int64_t elements, cuuint64_t extent) {
    constexpr cuuint64_t kLegal = 16;
    return extent == 1 ? kLegal : static_cast<cuuint64_t>(elements) * kElementBytes;
  };
  const cuuint64_t strides[kRank - 1] = {bytes(stride.row, extents[1]),
                                         bytes(stride.head, extents[2]),
                                         bytes(stride.batch, extents[3])};
  const cuuint32_t box[kRank] = {kPanelColumns, static_cast<cuuint32_t>(shape.box_rows), 1, 1};
  const cuuint32_t steps[kRank] = {1, 1, 1, 1};
  CUtensorMap map{};
  const CUresult status =
      tensor_map_encoder()(&map,
                           shape.dtype == DType::kFloat16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                                          : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                           kRank, const_cast<void*>(data), extents, strides, box, steps,
                           CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                           CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS) {
    throw Error(ErrorCode::kDevice,
                "cuTensorMapEncodeTiled: error " + std::to_string(static_cast<int>(status)) +
                    " for " + std::to_string(extents[1]) + " rows of " +
                    std::to_string(extents[0]) + " columns, strides " + std::to_string(strides[0]) +
                    ", " + std::to_string(strides[1]) + " and " + std::to_string(strides[2]) +
                    " bytes");
  }
  return map;
}

}  // namespace anyflash::sm90
