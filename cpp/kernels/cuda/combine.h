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

// The weighted sum of four columns of a row's parts is that of four sums, each of every fourth
// split. So it is the same, however many splits a launch has and whoever adds them: four warps with
// a sum each, or one thread with all four.
inline constexpr int kPartSums = 4;

template <int kSums>
struct PartSums {
  float sums[kSums][4] = {};

  ANYFLASH_DEVICE void add(int split, float weight, const float4& part) {
    float (&sum)[4] = sums[split % kSums];
    sum[0] += weight * part.x;
    sum[1] += weight * part.y;
    sum[2] += weight * part.z;
    sum[3] += weight * part.w;
  }
  ANYFLASH_DEVICE float column(int col) const {
    float result = sums[0][col];
    ANYFLASH_UNROLL
    for (int i = 1; i < kSums; ++i) result += sums[i][col];
    return result;
  }
};

struct CombineParams {
  KvCacheParams result;  // out and lse are the call's
  DType q_dtype = DType::kFloat16;
  const float* out = nullptr;
  const float* lse = nullptr;
};

void combine_splits(const CombineParams& params, void* stream);  // asynchronous

}  // namespace anyflash
