// From a tile of q.k and of dO.v to probabilities P and to the gradient dS of q.k, in registers.
//
//   P  = exp(S - lse)                      0 where hidden
//   dS = P (kept dP - delta) dS/d(q.k)     0 where hidden, whatever dP is; without softmax_scale
//
// kept is 0 or 1 / (1 - p) with dropout, else 1. Tensors are (row, col) views of accumulators,
// `coordinates` places relative to (row0, col0). Here is what every kernel has, and the generic
// one; those with one feature are in variant/backward_single_feature.h.
#pragma once

#include <cmath>
#include <cute/tensor.hpp>

#include "common/convert.h"
#include "common/layout.h"
#include "common/macros.h"
#include "common/softmax.h"
#include "kernel_descriptor.h"
#include "variant/apply_key_ranges.h"
#include "variant/backward_scratch.h"
#include "variant/dropout.h"
#include "variant/key_ranges.h"
#include "variant/mask.h"
#include "variant/score_mod.h"
#include "variant/sequence.h"
#include "variant/work_tile.h"

namespace anyflash {

// The K/V head of a query head.
ANYFLASH_DEVICE int head_k_of(const BackwardScratch& params, int head) {
  return head / (params.attention.heads / params.attention.heads_k);
}

// Of a thread's rows; `lse_and_delta` begins at row0's.
template <class Coordinates>
ANYFLASH_DEVICE auto load_lse_and_delta(const LseAndDelta* lse_and_delta,
                                        const Coordinates& coordinates) {
  constexpr int kRows = decltype(cute::size<0>(coordinates))::value;
  auto rows = cute::make_tensor<LseAndDelta>(cute::Int<kRows>{});
  CUTE_UNROLL
  for (int row = 0; row < kRows; ++row) {
    const auto* const at =
        reinterpret_cast<const float2*>(lse_and_delta + cute::get<0>(coordinates(row, 0)));
    rows(row) = LseAndDelta{at->x, at->y};
  }
  return rows;
}

// Those of a thread's rows from the kFirst-th on.
template <int kFirst, class Rows>
ANYFLASH_DEVICE auto rows_from(const Rows& rows) {
  constexpr int kCount = decltype(cute::size(rows))::value - kFirst;
  return cute::make_tensor(rows.data() + kFirst, cute::make_layout(cute::Int<kCount>{}));
}

// Where a tile of scores lies and what it is made with.
struct ScoreTile {
  const Mask& mask;
  int row0;
  int col0;
  bool sees_all;  // each row each key, masks by position apart

  // What row i of the problem sees of the tile, where that may not be all. A row that does not
  // exist sees nothing: its scores are 0, but NaN where a key is infinite. (Written in another way,
  // nvcc 13.0 gives the loops without masks other registers, and more instructions.)
  template <bool kMasked>
  ANYFLASH_DEVICE RowBounds row_bounds(int i, const LseAndDelta& of_row) const {
    if (!kMasked) return RowBounds{};
    RowBounds seen = mask.row_bounds(i, col0);
    if (of_row.lse >= kFarLse) seen.end = 0;
    return seen;
  }
};

// What a variant keeps beside a (row, col) view of a tile of scores.
template <class Variant, class Element, class Scores>
using ScoreAuxOf =
    typename Variant::template ScoreAux<Element, decltype(cute::size<0>(Scores{}))::value,
                                        decltype(cute::size<1>(Scores{}))::value>;

// Marks the P of a hidden score. No visible P is -0, not even one that is rounded to 0.
inline constexpr float kHiddenP = -0.0f;
ANYFLASH_DEVICE bool is_hidden(float p) { return __float_as_uint(p) == 0x80000000u; }

// Masks by position only. The LSE is in units of log 2: one FFMA and one MUFU a score.
class PlainBackward {
 public:
  static constexpr unsigned kFeatures = kNoFeatures;
  static constexpr bool kGeneric = false;         // with the generic kernel's tiles
  static constexpr bool kKeysInRuns = false;      // a thread's keys must come in runs of eight
  static constexpr bool kAlwaysMasked = false;    // any tile may hide keys
  static constexpr bool kSkipsMaskedHalf = true;  // has code for the halves of a diagonal tile
  static constexpr bool kKeepsAddresses = true;   // leaves registers for the main loop's addresses
  static constexpr float kLseUnit = kLog2E;       // what the LSE is multiplied by
  template <class Element, int kRows, int kCols>
  struct ScoreAux {};  // what is kept beside a tile of scores
  struct Seed {        // what is read once, not for each head
    ANYFLASH_DEVICE explicit Seed(const Attention&) {}
  };

