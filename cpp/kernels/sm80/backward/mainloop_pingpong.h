// The backward's main loop where two groups of warps take the tiles of query rows alternately, over
// the stages of mainloop.h's.
#pragma once

#include <cute/tensor.hpp>

#include "common/macros.h"
#include "cuda/query_tile_iterator.h"
#include "sm80/backward/accumulate.h"
#include "sm80/backward/load.h"
#include "sm80/backward/pingpong.h"
#include "sm80/backward/stages.h"
#include "variant/backward_scratch.h"
#include "variant/mask.h"
#include "variant/work_tile.h"

namespace anyflash::sm80 {

// As backward_mainloop(). A step takes a tile of the group's, and adds what the other group's tile
// before it gives to dK and dV of the group's keys.
template <class Traits, class Variant, class AccK, class AccV>
ANYFLASH_DEVICE void pingpong_mainloop(const BackwardScratch& params, const BackwardWorkTile& block,
                                       typename Traits::SharedStorage& smem, AccK& acc_dk,
                                       AccV& acc_dv) {
  using namespace cute;
  using Tiles = QueryTileIterator<Traits, Variant>;
  const typename Traits::SequenceInLoop sequence = block.sequence;
  const Mask mask = Mask(sequence, params.attention.window).up_to_last_row();
  Tiles tiles(params, block, mask);
  if (!tiles.valid()) return;
  PingPong<Traits, Tiles> schedule(smem.ping_pong, tiles);
  const int group = schedule.group();
  RowLoader<Traits> rows(params, sequence, smem);
  KeyLoader<Traits> keys(params, sequence, block, smem);
  const ScoreStage<Traits, Variant> scores(smem, group);
  const KeyStage<Traits> key_gradients(smem);
  const QueryStage<Traits> query_gradients(smem, group);
  const auto add_to_keys = [&](int of_group, int buffer) ANYFLASH_INLINE_LAMBDA {
    const KeyStage<Traits> stage = key_gradients.at(of_group, buffer);
    stage.template accumulate_dv<false>(acc_dv);
    stage.template accumulate_dk<false>(acc_dk);
  };

  keys.load_k();
  keys.load_v();
  rows.advance(group);
  if (tiles.valid()) rows.load(tiles);
  cp_async_fence();
  cp_async_wait<0>();
  keys.note_nonfinite_k();
  __syncthreads();  // K and V are there, and all of K has been looked at
  if (smem.nonfinite_keys != 0) tiles.mask_rows_beyond(sequence.seqlen_q);

  const int64_t first_row = params.first_row(sequence, block.batch, 0);
  const typename Variant::Seed seed(params.attention);
  const auto step = [&](auto masked, auto diagonal) ANYFLASH_INLINE_LAMBDA {
    constexpr bool kMasked = decltype(masked)::value;
    constexpr bool kDiagonal = decltype(diagonal)::value;
    const ScoreTile tile{mask, tiles.row(), block.first_key, tiles.see().all};
    const Variant variant(params, sequence, block.batch, tiles.head(), seed);
    const int64_t scratch_row = first_row + tiles.head() * params.padded_rows + tile.row0;
    const auto lse_and_delta = scores.load_lse_and_delta(params.lse_and_delta + scratch_row);
    cp_async_wait<0>();
    if (kMasked) rows.clear_nonfinite();
    schedule.begin();
    scores.at(schedule.buffer())
        .template compute_p_and_ds<kMasked, kDiagonal>(variant, lse_and_delta, tile, schedule);
    schedule.end_scores();
    if (schedule.has_peer()) {
      if (schedule.sees_peer()) add_to_keys(1 - group, schedule.other_buffer());
      schedule.release_peer();
    }
    schedule.await_scores();
    if (!kDiagonal || group == 0) add_to_keys(group, schedule.buffer());
    const int from = schedule.buffer();
    schedule.end(tiles);
    if (tiles.valid()) {
      rows.advance(schedule.buffer() - from);
      rows.load(tiles);
      cp_async_fence();
    }

    if (params.dq_accum == nullptr) return;
    float* const dq_accum = params.dq_accum + scratch_row * Traits::kHeadDim;
    if (kMasked && smem.nonfinite_keys != 0) {
      // K stays as it is: the other group's scores want its NaN.
      constexpr int kKeys = kDiagonal ? Traits::kTopKeys : Traits::kBlockN;
      add_finite_to_dq_accum<Traits, kKeys>(dq_accum, smem.ds(group), smem.k.data(),
                                            Traits::row_thread());
    } else {
      query_gradients.template accumulate_dq<kDiagonal>(dq_accum);
    }
  };
  for_each_tile<Traits, Variant>(tiles, step);

  if (!schedule.has_peer()) return;
  schedule.await_peer_scores();
  if (schedule.sees_peer()) add_to_keys(1 - group, schedule.other_buffer());
}

}  // namespace anyflash::sm80
