// The backward's scores with one feature: ALiBi, softcap, dropout or key ranges, which need little
// but a score and its place, in the plain kernel's tiles. A kernel for each, since code that is
// skipped slows the loop, too; two features together are left to the generic kernel.
#pragma once

#include <cmath>
#include <cstdint>
#include <cute/tensor.hpp>

#include "common/convert.h"
#include "common/macros.h"
#include "common/softmax.h"
#include "kernel_descriptor.h"
#include "variant/apply_key_ranges.h"
#include "variant/backward_scratch.h"
#include "variant/backward_variants.h"
#include "variant/block_mask.h"
#include "variant/dropout.h"
#include "variant/key_ranges.h"
#include "variant/sequence.h"
#include "variant/uniform_seed.h"
#include "variant/work_tile.h"

namespace anyflash {

// Of dV's product: a tile, rounded, in the order of the accumulator that `scores` is a view of.
template <class Element, int kRows, int kCols>
struct RoundedP {
  decltype(cute::make_tensor<Element>(cute::Int<kRows * kCols>{})) p;

  // That of two neighbouring columns.
  template <class Scores>
  ANYFLASH_DEVICE void set(const Scores& scores, int row, int col, float2 pair) {
    auto pairs = cute::recast<decltype(round_pair(pair, Element{}))>(p);
    pairs(scores.layout()(row, col) / 2) = round_pair(pair, Element{});
  }
};

class OneFeatureBackward : public PlainBackward {
 public:
  static constexpr bool kSkipsMaskedHalf = false;
  using PlainBackward::PlainBackward;
};

// A tile that the diagonal does not cross needs no absolute value, because its distances have one
// sign. What ALiBi adds there is a number of the row and one of the column.
class AlibiBackward : public OneFeatureBackward {
 public:
  static constexpr unsigned kFeatures = kAlibi;

  ANYFLASH_DEVICE AlibiBackward(const BackwardScratch& params, const Sequence& sequence,
                                int64_t batch, int head, Seed seed)
      : OneFeatureBackward(params, sequence, batch, head, seed),
        shift_(sequence.shift),
        slope_log2_(params.slopes_log2[batch * params.attention.heads + head]) {}

  template <int kBlockM, int kBlockN>
  ANYFLASH_DEVICE static bool needs_masked_loop(const BackwardScratch&,
                                                const BackwardWorkTile& block, int, int row0) {
    const int diagonal = row0 - block.first_key + block.sequence.shift;
    return diagonal > -kBlockM && diagonal < kBlockN;
  }

  template <bool kMasked, class Scores, class ScoreAux, class LseAndDeltas, class Coordinates>
  ANYFLASH_DEVICE void compute_p(Scores& scores, ScoreAux&, const LseAndDeltas& lse_and_delta,
                                 const Coordinates& coordinates, const ScoreTile& tile) const {
    using namespace cute;
    const float slope = tile.row0 + shift_ > tile.col0 ? slope_log2_ : -slope_log2_;
    const int first_row = get<0>(coordinates(0, 0));
    const int first_col = get<1>(coordinates(0, 0));
    const float diagonal =
        static_cast<float>(tile.row0 + first_row + shift_ - tile.col0 - first_col);
    CUTE_UNROLL
    for (int row = 0; row < size<0>(scores); ++row) {
      const int i = tile.row0 + get<0>(coordinates(row, 0));
      const RowBounds seen = tile.row_bounds<kMasked>(i, lse_and_delta(row));
      const float row_offset = static_cast<float>(get<0>(coordinates(row, 0)) - first_row);
      const float distance = diagonal + row_offset;  // row_offset and offset are constants
      const float at_first = -lse_and_delta(row).lse - distance * slope;
      CUTE_UNROLL
      for (int col = 0; col < size<1>(scores); ++col) {
        const int j = get<1>(coordinates(row, col));
        const float offset = static_cast<float>(j - first_col);
        const float added = kMasked
                                ? -lse_and_delta(row).lse - fabsf(distance - offset) * slope_log2_
                                : at_first + offset * slope;
        const float p = exp2f(scores(row, col) * scale_log2_ + added);
        scores(row, col) = kMasked && seen.hides(j) ? kHiddenP : p;
      }
    }
  }

  // The derivative of a score by the slope.
  ANYFLASH_DEVICE float slope_factor(int row, int col) const {
    return -fabsf(static_cast<float>(row + shift_ - col));
  }

 private:
  int shift_;
  float slope_log2_;
};

// With t = 1 / (1 + exp(2 x)), x = scale q.k / softcap: tanh(x) = 1 - 2 t, whose slope is
// 4 t (1 - t). P is 4 times as large as it should be, so that no score is multiplied by that 4.
class CappedScores {
 public:
  ANYFLASH_DEVICE CappedScores(float softcap_log2, float scale_log2)
      : softcap_log2_(softcap_log2), factor_(2.0f * kLog2E * scale_log2 / softcap_log2) {}
  ANYFLASH_DEVICE explicit CappedScores(const Attention& p)
      : CappedScores(static_cast<float>(p.softcap) * kLog2E, p.scale_log2) {}

