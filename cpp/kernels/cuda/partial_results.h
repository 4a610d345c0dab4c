// Host side of keys that are divided into splits: results of each go to the workspace, and are
// joined.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/element.h"
#include "common/math.h"
#include "cuda/combine.h"
#include "cuda/descriptor.h"
#include "kernel_descriptor.h"
#include "params.h"

namespace anyflash {

inline std::size_t partial_out_bytes(const KvCacheParams& params) {
  const auto bytes = static_cast<std::size_t>(params.num_splits * stride_of_split(params)) * 4;
  return ceil_div(bytes, std::size_t{256}) * 256;
}

inline std::size_t parts_bytes(const KvCacheParams& params) {
  if (params.num_splits == 1) return 0;
  const int64_t lses = params.num_splits * lse_stride_of_split(params);
  return partial_out_bytes(params) + static_cast<std::size_t>(lses) * sizeof(float);
}

// The same problem with partial results for results.
inline KvCacheParams partial_params(const KvCacheParams& params, const LaunchContext& context) {
  KvCacheParams parts = params;
  char* const scratch = static_cast<char*>(context.scratch);
  const int64_t rows = part_rows(params);
  const int64_t columns = part_columns(params);
  const int64_t of_batch = params.packed_parts ? 0 : params.attention.heads * rows;
  parts.out = scratch;
  parts.out_dtype = DType::kFloat32;
  parts.out_stride = {of_batch * columns, columns, rows * columns, 1};
  parts.lse = reinterpret_cast<float*>(scratch + partial_out_bytes(params));
  parts.lse_stride = {of_batch, 1, rows, 0};
  parts.attention.sinks = {};
  return parts;
}

// parts: partial_params(params)
template <class Element>
void combine_parts(const KvCacheParams& params, const KvCacheParams& parts, void* stream) {
  CombineParams combine;
  combine.result = params;
  combine.out = static_cast<const float*>(parts.out);
  combine.lse = parts.lse;
  combine.q_dtype = kElementType<Element>;
  combine_splits(combine, stream);
}

}  // namespace anyflash
