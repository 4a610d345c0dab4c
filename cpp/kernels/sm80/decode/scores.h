// What happens to scores of a decoding CTA between the products.
#pragma once

#include <cmath>
#include <cstdint>
#include <cute/tensor.hpp>

#include "common/macros.h"
#include "common/softmax.h"
#include "cuda/cache_scales.h"
#include "cuda/decode_work_tile.h"
#include "params.h"
#include "variant/broadcast_tensor.h"
#include "variant/cache.h"
#include "variant/mask.h"
#include "variant/score_mod.h"
#include "variant/tree_mask.h"

namespace anyflash::sm80 {

// What a thread knows of its two rows.
struct DecodeRows {
  static constexpr int kRows = 2;
  SplitKeys seen[kRows];
  int query[kRows];
  float slope[kRows];  // ALiBi's; 0: none

  template <class Coordinates>
  ANYFLASH_DEVICE DecodeRows(const KvCacheParams& params, const DecodeWorkTile& block,
                             const Coordinates& coordinates) {
    const Mask mask = block.mask(params);
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      const int row = cute::get<0>(coordinates(i, 0));
      seen[i] = block.seen(mask, row);
      query[i] = block.query(row);
      slope[i] = 0.0f;
      if (params.attention.alibi_slopes.data != nullptr && row < block.rows) {
        const Strides& stride = params.attention.alibi_slopes.stride;
        slope[i] = load_float(params.attention.alibi_slopes,
                              block.batch * stride.batch + block.head(row) * stride.head);
      }
    }
  }
};

// scores -= slope * |query + seqlen_k - seqlen_q - key|
template <class Scores, class Coordinates>
ANYFLASH_DEVICE void add_slopes(Scores& scores, const Coordinates& coordinates,
                                const DecodeRows& rows, int shift, int col0) {
  CUTE_UNROLL
  for (int row = 0; row < cute::size<0>(scores); ++row) {
    CUTE_UNROLL
    for (int col = 0; col < cute::size<1>(scores); ++col) {
      const int key = col0 + cute::get<1>(coordinates(row, col));
      scores(row, col) -= rows.slope[row] * static_cast<float>(abs(rows.query[row] + shift - key));
    }
  }
}

template <class Scores, class Coordinates>
ANYFLASH_DEVICE void hide_keys(Scores& scores, const Coordinates& coordinates,
                               const DecodeRows& rows, const TreeMask& tree, int col0) {
  CUTE_UNROLL
  for (int row = 0; row < cute::size<0>(scores); ++row) {
    CUTE_UNROLL
    for (int col = 0; col < cute::size<1>(scores); ++col) {
      const int key = col0 + cute::get<1>(coordinates(row, col));
      if (key < rows.seen[row].begin || key >= rows.seen[row].end ||
          !tree.keep(rows.query[row], key)) {
        scores(row, col) = -INFINITY;
      }
    }
  }
}

// What a thread's rows of O count in: the same number, or each a power of two, of which half of a
// float32 says all. 0 is both. It is one register: a second one would leave room for fewer CTAs.
class RowUnits {
 public:
  ANYFLASH_DEVICE explicit RowUnits(float of_both) { bits_ = __float_as_uint(of_both); }

  ANYFLASH_DEVICE float of_both() const { return __uint_as_float(bits_); }
  ANYFLASH_DEVICE float of_row(int row) const {
    return __uint_as_float(row == 0 ? bits_ << 16 : bits_ & 0xffff0000u);
  }
  ANYFLASH_DEVICE void set(const float (&powers)[DecodeRows::kRows]) {
    bits_ = __float_as_uint(powers[0]) >> 16 | __float_as_uint(powers[1]);
  }

 private:
  uint32_t bits_;
};

