// A softcap where multiplications are cheap and exponentials are not, as on Hopper.
#pragma once

#include <cstdint>
#include <cute/tensor.hpp>

#include "common/element.h"
#include "common/macros.h"

namespace anyflash {

// softcap * tanh(s / softcap), in units of softcap * kLimit / 2, which are those of
// y = s / softcap * 2 / kLimit.
//
// Up to |y| = 2, tanh is a polynomial, of a relative error of 1.3e-7, and 2e-7 with rounding.
// Beyond that it takes an exponential and a reciprocal (two MUFU). Most scores are small. So a warp
// runs the second code only for 16 columns of which some lane has a large score, and then both.
// That takes longer than the second alone. Which of the two a score gets, it alone decides.
class Softcap {
 public:
  // A score is scale * qk.
  ANYFLASH_DEVICE Softcap(float softcap, float scale)
      : to_y_(fminf(2.0f / kLimit * scale / softcap, kLargestFloat)) {}

  // The natural value of 1 in these units. Not 0, also times log 2 and 1 / log 2: hidden scores are
  // -inf.
  ANYFLASH_DEVICE static float unit(float softcap) {
    return fmaxf(kLimit / 2.0f * softcap, 2.0f * kSmallestNormal);
  }

  // Of a (row, col) view of qk.
  template <class Scores>
  ANYFLASH_DEVICE void apply(Scores& scores) const {
    constexpr int kColumns = 16;  // at a time: with more, the code for large ones takes registers
    static_assert(cute::size<1>(typename Scores::layout_type{}) % kColumns == 0);
    CUTE_UNROLL
    for (int row = 0; row < cute::size<0>(scores); ++row) {
      CUTE_UNROLL
      for (int col = 0; col < cute::size<1>(scores); col += kColumns) {
        apply<kColumns>(scores, row, col);
      }
    }
  }

 private:
  template <int kColumns, class Scores>
  ANYFLASH_DEVICE void apply(Scores& scores, int row, int first_col) const {
    const auto each = [&](const auto& change) ANYFLASH_INLINE_LAMBDA {
      CUTE_UNROLL
      for (int i = 0; i < kColumns; ++i) change(scores(row, first_col + i));
    };
    uint32_t bits = 0;
    each([&](float& score) ANYFLASH_INLINE_LAMBDA {
      score *= to_y_;
      bits |= __float_as_uint(score);
    });
    if (!__any_sync(0xffffffffu, is_large(bits))) {
      each([](float& score) ANYFLASH_INLINE_LAMBDA { score = small(score); });
    } else {
      each([](float& score) ANYFLASH_INLINE_LAMBDA {
        score = is_large(__float_as_uint(score)) ? large(score) : small(score);
      });
    }
  }
  // From 2 on, infinity and NaN.
  ANYFLASH_DEVICE static bool is_large(uint32_t bits) { return (bits & 0x40000000u) != 0; }

  static constexpr float kLimit = 0.625f;
  static constexpr float kLargestFloat = 0x1.fffffep127f;  // NVRTC has no <cfloat>
  static constexpr float kSmallestNormal = 0x1p-126f;

  // tanh(x) = x (1 + z P(z)), z = y^2, x = kLimit / 2 * y: P has the least largest error for
  // |y| <= 2.
  ANYFLASH_DEVICE static float small(float y) {
    const float z = y * y;
    float p = fmaf(1.38487862e-6f, z, -4.84023403e-5f);
    p = fmaf(p, z, 1.26921786e-3f);
    p = fmaf(p, z, -3.25511486e-2f);
    return y * fmaf(p, z, 1.0f);
  }
  // tanh(x) = 1 - 2 / (1 + exp(2 x)), exact to a few units of 2^-24.
  ANYFLASH_DEVICE static float large(float y) {
    constexpr float kOne = 2.0f / kLimit;
    return fmaf(-2.0f * kOne, __fdividef(1.0f, 1.0f + exp2f(kLog2E * kLimit * y)), kOne);
  }

  float to_y_;
};

}  // namespace anyflash