  // Of a product q.k.
  ANYFLASH_DEVICE float t(float product) const {
    return __fdividef(1.0f, 1.0f + exp2f(product * factor_));
  }
  // log2 of P. The row's LSE is in units of log 2.
  ANYFLASH_DEVICE float exponent(float t, float lse) const {
    constexpr float kLog2Of4 = 2.0f;
    return (kLog2Of4 - lse + softcap_log2_) - 2.0f * softcap_log2_ * t;
  }
  // Its product with P is as it should be.
  ANYFLASH_DEVICE static float slope(float t) { return t - t * t; }

 private:
  float softcap_log2_;
  float factor_;
};

class SoftcapBackward : public OneFeatureBackward {
 public:
  static constexpr unsigned kFeatures = kSoftcap;
  static constexpr bool kKeepsAddresses = false;
  template <class Element, int kRows, int kCols>
  using ScoreAux = RoundedP<Element, kRows, kCols>;

  ANYFLASH_DEVICE SoftcapBackward(const BackwardScratch& params, const Sequence& sequence,
                                  int64_t batch, int head, Seed seed)
      : OneFeatureBackward(params, sequence, batch, head, seed),
        softcap_log2_(static_cast<float>(params.attention.softcap) * kLog2E) {}

  ANYFLASH_DEVICE static float p_scale(const BackwardScratch&) { return 0.25f; }

  template <bool kMasked, class Scores, class ScoreAux, class LseAndDeltas, class Coordinates>
  ANYFLASH_DEVICE void compute_p(Scores& scores, ScoreAux& aux, const LseAndDeltas& lse_and_delta,
                                 const Coordinates& coordinates, const ScoreTile& tile) const {
    using namespace cute;
    const CappedScores capped(softcap_log2_, scale_log2_);
    CUTE_UNROLL
    for (int row = 0; row < size<0>(scores); ++row) {
      const int i = tile.row0 + get<0>(coordinates(row, 0));
      const RowBounds seen = tile.row_bounds<kMasked>(i, lse_and_delta(row));
      CUTE_UNROLL
      for (int col = 0; col < size<1>(scores); col += 2) {
        float both[2];
        CUTE_UNROLL
        for (int k = 0; k < 2; ++k) {
          const int j = get<1>(coordinates(row, col + k));
          float& s = scores(row, col + k);
          const float t = capped.t(s);
          const float slope = capped.slope(t);
          const float p = capped.exponent(t, lse_and_delta(row).lse);
          const bool hidden = kMasked && seen.hides(j);
          both[k] = hidden ? kHiddenP : exp2f(p);
          s = hidden ? kHiddenP : both[k] * slope;
        }
        aux.set(scores, row, col, float2{both[0], both[1]});
      }
    }
  }

  template <class Element, class Acc, class ScoreAux, class Coordinates>
  ANYFLASH_DEVICE auto rounded_p(const Acc& p, ScoreAux& aux, const Coordinates&,
                                 const ScoreTile&) const {
    return cute::make_tensor(aux.p.data(), p.layout());
  }

 private:
  float softcap_log2_;
};

// dS = P (kept dP - delta). Without the factor on what is kept, that is P (dP - delta (1 - p)), and
// P (-delta (1 - p)) where P is dropped. P is made negative there, and 0 for dV's product.
class DropoutBackward : public OneFeatureBackward {
 public:
  static constexpr unsigned kFeatures = kDropout;
  static constexpr bool kKeysInRuns = true;
  using Seed = UniformSeed;

  ANYFLASH_DEVICE DropoutBackward(const BackwardScratch& params, const Sequence& sequence,
                                  int64_t batch, int head, const Seed& seed)
      : OneFeatureBackward(params, sequence, batch, head, PlainBackward::Seed(params.attention)),
        dropout_(params.attention, seed, batch, head),
        kept_(1.0f / dropout_scale(params.attention.dropout_threshold)) {}

  ANYFLASH_DEVICE static float p_scale(const BackwardScratch& params) {
    return dropout_scale(params.attention.dropout_threshold);
  }
  static float ds_factor(const BackwardScratch& params) {
    return dropout_scale(params.attention.dropout_threshold);
  }
  ANYFLASH_DEVICE bool is_dropped(int row, int col) const {
    return !dropout_.keep(dropout_.draws(row, col / 8)[col % 8]);
  }

  template <bool kMasked, class Scores, class ScoreAux, class LseAndDeltas, class Coordinates>
  ANYFLASH_DEVICE void compute_p(Scores& scores, ScoreAux& aux, const LseAndDeltas& lse_and_delta,
                                 const Coordinates& coordinates, const ScoreTile& tile) const {
    using namespace cute;
    PlainBackward::template compute_p<kMasked>(scores, aux, lse_and_delta, coordinates, tile);
    constexpr int kRows = decltype(size<0>(scores))::value;
    int rows[kRows];
    CUTE_UNROLL
    for (int row = 0; row < kRows; ++row) rows[row] = tile.row0 + get<0>(coordinates(row, 0));
    CUTE_UNROLL
    for (int run = 0; run < size<1>(scores); run += 8) {
      Draws draws[kRows];
      dropout_.draws(draws, rows, (tile.col0 + get<1>(coordinates(0, run))) / 8);
      CUTE_UNROLL
      for (int row = 0; row < kRows; ++row) {
        CUTE_UNROLL
        for (int i = 0; i < 8; ++i) {
          float& p = scores(row, run + i);
          p = dropout_.keep(draws[row], i) ? p : -p;
        }
      }
    }
  }

