// Tensor memory accelerator: maps of (batch, row, head, column) tensors, whose tiles lie in shared
// memory as panels.
#pragma once

#include <cuda.h>

#include <algorithm>
#include <cstdint>
#include <string>

#include "common/launch.h"
#include "common/macros.h"
#include "params.h"
#include "sm90/panel.h"
#include "sm90/ptx.h"
#include "sm90/tensor_map_encoder.h"

namespace anyflash::sm90 {

// What a map describes, and the box that a copy moves. Extents of 0 become 1: then nothing is
// copied.
struct TensorMapShape {
  DType dtype;  // of 16 bits, or is_quantized()
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

// What a map is encoded from, beside what all have in common. The first axis has neighbours.
struct TensorMapArguments {
  static constexpr int kRank = 4;

  const void* data;
  DType dtype;
  cuuint32_t box_rows;
  cuuint64_t extents[kRank];
  cuuint64_t strides[kRank - 1];  // in bytes
};

inline bool operator==(const TensorMapArguments& a, const TensorMapArguments& b) {
  if (a.data != b.data) return false;
  bool equal = a.dtype == b.dtype && a.box_rows == b.box_rows;
  for (int i = 0; i < TensorMapArguments::kRank; ++i) equal &= a.extents[i] == b.extents[i];
  for (int i = 0; i < TensorMapArguments::kRank - 1; ++i) equal &= a.strides[i] == b.strides[i];
  return equal;
}

constexpr int element_bytes(DType dtype) { return is_quantized(dtype) ? 1 : 2; }

// Strides in elements; of axes that have one element, any.
inline TensorMapArguments tensor_map_arguments(const void* data, const Strides& stride,
                                               const TensorMapShape& shape) {
  const auto extent = [](int64_t n) { return static_cast<cuuint64_t>(std::max<int64_t>(n, 1)); };
  const auto bytes = [&](int64_t elements, cuuint64_t extent) {
    constexpr cuuint64_t kLegal = 16;
    return extent == 1 ? kLegal : static_cast<cuuint64_t>(elements * element_bytes(shape.dtype));
  };
  TensorMapArguments arguments{};
  arguments.data = data;
  arguments.dtype = shape.dtype;
  arguments.box_rows = static_cast<cuuint32_t>(shape.box_rows);
  arguments.extents[0] = extent(shape.columns);
  arguments.extents[1] = extent(shape.rows);
  arguments.extents[2] = extent(shape.heads);
  arguments.extents[3] = extent(shape.batch);
  arguments.strides[0] = bytes(stride.row, arguments.extents[1]);
  arguments.strides[1] = bytes(stride.head, arguments.extents[2]);
  arguments.strides[2] = bytes(stride.batch, arguments.extents[3]);
  return arguments;
}

inline CUtensorMapDataType tensor_map_type(DType dtype) {
  if (dtype == DType::kFloat16) return CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  if (dtype == DType::kBFloat16) return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  return CU_TENSOR_MAP_DATA_TYPE_UINT8;
}

inline CUtensorMap encode_tensor_map(const TensorMapArguments& a) {
  const auto columns = static_cast<cuuint32_t>(kPanelBytes / element_bytes(a.dtype));
  const cuuint32_t box[TensorMapArguments::kRank] = {columns, a.box_rows, 1, 1};
  const cuuint32_t steps[TensorMapArguments::kRank] = {1, 1, 1, 1};
  CUtensorMap map{};
  const CUresult status = tensor_map_encoder()(
      &map, tensor_map_type(a.dtype), TensorMapArguments::kRank, const_cast<void*>(a.data),
      a.extents, a.strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS) {
    throw Error(ErrorCode::kDevice,
                "cuTensorMapEncodeTiled: error " + std::to_string(static_cast<int>(status)) +
                    " for " + std::to_string(a.extents[1]) + " rows of " +
                    std::to_string(a.extents[0]) + " columns, strides " +
                    std::to_string(a.strides[0]) + ", " + std::to_string(a.strides[1]) + " and " +
                    std::to_string(a.strides[2]) + " bytes");
  }
  return map;
}

// A thread's last maps: a forward and a backward have ten. Allocators give the same addresses
// again, and to encode a map takes longer than to find it.
struct TensorMapMemory {
  static constexpr int kSize = 16;

  TensorMapArguments arguments[kSize];
  CUtensorMap maps[kSize];
  int oldest;
};

inline CUtensorMap make_tensor_map(const void* data, const Strides& stride,
                                   const TensorMapShape& shape) {
  const TensorMapArguments arguments = tensor_map_arguments(data, stride, shape);
  TensorMapMemory& memory = of_this_thread<TensorMapMemory>();
  for (int i = 0; i < TensorMapMemory::kSize; ++i) {
    if (memory.arguments[i] == arguments) return memory.maps[i];
  }
  const int place = memory.oldest;
  memory.maps[place] = encode_tensor_map(arguments);
  memory.arguments[place] = arguments;
  memory.oldest = (place + 1) % TensorMapMemory::kSize;
  return memory.maps[place];
}

// Of K, and of V with its own head dim.
template <class Launch>
void make_key_maps(Launch& launch, TensorMapShape keys) {
  const Attention& a = launch.attention;
  launch.k_map = make_tensor_map(a.k, a.k_stride, keys);
  keys.columns = a.head_dim_v;
  launch.v_map = make_tensor_map(a.v, a.v_stride, keys);
}

}  // namespace anyflash::sm90
