// The online softmax in stages, for loops that rescale O later than they compute P.
#pragma once

#include <cute/tensor.hpp>

#include "common/macros.h"
#include "common/softmax.h"
#include "sm90/accumulator.h"

namespace anyflash::sm90 {

// What O has to be multiplied with before the next product is added.
struct Rescale {
  float factor[kThreadRows];
  bool any = false;  // some row of this warp has a factor other than 1

  template <class Out>
  ANYFLASH_DEVICE void apply(Out& out) const {
    if (!any) return;
    CUTE_UNROLL
    for (int row = 0; row < kThreadRows; ++row) {
      CUTE_UNROLL
      for (int col = 0; col < cute::size<1>(out); ++col) out(row, col) *= factor[row];
    }
  }
};

// What a row's sum of P V is multiplied with, and its log-sum-exp.
struct FinishedRows {
  using Rows = decltype(cute::make_tensor<float>(cute::Int<kThreadRows>{}));
  Rows scale;
  Rows lse;

  template <class Out>
  ANYFLASH_DEVICE void apply(Out& out, float factor) const {
    CUTE_UNROLL
    for (int row = 0; row < kThreadRows; ++row) {
      CUTE_UNROLL
      for (int col = 0; col < cute::size<1>(out); ++col) out(row, col) *= scale(row) * factor;
    }
  }
};

// A maximum is kept beside each reference: asking for max_logits does not change the output's bits.
class StagedSoftmax : public OnlineSoftmax<kThreadRows, /*kLazy=*/true> {
 public:
  ANYFLASH_DEVICE explicit StagedSoftmax(float scale_log2)
      : OnlineSoftmax(scale_log2, /*exact_max=*/false) {
    cute::fill(largest_, -INFINITY);
  }

  // The largest score of a row, natural units; -inf if it saw nothing.
  ANYFLASH_DEVICE float max_score(int row) const { return largest_(row) * unit_; }

  // Moves the references to the rows' maxima where these have grown much. Whether one moves depends
  // on its row's scores alone.
  template <class Scores>
  ANYFLASH_DEVICE Rescale move_references(const Scores& scores) {
    Rescale rescale;
    bool moves_any = false;
    CUTE_UNROLL
    for (int row = 0; row < kThreadRows; ++row) {
      const float previous = max_(row);
      const float larger = maximum(scores, row, previous);
      largest_(row) = fmaxf(largest_(row), larger);
      const bool moves = !((larger - previous) * scale_log2_ <= limit_);
      if (moves) max_(row) = larger;
      // While no key has been visible, the factor is 0, since -inf - -inf would be NaN.
      const float exponent = previous == -INFINITY ? -INFINITY : (previous - larger) * scale_log2_;
      rescale.factor[row] = moves ? exp2f(exponent) : 1.0f;
      moves_any |= moves;
    }
    rescale.any = __any_sync(0xffffffffu, moves_any);
    // No branch on `any`: ptxas would not move one row's instructions beside the other's.
    CUTE_UNROLL
    for (int row = 0; row < kThreadRows; ++row) sum_(row) *= rescale.factor[row];
    return rescale;
  }

  // P = exp2(S - reference) of a row in place, and its sum.
  template <class Scores>
  ANYFLASH_DEVICE void exponentiate(Scores& scores, int row) {
    const float reference = max_(row) == -INFINITY ? 0.0f : max_(row);
    const float shift = reference * scale_log2_;
    CUTE_UNROLL
    for (int col = 0; col < cute::size<1>(scores); ++col) {
      scores(row, col) = exp2f(scores(row, col) * scale_log2_ - shift);
      sum_(row) += scores(row, col);
    }
  }

  // Rows that saw nothing have scale 1 and -inf. `sink` is one more logit of the denominator, -inf
  // if there is none. No reference exceeds its row's largest logit, so a sum is at least 1, or 0,
  // or NaN: approximations need no other way for small numbers. Each step is taken for all rows
  // before the next one, so that their shuffles overlap.
  ANYFLASH_DEVICE FinishedRows finish(float sink) const {
    Rows sums, references;
    FinishedRows rows;
    CUTE_UNROLL
    for (int row = 0; row < kThreadRows; ++row) {
      sums(row) = quad_reduce(sum_(row), [](float a, float b) { return a + b; });
      references(row) = max_(row) * unit_;
      rows.scale(row) = 1.0f;
    }
    if (sink != -INFINITY) {
      CUTE_UNROLL
      for (int row = 0; row < kThreadRows; ++row) {
        rows.scale(row) = add_sink(sink, references(row), sums(row));
      }
    }
    CUTE_UNROLL
    for (int row = 0; row < kThreadRows; ++row) {
      const bool empty = sums(row) == 0.0f;
      rows.scale(row) = empty ? 1.0f : __fdividef(rows.scale(row), sums(row));
      rows.lse(row) = empty ? -INFINITY : references(row) + __log2f(sums(row)) * kLn2;
    }
    return rows;
  }

 private:
  Rows largest_;
};

}  // namespace anyflash::sm90
