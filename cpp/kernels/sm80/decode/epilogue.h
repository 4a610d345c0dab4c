// The end of a decoding CTA: its warps' results are joined. They are the result itself or, where
// the keys are split, a part of it. Parts are joined by combine.cu or, where the CTAs of all splits
// are a cluster, by these (join_splits). Both add up the same numbers in the same order.
#pragma once

#include <cute/tensor.hpp>

#include "common/cluster.h"
#include "common/element.h"
#include "common/layout.h"
#include "common/macros.h"
#include "common/sink.h"
#include "common/store.h"
#include "cuda/combine.h"
#include "cuda/decode_epilogue.h"
#include "cuda/decode_work_tile.h"
#include "cuda/restore_nonfinite.h"
#include "params.h"
#include "sm80/decode/scores.h"
#include "variant/mask.h"
#include "variant/tree_mask.h"

namespace anyflash::sm80 {

// Gives what clear_values() took out of V to the rows that see it: result(row, column).
template <class Traits, class Result>
ANYFLASH_DEVICE void restore_values(const KvCacheParams& params, const DecodeWorkTile& block,
                                    const Result& result) {
  const Mask mask = block.mask(params);
  const TreeMask tree(params, block.batch, block.sequence);
  for (int tile = block.keys.begin; tile < block.keys.end; tile += Traits::kBlockN) {
    if (!block.hides(tile, tile + Traits::kBlockN)) continue;
    const IndexRange keys{tile, min(tile + Traits::kBlockN, block.keys.end)};
    restore_nonfinite<Traits::kThreads>(
        keys, {0, block.rows}, params.attention.head_dim_v,
        [&](int key, int x) { return cached_value<Traits>(params, block, key, x); },
        [&](int row, int key) {
          const SplitKeys seen = block.seen(mask, row);
          const bool visible =
              seen.begin <= key && key < seen.end && tree.keep(block.query(row), key);
          return visible ? kLostWeight<Traits> : TermWeight::kHidden;
        },
        result);
  }
}

// Turns the LSEs of each row's parts, one a group of warps, into the parts' weights, and writes the
// row's LSE. A sink is one more part, but for a split's.
template <class Traits>
ANYFLASH_DEVICE void weigh_parts(const KvCacheParams& params, const DecodeWorkTile& block,
                                 typename Traits::Result& result) {
  const int row = threadIdx.x;
  if (row >= block.rows) return;
  const float sink = params.splits_in_cluster ? -INFINITY : row_sink(params, block, row);
  float top = sink;
  CUTE_UNROLL
  for (int part = 0; part < Traits::kKeyWarps; ++part) top = fmaxf(top, result.lse[part][row]);
  const float reference = top == -INFINITY ? 0.0f : top;
  float sum = sink_term(sink, reference);
  CUTE_UNROLL
  for (int part = 0; part < Traits::kKeyWarps; ++part) {
    sum += exp2f((result.lse[part][row] - reference) * kLog2E);
  }
  const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
  CUTE_UNROLL
  for (int part = 0; part < Traits::kKeyWarps; ++part) {
    float& lse = result.lse[part][row];
    lse = exp2f((lse - reference) * kLog2E) * inverse;
  }
  const float of_row = sum == 0.0f ? -INFINITY : reference + logf(sum);
  if (params.splits_in_cluster) result.split_lse[row] = of_row;
  else if (params.lse != nullptr) *result_lse(params, block, row) = of_row;
}

// Calls store(row, column, four numbers): the weighted sums of the parts. A part without keys has 0
// and weighs nothing.
template <class Traits, class Store>
ANYFLASH_DEVICE void join_parts(const KvCacheParams& params, const DecodeWorkTile& block,
                                const typename Traits::Result& result, const Store& store) {
  constexpr int kLanes = Traits::kHeadDim < 128 ? Traits::kHeadDim / 4 : 32;  // of a row
  const int thread = threadIdx.x;
  for (int row = thread / kLanes; row < block.rows; row += Traits::kThreads / kLanes) {
    for (int x = thread % kLanes * 4; x < params.attention.head_dim_v; x += kLanes * 4) {
      float sums[4] = {};
      CUTE_UNROLL
      for (int part = 0; part < Traits::kKeyWarps; ++part) {
        const float weight = result.lse[part][row];
        const auto values = *reinterpret_cast<const float4*>(&result.out[part][row][x]);
        sums[0] += weight * values.x;
        sums[1] += weight * values.y;
        sums[2] += weight * values.z;
        sums[3] += weight * values.w;
      }
      store(row, x, sums);
    }
  }
}

// This CTA's result in global memory.
template <class Traits, class Out>
ANYFLASH_DEVICE void store_rows(const KvCacheParams& params, const DecodeWorkTile& block,
                                const typename Traits::Result& result, bool found_nonfinite) {
  const int64_t stride = params.out_stride.col;
  join_parts<Traits>(params, block, result, [&](int row, int x, const float (&sums)[4]) {
    store_four(sums, result_row<Out>(params, block, row) + x * stride, stride,
               params.attention.head_dim_v - x);
  });
  if (__syncthreads_or(found_nonfinite)) {  // and all rows are in global memory
    restore_values<Traits>(params, block, [&](int row, int x) -> Out& {
      return result_row<Out>(params, block, row)[x * stride];
    });
  }
}

// The same in shared memory, in the place of the first part.
template <class Traits>
ANYFLASH_DEVICE void keep_rows(const KvCacheParams& params, const DecodeWorkTile& block,
                               typename Traits::Result& result, bool found_nonfinite) {
  join_parts<Traits>(params, block, result, [&](int row, int x, const float (&sums)[4]) {
    *reinterpret_cast<float4*>(&result.out[0][row][x]) = {sums[0], sums[1], sums[2], sums[3]};
  });
  if (__syncthreads_or(found_nonfinite)) {  // and all rows are there
    restore_values<Traits>(params, block,
                           [&](int row, int x) -> float& { return result.out[0][row][x]; });
  }
}

template <class Traits, class AccO, class Softmax>
ANYFLASH_DEVICE void decode_epilogue(const KvCacheParams& params, const DecodeWorkTile& block,
                                     typename Traits::SharedStorage& smem, AccO& acc_o,
                                     Softmax& softmax, const float (&factors)[DecodeRows::kRows],
                                     bool found_nonfinite) {
  using namespace cute;
  const int group = Traits::group();
  const int first_column = Traits::column_warp() * Traits::kWarpColumns;
  auto out_matrix = as_matrix(acc_o);
  auto lse = softmax.finish(out_matrix, -INFINITY, factors);

  auto cO = make_identity_tensor(Shape<Int<Traits::kBlockM>, Int<Traits::kWarpColumns>>{});
  auto tOcO =  // (MMA, MMA_M, MMA_N)
      typename Traits::TiledMma{}
          .get_thread_slice(Traits::mma_thread())
          .partition_C(make_tensor(
              cO.data(), composition(cO.layout(), make_tile(_, typename Traits::OutColumns{}))));
  auto coordinates = as_matrix(tOcO);
  __syncthreads();  // every warp has done with the buffers
  CUTE_UNROLL
  for (int row = 0; row < size<0>(out_matrix); ++row) {
    const int i = get<0>(coordinates(row, 0));
    if (i >= block.rows) continue;
    if (first_column + get<1>(coordinates(row, 0)) == 0) smem.result.lse[group][i] = lse(row);
    CUTE_UNROLL
    for (int col = 0; col < size<1>(out_matrix); ++col) {
      smem.result.out[group][i][first_column + get<1>(coordinates(row, col))] =
          out_matrix(row, col);
    }
  }
  __syncthreads();  // all parts are there
  weigh_parts<Traits>(params, block, smem.result);
  __syncthreads();  // their weights too
  if (params.splits_in_cluster) {
    keep_rows<Traits>(params, block, smem.result, found_nonfinite);
  } else if (params.out_dtype == DType::kFloat32) {
    store_rows<Traits, float>(params, block, smem.result, found_nonfinite);
  } else {
    store_rows<Traits, typename Traits::Element>(params, block, smem.result, found_nonfinite);
  }
}

// A split without keys says so and writes nothing else.
template <class Traits>
ANYFLASH_DEVICE void decode_nothing(const KvCacheParams& params, const DecodeWorkTile& block,
                                    typename Traits::Result& result) {
  for (int row = threadIdx.x; row < block.rows; row += Traits::kThreads) {
    if (params.splits_in_cluster) result.split_lse[row] = -INFINITY;
    else *result_lse(params, block, row) = -INFINITY;
  }
}

// The result of a cluster: each CTA joins some columns of some rows of all splits.
template <class Traits, class Out>
ANYFLASH_DEVICE void join_splits(const KvCacheParams& params, const DecodeWorkTile& block,
                                 const typename Traits::Result& result) {
  constexpr int kPieces = Traits::kHeadDimV / 4;  // of a row
  const int columns = params.attention.head_dim_v;
  const int64_t stride = params.out_stride.col;
  for (int i = block.split * Traits::kThreads + static_cast<int>(threadIdx.x);
       i < block.rows * kPieces; i += params.num_splits * Traits::kThreads) {
    const int row = i / kPieces;
    const int x = i % kPieces * 4;
    if (x >= columns) continue;
    float lses[kLargestCluster];
    CUTE_UNROLL
    for (int s = 0; s < kLargestCluster; ++s) {
      lses[s] = s < params.num_splits ? *in_cta(&result.split_lse[row], s) : -INFINITY;
    }
    const SplitWeights weights(lses, row_sink(params, block, row));
    float4 parts[kLargestCluster];  // their loads overlap
    CUTE_UNROLL
    for (int s = 0; s < kLargestCluster; ++s) {
      const auto* const part = reinterpret_cast<const float4*>(&result.out[0][row][x]);
      parts[s] = lses[s] != -INFINITY ? *in_cta(part, s) : float4{0.0f, 0.0f, 0.0f, 0.0f};
    }
    PartSums<kPartSums> sums;
    CUTE_UNROLL
    for (int s = 0; s < kLargestCluster; ++s) sums.add(s, weights.weight[s], parts[s]);
    const float joined[4] = {sums.column(0), sums.column(1), sums.column(2), sums.column(3)};
    store_four(joined, result_row<Out>(params, block, row) + x * stride, stride, columns - x);
    if (x == 0 && params.lse != nullptr) *result_lse(params, block, row) = weights.lse;
  }
}

}  // namespace anyflash::sm80
