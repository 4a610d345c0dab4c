// The consumers' loop over the tiles of keys that a block of query rows sees.
#pragma once

#include <type_traits>

#include "common/macros.h"
#include "sm90/forward/config.h"
#include "sm90/forward/key_tiles.h"
#include "sm90/forward/launch_params.h"
#include "sm90/forward/softmax.h"
#include "sm90/forward/stages.h"
#include "sm90/kept_elements.h"
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

// acc_o = sum_j P_j v_j (not normalised) and the softmax statistics of the block's rows. Q K^T of
// each tile and P V of the tile before run beside the softmax of this one.
//
// A tile takes a warpgroup the time to issue its products plus that of its softmax. So other work
// stands beside the exponentials. A thread's second row looks for its maximum beside those of the
// first, and P is rounded beside those of the second. Before that, P V of the tile before has to
// land, for it reads P's registers. Where the config says so, it lands behind both rows. It lands
// before both in masked steps of variants that compare key by key, and with a softcap up to 64.
//
// What nvcc 13.0's ptxas does to it: it moves exponentials past barriers and waits, which they do
// not depend on, but not past a loop. So a wait for memory that should long have come stands where
// they have to stay.
template <class Traits, class Variant>
class ForwardMainloop {
  using Stages = ForwardStages<Traits>;
  using Tiles = TileCursor<Traits, Variant>;
  using AccO = typename Traits::AccO;

 public:
  ANYFLASH_DEVICE ForwardMainloop(const ForwardLaunch& params, Stages& stages,
                                  const BlockWork& block, AccO& acc_o, StagedSoftmax& softmax)
      : params_(params),
        stages_(stages),
        block_(block),
        acc_o_(acc_o),
        softmax_(softmax),
        tiles_(stages, block),
        variant_(params.attention, block.tile, Traits::kBlockM, Traits::kBlockN),
        visible_(block) {}

  // Returns the statistics.
  ANYFLASH_DEVICE FinishedRows run() {
    const int end_key = stages_.end_key(block_);
    const SkippedTile skipped = skip_tiles(stages_, tiles_, end_key);
    if (!tiles_.exists()) {
      stages_.release_last_block_late();
      stages_.release_queries();
      skipped.skip_values(stages_);
      return finished();
    }
    stages_.wait_keys();
    // Under a causal mask, half of the warpgroups see half of their first tile.
    if (Traits::kFewKeys < Traits::kBlockN &&
        tiles_.n() * Traits::kBlockN + Traits::kFewKeys >= end_key) {
      first_step<Traits::kFewKeys>();
    } else {
      first_step<Traits::kBlockN>();
    }
    skipped.skip_values(stages_);
    tiles_.move(stages_);
    do {
      while (tiles_.template is_in_loop<true>()) step<true>();
      while (tiles_.template is_in_loop<false>()) step<false>();
    } while (Tiles::kIsMixed && tiles_.exists());
    return last_values();
  }

 private:
  template <int kKeys>
  ANYFLASH_DEVICE void first_step() {
    auto scores = as_matrix(leading_columns<kKeys>(acc_s_));
    was_masked_ = tiles_.needs_mask();
    stages_.template issue_scores<kKeys>(acc_s_);
    stages_.release_last_block_late();
    draw<kKeys>();
    stages_.template land_scores<0>(acc_s_);
    if (tiles_.is_last()) stages_.release_queries();
    finish_scores(scores, was_masked_);
    rescale_.any = false;  // O is 0
    CUTE_UNROLL
    for (int row = 0; row < kThreadRows; ++row) softmax_.exponentiate(scores, row);
    p_.template round<kKeys>(acc_s_);
    drop_probabilities();
  }

