// What the ends of decoding CTAs of all families have in common: where results go, and what splits
// weigh in them.
#pragma once

#include <cmath>
#include <cstdint>

#include "common/dequantize.h"
#include "common/element.h"
#include "common/macros.h"
#include "common/sink.h"
#include "cuda/combine.h"
#include "cuda/decode_work_tile.h"
#include "cuda/restore_nonfinite.h"
#include "params.h"
#include "variant/broadcast_tensor.h"
#include "variant/cache.h"

namespace anyflash {

// Element (row, 0) of the result, or of this split's part of it.
template <class Out>
ANYFLASH_DEVICE Out* result_row(const KvCacheParams& params, const DecodeWorkTile& block, int row) {
  const int part = params.splits_in_cluster ? 0 : block.split;
  return static_cast<Out*>(params.out) + part * stride_of_split(params) +
         block.offset(params.out_stride, row);
}
ANYFLASH_DEVICE float* result_lse(const KvCacheParams& params, const DecodeWorkTile& block,
                                  int row) {
  const int part = params.splits_in_cluster ? 0 : block.split;
  return params.lse + part * lse_stride_of_split(params) + block.offset(params.lse_stride, row);
}

// One number of a cache of values, 0 if it does not exist. Of a cache of 8 bits it is 0 if it is
// finite: only NaN and infinity are restored.
template <class Traits>
ANYFLASH_DEVICE float cached_value(const KvCacheParams& params, const DecodeWorkTile& block,
                                   int key, int x) {
  const Strides& stride = params.attention.v_stride;
  const CacheSlot place = place_of(params, block.sequence, key);
  if (place.slot < 0) return 0.0f;
  const int64_t offset = place.slot * stride.batch + place.row * stride.row +
                         block.head_k * stride.head + x * stride.col;
  if constexpr (Traits::k8Bit) {
    const float lost = nonfinite_part(static_cast<const unsigned char*>(params.attention.v)[offset],
                                      params.cache_dtype);
    if (lost == 0.0f || params.v_scale.data == nullptr) return lost;
    return lost * load_float(params.v_scale, scale_index(params.v_scale, place, block.head_k));
  } else {
    return static_cast<float>(
        static_cast<const typename Traits::Element*>(params.attention.v)[offset]);
  }
}

// How NaN and infinity that were taken out of V count in a row that sees them. Latent attention has
// them in K, too: the score is NaN or infinite, and the result NaN. If it is -inf, 0 * infinity is.
template <class Traits>
inline constexpr TermWeight kLostWeight =
    Traits::kLatent ? TermWeight::kDropped : TermWeight::kVisible;

ANYFLASH_DEVICE float row_sink(const KvCacheParams& params, const DecodeWorkTile& block, int row) {
  const BroadcastTensor& sinks = params.attention.sinks;
  return sinks.data == nullptr ? -INFINITY : load_float(sinks, block.head(row) * sinks.stride.head);
}

// What a row's splits weigh in its result.
struct SplitWeights {
  float weight[kLargestCluster];
  float lse;  // of all

  ANYFLASH_DEVICE SplitWeights(const float (&lses)[kLargestCluster], float sink) {
    float top = sink;
    ANYFLASH_UNROLL
    for (int s = 0; s < kLargestCluster; ++s) top = fmaxf(top, lses[s]);
    const float reference = top == -INFINITY ? 0.0f : top;
    float terms[kLargestCluster];
    ANYFLASH_UNROLL
    for (int s = 0; s < kLargestCluster; ++s) {
      weight[s] = terms[s] = exp2f((lses[s] - reference) * kLog2E);
    }
    ANYFLASH_UNROLL
    for (int distance = kLargestCluster / 2; distance > 0; distance /= 2) {
      ANYFLASH_UNROLL
      for (int s = 0; s < distance; ++s) terms[s] += terms[s + distance];
    }
    float sum = terms[0];
    sum += sink_term(sink, reference);
    const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
    ANYFLASH_UNROLL
    for (int s = 0; s < kLargestCluster; ++s) weight[s] *= inverse;
    lse = sum == 0.0f ? -INFINITY : reference + logf(sum);
  }
};

}  // namespace anyflash
