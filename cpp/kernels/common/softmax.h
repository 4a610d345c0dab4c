// Online softmax (FlashAttention-2, arXiv 2307.08691, section 3.1) over a thread's rows.
//
// With scores s, c = scale * log2(e) and the running maximum m of a row,
//   P   = exp2(c * s - c * m)            one FFMA and one MUFU per score
//   l   = sum_j P_j                      kept per thread, reduced over the quad at the end
//   O   = sum_j P_j v_j                  not normalised until the end
// and both l and O are multiplied by exp2(c * (m_old - m_new)) whenever m grows. c is positive: a
// negative or zero scale is folded into Q before.
#pragma once

#include <cmath>
#include <cute/tensor.hpp>

#include "common/macros.h"

namespace anyflash {

inline constexpr float kLog2E = 1.4426950408889634f;
inline constexpr float kLn2 = 0.6931471805599453f;

// Reduction over the four lanes that share an accumulator row of mma.sync.
template <class Op>
ANYFLASH_DEVICE float quad_reduce(float x, Op op) {
  x = op(x, __shfl_xor_sync(0xffffffffu, x, 2));
  return op(x, __shfl_xor_sync(0xffffffffu, x, 1));
}

// Rows of a thread: kRows. Tensors passed in are (row, col) views of accumulators.
template <int kRows>
class OnlineSoftmax {
 public:
  ANYFLASH_DEVICE explicit OnlineSoftmax(float scale_log2) : scale_log2_(scale_log2) {
    cute::fill(max_, -INFINITY);
    cute::fill(sum_, 0.0f);
  }

  // Turns scores into probabilities in place and rescales `out` to the new maximum.
  template <class Scores, class Out>
  ANYFLASH_DEVICE void update(Scores& scores, Out& out) {
    CUTE_UNROLL
    for (int row = 0; row < kRows; ++row) {
      const float previous = max_(row);
      float maximum = previous;
      CUTE_UNROLL
      for (int col = 0; col < cute::size<1>(scores); ++col) {
        maximum = fmaxf(maximum, scores(row, col));
      }
      maximum = quad_reduce(maximum, [](float a, float b) { return fmaxf(a, b); });
      max_(row) = maximum;

      // -inf means that nothing was visible yet: then every score is -inf and P must be 0, not NaN.
      const float shift = maximum == -INFINITY ? 0.0f : maximum * scale_log2_;
      const float rescale = exp2f(previous * scale_log2_ - shift);
      float sum = sum_(row) * rescale;
      CUTE_UNROLL
      for (int col = 0; col < cute::size<1>(out); ++col) {
        out(row, col) *= rescale;
      }
      CUTE_UNROLL
      for (int col = 0; col < cute::size<1>(scores); ++col) {
        scores(row, col) = exp2f(scores(row, col) * scale_log2_ - shift);
        sum += scores(row, col);
      }
      sum_(row) = sum;
    }
  }

  // Normalises `out` and returns each row's log-sum-exp; rows that saw nothing give 0 and -inf.
  template <class Out>
  ANYFLASH_DEVICE auto finish(Out& out) {
    auto lse = cute::make_tensor<float>(cute::Int<kRows>{});
    CUTE_UNROLL
    for (int row = 0; row < kRows; ++row) {
      const float sum = quad_reduce(sum_(row), [](float a, float b) { return a + b; });
      const float inverse = sum == 0.0f ? 1.0f : 1.0f / sum;
      lse(row) = sum == 0.0f ? -INFINITY : max_(row) * scale_log2_ * kLn2 + logf(sum);
      CUTE_UNROLL
      for (int col = 0; col < cute::size<1>(out); ++col) {
        out(row, col) *= inverse;
      }
    }
    return lse;
  }

 private:
  using Rows = decltype(cute::make_tensor<float>(cute::Int<kRows>{}));
  Rows max_;
  Rows sum_;
  float scale_log2_;
};

}  // namespace anyflash