// P becomes P * v_scale / unit, and O counts in such units: in each row, that of the largest scale
// so far of keys that weigh anything in it. So small scales do not take P to where float16 is
// coarse. A hidden key's scale may be anything, also NaN.
template <class Scores, class Coordinates, class Out>
ANYFLASH_DEVICE void scale_values(Scores& probabilities, const Coordinates& coordinates, Out& out,
                                  const float* scales, RowUnits& units) {
  float powers[DecodeRows::kRows];
  CUTE_UNROLL
  for (int row = 0; row < DecodeRows::kRows; ++row) {
    const float unit = units.of_row(row);
    float largest = unit;
    CUTE_UNROLL
    for (int col = 0; col < cute::size<1>(probabilities); ++col) {
      const float scale = fabsf(scales[cute::get<1>(coordinates(0, col))]);
      largest = fmaxf(largest, probabilities(row, col) != 0.0f ? scale : 0.0f);
    }
    largest = quad_reduce(largest, [](float a, float b) { return fmaxf(a, b); });
    powers[row] = power_of_two(largest);
    if (powers[row] != unit) {
      const float rescale = unit / powers[row];
      CUTE_UNROLL
      for (int col = 0; col < cute::size<1>(out); ++col) out(row, col) *= rescale;
    }
    const float inverse = powers[row] > 0.0f ? 1.0f / powers[row] : 0.0f;
    CUTE_UNROLL
    for (int col = 0; col < cute::size<1>(probabilities); ++col) {
      const float factor = scales[cute::get<1>(coordinates(0, col))] * inverse;
      float& p = probabilities(row, col);
      p = p == 0.0f ? 0.0f : p * factor;
    }
  }
  units.set(powers);
}

// What happens to a thread's scores between the product and the softmax.
template <class Traits, class Coordinates>
class DecodeScores {
 public:
  ANYFLASH_DEVICE DecodeScores(const KvCacheParams& params, const DecodeWorkTile& block,
                               const Coordinates& coordinates)
      : params_(params),
        coordinates_(coordinates),
        rows_(params, block, coordinates),
        score_mod_(params.attention, static_cast<float>(params.attention.softmax_scale)),
        tree_(params, block.batch, block.sequence),
        shift_(block.sequence.seqlen_k - block.sequence.seqlen_q) {}

  // 8-bit caches: what scale() multiplies rows by.
  ANYFLASH_DEVICE void set_factors(const float* of_q, float of_k) {
    CUTE_UNROLL
    for (int row = 0; row < DecodeRows::kRows; ++row) {
      factor_[row] = of_k;
      if constexpr (Traits::kConvertsQ) factor_[row] *= of_q[cute::get<0>(coordinates_(row, 0))];
    }
  }

  // by_key: scales of these keys, null if all have the same.
  template <class Scores>
  ANYFLASH_DEVICE void scale(Scores& scores, const float* by_key) const {
    CUTE_UNROLL
    for (int row = 0; row < cute::size<0>(scores); ++row) {
      CUTE_UNROLL
      for (int col = 0; col < cute::size<1>(scores); ++col) scores(row, col) *= factor_[row];
    }
    if (by_key == nullptr) return;
    CUTE_UNROLL
    for (int col = 0; col < cute::size<1>(scores); ++col) {
      const float scale = by_key[cute::get<1>(coordinates_(0, col))];
      CUTE_UNROLL
      for (int row = 0; row < cute::size<0>(scores); ++row) scores(row, col) *= scale;
    }
  }

  // Of the keys from col0 on. hides: some of them may be hidden.
  template <class Scores>
  ANYFLASH_DEVICE void modify(Scores& scores, int col0, bool hides) const {
    score_mod_.scale_and_cap(scores);
    if (params_.attention.alibi_slopes.data != nullptr) {
      add_slopes(scores, coordinates_, rows_, shift_, col0);
    }
    if (hides) hide_keys(scores, coordinates_, rows_, tree_, col0);
  }

 private:
  const KvCacheParams& params_;
  const Coordinates& coordinates_;
  const DecodeRows rows_;
  const ScoreMod score_mod_;
  const TreeMask tree_;
  const int shift_;
  float factor_[DecodeRows::kRows] = {};
};

}  // namespace anyflash::sm80