  // Whether the tile of a block of keys and of a head's rows from one on needs the masked loop for
  // another reason than its masks.
  template <int kBlockM, int kBlockN>
  ANYFLASH_DEVICE static bool needs_masked_loop(const BackwardScratch&, const BackwardWorkTile&,
                                                int, int) {
    return false;
  }
  // What the sum of P^T dO is multiplied by, and that of dS beside softmax_scale.
  ANYFLASH_DEVICE static float p_scale(const BackwardScratch&) { return 1.0f; }
  static float ds_factor(const BackwardScratch&) { return 1.0f; }

  ANYFLASH_DEVICE PlainBackward(const BackwardScratch& params, const Sequence&, int64_t, int, Seed)
      : scale_log2_(params.attention.scale_log2) {}

  // Whether keys may be hidden in any tile.
  ANYFLASH_DEVICE bool may_hide_anywhere() const { return false; }
  ANYFLASH_DEVICE bool keep(int, int) const { return true; }
  ANYFLASH_DEVICE bool is_dropped(int, int) const { return false; }

  // Before the products, so that it arrives meanwhile.
  template <bool kMasked, class ScoreAux, class Coordinates>
  ANYFLASH_DEVICE void prefetch(ScoreAux&, const Coordinates&, const ScoreTile&) const {}

  template <bool kMasked, class Scores, class ScoreAux, class LseAndDeltas, class Coordinates>
  ANYFLASH_DEVICE void compute_p(Scores& scores, ScoreAux&, const LseAndDeltas& lse_and_delta,
                                 const Coordinates& coordinates, const ScoreTile& tile) const {
    using namespace cute;
    CUTE_UNROLL
    for (int row = 0; row < size<0>(scores); ++row) {
      const int i = tile.row0 + get<0>(coordinates(row, 0));
      const RowBounds seen = tile.row_bounds<kMasked>(i, lse_and_delta(row));
      CUTE_UNROLL
      for (int col = 0; col < size<1>(scores); ++col) {
        const int j = get<1>(coordinates(row, col));
        const float p = exp2f(scores(row, col) * scale_log2_ - lse_and_delta(row).lse);
        scores(row, col) = kMasked && seen.hides(j) ? kHiddenP : p;
      }
    }
  }

  // The P of dV's product, from the accumulator that compute_p() has worked on.
  template <class Element, class Acc, class ScoreAux, class Coordinates>
  ANYFLASH_DEVICE auto rounded_p(const Acc& p, ScoreAux&, const Coordinates&,
                                 const ScoreTile&) const {
    return round_fragment<Element>(p);
  }

  // What the product dO V^T is added to: -delta, which costs nothing there.
  template <class Acc, class LseAndDeltas>
  ANYFLASH_DEVICE auto initial_dp(const Acc& acc, const LseAndDeltas& lse_and_delta) const {
    using namespace cute;
    // (MMA, MMA_M, MMA_N): what holds for eight columns holds for all.
    using Rows = Int<decltype(size<1>(acc))::value>;
    using Cols = Int<decltype(size<2>(acc))::value>;
    auto init = make_tensor<float>(make_layout(Shape<_4, Rows, Cols>{}, Stride<_1, _4, _0>{}));
    CUTE_UNROLL
    for (int m = 0; m < Rows{}; ++m) {
      CUTE_UNROLL
      for (int i = 0; i < 4; ++i) init(i, m, 0) = -lse_and_delta(2 * m + i / 2).delta;
    }
    return init;
  }

