// Rows of bfloat16 queries as float16 ones, for products with caches of 8 bits: each row times a
// power of two that takes its largest finite number to 2^14. Numbers that float16 then rounds are
// below 2^-28 of that.
#pragma once

#include <cmath>
#include <cstdint>

#include "common/macros.h"

namespace anyflash {

inline constexpr int kBFloat16Exponent = 0x7f80;  // all ones: not finite; 0: 0 or subnormal

// The exponent's bits of a bfloat16, 0 if it is not finite.
ANYFLASH_DEVICE int finite_exponent(uint16_t bits) {
  const int exponent = bits & kBFloat16Exponent;
  return exponent == kBFloat16Exponent ? 0 : exponent;
}

// A row's power of two, and its inverse.
struct HalfScale {
  float power;
  float inverse;

  // largest: of its numbers' finite_exponent()
  ANYFLASH_DEVICE explicit HalfScale(int largest) {
    const int exponent = min(14 + 2 * 127 - (largest >> 7), 253);
    power = __int_as_float(exponent << 23);
    inverse = __int_as_float((254 - exponent) << 23);
  }
};

// A bfloat16 times a power of two. GPU code flushes subnormal operands to 0 (-ftz=true), so a
// subnormal number's digits are taken as those of a normal one: 1.m - 1.
ANYFLASH_DEVICE float scaled(uint16_t bits, float power) {
  constexpr int kOne = 0x3f80;
  constexpr int kDigits = 0x7f;
  const float value = __int_as_float(static_cast<int>(bits) << 16);
  if ((bits & kBFloat16Exponent) != 0) return value * power;
  const float digits = __int_as_float((kOne | (bits & kDigits)) << 16) - 1.0f;
  return copysignf(digits * (power * 0x1p-126f), value);
}

}  // namespace anyflash
