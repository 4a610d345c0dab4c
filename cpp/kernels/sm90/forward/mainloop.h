// The consumers' loop over the tiles of keys that a block of query rows sees.
#pragma once

#include <type_traits>

#include "common/macros.h"
#include "sm90/forward/config.h"
#include "sm90/forward/key_tiles.h"
#include "sm90/forward/launch_params.h"
#include "sm90/forward/softmax.h"
#include "sm90/forward/stages.h"
#include "variant/broadcast_tensor.h"
#include "variant/score_places.h"

namespace anyflash::sm90 {

// A tile that was passed over, whose V has not been.
struct SkippedTile {
  bool exists = false;
  bool needs_mask = false;

  template <class Traits>
  ANYFLASH_DEVICE void skip_values(ForwardStages<Traits>& stages) const {
    if (exists) stages.skip_values(needs_mask);
  }
};

// Passes over the tiles of which other warpgroups alone see something: this one's rows see nothing
// from end_key on. V of the last one, which is returned, remains: it may come later than the next
// K.
template <class Traits, class Tiles>
ANYFLASH_DEVICE SkippedTile skip_tiles(ForwardStages<Traits>& stages, Tiles& tiles, int end_key) {
  SkippedTile skipped;
  while (tiles.exists() && tiles.n() * Traits::kBlockN >= end_key) {
    const bool needs_mask = tiles.needs_mask();
    stages.skip_keys(!tiles.is_last());
    tiles.move(stages);
    skipped.skip_values(stages);
    skipped = {true, needs_mask};
  }
  return skipped;
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
template <class Traits, class Variant>
ANYFLASH_DEVICE FinishedRows forward_mainloop(const ForwardLaunch& params,
                                              ForwardStages<Traits>& stages, const BlockWork& block,
                                              typename Traits::AccO& acc_o,
                                              StagedSoftmax& softmax) {
  using Tiles = TileCursor<Traits, Variant>;
  Tiles tiles(stages, block);
  const int end_key = stages.end_key(block);
  const SkippedTile skipped = skip_tiles(stages, tiles, end_key);
  if (!tiles.exists()) {
    stages.release_last_block_late();
    stages.release_queries();
    skipped.skip_values(stages);
    return softmax.finish(sink_of(params, block.tile.head));
  }
  const Variant variant(params.attention, block.tile, Traits::kBlockM, Traits::kBlockN);
  // Where a variant masks tiles anywhere, these are made anew for each: the loop needs the registers.
  const VisibleKeys visible_in_all(block);
  const auto visible = [&]() ANYFLASH_INLINE_LAMBDA {
    return Variant::kMasksTiles ? VisibleKeys(block) : visible_in_all;
  };
  typename Traits::AccS acc_s;
  typename ForwardStages<Traits>::Probabilities p;
  auto scores = as_matrix(acc_s);
  auto out = as_matrix(acc_o);
  bool was_masked = tiles.needs_mask();
  Rescale rescale;

  // What happens to a tile's scores before the softmax, or to those of its first keys.
  const auto modify = [&](auto& scores, bool masked) ANYFLASH_INLINE_LAMBDA {
    if constexpr (Variant::kMasksTiles) {
      if (masked && !tiles.sees_all()) {
        stages.hide_by_ranges(scores, variant, block.tile.first_row, tiles.n());
      }
    } else if constexpr (Variant::kAsksPlaces) {
      const auto coordinates = coordinates_of(scores);
      variant.template modify_scores<Variant::kOps>(
          scores, nullptr,
          ScorePlaces<decltype(coordinates)>{coordinates, block.tile.first_row,
                                             tiles.n() * Traits::kBlockN, true});
    }
    if (masked) stages.mask_scores(scores, visible(), tiles.n());
  };

  // Which of a tile's probabilities dropout keeps, while its scores are on their way.
  uint32_t kept[kThreadRows];
  const auto draw = [&](auto keys) ANYFLASH_INLINE_LAMBDA {
    if constexpr (Variant::kDrops)
      stages.template draw<decltype(keys)::value>(variant.dropout, block.tile.first_row, tiles.n(),
                                                  kept);
  };

  const auto first_step = [&](auto keys) ANYFLASH_INLINE_LAMBDA {
    constexpr int kKeys = decltype(keys)::value;
    auto scores = as_matrix(leading_columns<kKeys>(acc_s));
    stages.template issue_scores<kKeys>(acc_s);
    stages.release_last_block_late();
    draw(keys);
    stages.template land_scores<0>(acc_s);
    if (tiles.is_last()) stages.release_queries();
    modify(scores, was_masked);
    rescale = softmax.move_references(scores);
    softmax.exponentiate(scores);
    if constexpr (Variant::kDrops) stages.drop(scores, kept);
    p.template round<kKeys>(acc_s);
  };
  stages.wait_keys();
  // Under a causal mask, half of the warpgroups see half of their first tile.
  if (Traits::kFewKeys < Traits::kBlockN &&
      tiles.n() * Traits::kBlockN + Traits::kFewKeys >= end_key) {
    first_step(cute::Int<Traits::kFewKeys>{});
  } else {
    first_step(cute::Int<Traits::kBlockN>{});
  }
  rescale.any = false;  // O is 0
  skipped.skip_values(stages);
  tiles.move(stages);

  const auto step = [&](auto masked) ANYFLASH_INLINE_LAMBDA {
    constexpr bool kMasked = decltype(masked)::value;
    // P of the tile before has to be out of the way of what hides scores by key.
    constexpr bool kLandsFirst = kMasked && Variant::kMasksTiles;
    stages.wait_ping_pong();
    stages.issue_scores(acc_s);
    rescale.apply(out);
    stages.wait_values(was_masked);
    stages.issue_values(acc_o, p);
    stages.pass_ping_pong();
    draw(cute::Int<Traits::kBlockN>{});
    stages.template land_scores<1>(acc_s);
    if (tiles.template is_last<kMasked>()) stages.release_queries();
    if (kLandsFirst) stages.land_values(acc_o);
    modify(scores, kMasked);
    rescale = softmax.move_references(scores);
    softmax.exponentiate(scores);
    if constexpr (Variant::kDrops) stages.drop(scores, kept);
    stages.keep_before_wait(acc_s);
    tiles.template move<kMasked>(stages);
    if (!kLandsFirst) stages.land_values(acc_o);
    p.round(acc_s);
    was_masked = kMasked;
  };
  do {
    while (tiles.template is_in_loop<true>()) step(std::true_type{});
    while (tiles.template is_in_loop<false>()) step(std::false_type{});
  } while (Tiles::kIsMixed && tiles.exists());

  rescale.apply(out);
  stages.wait_values(was_masked);
  stages.issue_values(acc_o, p);
  const FinishedRows rows = softmax.finish(sink_of(params, block.tile.head));
  stages.land_values(acc_o);
  return rows;
}

}  // namespace anyflash::sm90
