// What a forward kernel does beyond masks by position.
#pragma once

#include <type_traits>

#include "common/macros.h"
#include "common/softmax.h"
#include "kernel_descriptor.h"
#include "params.h"
#include "variant/apply_dropout.h"
#include "variant/block_mask.h"
#include "variant/dropout.h"
#include "variant/score_mod.h"
#include "variant/uniform_seed.h"
#include "variant/work_tile.h"

namespace anyflash {

template <ScoreOps kOps>
using ScoreOpsTag = std::integral_constant<ScoreOps, kOps>;

// Nothing: what it answers is a constant.
struct PlainForward {
  static constexpr bool kGeneric = false;   // with the generic kernels' tiles
  static constexpr bool kQuadKeys = false;  // with keys in the order of QuadKeyOrder
  // What steps do to scores.
  static constexpr ScoreOps kOps = ScoreOps::kNone;
  static constexpr unsigned kFeatures = kNoFeatures;

  ANYFLASH_DEVICE PlainForward(const ForwardParams&, const ForwardWorkTile&, int) {}

  ANYFLASH_DEVICE bool visits(int) const { return true; }
  ANYFLASH_DEVICE bool may_hide_anywhere() const { return false; }
  ANYFLASH_DEVICE bool keep(int, int) const { return true; }
  ANYFLASH_DEVICE bool is_dropped(int, int) const { return false; }
  ANYFLASH_DEVICE float dropout_scale() const { return 1.0f; }
};

// What follows from a score and its place alone: the plain kernel with a few more instructions.
struct ScoredForward : PlainForward {
  static constexpr ScoreOps kOps = ScoreOps::kSoftcapAlibi;
  static constexpr unsigned kFeatures = kSoftcap | kLargeSoftcap | kAlibi;

  ANYFLASH_DEVICE ScoredForward(const ForwardParams& params, const ForwardWorkTile& block, int keys)
      : PlainForward(params, block, keys),
        score_mod(params, block.sequence, block.batch, block.head, 1.0f, params.scale_log2 * kLn2) {
  }

  // Calls loop(part) with the smallest part that is enough for tiles without a mask.
  template <class Loop>
  ANYFLASH_DEVICE void dispatch_score_ops(const Loop& loop) const {
    if (score_mod.covered_by(ScoreOps::kAlibi)) loop(ScoreOpsTag<ScoreOps::kAlibi>{});
    else if (score_mod.covered_by(ScoreOps::kSoftcap)) loop(ScoreOpsTag<ScoreOps::kSoftcap>{});
    else loop(ScoreOpsTag<kOps>{});
  }

  ScoreMod score_mod;
};

// Dropout alone: the plain kernel, but for P V (variant/forward_dropout.h).
struct DropoutForward : PlainForward {
  static constexpr bool kQuadKeys = true;
  static constexpr unsigned kFeatures = kDropout;

  ANYFLASH_DEVICE DropoutForward(const ForwardParams& params, const ForwardWorkTile& block,
                                 int keys)
      : PlainForward(params, block, keys),
        dropout(params, UniformSeed(params), block.batch, block.head) {}

  ANYFLASH_DEVICE bool is_dropped(int row, int col) const {
    return !dropout.keep(dropout.draws(row, col / 8)[col % 8]);
  }
  ANYFLASH_DEVICE float dropout_scale() const { return dropout.scale(); }

  Dropout dropout;
};

// Every feature, in any combination; those that are not asked for cost a uniform branch a tile.
// Tiles without masks have a loop of their own where no bias, softcap or dropout is asked for.
struct GenericForward {
  static constexpr bool kGeneric = true;
  static constexpr bool kQuadKeys = true;
  static constexpr ScoreOps kOps = ScoreOps::kAll;
  static constexpr unsigned kFeatures = kAllFeatures;

  ANYFLASH_DEVICE GenericForward(const ForwardParams& params, const ForwardWorkTile& block,
                                 int tile_keys)
      : score_mod(params, block.sequence, block.batch, block.head,
                  static_cast<float>(params.softmax_scale), 1.0f),
        blocks(BlockMask(params, block.batch, block.head), block.first_row, tile_keys),
        dropout(params, block.batch, block.head) {}

  // Whether the block map keeps a tile of keys.
  ANYFLASH_DEVICE bool visits(int tile) const { return blocks.keep(tile); }
  template <class Loop>
  ANYFLASH_DEVICE void dispatch_score_ops(const Loop& loop) const {
    const bool small = score_mod.covered_by(ScoreOps::kAlibi) && !dropout.active();
    if (small) loop(ScoreOpsTag<ScoreOps::kAlibi>{});
    else loop(ScoreOpsTag<kOps>{});
  }
  // Whether keys may be hidden in any tile, by a bias.
  ANYFLASH_DEVICE bool may_hide_anywhere() const { return score_mod.may_hide_anywhere(); }
  ANYFLASH_DEVICE bool keep(int row, int col) const { return score_mod.keep(row, col); }
  ANYFLASH_DEVICE bool is_dropped(int row, int col) const {
    return dropout.active() && !dropout.keep(dropout.draws(row, col / 8)[col % 8]);
  }
  ANYFLASH_DEVICE float dropout_scale() const { return dropout.scale(); }

  ScoreMod score_mod;
  BlockMask::Row blocks;
  Dropout dropout;
};

}  // namespace anyflash
