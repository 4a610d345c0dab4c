// A pass over blocks of rows, which does not depend on the order of CTAs: dQ where it must be
// deterministic, and the gradient of ALiBi's slopes.
#pragma once

#include <cute/tensor.hpp>

#include "common/launch.h"
#include "common/reduce.h"
#include "sm80/backward/epilogue.h"
#include "sm80/backward/score_gradient_tile.h"
#include "sm80/forward/traits.h"
#include "variant/block_mask.h"
#include "variant/key_range_bounds.h"
#include "variant/sequence.h"

namespace anyflash::sm80 {

// dQ of one block of rows a CTA, if params.deterministic, and its share of the gradient of ALiBi's
// slope, if that is wanted. Of dQ it makes kDqColumns columns from params.dq_first_column on. Grid:
// x = all row blocks of all (batch, head) pairs.
template <class Traits, class Variant>
__global__ void __launch_bounds__(Traits::kThreads, 2)
    deterministic_dq_kernel(const __grid_constant__ BackwardScratch params) {
  using namespace cute;
  auto& smem = *reinterpret_cast<typename Traits::SharedStorage*>(anyflash_smem);
  const int row_blocks = count_tiles(params.attention.seqlen_q, Traits::kBlockM);
  const int row0 = (row_blocks - 1 - static_cast<int>(blockIdx.x) % row_blocks) * Traits::kBlockM;
  const int pair = static_cast<int>(blockIdx.x) / row_blocks;
  const int64_t batch = pair / params.attention.heads;
  const int head = pair % params.attention.heads;
  const int head_k = head / (params.attention.heads / params.attention.heads_k);
  const Sequence sequence = sequence_of(params.attention, batch);

  typename Traits::TiledMma mma;
  auto acc_dq = partition_fragment_C(mma, Shape<Int<Traits::kBlockM>, Int<Traits::kDqColumns>>{});
  clear(acc_dq);  // (MMA, MMA_M, MMA_D)
  float slope_sum = 0.0f;
  if (row0 < sequence.seqlen_q) {
    ScoreGradientTile<Traits> tiles(params, sequence, smem);
    const Mask mask(sequence, params.attention.window);
    const Variant variant(params, sequence, batch, head, typename Variant::Seed(params.attention));
    const BlockMask blocks(params.attention, batch, head);
    const VisibleKeys visible(params.attention, sequence, batch, head_k, row0, Traits::kBlockM);
    const LseAndDelta* const lse_and_delta =
        params.lse_and_delta + params.first_row(sequence, batch, head) + row0;
    tiles.load_rows(head, row0);
    const KRange range = mask.k_range(row0, Traits::kBlockM, Traits::kBlockN);
    for (int n = range.begin; n < range.end; ++n) {
      const int col0 = n * Traits::kBlockN;
      if ((Variant::kFeatures & kBlockMask) != 0 && !blocks.keep(row0, col0)) continue;
      Visibility seen{true, true};
      if constexpr ((Variant::kFeatures & kKeyRanges) != 0) {
        seen = visible.of(col0, Traits::kBlockN);
      }
      if (!seen.any) continue;
      tiles.load_keys(head_k, col0);
      cp_async_wait<0>();
      __syncthreads();  // the tile is there
      const auto ds = tiles.compute_ds(
          variant, mask, lse_and_delta, row0, col0, seen.all,
          [&](const auto& gradient, const auto& places) ANYFLASH_INLINE_LAMBDA {
            if constexpr ((Variant::kFeatures & kAlibi) != 0) {
              if (params.slope_sums == nullptr) return;
              CUTE_UNROLL
              for (int i = 0; i < size(gradient); ++i) {
                const int row = row0 + get<0>(places(i));
                if (row >= sequence.seqlen_q) continue;  // it may see NaN that no row sees
                slope_sum += gradient(i) * variant.slope_factor(row, col0 + get<1>(places(i)));
              }
            }
          });
      if (params.deterministic) {
        if (range.needs_mask(n) || !seen.all || variant.may_hide_anywhere())
          tiles.clear_nonfinite_keys();
        tiles.add_product(acc_dq, ds);
      }
      __syncthreads();  // every warp has done with K and V
    }
  }

  if (params.slope_sums != nullptr) {
    const int64_t sums = params.slope_sums_of_head(params.attention.seqlen_q);
    const float sum = block_sum<Traits::kThreads>(slope_sum, reinterpret_cast<float*>(&smem.k));
    if (threadIdx.x == 0) params.slope_sums[pair * sums + row0 / params.kSlopeSumRows] = sum;
  }
  if (!params.deterministic || row0 >= sequence.seqlen_q) return;
  CUTE_UNROLL
  for (int i = 0; i < size(acc_dq); ++i) acc_dq(i) *= params.ds_scale;
  cp_async_wait<0>();
  __syncthreads();  // every warp has done with Q, also if there were no keys
  visit_gradient_type<Traits>(params, [&](auto type) {
    const auto target =
        gradient_tile<decltype(type)>(params.dq, params.dq_stride, query_rows(sequence, head, row0),
                                      params.attention.head_dim, params.accumulates_dq)
            .from_column(params.dq_first_column);
    store_gradient<typename Traits::TileQ, PlainKeyOrder<Traits::kBlockM>>(target, mma, acc_dq,
                                                                           smem.q);
  });
}

}  // namespace anyflash::sm80
