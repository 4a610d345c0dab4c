// What a forward kernel does beyond masks by position: what its main loop asks, and its epilogue.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cute/tensor.hpp>
#include <type_traits>

#include "common/element.h"
#include "common/layout.h"
#include "common/macros.h"
#include "kernel_descriptor.h"
#include "params.h"
#include "variant/apply_dropout.h"
#include "variant/apply_key_ranges.h"
#include "variant/block_mask.h"
#include "variant/dropout.h"
#include "variant/forward_dropout.h"
#include "variant/key_ranges.h"
#include "variant/score_mod.h"
#include "variant/score_places.h"
#include "variant/uniform_seed.h"
#include "variant/work_tile.h"

namespace anyflash {

template <ScoreOps kOps>
using ScoreOpsTag = std::integral_constant<ScoreOps, kOps>;

// Nothing: what it answers is a constant. The others answer the same questions.
struct PlainForward {
  static constexpr bool kNaturalUnits = false;  // scores are scaled by the variant, not the softmax
  static constexpr bool kKeysInRuns = false;    // a thread's keys must come in runs of eight
  static constexpr bool kAsksPlaces = false;    // where unmasked tiles lie
  static constexpr bool kSkipsTiles = false;    // visits() may say no
  // What masked steps do to scores.
  static constexpr ScoreOps kOps = ScoreOps::kNone;
  static constexpr unsigned kFeatures = kNoFeatures;

  ANYFLASH_DEVICE PlainForward(const Attention&, const ForwardWorkTile&, int) {}

  // Calls loop(ops) with the least that is enough for unmasked tiles.
  template <class Loop>
  ANYFLASH_DEVICE void dispatch_score_ops(const Loop& loop) const {
    loop(ScoreOpsTag<kOps>{});
  }
  // Whether any key of a tile may be visible to the block's rows. Whole warps ask.
  ANYFLASH_DEVICE bool visits(int, int) const { return true; }
  // Whether keys may be hidden in tiles that need no mask, in a loop for kOps.
  template <ScoreOps>
  ANYFLASH_DEVICE bool may_hide() const {
    return false;
  }

  // The stages of a step: before Q K^T; before and after the softmax; as P V reaches block k of P,
  // which is rounded. What prefetch() returns goes to modify_scores().
  template <bool kEdge, ScoreOps, class Places>
  ANYFLASH_DEVICE std::nullptr_t prefetch(const Places&) const {
    return nullptr;
  }
  template <ScoreOps, class Scores, class Prefetched, class Places>
  ANYFLASH_DEVICE void modify_scores(Scores&, const Prefetched&, const Places&) const {}
  template <ScoreOps, class Scores, class Places>
  ANYFLASH_DEVICE void drop(Scores&, const Places&) const {}
  template <class Probabilities, class Places>
  ANYFLASH_DEVICE void before_value_block(int, Probabilities&, const Places&) const {}

  // For the epilogue.
  ANYFLASH_DEVICE bool may_hide_anywhere() const { return false; }
  ANYFLASH_DEVICE bool keep(int, int) const { return true; }
  ANYFLASH_DEVICE bool is_dropped(int, int) const { return false; }
  ANYFLASH_DEVICE float dropout_scale() const { return 1.0f; }
};

// What follows from a score and its place alone: the plain kernel with a few more instructions.
struct ScoredForward : PlainForward {
  static constexpr bool kAsksPlaces = true;
  static constexpr ScoreOps kOps = ScoreOps::kSoftcapAlibi;
  static constexpr unsigned kFeatures = kSoftcap | kLargeSoftcap | kAlibi;

  ANYFLASH_DEVICE ScoredForward(const Attention& attention, const ForwardWorkTile& work_tile,
                                int keys)
      : PlainForward(attention, work_tile, keys),
        score_mod(attention, work_tile.sequence, work_tile.batch, work_tile.head, 1.0f,
                  attention.scale_log2 * kLn2) {}

  template <class Loop>
  ANYFLASH_DEVICE void dispatch_score_ops(const Loop& loop) const {
    if (score_mod.covered_by(ScoreOps::kAlibi)) loop(ScoreOpsTag<ScoreOps::kAlibi>{});
    else if (score_mod.covered_by(ScoreOps::kSoftcap)) loop(ScoreOpsTag<ScoreOps::kSoftcap>{});
    else loop(ScoreOpsTag<kOps>{});
  }
  template <ScoreOps kScoreOps, class Scores, class Prefetched, class Places>
  ANYFLASH_DEVICE void modify_scores(Scores& scores, const Prefetched& none,
                                     const Places& places) const {
    score_mod.template apply<kScoreOps, /*kScale=*/false>(scores, none, places.coordinates,
                                                          places.row0, places.col0);
  }

  ScoreMod score_mod;
};

// Dropout alone: the plain kernel, but for P V (variant/forward_dropout.h).
struct DropoutForward : PlainForward {
  static constexpr bool kKeysInRuns = true;
  static constexpr bool kAsksPlaces = true;
  static constexpr unsigned kFeatures = kDropout;

  ANYFLASH_DEVICE DropoutForward(const Attention& attention, const ForwardWorkTile& work_tile,
                                 int keys)
      : PlainForward(attention, work_tile, keys),
        dropout(attention, UniformSeed(attention), work_tile.batch, work_tile.head) {}