  // dp - delta becomes the gradient of the final score: of a bias, say.
  template <bool kMasked, class Scores, class ScoreAux, class LseAndDeltas>
  ANYFLASH_DEVICE void compute_ds(Scores& dp, const Scores& p, const ScoreAux&,
                                  const LseAndDeltas&) const {
    using namespace cute;
    CUTE_UNROLL
    for (int i = 0; i < size(p); ++i) {
      dp(i) = kMasked && is_hidden(p(i)) ? 0.0f : p(i) * dp(i);
    }
  }

  // The gradient of the final score becomes that of softmax_scale q.k.
  template <class Scores, class ScoreAux>
  ANYFLASH_DEVICE void apply_score_derivative(Scores&, const ScoreAux&) const {}

 protected:
  float scale_log2_;
};

// Every feature, in any combination. The LSE is in natural units.
class GenericBackward {
 public:
  static constexpr unsigned kFeatures = kAllFeatures;
  static constexpr bool kGeneric = true;
  static constexpr bool kKeysInRuns = true;
  static constexpr bool kAlwaysMasked = true;
  static constexpr bool kSkipsMaskedHalf = false;
  static constexpr bool kKeepsAddresses = true;
  static constexpr float kLseUnit = 1.0f;
  template <class Element, int kRows, int kCols>
  struct ScoreAux {
    using Shape = cute::Shape<cute::Int<kRows>, cute::Int<kCols>>;
    decltype(cute::make_tensor<uint32_t>(Shape{})) biases;
    decltype(cute::make_tensor<float>(Shape{})) slopes;              // of the softcap
    decltype(cute::make_tensor<uint32_t>(cute::Int<kRows>{})) kept;  // a bit a column
  };
  using Seed = PlainBackward::Seed;

  // A bias and key ranges may hide keys anywhere.
  template <int kBlockM, int kBlockN>
  ANYFLASH_DEVICE static bool needs_masked_loop(const BackwardScratch&, const BackwardWorkTile&,
                                                int, int) {
    return true;
  }
  ANYFLASH_DEVICE static float p_scale(const BackwardScratch& params) {
    return dropout_scale(params.attention.dropout_threshold);
  }
  static float ds_factor(const BackwardScratch&) { return 1.0f; }

  ANYFLASH_DEVICE GenericBackward(const BackwardScratch& params, const Sequence& sequence,
                                  int64_t batch, int head, Seed)
      : score_mod_(params.attention, sequence, batch, head,
                   static_cast<float>(params.attention.softmax_scale), 1.0f),
        ranges_(params.attention, sequence, batch, head_k_of(params, head)),
        dropout_(params.attention, batch, head) {}

  ANYFLASH_DEVICE bool may_hide_anywhere() const {
    return score_mod_.may_hide_anywhere() || ranges_.active();
  }
  ANYFLASH_DEVICE bool keep(int row, int col) const {
    return score_mod_.keep(row, col) && ranges_.keep(row, col);
  }
  ANYFLASH_DEVICE bool is_dropped(int row, int col) const {
    return dropout_.active() && !dropout_.keep(dropout_.draws(row, col / 8)[col % 8]);
  }

  template <bool kMasked, class ScoreAux, class Coordinates>
  ANYFLASH_DEVICE void prefetch(ScoreAux& aux, const Coordinates& coordinates,
                                const ScoreTile& tile) const {
    score_mod_.template prefetch<kMasked>(aux.biases, coordinates, tile.row0, tile.col0);
  }

  template <bool kMasked, class Scores, class ScoreAux, class LseAndDeltas, class Coordinates>
  ANYFLASH_DEVICE void compute_p(Scores& scores, ScoreAux& aux, const LseAndDeltas& lse_and_delta,
                                 const Coordinates& coordinates, const ScoreTile& tile) const {
    using namespace cute;
    score_mod_.apply(scores, aux.slopes, aux.biases, coordinates, tile.row0, tile.col0);
    if (!tile.sees_all) {
      apply_key_ranges(scores, ranges_, coordinates, tile.row0, tile.col0);
    }
    CUTE_UNROLL
    for (int row = 0; row < size<0>(scores); ++row) {
      const int i = tile.row0 + get<0>(coordinates(row, 0));
      const RowBounds seen = tile.row_bounds<kMasked>(i, lse_and_delta(row));
      CUTE_UNROLL
      for (int col = 0; col < size<1>(scores); ++col) {
        const int j = get<1>(coordinates(row, col));
        const float s = scores(row, col);
        const bool hidden = s == -INFINITY || (kMasked && seen.hides(j));
        scores(row, col) = hidden ? 0.0f : exp2f((s - lse_and_delta(row).lse) * kLog2E);
      }
    }
  }

