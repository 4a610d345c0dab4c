// Splits of the keys: where their partial results lie, and the kernel that joins them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/macros.h"
#include "common/math.h"
#include "params.h"

namespace anyflash {

// Partial results are float32 tensors (split, batch, head, query, column), columns padded to whole
// pieces of 16 bytes, and (split, batch, head, query). A kernel that writes them has them as its
// `out` and `lse`. Where queries are packed, parts are so as well (packed_parts), or each sequence
// has room for as many queries as the launch takes.
ANYFLASH_HOST_DEVICE int64_t part_rows(const KvCacheParams& p) {
  if (p.packed_parts) return p.attention.total_q;
  return p.most_queries < p.attention.seqlen_q ? p.most_queries : p.attention.seqlen_q;
}
ANYFLASH_HOST_DEVICE int part_columns(const KvCacheParams& p) {
  return ceil_div(p.attention.head_dim_v, 4) * 4;
}
ANYFLASH_HOST_DEVICE int64_t lse_stride_of_split(const KvCacheParams& p) {
  return (p.packed_parts ? 1 : p.attention.batch) * p.attention.heads * part_rows(p);
}
ANYFLASH_HOST_DEVICE int64_t stride_of_split(const KvCacheParams& p) {
  return lse_stride_of_split(p) * part_columns(p);
}

struct CombineParams {
  KvCacheParams result;  // out and lse are the call's
  DType q_dtype = DType::kFloat16;
  const float* out = nullptr;
  const float* lse = nullptr;
};

void combine_splits(const CombineParams& params, void* stream);  // asynchronous

}  // namespace anyflash
