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
#include "variant/score_mod.h"
#include "variant/score_places.h"
#include "variant/softcap.h"
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
  static constexpr bool kSkipsTiles = false;    // of what see() says
  static constexpr bool kMasksTiles = false;    // see() may ask for the masked step
  static constexpr bool kDrops = false;
  static constexpr bool kLandsFirst = false;  // modify_scores() needs the registers of P, on Hopper
  // What masked steps do to scores.
  static constexpr ScoreOps kOps = ScoreOps::kNone;
  static constexpr unsigned kFeatures = kNoFeatures;

  // What Hopper's softmax multiplies scores by.
  ANYFLASH_DEVICE static float scale_log2(const Attention& attention) {
    return attention.scale_log2;
  }

  // With the rows of a block and the keys of a tile.
  ANYFLASH_DEVICE PlainForward(const Attention&, const ForwardWorkTile&, int, int) {}

  // Calls loop(ops) with the least that is enough for unmasked tiles.
  template <class Loop>
  ANYFLASH_DEVICE void dispatch_score_ops(const Loop& loop) const {
    loop(ScoreOpsTag<kOps>{});
  }
  // What the block's rows see of a tile of keys, masks by position apart, in a loop for kOps.
  template <ScoreOps>
  ANYFLASH_DEVICE Visibility see(int) const {
    return {true, true};
  }
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

  // For the epilogue: whether keys may be hidden in a tile that needs no mask by position.
  ANYFLASH_DEVICE bool may_hide_in(int) const { return false; }
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
                                int rows, int keys)
      : PlainForward(attention, work_tile, rows, keys),
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

// One of the two, where a kernel for each is faster.
struct AlibiForward : ScoredForward {
  static constexpr ScoreOps kOps = ScoreOps::kAnyAlibi;
  static constexpr unsigned kFeatures = kAlibi;
  using ScoredForward::ScoredForward;
};
struct SoftcapForward : ScoredForward {
  static constexpr ScoreOps kOps = ScoreOps::kSoftcap;
  static constexpr unsigned kFeatures = kSoftcap;
  using ScoredForward::ScoredForward;
};

// The same where the exponentials take longer than the products: up to head dim 64, on Hopper.
struct SoftcapSeriesForward : PlainForward {
  static constexpr bool kAsksPlaces = true;  // that is, modify_scores() has something to do
  static constexpr bool kLandsFirst = true;
  static constexpr ScoreOps kOps = ScoreOps::kSoftcap;
  static constexpr unsigned kFeatures = kSoftcap;

  ANYFLASH_DEVICE SoftcapSeriesForward(const Attention& attention, const ForwardWorkTile& work_tile,
                                       int rows, int keys)
      : PlainForward(attention, work_tile, rows, keys),
        softcap(static_cast<float>(attention.softcap),
                static_cast<float>(attention.softmax_scale)) {}

  ANYFLASH_DEVICE static float scale_log2(const Attention& attention) {
    return Softcap::unit(static_cast<float>(attention.softcap)) * kLog2E;
  }

  template <ScoreOps, class Scores, class Prefetched, class Places>
  ANYFLASH_DEVICE void modify_scores(Scores& scores, const Prefetched&, const Places&) const {
    softcap.apply(scores);
  }

  Softcap softcap;
};

// Dropout alone: the plain kernel, but for P V (variant/forward_dropout.h).
struct DropoutForward : PlainForward {
  static constexpr bool kDrops = true;
  static constexpr bool kKeysInRuns = true;
  static constexpr bool kAsksPlaces = true;
  static constexpr unsigned kFeatures = kDropout;

  ANYFLASH_DEVICE DropoutForward(const Attention& attention, const ForwardWorkTile& work_tile,
                                 int rows, int keys)
      : PlainForward(attention, work_tile, rows, keys),
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

// Key ranges alone: the plain kernel, which takes the masked step where a tile's ranges hide some
// of its scores.
struct RangesForward : PlainForward {
  static constexpr bool kAsksPlaces = true;
  static constexpr bool kSkipsTiles = true;
  static constexpr bool kMasksTiles = true;
  static constexpr ScoreOps kOps = ScoreOps::kRanges;
  static constexpr unsigned kFeatures = kKeyRanges;

  ANYFLASH_DEVICE RangesForward(const Attention& p, const ForwardWorkTile& tile, int rows,
                                int tile_keys)
      : PlainForward(p, tile, rows, tile_keys),
        attention(p),
        work_tile(tile),
        visible(p, tile.sequence, tile.batch, tile.head_k, tile.first_row, rows),
        keys(tile_keys) {}

  template <class Loop>
  ANYFLASH_DEVICE void dispatch_score_ops(const Loop& loop) const {
    loop(ScoreOpsTag<ScoreOps::kNone>{});
  }
  template <ScoreOps>
  ANYFLASH_DEVICE Visibility see(int tile) const {
    return visible.of(tile * keys, keys);
  }
  // What some rows see of some keys.
  ANYFLASH_DEVICE Visibility see(int row, int rows, int key, int some_keys) const {
    return VisibleKeys(attention, work_tile.sequence, work_tile.batch, work_tile.head_k, row, rows)
        .of(key, some_keys);
  }