  // Eight of a thread's columns are two blocks of the sum, and neighbouring keys.
  // Dropped where the product gets to them, so that the rounds of Philox for some keys run beside
  // the tensor instructions for others, and few draws have to be kept.
  template <class Probabilities, class Places>
  ANYFLASH_DEVICE void before_value_block(int k, Probabilities& p, const Places& places) const {
    if (k % 2 != 0) return;
    auto pairs = cute::recast<uint32_t>(p);
    drop_run(pairs, accumulator_as_matrix(p.layout()), dropout, places, 4 * k);
  }

  ANYFLASH_DEVICE bool is_dropped(int row, int col) const {
    return !dropout.keep(dropout.draws(row, col / 8)[col % 8]);
  }
  ANYFLASH_DEVICE float dropout_scale() const { return dropout.scale(); }

  Dropout dropout;
};

// Every feature, in any combination; those that are not asked for cost a uniform branch a tile.
// Tiles without masks have a loop of their own where no bias, softcap or dropout is asked for, and
// another one where there are key ranges.
struct GenericForward {
  static constexpr bool kNaturalUnits = true;
  static constexpr bool kKeysInRuns = true;
  static constexpr bool kAsksPlaces = true;
  static constexpr bool kSkipsTiles = true;
  static constexpr ScoreOps kOps = ScoreOps::kAll;
  static constexpr unsigned kFeatures = kAllFeatures;

  ANYFLASH_DEVICE GenericForward(const Attention& attention, const ForwardWorkTile& work_tile,
                                 int tile_keys)
      : score_mod(attention, work_tile.sequence, work_tile.batch, work_tile.head,
                  static_cast<float>(attention.softmax_scale), 1.0f),
        blocks(BlockMask(attention, work_tile.batch, work_tile.head), work_tile.first_row,
               tile_keys),
        ranges(attention, work_tile.sequence, work_tile.batch, work_tile.head_k),
        first_row(work_tile.first_row),
        keys(tile_keys),
        dropout(attention, work_tile.batch, work_tile.head) {}

  template <class Loop>
  ANYFLASH_DEVICE void dispatch_score_ops(const Loop& loop) const {
    const bool small = score_mod.covered_by(ScoreOps::kAlibi) && !dropout.active();
    if (small && !ranges.active()) loop(ScoreOpsTag<ScoreOps::kAlibi>{});
    else if (small) loop(ScoreOpsTag<ScoreOps::kAlibiRanges>{});
    else loop(ScoreOpsTag<kOps>{});
  }
  // Whether block map and key ranges leave something of a tile of keys.
  ANYFLASH_DEVICE bool visits(int tile, int rows) const {
    return blocks.keep(tile) && visits_tile(ranges, first_row, rows, tile * keys, keys);
  }
  // By a bias or key ranges.
  template <ScoreOps kScoreOps>
  ANYFLASH_DEVICE bool may_hide() const {
    return kScoreOps != ScoreOps::kAlibi && may_hide_anywhere();
  }

  template <bool kEdge, ScoreOps kScoreOps, class Places>
  ANYFLASH_DEVICE auto prefetch(const Places& places) const {
    auto biases = cute::make_tensor<uint32_t>(cute::shape(places.coordinates));
    if constexpr (kScoreOps == ScoreOps::kAll) {
      score_mod.template prefetch<kEdge>(biases, places.coordinates, places.row0, places.col0);
    }
    return biases;
  }
  template <ScoreOps kScoreOps, class Scores, class Biases, class Places>
  ANYFLASH_DEVICE void modify_scores(Scores& scores, const Biases& biases,
                                     const Places& places) const {
    constexpr bool kSmall = kScoreOps == ScoreOps::kAlibiRanges;
    score_mod.template apply<kSmall ? ScoreOps::kAlibi : kScoreOps, /*kScale=*/true>(
        scores, biases, places.coordinates, places.row0, places.col0);
    if (kScoreOps != ScoreOps::kAlibi && ranges.active()) {
      apply_key_ranges(scores, ranges, places.coordinates, places.row0, places.col0);
    }
  }
  template <ScoreOps kScoreOps, class Scores, class Places>
  ANYFLASH_DEVICE void drop(Scores& scores, const Places& places) const {
    if (kScoreOps == ScoreOps::kAll && dropout.active()) apply_dropout(scores, dropout, places);
  }
  template <class Probabilities, class Places>
  ANYFLASH_DEVICE void before_value_block(int, Probabilities&, const Places&) const {}

  ANYFLASH_DEVICE bool may_hide_anywhere() const {
    return score_mod.may_hide_anywhere() || ranges.active();
  }
  ANYFLASH_DEVICE bool keep(int row, int col) const {
    return score_mod.keep(row, col) && ranges.keep(row, col);
  }
  ANYFLASH_DEVICE bool is_dropped(int row, int col) const {
    return dropout.active() && !dropout.keep(dropout.draws(row, col / 8)[col % 8]);
  }
  ANYFLASH_DEVICE float dropout_scale() const { return dropout.scale(); }

  ScoreMod score_mod;
  BlockMask::Row blocks;
  KeyRanges ranges;
  int first_row;
  int keys;  // of a tile
  Dropout dropout;
};

}  // namespace anyflash