  template <bool kMasked>
  ANYFLASH_DEVICE void step() {
    // What hides scores key by key needs the registers of P of the tile before, too.
    constexpr bool kLandsFirst = Variant::kLandsFirst || (kMasked && Variant::kMasksTiles);
    auto scores = as_matrix(acc_s_);
    stages_.wait_ping_pong();
    stages_.issue_scores(acc_s_);
    if constexpr (Variant::kDrops) {
      // A warp that issues P V waits until its registers have been read. So it draws before, and
      // the other warpgroup may issue its products meanwhile.
      stages_.pass_ping_pong();
      draw<Traits::kBlockN>();
    }
    issue_values();
    if constexpr (!Variant::kDrops) stages_.pass_ping_pong();
    stages_.template land_scores<1>(acc_s_);
    if (tiles_.template is_last<kMasked>()) stages_.release_queries();
    if (kLandsFirst) stages_.land_values(acc_o_);
    finish_scores(scores, kMasked);
    static_assert(kThreadRows == 2);
    const auto land = [&] {
      tiles_.template move<kMasked>(stages_);
      if (!kLandsFirst) stages_.land_values(acc_o_);
    };
    softmax_.exponentiate(scores, 0);
    if (Traits::kConfig.lands_between_rows) land();
    softmax_.exponentiate(scores, 1);
    if (!Traits::kConfig.lands_between_rows) {
      stages_.keep_before_wait(acc_s_);
      land();
    }
    p_.round(acc_s_);
    drop_probabilities();
    was_masked_ = kMasked;
  }

  ANYFLASH_DEVICE FinishedRows last_values() {
    issue_values();
    const FinishedRows rows = finished();
    stages_.land_values(acc_o_);
    return rows;
  }

  // P V of the tile before is on its way.
  ANYFLASH_DEVICE void issue_values() {
    auto out = as_matrix(acc_o_);
    rescale_.apply(out);
    stages_.wait_values(was_masked_);
    stages_.issue_values(acc_o_, p_);
  }

  // What comes before the exponentials of a tile, or of its first keys: scores are changed and
  // masked, and the rows' references move.
  template <class Scores>
  ANYFLASH_DEVICE void finish_scores(Scores& scores, bool masked) {
    modify(scores, masked);
    if (masked) stages_.mask_scores(scores, visible(), tiles_.n());
    rescale_ = softmax_.move_references(scores);
  }

  // 0 for the probabilities that dropout does not keep.
  ANYFLASH_DEVICE void drop_probabilities() {
    if constexpr (Variant::kDrops) drop(p_, kept_);
  }

  // What the variant does to scores before they are masked by position.
  template <class Scores>
  ANYFLASH_DEVICE void modify(Scores& scores, bool masked) {
    if constexpr (Variant::kMasksTiles) {
      if (masked && !tiles_.sees_all()) {
        stages_.hide_unseen(scores, variant_, block_.tile.first_row, tiles_.n());
      }
    } else if constexpr (Variant::kAsksPlaces) {
      const auto coordinates = coordinates_of(scores);
      variant_.template modify_scores<Variant::kOps>(
          scores, nullptr,
          ScorePlaces<decltype(coordinates)>{coordinates, block_.tile.first_row,
                                             tiles_.n() * Traits::kBlockN, true});
    }
  }

  // Which of a tile's probabilities dropout keeps, while its scores are on their way.
  template <int kKeys>
  ANYFLASH_DEVICE void draw() {
    if constexpr (Variant::kDrops) {
      stages_.template draw<kKeys>(variant_.dropout, block_.tile.first_row, tiles_.n(), kept_);
    }
  }

  // Where a variant masks tiles anywhere, made anew for each: the loop needs the registers.
  ANYFLASH_DEVICE RowBounds visible() const {
    return Variant::kMasksTiles ? RowBounds(block_) : visible_;
  }
  ANYFLASH_DEVICE FinishedRows finished() const {
    return softmax_.finish(sink_of(params_, block_.tile.head));
  }

  const ForwardLaunch& params_;
  Stages& stages_;
  const BlockWork& block_;
  AccO& acc_o_;
  StagedSoftmax& softmax_;
  Tiles tiles_;
  const Variant variant_;
  const RowBounds visible_;
  typename Traits::AccS acc_s_;
  typename Stages::Probabilities p_;
  KeptElements kept_;  // of dropout
  Rescale rescale_;
  bool was_masked_;  // the tile before
};

}  // namespace anyflash::sm90
