// Passes over blocks of rows, which do not depend on the order of CTAs: dQ where it must be
// deterministic, the gradient of ALiBi's slopes, and the gradient of a bias.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cute/tensor.hpp>

#include "common/launch.h"
#include "common/reduce.h"
#include "sm80/backward/epilogue.h"
#include "sm80/backward/score_gradient_tile.h"
#include "sm80/forward/traits.h"
#include "variant/block_mask.h"
#include "variant/broadcast_tensor.h"
#include "variant/sequence.h"

namespace anyflash::sm80 {

// dQ of one block of rows a CTA, if params.deterministic, and its share of the gradient of ALiBi's
// slope, if that is wanted. Grid: x = all row blocks of all (batch, head) pairs.
template <class Traits, class Scores>
__global__ void __launch_bounds__(Traits::kThreads, 2)
    deterministic_dq_kernel(const __grid_constant__ BackwardScratch params) {
  using namespace cute;
  auto& smem = *reinterpret_cast<typename Traits::SharedStorage*>(anyflash_smem);
  const int row_blocks = (params.seqlen_q + Traits::kBlockM - 1) / Traits::kBlockM;
  const int row0 = (row_blocks - 1 - static_cast<int>(blockIdx.x) % row_blocks) * Traits::kBlockM;
  const int pair = static_cast<int>(blockIdx.x) / row_blocks;
  const int64_t batch = pair / params.heads;
  const int head = pair % params.heads;
  const int head_k = head / (params.heads / params.heads_k);
  const Sequence sequence = sequence_of(params, batch);

  typename Traits::TiledMma mma;
  auto acc_dq = partition_fragment_C(mma, Shape<Int<Traits::kBlockM>, Int<Traits::kHeadDim>>{});
  clear(acc_dq);  // (MMA, MMA_M, MMA_D)
  float slope_sum = 0.0f;
  if (row0 < sequence.seqlen_q) {
    const ScoreGradientTile<Traits> tiles(params, sequence, smem);
    const Mask mask(sequence.seqlen_q, sequence.seqlen_k, params.window);
    const Scores variant(params, sequence, batch, head, typename Scores::Seed(params));
    const BlockMask blocks(params, batch, head);
    const LseDelta* const stats = params.lse_delta + params.first_row(sequence, batch, head) + row0;
    tiles.load_rows(head, row0);
    const KRange range = mask.k_range(row0, Traits::kBlockM, Traits::kBlockN);
    for (int n = range.begin; n < range.end; ++n) {
      const int col0 = n * Traits::kBlockN;
      if ((Scores::kFeatures & kBlockMask) != 0 && !blocks.keep(row0, col0)) continue;
      tiles.load_keys(head_k, col0);
      cp_async_wait<0>();
      __syncthreads();  // the tile is there
      const auto ds = tiles.compute_ds(
          variant, mask, stats, row0, col0,
          [&](const auto& gradient, const auto& places) ANYFLASH_INLINE_LAMBDA {
            if constexpr ((Scores::kFeatures & kAlibi) != 0) {
              if (params.slope_sums == nullptr) return;
              CUTE_UNROLL
              for (int i = 0; i < size(gradient); ++i) {
                slope_sum += gradient(i) * variant.slope_factor(row0 + get<0>(places(i)),
                                                                col0 + get<1>(places(i)));
              }
            }
          });
      if (params.deterministic) {
        if (range.needs_mask(n) || variant.may_hide_anywhere()) tiles.clear_nonfinite_keys();
        tiles.add_product(acc_dq, ds);
      }
      __syncthreads();  // every warp has done with K and V
    }
  }

  if (params.slope_sums != nullptr) {
    const int64_t blocks = (int64_t{params.seqlen_q} + 63) / 64;
    const float sum = block_sum<Traits::kThreads>(slope_sum, reinterpret_cast<float*>(&smem.k));
    if (threadIdx.x == 0) params.slope_sums[pair * blocks + row0 / 64] = sum;
  }
  if (!params.deterministic || row0 >= sequence.seqlen_q) return;
  CUTE_UNROLL
  for (int i = 0; i < size(acc_dq); ++i) acc_dq(i) *= params.ds_scale;
  cp_async_wait<0>();
  __syncthreads();  // every warp has done with Q, also if there were no keys
  const auto store = [&](auto type) {
    const auto target = gradient_tile<decltype(type)>(params.dq, params.dq_stride, sequence.batch,
                                                      head, sequence.first_q + row0,
                                                      sequence.seqlen_q - row0, params.head_dim);
    store_gradient<typename Traits::TileQ, PlainKeyOrder<Traits::kBlockM>>(target, mma, acc_dq,
                                                                           smem.q);
  };
  if (params.grad_dtype == DType::kFloat32) store(float{});
  else store(typename Traits::Element{});
}

// What of an axis a CTA of dbias_kernel sums over: [first, end).
struct Span {
  int64_t first;
  int64_t end;
};
ANYFLASH_DEVICE Span span_of(int64_t index, bool broadcast, int64_t count) {
  return broadcast ? Span{0, count} : Span{index, index + 1};
}

// Shared memory of dbias_kernel: the tiles, later the sums.
template <class Traits>
inline constexpr int kDbiasPitch = Traits::kBlockN + 1;
template <class Traits>
inline constexpr std::size_t kDbiasBytes = std::max(
    sizeof(typename Traits::SharedStorage), sizeof(float) * Traits::kBlockM * kDbiasPitch<Traits>);

// One tile of dbias a CTA: the gradient of the scores, summed over every axis that the bias is
// broadcast along. Grid: x = all tiles of all (batch or 1, heads or 1) of dbias.
template <class Traits, class Scores>
__global__ void __launch_bounds__(Traits::kThreads, 2)
    dbias_kernel(const __grid_constant__ BackwardScratch params) {
  using namespace cute;
  constexpr int kBlockM = Traits::kBlockM;
  constexpr int kBlockN = Traits::kBlockN;
  auto& smem = *reinterpret_cast<typename Traits::SharedStorage*>(anyflash_smem);
  const Strides& stride = params.dbias.stride;
  const bool one_row = stride.row == 0;
  const bool one_col = stride.col == 0;
  const int64_t row_tiles = one_row ? 1 : (params.dbias_rows + kBlockM - 1) / kBlockM;
  const int64_t col_tiles = one_col ? 1 : (params.dbias_columns + kBlockN - 1) / kBlockN;
  int64_t index = blockIdx.x;
  const int64_t m0 = index % row_tiles;
  index /= row_tiles;
  const int64_t n0 = index % col_tiles;
  index /= col_tiles;
  const int64_t head0 = index % params.dbias_heads;
  const int64_t batch0 = index / params.dbias_heads;
  const Span batches = span_of(batch0, stride.batch == 0, params.batch);
  const Span heads = span_of(head0, stride.head == 0, params.heads);

  auto sum = partition_fragment_C(typename Traits::TiledMma{},
                                  Shape<Int<kBlockM>, Int<kBlockN>>{});  // (MMA, MMA_M, MMA_N)
  clear(sum);
  for (int64_t batch = batches.first; batch < batches.end; ++batch) {
    const Sequence sequence = sequence_of(params, batch);
    const ScoreGradientTile<Traits> tiles(params, sequence, smem);
    const Mask mask(sequence.seqlen_q, sequence.seqlen_k, params.window);
    const Span ms = span_of(m0, one_row, (sequence.seqlen_q + kBlockM - 1) / kBlockM);
    for (int head = static_cast<int>(heads.first); head < heads.end; ++head) {
      const Scores variant(params, sequence, batch, head, typename Scores::Seed(params));
      const BlockMask blocks(params, batch, head);
      for (int64_t m = ms.first; m < ms.end; ++m) {
        const int row0 = static_cast<int>(m) * kBlockM;
        if (row0 >= sequence.seqlen_q) continue;
        const KRange range = mask.k_range(row0, kBlockM, kBlockN);
        const int first = max(range.begin, one_col ? 0 : static_cast<int>(n0));
        const int end = min(range.end, one_col ? range.end : static_cast<int>(n0) + 1);
        for (int n = first; n < end; ++n) {
          if (!blocks.keep(row0, n * kBlockN)) continue;
          __syncthreads();  // every warp has done with the tiles before
          tiles.load_rows(head, row0);
          tiles.load_keys(head / (params.heads / params.heads_k), n * kBlockN);
          cp_async_wait<0>();
          __syncthreads();  // the tiles are there
          tiles.compute_ds(
              variant, mask, params.lse_delta + params.first_row(sequence, batch, head) + row0,
              row0, n * kBlockN, [&](const auto& gradient, const auto&) ANYFLASH_INLINE_LAMBDA {
                auto total = make_tensor(sum.data(), accumulator_as_matrix(sum.layout()));
                CUTE_UNROLL
                for (int i = 0; i < size(total); ++i) total(i) += gradient(i);
              });
        }
      }
    }
  }

  // Through shared memory: a thread adds what belongs to one element, in order.
  constexpr int kPitch = kDbiasPitch<Traits>;
  auto* const sums = reinterpret_cast<float*>(anyflash_smem);
  const auto places = ScoreGradientTile<Traits>::coordinates();
  const auto total = make_tensor(sum.data(), accumulator_as_matrix(sum.layout()));
  __syncthreads();  // every warp has done with the tiles
  CUTE_UNROLL
  for (int i = 0; i < size(total); ++i) {
    sums[get<0>(places(i)) * kPitch + get<1>(places(i))] = total(i);
  }
  __syncthreads();  // all sums are there
  const int rows = one_row ? 1 : kBlockM;
  const int cols = one_col ? 1 : kBlockN;
  for (int i = threadIdx.x; i < rows * cols; i += Traits::kThreads) {
    const int64_t row = m0 * kBlockM + i / cols;
    const int64_t col = n0 * kBlockN + i % cols;
    if ((!one_row && row >= params.dbias_rows) || (!one_col && col >= params.dbias_columns)) {
      continue;
    }
    float x = 0.0f;
    for (int r = one_row ? 0 : i / cols; r < (one_row ? kBlockM : i / cols + 1); ++r) {
      for (int c = one_col ? 0 : i % cols; c < (one_col ? kBlockN : i % cols + 1); ++c) {
        x += sums[r * kPitch + c];
      }
    }
    store_float(params.dbias,
                batch0 * stride.batch + head0 * stride.head + row * stride.row + col * stride.col,
                x);
  }
}

}  // namespace anyflash::sm80
