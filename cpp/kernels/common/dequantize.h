// int8, float8_e4m3fn and float8_e5m2 numbers as 16-bit ones, two at a time; exact.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cutlass/numeric_types.h>

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "anyflash/tensor_view.h"
#include "common/macros.h"

namespace anyflash {

template <class Pair>
ANYFLASH_DEVICE Pair pair_of(uint32_t bits) {
  return *reinterpret_cast<const Pair*>(&bits);
}
template <class Pair>
ANYFLASH_DEVICE uint32_t bits_of(Pair pair) {
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// Bytes kA and kB of x, the first in the low half, each below `other`.
template <int kA, int kB>
ANYFLASH_DEVICE uint32_t bytes_below(uint32_t x, uint32_t other) {
  return __byte_perm(x, other, 0x4040 | kB << 8 | kA);
}
template <int kA, int kB>
ANYFLASH_DEVICE uint32_t bytes_above_zero(uint32_t x) {
  return __byte_perm(x, 0u, 0x0404 | kB << 12 | kA << 4);
}

// float16: 0x6400 + u is 1024 + u, with u = i + 128.
template <int kA, int kB>
ANYFLASH_DEVICE uint32_t int8_pair(uint32_t x, cutlass::half_t) {
  const uint32_t biased = bytes_below<kA, kB>(x ^ 0x80808080u, 0x64646464u);
  return bits_of(__hsub2(pair_of<__half2>(biased), pair_of<__half2>(0x64806480u)));
}

// bfloat16 has 7 bits behind the point: 0x4300 + the lower 7 bits is 128 + those, and 0x4300 + the
// sign's bit is 128 or 256.
template <int kA, int kB>
ANYFLASH_DEVICE uint32_t int8_pair(uint32_t x, cutlass::bfloat16_t) {
  const uint32_t bytes = bytes_below<kA, kB>(x, 0x43434343u);
  return bits_of(__hsub2(pair_of<__nv_bfloat162>(bytes & 0xff7fff7fu),
                         pair_of<__nv_bfloat162>(bytes & 0xff80ff80u)));
}

// What tells the float8 formats apart, where they become Elements.
template <class Element>
struct Float8Format {
  static constexpr bool kHalf = std::is_same_v<Element, cutlass::half_t>;
  static constexpr uint32_t kInfinity = kHalf ? 0x7c00 : 0x7f80;
  static constexpr uint32_t kNan = 0x7fff;

  uint32_t shift;   // between the places of exponent and mantissa
  uint32_t factor;  // a pair: the power of two between the exponents' biases
  uint32_t carry;   // added to a byte without its sign, reaches that place if it is not finite

  ANYFLASH_DEVICE explicit Float8Format(DType dtype)
      : shift(dtype == DType::kFloat8E5M2 ? (kHalf ? 0 : 3) : (kHalf ? 1 : 4)),
        factor(dtype == DType::kFloat8E5M2 ? (kHalf ? 0x3c003c00 : 0x77807780)    // 1, 2^112
                                           : (kHalf ? 0x5c005c00 : 0x7b807b80)),  // 2^8, 2^120
        carry(dtype == DType::kFloat8E5M2 ? 0x04040404 : 0x01010101) {}

  // The bytes of x that are not finite, by their highest bits.
  ANYFLASH_DEVICE uint32_t nonfinite(uint32_t x) const {
    return ((x & 0x7f7f7f7fu) + carry) & 0x80808080u;
  }
};

// float8_e4m3fn's NaN has all bits of the mantissa, float8_e5m2's infinity none.
ANYFLASH_DEVICE bool is_float8_infinity(uint32_t nonfinite_byte) {
  return (nonfinite_byte & 3u) == 0;
}

// Of the low byte of x: an infinity or NaN, else 0.
template <class Element>
ANYFLASH_DEVICE float nonfinite_part(uint32_t x, const Float8Format<Element>& format) {
  if ((format.nonfinite(x) & 0x80u) == 0) return 0.0f;
  if (!is_float8_infinity(x)) return NAN;
  return (x & 0x80u) == 0 ? INFINITY : -INFINITY;
}

// Sign, exponent and mantissa moved to their places. Denormal numbers come out right.
template <int kA, int kB, class Element>
ANYFLASH_DEVICE uint32_t float8_pair(uint32_t x, const Float8Format<Element>& format) {
  using Pair = std::conditional_t<Float8Format<Element>::kHalf, __half2, __nv_bfloat162>;
  const uint32_t bytes = bytes_above_zero<kA, kB>(x);
  const uint32_t moved = (bytes & 0x80008000u) | (bytes & 0x7f007f00u) >> format.shift;
  return bits_of(__hmul2(pair_of<Pair>(moved), pair_of<Pair>(format.factor)));
}

// Elements kA and kB of the four in x; what is not finite becomes some number (see
// restore_nonfinite_pair).
template <bool kInt8, int kA, int kB, class Element>
ANYFLASH_DEVICE uint32_t dequantize_pair(uint32_t x, const Float8Format<Element>& format) {
  if constexpr (kInt8) return int8_pair<kA, kB>(x, Element{});
  else return float8_pair<kA, kB>(x, format);
}

// Makes NaN and infinity of those elements of dequantize_pair<.., kA, kB>(x) that are.
template <int kA, int kB, class Element>
ANYFLASH_DEVICE void restore_nonfinite_pair(uint32_t x, const Float8Format<Element>& format,
                                            uint32_t& pair) {
  using Format = Float8Format<Element>;
  const uint32_t nonfinite = format.nonfinite(x);
  const uint32_t a = is_float8_infinity(x >> 8 * kA) ? Format::kInfinity : Format::kNan;
  const uint32_t b = is_float8_infinity(x >> 8 * kB) ? Format::kInfinity : Format::kNan;
  if ((nonfinite >> (8 * kA + 7) & 1) != 0) pair = (pair & 0xffff8000u) | a;
  if ((nonfinite >> (8 * kB + 7) & 1) != 0) pair = (pair & 0x8000ffffu) | b << 16;
}

}  // namespace anyflash
