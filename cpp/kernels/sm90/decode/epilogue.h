// The end of a decoding CTA: what it has staged is the result or, where the keys are split, a part
// of it. Parts are joined by combine.cu or, where the CTAs of all splits are a cluster, by these:
// each joins some columns. Both add up the same numbers in the same order.
#pragma once

#include <cmath>
#include <cstdint>

#include "common/element.h"
#include "common/macros.h"
#include "common/sink.h"
#include "common/store.h"
#include "cuda/combine.h"
#include "cuda/decode_epilogue.h"
#include "cuda/decode_work_tile.h"
#include "sm90/decode/loader.h"

namespace anyflash::sm90 {

// What a row's output has to be multiplied by, and its LSE. A sink is one more logit of the
// denominator.
struct RowResult {
  float factor;
  float lse;

  // maximum: in natural units
  ANYFLASH_DEVICE RowResult(float maximum, float sum, float sink) {
    const float reference = fmaxf(maximum, sink);
    factor = 1.0f;
    if (sink != -INFINITY) {
      factor = exp2f((maximum - reference) * kLog2E);
      sum = sum * factor + sink_term(sink, reference);
    }
    factor = sum == 0.0f ? 0.0f : factor / sum;
    lse = sum == 0.0f ? -INFINITY : reference + logf(sum);
  }
};

template <class Traits>
ANYFLASH_DEVICE RowResult row_result(const typename Traits::SharedStorage& smem, int row,
                                     float softmax_scale, float sink) {
  float sum = smem.of_warps[0][row];
  ANYFLASH_UNROLL
  for (int warp = 1; warp < 4; ++warp) sum += smem.of_warps[warp][row];
  return RowResult(smem.maximum[row] * softmax_scale, sum, sink);
}

// What its staged output counts in.
template <class Traits>
ANYFLASH_DEVICE float row_unit(const typename Traits::SharedStorage& smem, int row) {
  if constexpr (Traits::k8Bit) return smem.scales.unit[row];
  else return 1.0f;
}

// Calls store(row, column, four numbers) for the result, and store_lse(row, lse). A warp a row.
template <class Traits, class Store, class StoreLse>
ANYFLASH_DEVICE void for_each_result(const DecodeLaunch& params, const DecodeWorkTile& block,
                                     const typename Traits::SharedStorage& smem, bool has_sink,
                                     const Store& store, const StoreLse& store_lse) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const auto scale = static_cast<float>(params.attention.softmax_scale);
  for (int row = static_cast<int>(threadIdx.x) / 32; row < block.rows;
       row += Traits::kConsumerWarps) {
    const float sink = has_sink ? row_sink(params, block, row) : -INFINITY;
    const RowResult result = row_result<Traits>(smem, row, scale, sink);
    const float unit = row_unit<Traits>(smem, row);
    for (int x = 4 * lane; x < Traits::kHeadDimV; x += 128) {
      const auto four = *reinterpret_cast<const float4*>(&smem.result[row][x]);
      const float f = result.factor;
      store(row, x,
            float4{four.x * f * unit, four.y * f * unit, four.z * f * unit, four.w * f * unit});
    }
    store_lse(row, result.lse);
  }
}

// A split without keys says so and writes nothing else.
template <class Traits>
ANYFLASH_DEVICE void store_nothing(const DecodeLaunch& params, const DecodeWorkTile& block) {
  const int row = static_cast<int>(threadIdx.x);
  if (row < block.rows) *result_lse(params, block, row) = -INFINITY;
}

template <class Traits, class Out>
ANYFLASH_DEVICE void store_result(const DecodeLaunch& params, const DecodeWorkTile& block,
                                  const typename Traits::SharedStorage& smem) {
  const int64_t stride = params.out_stride.col;
  for_each_result<Traits>(
      params, block, smem, /*has_sink=*/true,
      [&](int row, int x, const float4& four) {
        const float numbers[4] = {four.x, four.y, four.z, four.w};
        store_four(numbers, result_row<Out>(params, block, row) + x * stride, stride,
                   params.attention.head_dim_v - x);
      },
      [&](int row, float lse) {
        const bool tells = threadIdx.x % 32 == 0 && params.lse != nullptr;
        if (tells) *result_lse(params, block, row) = lse;
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
                                 typename Traits::SharedStorage& smem) {
  const int splits = params.num_splits;
  for_each_result<Traits>(
      params, block, smem, /*has_sink=*/false,
      [&](int row, int x, const float4& four) {
        int rank = 0;
        const int slab = params.by_splits.divmod(rank, x / 16);
        const int place = slab * splits + block.split;
        smem.inbox.arrived.send(&smem.inbox.parts[place][row][x % 16], four, rank);
      },
      [&](int row, float lse) {
        const int rank = static_cast<int>(threadIdx.x) % 32;
        if (rank < splits) smem.inbox.arrived.send(&smem.inbox.lse[block.split][row], lse, rank);
      });
}

// This CTA's columns of all splits. A thread has one of sixteen columns.
template <class Traits, class Out>
ANYFLASH_DEVICE void join_splits(const DecodeLaunch& params, const DecodeWorkTile& block,
                                 typename Traits::SharedStorage& smem) {
  const int splits = params.num_splits;
  const int x = static_cast<int>(threadIdx.x) % 16;
  const int slabs = slabs_of<Traits>(block.split, splits);
  smem.inbox.arrived.wait();
  for (int row = static_cast<int>(threadIdx.x) / 16; row < block.rows;
       row += Traits::kThreads / 16) {
    float lses[kLargestCluster];
    ANYFLASH_UNROLL
    for (int s = 0; s < kLargestCluster; ++s)
      lses[s] = s < splits ? smem.inbox.lse[s][row] : -INFINITY;
    const SplitWeights weights(lses, row_sink(params, block, row));
    Out* const target = result_row<Out>(params, block, row);
    for (int slab = 0; slab < slabs; ++slab) {
      float sums[kPartSums] = {};
      ANYFLASH_UNROLL
      for (int s = 0; s < kLargestCluster; ++s) {
        const float part = s < splits ? smem.inbox.parts[slab * splits + s][row][x] : 0.0f;
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
