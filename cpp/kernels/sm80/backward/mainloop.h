// The backward's main loop of one CTA. It goes over all tiles of query rows that see a block of
// keys, for query heads that share its K/V head (FlashAttention-2, arXiv 2307.08691, section
// 3.1.2). All warps work at the same tile; in mainloop_pingpong.h two groups of warps take the
// tiles alternately.
#pragma once

#include <cute/tensor.hpp>
#include <type_traits>

#include "common/macros.h"
#include "cuda/query_tile_iterator.h"
#include "sm80/backward/load.h"
#include "sm80/backward/stages.h"
#include "variant/backward_scratch.h"
#include "variant/mask.h"
#include "variant/work_tile.h"

namespace anyflash::sm80 {

// With kReloadV, P and dS lie where V was, which comes again with each tile, during Q K^T.
template <bool kReloadV>
struct WaitsForV {
  ANYFLASH_DEVICE void before_dp() const {
    if constexpr (kReloadV) {
      cute::cp_async_wait<0>();
      __syncthreads();  // V is there
    }
  }
  ANYFLASH_DEVICE void after_dp() const {
    if constexpr (kReloadV) __syncthreads();  // every warp has done with V
  }
  ANYFLASH_DEVICE void before_p() const {}
};

// acc_dk += dS^T Q and acc_dv += P^T dO over all tiles, without the scales of dS and of P; and dS K
// to dq_accum, where there is one.
//
// A step takes one tile. The next one arrives during the last product, with two buffers during the
// last two. smem.nonfinite_dout says afterwards whether NaN or infinity was taken out of a partly
// hidden tile of dO: restore_dout() then has to follow.
template <class Traits, class Variant, class AccK, class AccV>
ANYFLASH_DEVICE void backward_mainloop(const BackwardScratch& params, const BackwardWorkTile& block,
                                       typename Traits::SharedStorage& smem, AccK& acc_dk,
                                       AccV& acc_dv) {
  using namespace cute;
  const typename Traits::SequenceInLoop sequence = block.sequence;
  const Mask mask = Mask(sequence, params.attention.window).up_to_last_row();
  QueryTileIterator<Traits, Variant> tiles(params, block, mask);
  if (!tiles.valid()) return;
  RowLoader<Traits> rows(params, sequence, smem);
  KeyLoader<Traits> keys(params, sequence, block, smem);
  ScoreStage<Traits, Variant> scores(smem, 0);
  KeyStage<Traits> key_gradients(smem);
  const QueryStage<Traits> query_gradients(smem, 0);

  keys.load_k();
  if constexpr (!Traits::kReloadV) keys.load_v();
  rows.load(tiles);
  cp_async_fence();
  cp_async_wait<0>();
  keys.note_nonfinite_k();
  __syncthreads();  // all of K has been looked at
  if (smem.nonfinite_keys != 0) tiles.mask_rows_beyond(sequence.seqlen_q);

  const int64_t first_row = params.first_row(sequence, block.batch, 0);
  const typename Variant::Seed seed(params.attention);
  int next_buffer = 1;  // from the tile's: 1 or -1
  const auto step = [&](auto masked, auto diagonal) ANYFLASH_INLINE_LAMBDA {
    constexpr bool kMasked = decltype(masked)::value;
    constexpr bool kDiagonal = decltype(diagonal)::value;
    const ScoreTile tile{mask, tiles.row(), block.first_key, tiles.see().all};
    const Variant variant(params, sequence, block.batch, tiles.head(), seed);
    const int64_t scratch_row = first_row + tiles.head() * params.padded_rows + tile.row0;
    const auto lse_and_delta = scores.load_lse_and_delta(params.lse_and_delta + scratch_row);
    cp_async_wait<0>();
    if (kMasked) rows.clear_nonfinite();
    __syncthreads();  // the tile is there; every warp has done with the one before, P and dS
    tiles.advance();
    const auto load_next = [&] {
      if (!tiles.valid()) return;
      if constexpr (Traits::kStages == 2) rows.advance(next_buffer);
      rows.load(tiles);
      cp_async_fence();
    };

    if constexpr (Traits::kReloadV) {
      keys.load_v();
      cp_async_fence();
    }
    scores.template compute_p_and_ds<kMasked, kDiagonal>(variant, lse_and_delta, tile,
                                                         WaitsForV<Traits::kReloadV>{});
    __syncthreads();  // P and dS are there
    key_gradients.template accumulate_dv<kDiagonal>(acc_dv);
    if constexpr (Traits::kStages == 2) load_next();
    key_gradients.template accumulate_dk<kDiagonal>(acc_dk);
    if constexpr (Traits::kStages == 1) {
      __syncthreads();  // every warp has done with Q and dO
      load_next();
    } else {
      scores.advance(next_buffer);
      key_gradients.advance(next_buffer);
      next_buffer = -next_buffer;
    }

    if (params.dq_accum == nullptr) return;
    const bool clear_keys = kMasked && smem.nonfinite_keys != 0;
    if (clear_keys) {
      keys.clear_nonfinite_k();
      __syncthreads();  // K without NaN and infinity
    }
    query_gradients.template accumulate_dq<kDiagonal>(params.dq_accum +
                                                      scratch_row * Traits::kHeadDim);
    if (clear_keys) {
      __syncthreads();  // every warp has done with that K
      keys.load_k();
      cp_async_fence();
    }
  };
  for_each_tile<Traits, Variant>(tiles, step);
}

}  // namespace anyflash::sm80
