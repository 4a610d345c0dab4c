// The consumers' loop over the tiles of keys that a block of query rows sees.
#pragma once

#include <type_traits>

#include "common/macros.h"
#include "sm90/forward/config.h"
#include "sm90/forward/launch_params.h"
#include "sm90/forward/softmax.h"
#include "sm90/forward/stages.h"
#include "variant/broadcast_tensor.h"
#include "variant/mask.h"

namespace anyflash::sm90 {

// V of tile `skipped`, if there is one.
template <class Traits>
ANYFLASH_DEVICE void skip_values(ForwardStages<Traits>& stages, const KRange& range, int skipped) {
  if (skipped >= 0) stages.skip_values(range.needs_mask(skipped));
}

// Passes over the tiles of which other warpgroups alone see something: this one's rows see nothing
// from end_key on. Returns the first tile that is left, -1 for none. V of the last one passed over,
// `skipped`, remains: it may come later than the next K.
template <class Traits>
ANYFLASH_DEVICE int skip_tiles(ForwardStages<Traits>& stages, const KRange& range, int end_key,
                               int& skipped) {
  int tile = range.first();
  while (tile >= 0 && tile * Traits::kBlockN >= end_key) {
    const int next = range.next(tile);
    stages.skip_keys(next >= 0);
    skip_values(stages, range, skipped);
    skipped = tile;
    tile = next;
  }
  return tile;
}

ANYFLASH_DEVICE float sink_of(const ForwardLaunch& params, int head) {
  const auto& sinks = params.attention.sinks;
  return sinks.data == nullptr ? -INFINITY : load_float(sinks, head * sinks.stride.head);
}

// acc_o = sum_j P_j v_j (not normalised) and the softmax statistics of the block's rows, which it
// returns. Q K^T of each tile and P V of the tile before run beside the softmax of this one.
//
// What nvcc 13.0's ptxas does to it: it moves exponentials past barriers and waits, which they do
// not depend on, but not past a loop. So a wait for memory that should long have come stands where
// they have to stay.
template <class Traits>
ANYFLASH_DEVICE FinishedRows forward_mainloop(const ForwardLaunch& params,
                                              ForwardStages<Traits>& stages, const BlockWork& block,
                                              typename Traits::AccO& acc_o,
                                              StagedSoftmax& softmax) {
  const KRange range = uniform(block.range);
  const int end_key = stages.end_key(block);
  int skipped = -1;
  int tile = skip_tiles(stages, range, end_key, skipped);
  if (tile < 0) {
    stages.release_last_block_late();
    stages.release_queries();
    skip_values(stages, range, skipped);
    return softmax.finish(sink_of(params, block.tile.head));
  }
  const VisibleKeys visible(block);
  typename Traits::AccS acc_s;
  typename ForwardStages<Traits>::Probabilities p;
  auto scores = as_matrix(acc_s);
  auto out = as_matrix(acc_o);
  bool was_masked = range.needs_mask(tile);
  Rescale rescale;

  const auto first_step = [&](auto keys) ANYFLASH_INLINE_LAMBDA {
    constexpr int kKeys = decltype(keys)::value;
    auto scores = as_matrix(leading_columns<kKeys>(acc_s));
    stages.template issue_scores<kKeys>(acc_s);
    stages.release_last_block_late();
    stages.template land_scores<0>(acc_s);
    if (range.next(tile) < 0) stages.release_queries();
    if (was_masked) stages.mask_scores(scores, visible, tile);
    rescale = softmax.move_references(scores);
    softmax.exponentiate(scores);
    p.template round<kKeys>(acc_s);
  };
  stages.wait_keys();
  // Under a causal mask, half of the warpgroups see half of their first tile.
  if (Traits::kFewKeys < Traits::kBlockN && tile * Traits::kBlockN + Traits::kFewKeys >= end_key) {
    first_step(cute::Int<Traits::kFewKeys>{});
  } else {
    first_step(cute::Int<Traits::kBlockN>{});
  }
  rescale.any = false;  // O is 0
  skip_values(stages, range, skipped);
  tile = range.next(tile);
  if (tile >= 0) stages.wait_keys();

  // `next`: the tile after this one, -1 for none.
  const auto step = [&](auto masked, int next) ANYFLASH_INLINE_LAMBDA {
    constexpr bool kMasked = decltype(masked)::value;
    stages.wait_ping_pong();
    stages.issue_scores(acc_s);
    rescale.apply(out);
    stages.wait_values(was_masked);
    stages.issue_values(acc_o, p);
    stages.pass_ping_pong();
    stages.template land_scores<1>(acc_s);
    if (next < 0) stages.release_queries();
    if constexpr (kMasked) stages.mask_scores(scores, visible, tile);
    rescale = softmax.move_references(scores);
    softmax.exponentiate(scores);
    stages.keep_before_wait(acc_s);
    if (next >= 0) stages.wait_keys();
    stages.land_values(acc_o);
    p.round(acc_s);
    was_masked = kMasked;
    tile = next;
  };
  while (tile >= 0 && range.needs_mask(tile)) step(std::true_type{}, range.next(tile));
  while (tile >= 0) step(std::false_type{}, tile > range.unmasked_begin ? tile - 1 : -1);

  rescale.apply(out);
  stages.wait_values(was_masked);
  stages.issue_values(acc_o, p);
  const FinishedRows rows = softmax.finish(sink_of(params, block.tile.head));
  stages.land_values(acc_o);
  return rows;
}

}  // namespace anyflash::sm90