  template <class Element, class Acc, class ScoreAux, class Coordinates>
  ANYFLASH_DEVICE auto rounded_p(const Acc& p, ScoreAux&, const Coordinates&,
                                 const ScoreTile&) const {
    return round_positive<Element>(p);
  }

  template <class Acc, class LseAndDeltas>
  ANYFLASH_DEVICE auto initial_dp(const Acc& acc, const LseAndDeltas& lse_and_delta) const {
    auto init = PlainBackward::initial_dp(acc, lse_and_delta);
    CUTE_UNROLL
    for (int i = 0; i < cute::cosize_v<decltype(init.layout())>; ++i) init.data()[i] *= kept_;
    return init;
  }

  template <bool kMasked, class Scores, class ScoreAux, class LseAndDeltas>
  ANYFLASH_DEVICE void compute_ds(Scores& dp, const Scores& p, const ScoreAux&,
                                  const LseAndDeltas& lse_and_delta) const {
    using namespace cute;
    CUTE_UNROLL
    for (int row = 0; row < size<0>(p); ++row) {
      const float of_dropped = lse_and_delta(row).delta * kept_;  // P's sign turns it
      CUTE_UNROLL
      for (int col = 0; col < size<1>(p); ++col) {
        const float ds = p(row, col) * (p(row, col) < 0.0f ? of_dropped : dp(row, col));
        dp(row, col) = kMasked && p(row, col) == 0.0f ? 0.0f : ds;
      }
    }
  }

 private:
  Dropout dropout_;
  float kept_;  // the share of it, 1 - p
};

// A tile whose rows see all of its keys takes the plain kernel's loop.
class RangesBackward : public OneFeatureBackward {
 public:
  static constexpr unsigned kFeatures = kKeyRanges;

  ANYFLASH_DEVICE RangesBackward(const BackwardScratch& params, const Sequence& sequence,
                                 int64_t batch, int head, Seed seed)
      : OneFeatureBackward(params, sequence, batch, head, seed),
        ranges_(params.attention, sequence, batch, head_k_of(params, head)) {}

  // What a tile's rows see of the block's keys, masks by position apart.
  template <int kBlockM, int kBlockN>
  ANYFLASH_DEVICE static Visibility see(const BackwardScratch& params,
                                        const BackwardWorkTile& block, int, int row0) {
    return anyflash::see(params.attention, block, row0, kBlockM);
  }
  template <int kBlockM, int kBlockN>
  ANYFLASH_DEVICE static bool needs_masked_loop(const BackwardScratch& params,
                                                const BackwardWorkTile& block, int head, int row0) {
    return !see<kBlockM, kBlockN>(params, block, head, row0).all;
  }

  ANYFLASH_DEVICE bool keep(int row, int col) const { return ranges_.keep(row, col); }

  template <bool kMasked, class Scores, class ScoreAux, class LseAndDeltas, class Coordinates>
  ANYFLASH_DEVICE void compute_p(Scores& scores, ScoreAux& aux, const LseAndDeltas& lse_and_delta,
                                 const Coordinates& coordinates, const ScoreTile& tile) const {
    PlainBackward::template compute_p<kMasked>(scores, aux, lse_and_delta, coordinates, tile);
    if (kMasked && !tile.sees_all) {
      apply_key_ranges(scores, ranges_, coordinates, tile.row0, tile.col0, kHiddenP);
    }
  }

 private:
  KeyRanges ranges_;
};

// A block mask, for kernels whose tiles may be larger than its blocks. These leave hidden tiles
// out, and hide what a tile has of other blocks (sm90).
class BlocksBackward : public OneFeatureBackward {
 public:
  static constexpr unsigned kFeatures = kBlockMask;

  using OneFeatureBackward::OneFeatureBackward;

  template <int kBlockM, int kBlockN>
  ANYFLASH_DEVICE static Visibility see(const BackwardScratch& params,
                                        const BackwardWorkTile& block, int head, int row0) {
    const Sequence& sequence = block.sequence;
    return BlockMask(params.attention, block.batch, head)
        .see(row0, min(row0 + kBlockM, sequence.seqlen_q), block.first_key,
             min(block.first_key + kBlockN, sequence.seqlen_k));
  }
  template <int kBlockM, int kBlockN>
  ANYFLASH_DEVICE static bool needs_masked_loop(const BackwardScratch& params,
                                                const BackwardWorkTile& block, int head, int row0) {
    return !see<kBlockM, kBlockN>(params, block, head, row0).all;
  }
};

}  // namespace anyflash
