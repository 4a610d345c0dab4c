// Online softmax (FlashAttention-2, arXiv 2307.08691, section 3.1) over a thread's rows.
//
// With scores s, c = scale * log2(e) and the running maximum m of a row,
//   P   = exp2(c * s - c * m)            one FFMA and one MUFU per score
//   l   = sum_j P_j                      kept per thread, reduced over the quad at the end
//   O   = sum_j P_j v_j                  not normalised until the end
// and both l and O are multiplied by exp2(c * (m_old - m_new)) whenever m grows. Lazily, m is a
// reference that the maximum does not exceed by more than kLazyLimit / c, and is seldom moved
// (FlashAttention-4). c is positive: a negative or zero scale is folded into Q before. Where scores
// may be near the ends of fp32's range (a bias of its lowest number is a common mask), s - m is
// computed first: one FADD more.
#pragma once

#include <cmath>
#include <cute/tensor.hpp>
#include <type_traits>

#include "common/element.h"
#include "common/macros.h"
#include "common/sink.h"

namespace anyflash {

// Reduction over the four lanes that share an accumulator row of mma.sync.
template <class Op>
ANYFLASH_DEVICE float quad_reduce(float x, Op op) {
  x = op(x, __shfl_xor_sync(0xffffffffu, x, 2));
  return op(x, __shfl_xor_sync(0xffffffffu, x, 1));
}

// Probabilities up to 2^8: float16 has as many digits for these as for 1.
inline constexpr float kLazyLimit = 8.0f;

// Joins values of rows with those of other warps that share them; of a warp alone, nothing.
struct NoExchange {
  template <class Rows>
  ANYFLASH_DEVICE void operator()(Rows&) const {}
};

// Rows of a thread: kRows. Tensors passed in are (row, col) views of accumulators.
template <int kRows, bool kLazy = false>
class OnlineSoftmax {
 public:
  // exact_max: max_score() will be asked for.
  ANYFLASH_DEVICE explicit OnlineSoftmax(float scale_log2, bool exact_max = true)
      : scale_log2_(scale_log2),
        unit_(scale_log2 == kLog2E ? 1.0f : scale_log2 * kLn2),
        limit_(exact_max ? 0.0f : kLazyLimit) {
    cute::fill(max_, -INFINITY);
    cute::fill(sum_, 0.0f);
  }

  // Turns scores into probabilities in place and rescales `out` to the new maximum; both hold the
  // rows from kFirst on, the others see none of these scores. kWide: c * s may overflow.
  // all_reduce_pair(maxima) makes the rows' maxima of this warp's.
  template <bool kWide, int kFirst = 0, class Scores, class Out, class AllReduce = NoExchange>
  ANYFLASH_DEVICE void update(Scores& scores, Out& out, const AllReduce& all_reduce_pair = {}) {
    static_assert(!(kLazy && kWide));
    const auto maximum_of = [&](int i) { return maximum(scores, i, max_(kFirst + i)); };
    Rows maxima;
    if constexpr (kLazy && std::is_same_v<AllReduce, NoExchange>) {
      move_references<kFirst>(maximum_of, out);
    } else {
      CUTE_UNROLL
      for (int i = 0; i < kRows - kFirst; ++i) maxima(i) = maximum_of(i);
      all_reduce_pair(maxima);
      if constexpr (kLazy) move_references<kFirst>([&](int i) { return maxima(i); }, out);
    }
    CUTE_UNROLL
    for (int i = 0; i < kRows - kFirst; ++i) {
      const int row = kFirst + i;
      const float previous = max_(row);
      if constexpr (!kLazy) max_(row) = maxima(i);

      // -inf means that nothing was visible yet: then every score is -inf and P must be 0, not NaN.
      const float reference = max_(row) == -INFINITY ? 0.0f : max_(row);
      const float shift = reference * scale_log2_;
      const auto probability = [&](float score) {
        return exp2f(kWide ? (score - reference) * scale_log2_ : score * scale_log2_ - shift);
      };
      float sum = sum_(row);
      if constexpr (!kLazy) {
        const float rescale = probability(previous);
        sum *= rescale;
        CUTE_UNROLL
        for (int col = 0; col < cute::size<1>(out); ++col) {
          out(i, col) *= rescale;
        }
      }
      CUTE_UNROLL
      for (int col = 0; col < cute::size<1>(scores); ++col) {
        scores(i, col) = probability(scores(i, col));
        sum += scores(i, col);
      }
      sum_(row) = sum;
    }
  }

