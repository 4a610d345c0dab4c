// Sums of parts of a group of query heads, in float32, on their way through the workspace.
#pragma once

#include <cstdint>
#include <cute/tensor.hpp>

#include "common/macros.h"
#include "variant/backward_scratch.h"
#include "variant/work_tile.h"

namespace anyflash {

// The elements of one of `threads` threads lie in pieces of four, side by side in a warp.
template <class Acc>
ANYFLASH_DEVICE void store_sums(float* tile, const Acc& acc, unsigned thread, int threads) {
  CUTE_UNROLL
  for (int i = 0; i < cute::size(acc); i += 4) {
    const float4 sums{acc(i), acc(i + 1), acc(i + 2), acc(i + 3)};
    reinterpret_cast<float4*>(tile + i * threads)[thread] = sums;
  }
}
template <class Acc>
ANYFLASH_DEVICE void add_sums(Acc& acc, const float* tile, unsigned thread, int threads) {
  CUTE_UNROLL
  for (int i = 0; i < cute::size(acc); i += 4) {
    const float4 sums = reinterpret_cast<const float4*>(tile + i * threads)[thread];
    acc(i) += sums.x;
    acc(i + 1) += sums.y;
    acc(i + 2) += sums.z;
    acc(i + 3) += sums.w;
  }
}

// Elements of dK and dV of a block of keys.
template <class Traits>
inline constexpr int kPartElementsK = Traits::kBlockN * Traits::kHeadDim;
template <class Traits>
inline constexpr int kGqaPartialElements =
    kPartElementsK<Traits> + Traits::kBlockN * Traits::kHeadDimV;

// Of the first part of a block of keys, counted over all.
template <class Traits>
ANYFLASH_DEVICE int64_t first_part(const BackwardScratch& params, const BackwardWorkTile& block) {
  const int64_t first =
      params.first_block(block.sequence, block.batch, block.head_k, Traits::kBlockN);
  return (first + block.first_key / Traits::kBlockN) * params.gqa_splits;
}

template <class Traits, class AccK, class AccV>
ANYFLASH_DEVICE void store_part(const BackwardScratch& params, const BackwardWorkTile& block,
                                bool nonfinite_dout, const AccK& acc_dk, const AccV& acc_dv) {
  const int64_t part = first_part<Traits>(params, block) + block.gqa_split;
  float* const sums = params.gqa_partials + part * kGqaPartialElements<Traits>;
  store_sums(sums, acc_dk, threadIdx.x, Traits::kThreads);
  store_sums(sums + kPartElementsK<Traits>, acc_dv, threadIdx.x, Traits::kThreads);
  if (threadIdx.x == 0) params.gqa_nonfinite_dout[part] = nonfinite_dout;
}

// The sum of a block's parts, in their order, into accumulators that are 0; returns whether NaN or
// infinity was taken out of dO for one of them.
template <class Traits, class AccK, class AccV>
ANYFLASH_DEVICE bool add_parts(const BackwardScratch& params, const BackwardWorkTile& block,
                               AccK& acc_dk, AccV& acc_dv) {
  const int64_t first = first_part<Traits>(params, block);
  bool nonfinite_dout = false;
  for (int64_t part = first; part < first + params.gqa_splits; ++part) {
    const float* const sums = params.gqa_partials + part * kGqaPartialElements<Traits>;
    add_sums(acc_dk, sums, threadIdx.x, Traits::kThreads);
    add_sums(acc_dv, sums + kPartElementsK<Traits>, threadIdx.x, Traits::kThreads);
    nonfinite_dout |= params.gqa_nonfinite_dout[part];
  }
  return nonfinite_dout;
}

}  // namespace anyflash