  template <ScoreOps kScoreOps, class Scores, class Prefetched, class Places>
  ANYFLASH_DEVICE void modify_scores(Scores& scores, const Prefetched&,
                                     const Places& places) const {
    if (kScoreOps == ScoreOps::kRanges && !places.sees_all) {
      apply_key_ranges(scores, ranges(), places.coordinates, places.row0, places.col0);
    }
  }

  ANYFLASH_DEVICE bool may_hide_in(int tile) const { return !see<kOps>(tile).all; }
  ANYFLASH_DEVICE bool keep(int row, int col) const { return ranges().keep(row, col); }

  // Made where it is needed: the loop needs the registers.
  ANYFLASH_DEVICE KeyRanges ranges() const {
    return {attention, work_tile.sequence, work_tile.batch, work_tile.head_k};
  }

  const Attention& attention;
  const ForwardWorkTile& work_tile;
  VisibleKeys visible;
  int keys;  // of a tile
};

// A block mask alone, for kernels whose tiles may be larger than its blocks. These leave hidden
// tiles out, and hide what a tile has of other blocks (sm90).
struct BlocksForward : PlainForward {
  static constexpr bool kSkipsTiles = true;
  static constexpr bool kMasksTiles = true;
  static constexpr unsigned kFeatures = kBlockMask;

  ANYFLASH_DEVICE BlocksForward(const Attention& attention, const ForwardWorkTile& tile,
                                int tile_rows, int tile_keys)
      : PlainForward(attention, tile, tile_rows, tile_keys),
        blocks(attention, tile.batch, tile.head),
        sequence(tile.sequence),
        first_row(tile.first_row),
        rows(tile_rows),
        keys(tile_keys) {}

  template <ScoreOps>
  ANYFLASH_DEVICE Visibility see(int tile) const {
    return blocks.see(first_row, min(first_row + rows, sequence.seqlen_q), tile * keys,
                      min((tile + 1) * keys, sequence.seqlen_k));
  }
  ANYFLASH_DEVICE bool may_hide_in(int tile) const { return !see<kOps>(tile).all; }
  ANYFLASH_DEVICE bool keep(int row, int col) const { return blocks.keep(row, col); }

  BlockMask blocks;
  const Sequence& sequence;
  int first_row;
  int rows;  // of a tile
  int keys;
};

// Every feature, in any combination; those that are not asked for cost a uniform branch a tile.
// Tiles without masks have a loop of their own where no bias, softcap or dropout is asked for, and
// another one where there are key ranges.
struct GenericForward {
  static constexpr bool kNaturalUnits = true;
  static constexpr bool kKeysInRuns = true;
  static constexpr bool kAsksPlaces = true;
  static constexpr bool kSkipsTiles = true;
  static constexpr bool kMasksTiles = false;
  static constexpr ScoreOps kOps = ScoreOps::kAll;
  static constexpr unsigned kFeatures = kAllFeatures;

  ANYFLASH_DEVICE GenericForward(const Attention& attention, const ForwardWorkTile& work_tile,
                                 int rows, int tile_keys)
      : score_mod(attention, work_tile.sequence, work_tile.batch, work_tile.head,
                  static_cast<float>(attention.softmax_scale), 1.0f),
        blocks(BlockMask(attention, work_tile.batch, work_tile.head), work_tile.first_row,
               tile_keys),
        visible(attention, work_tile.sequence, work_tile.batch, work_tile.head_k,
                work_tile.first_row, rows),
        ranges(attention, work_tile.sequence, work_tile.batch, work_tile.head_k),
        keys(tile_keys),
        dropout(attention, work_tile.batch, work_tile.head) {}

  template <class Loop>
  ANYFLASH_DEVICE void dispatch_score_ops(const Loop& loop) const {
    const bool small = score_mod.covered_by(ScoreOps::kAlibi) && !dropout.active();
    if (small && !ranges.active()) loop(ScoreOpsTag<ScoreOps::kAlibi>{});
    else if (small) loop(ScoreOpsTag<ScoreOps::kAlibiRanges>{});
    else loop(ScoreOpsTag<kOps>{});
  }
  template <ScoreOps kScoreOps>
  ANYFLASH_DEVICE Visibility see(int tile) const {
    if (kScoreOps == ScoreOps::kAlibi) return {blocks.keep(tile), true};  // no ranges there
    const Visibility seen = visible.of(tile * keys, keys);
    return {blocks.keep(tile) && seen.any, seen.all};
  }
  // By a bias or key ranges.
  template <ScoreOps kScoreOps>
  ANYFLASH_DEVICE bool may_hide() const {
    return kScoreOps != ScoreOps::kAlibi && (score_mod.may_hide_anywhere() || ranges.active());
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
    if (kScoreOps != ScoreOps::kAlibi && !places.sees_all) {
      apply_key_ranges(scores, ranges, places.coordinates, places.row0, places.col0);
    }
  }
  template <ScoreOps kScoreOps, class Scores, class Places>
  ANYFLASH_DEVICE void drop(Scores& scores, const Places& places) const {
    if (kScoreOps == ScoreOps::kAll && dropout.active()) apply_dropout(scores, dropout, places);
  }
  template <class Probabilities, class Places>
  ANYFLASH_DEVICE void before_value_block(int, Probabilities&, const Places&) const {}

  ANYFLASH_DEVICE bool may_hide_in(int) const {
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
  VisibleKeys visible;
  KeyRanges ranges;
  int keys;  // of a tile
  Dropout dropout;
};

}  // namespace anyflash