  // Before finish(), where warps share rows: all_reduce_pair(sums) makes the rows' sums of this
  // warp's.
  template <class AllReduce>
  ANYFLASH_DEVICE void exchange_sums(const AllReduce& all_reduce_pair) {
    CUTE_UNROLL
    for (int row = 0; row < kRows; ++row) {
      sum_(row) = quad_reduce(sum_(row), [](float a, float b) { return a + b; });
    }
    all_reduce_pair(sum_);
    CUTE_UNROLL
    for (int row = 0; row < kRows; ++row) sum_(row) *= 0.25f;  // finish() adds four lanes'
  }

  // Normalises `out`, rows times their factors, and returns each row's log-sum-exp; rows that saw
  // nothing give 0 and -inf. `sink` is one more logit of the denominator, -inf if there is none.
  template <class Out>
  ANYFLASH_DEVICE auto finish(Out& out, float sink, const float (&factors)[kRows]) {
    auto lse = cute::make_tensor<float>(cute::Int<kRows>{});
    CUTE_UNROLL
    for (int row = 0; row < kRows; ++row) {
      float sum = quad_reduce(sum_(row), [](float a, float b) { return a + b; });
      float reference = max_(row) * unit_;
      float scale = factors[row];
      if (sink != -INFINITY) scale *= add_sink(sink, reference, sum);
      lse(row) = sum == 0.0f ? -INFINITY : reference + logf(sum);
      if (sum != 0.0f) scale /= sum;
      CUTE_UNROLL
      for (int col = 0; col < cute::size<1>(out); ++col) {
        out(row, col) *= scale;
      }
    }
    return lse;
  }
  template <class Out>
  ANYFLASH_DEVICE auto finish(Out& out, float sink, float factor) {
    float factors[kRows];
    CUTE_UNROLL
    for (float& of_row : factors) of_row = factor;
    return finish(out, sink, factors);
  }

  // The largest score of a row, natural units, or lazily a reference; -inf if it saw nothing.
  ANYFLASH_DEVICE float max_score(int row) const { return max_(row) * unit_; }

 protected:
  // One more logit of a row's denominator. Returns what the row's output is multiplied with.
  ANYFLASH_DEVICE static float add_sink(float sink, float& reference, float& sum) {
    // The larger of both is the new reference, so that neither term overflows.
    const float larger = fmaxf(reference, sink);
    const float rescale = exp2f((reference - larger) * kLog2E);
    sum = sum * rescale + sink_term(sink, larger);
    reference = larger;
    return rescale;
  }

  // Of a row's scores before and these.
  template <class Scores>
  ANYFLASH_DEVICE static float maximum(const Scores& scores, int i, float previous) {
    float result = previous;
    CUTE_UNROLL
    for (int col = 0; col < cute::size<1>(scores); ++col) {
      result = fmaxf(result, scores(i, col));
    }
    return quad_reduce(result, [](float a, float b) { return fmaxf(a, b); });
  }

  // Whether a row's reference moves depends on its own scores alone; other rows only decide whether
  // the multiplications by 1 are left out.
  template <int kFirst, class MaximumOf, class Out>
  ANYFLASH_DEVICE void move_references(const MaximumOf& maximum_of, Out& out) {
    Rows rescale;
    bool any_moves = false;
    CUTE_UNROLL
    for (int i = 0; i < kRows - kFirst; ++i) {
      const int row = kFirst + i;
      const float previous = max_(row);
      const float larger = maximum_of(i);
      const bool moves = !((larger - previous) * scale_log2_ <= limit_);
      if (moves) max_(row) = larger;
      // While no key has been visible, the factor is 0, since -inf - -inf would be NaN.
      const float exponent = previous == -INFINITY ? -INFINITY : (previous - larger) * scale_log2_;
      rescale(i) = moves ? exp2f(exponent) : 1.0f;
      any_moves |= moves;
    }
    if (!__any_sync(0xffffffffu, any_moves)) return;
    CUTE_UNROLL
    for (int i = 0; i < kRows - kFirst; ++i) {
      sum_(kFirst + i) *= rescale(i);
      CUTE_UNROLL
      for (int col = 0; col < cute::size<1>(out); ++col) {
        out(i, col) *= rescale(i);
      }
    }
  }

  using Rows = decltype(cute::make_tensor<float>(cute::Int<kRows>{}));
  Rows max_;
  Rows sum_;
  float scale_log2_;
  float unit_;   // of scores: exactly 1 where they are in natural units
  float limit_;  // lazy rescale: growth of a maximum, in powers of 2, that moves no reference
};

}  // namespace anyflash
