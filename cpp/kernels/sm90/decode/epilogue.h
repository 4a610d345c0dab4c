// The end of a decoding CTA: its accumulators are the result or, where the keys are split, a part of
// it. Parts are joined by combine.cu or, where the CTAs of all splits are a cluster, by these: each
// joins some columns. Both add up the same numbers in the same order.
#pragma once

#include <cmath>
#include <cstdint>

#include "common/cluster.h"
#include "common/element.h"
#include "common/macros.h"
#include "cuda/combine.h"
#include "cuda/decode_epilogue.h"
#include "cuda/decode_work_tile.h"
#include "params.h"
#include "sm90/decode/mainloop.h"

namespace anyflash::sm90 {

// The factor of a row's output, and its LSE. A sink is one more logit of the denominator.
struct RowResult {
  float factor;
  float lse;

  // maximum: in natural units
  ANYFLASH_DEVICE RowResult(float maximum, float sum, float sink) {
    const float reference = fmaxf(maximum, sink);
    if (sink != -INFINITY) {
      factor = exp2f((maximum - reference) * kLog2E);
      sum = sum * factor + exp2f((sink - reference) * kLog2E);
    } else {
      factor = 1.0f;
    }
    factor = sum == 0.0f ? 0.0f : factor / sum;
    lse = sum == 0.0f ? -INFINITY : reference + logf(sum);
  }
};

// A split without keys says so and writes nothing else.
template <class Traits>
ANYFLASH_DEVICE void store_nothing(const DecodeLaunch& params, const DecodeWorkTile& block) {
  const int row = static_cast<int>(threadIdx.x);
  if (row < block.rows) *result_lse(params, block, row) = -INFINITY;
}

template <class Traits, class Out>
ANYFLASH_DEVICE void store_result(const DecodeLaunch& params, const DecodeWorkTile& block,
                                  DecodeWarpgroup<Traits>& warpgroup) {
  const int64_t stride = params.out_stride.col;
  const int columns = params.attention.head_dim_v;
  warpgroup.for_each_row([&](int row, auto& out, float maximum, float sum) {
    if (row >= block.rows) return;
    const RowResult result(maximum, sum, row_sink(params, block, row));
    Out* const target = result_row<Out>(params, block, row);
    out.for_each([&](int x, float value) {
      if (x < columns) target[x * stride] = Out(value * result.factor);
    });
    if (out.is_first && params.lse != nullptr) *result_lse(params, block, row) = result.lse;
  });
}

// The columns that CTA `rank` of a cluster joins come by slabs of sixteen: rank, rank + splits, ...
template <class Traits>
ANYFLASH_DEVICE int slabs_of(int rank, int splits) {
  return (Traits::kSlabs - rank + splits - 1) / splits;
}
template <class Traits>
ANYFLASH_DEVICE int inbox_bytes(const DecodeLaunch& params, const DecodeWorkTile& block) {
  const int columns = 16 * slabs_of<Traits>(block.split, params.num_splits);
  return params.num_splits * block.rows * (columns + 1) * static_cast<int>(sizeof(float));
}

// This split's part, to the CTAs that join it.
template <class Traits>
ANYFLASH_DEVICE void send_result(const DecodeLaunch& params, const DecodeWorkTile& block,
                                 typename Traits::SharedStorage& smem,
                                 DecodeWarpgroup<Traits>& warpgroup) {
  const int splits = params.num_splits;
  warpgroup.for_each_row([&](int row, auto& out, float maximum, float sum) {
    if (row >= block.rows) return;
    const RowResult result(maximum, sum, -INFINITY);
    out.for_each([&](int x, float value) {
      int rank = 0;
      const int slab = params.by_splits.divmod(rank, x / 16);
      const int place = slab * splits + block.split;
      smem.arrived.send(&smem.parts[place][row][x % 16], value * result.factor, rank);
    });
    if (!out.is_first) return;
    for (int rank = 0; rank < splits; ++rank) {
      smem.arrived.send(&smem.lse[block.split][row], result.lse, rank);
    }
  });
}

// This CTA's columns of all splits. A thread has one of sixteen columns.
template <class Traits, class Out>
ANYFLASH_DEVICE void join_splits(const DecodeLaunch& params, const DecodeWorkTile& block,
                                 typename Traits::SharedStorage& smem) {
  const int splits = params.num_splits;
  const int x = static_cast<int>(threadIdx.x) % 16;
  const int slabs = slabs_of<Traits>(block.split, splits);
  smem.arrived.wait();
  for (int row = static_cast<int>(threadIdx.x) / 16; row < block.rows;
       row += Traits::kThreads / 16) {
    float lses[kLargestCluster];
    ANYFLASH_UNROLL
    for (int s = 0; s < kLargestCluster; ++s) lses[s] = s < splits ? smem.lse[s][row] : -INFINITY;
    const SplitWeights weights(lses, row_sink(params, block, row));
    Out* const target = result_row<Out>(params, block, row);
    for (int slab = 0; slab < slabs; ++slab) {
      float sums[kPartSums] = {};
      ANYFLASH_UNROLL
      for (int s = 0; s < kLargestCluster; ++s) {
        const float part = s < splits ? smem.parts[slab * splits + s][row][x] : 0.0f;
        sums[s % kPartSums] += weights.weight[s] * part;
      }
      float joined = sums[0];
      ANYFLASH_UNROLL
      for (int i = 1; i < kPartSums; ++i) joined += sums[i];
      const int column = (slab * splits + block.split) * 16 + x;
      if (column < params.attention.head_dim_v) {
        target[column * params.out_stride.col] = Out(joined);
      }
    }
    const bool tells = x == 0 && block.split == 0 && params.lse != nullptr;
    if (tells) *result_lse(params, block, row) = weights.lse;
  }
}

}  // namespace anyflash::sm90