  // With dropout, but for the factor on what is kept; compute_ds() asks aux what that is.
  template <class Element, class Acc, class ScoreAux, class Coordinates>
  ANYFLASH_DEVICE auto rounded_p(const Acc& p, ScoreAux& aux, const Coordinates& coordinates,
                                 const ScoreTile& tile) const {
    auto kept = cute::make_tensor<float>(p.layout());
    cute::copy(p, kept);
    auto scores = as_matrix(kept);
    if (dropout_.active()) drop(scores, aux, coordinates, tile);
    return round_fragment<Element>(kept);
  }

  template <class Acc, class LseAndDeltas>
  ANYFLASH_DEVICE auto initial_dp(const Acc& acc, const LseAndDeltas&) const {
    auto init = cute::make_fragment_like(acc);
    cute::clear(init);
    return init;
  }

  template <bool kMasked, class Scores, class ScoreAux, class LseAndDeltas>
  ANYFLASH_DEVICE void compute_ds(Scores& dp, const Scores& p, const ScoreAux& aux,
                                  const LseAndDeltas& lse_and_delta) const {
    using namespace cute;
    if (dropout_.active()) {
      const float factor = dropout_.scale();
      CUTE_UNROLL
      for (int row = 0; row < size<0>(dp); ++row) {
        CUTE_UNROLL
        for (int col = 0; col < size<1>(dp); ++col) {
          const bool keep = (aux.kept(row) >> col & 1u) != 0;
          dp(row, col) = keep ? dp(row, col) * factor : 0.0f;
        }
      }
    }
    CUTE_UNROLL
    for (int row = 0; row < size<0>(p); ++row) {
      CUTE_UNROLL
      for (int col = 0; col < size<1>(p); ++col) {
        const float ds = p(row, col) * (dp(row, col) - lse_and_delta(row).delta);
        dp(row, col) = p(row, col) == 0.0f ? 0.0f : ds;
      }
    }
  }

  // The derivative of a score by ALiBi's slope.
  ANYFLASH_DEVICE float slope_factor(int row, int col) const {
    return score_mod_.slope_factor(row, col);
  }

  template <class Scores, class ScoreAux>
  ANYFLASH_DEVICE void apply_score_derivative(Scores& ds, const ScoreAux& aux) const {
    if (!score_mod_.caps()) return;
    CUTE_UNROLL
    for (int i = 0; i < cute::size(ds); ++i) {
      // A hidden score may be NaN, and so its slope.
      ds(i) = ds(i) == 0.0f ? 0.0f : ds(i) * aux.slopes(i);
    }
  }

 private:
  template <class Scores, class ScoreAux, class Coordinates>
  ANYFLASH_DEVICE void drop(Scores& p, ScoreAux& aux, const Coordinates& coordinates,
                            const ScoreTile& tile) const {
    using namespace cute;
    static_assert(decltype(size<1>(p))::value <= 32, "a bit a column");
    CUTE_UNROLL
    for (int row = 0; row < size<0>(p); ++row) {
      uint32_t kept = 0;
      CUTE_UNROLL
      for (int run = 0; run < size<1>(p); run += 8) {
        const Draws draws = dropout_.draws(tile.row0 + get<0>(coordinates(row, 0)),
                                           (tile.col0 + get<1>(coordinates(row, run))) / 8);
        CUTE_UNROLL
        for (int i = 0; i < 8; ++i) {
          const bool keep = dropout_.keep(draws[i]);
          kept |= (keep ? 1u : 0u) << (run + i);
          if (!keep) p(row, run + i) = 0.0f;
        }
      }
      aux.kept(row) = kept;
    }
  }

  ScoreMod score_mod_;
  KeyRanges ranges_;
  Dropout dropout_;
};

}  // namespace anyflash
