// Elements of 8-bit caches: int8, float8_e4m3fn (a sign, 4 bits of exponent, 3 of mantissa;
// S.1111.111 is NaN, there is no infinity) and float8_e5m2 (the upper half of a float16).
#pragma once

#include <math.h>

#include <cstdint>

#include "cpu/simd/convert.h"
#include "cpu/simd/vector.h"

namespace anyflash::cpu::ANYFLASH_CPU_ISA {

struct Int8 {
  std::int8_t value;
};

template <int kBias_, int kMantissaBits_, int kLargest_>
struct Float8 {
  static constexpr int kBias = kBias_;
  static constexpr int kMantissaBits = kMantissaBits_;
  static constexpr int kLargest = kLargest_;
  static constexpr std::uint8_t kNan = 0x7f;
  std::uint8_t bits;
};
using Float8E4M3 = Float8<7, 3, 448>;
using Float8E5M2 = Float8<15, 2, 57344>;

ANYFLASH_CPU_INLINE float to_compute(Int8 x) { return static_cast<float>(x.value); }

// In masks, which are all ones or all zeros: GCC 12 does not vectorise loops over selections here.
ANYFLASH_CPU_INLINE float to_compute(Float8E4M3 x) {
  const std::uint32_t sign = static_cast<std::uint32_t>(x.bits & 0x80u) << 24;
  const std::uint32_t magnitude = x.bits & 0x7fu;
  // Exponent 1 to 15: move the field, change the bias from 7 to 127.
  const std::uint32_t normal = (magnitude << 20) + (120u << 23);
  // Exponent 0: the mantissa counts units of 2^-9.
  const std::uint32_t small =
      float_bits(static_cast<float>(static_cast<std::int32_t>(magnitude)) * 0x1p-9f);
  const std::uint32_t is_small = 0u - ((magnitude - 8u) >> 31);
  const std::uint32_t is_nan = 0u - ((magnitude + 1u) >> 7);
  return bits_float(sign | (normal & ~is_small) | (small & is_small) | (is_nan & 0x7fc00000u));
}

ANYFLASH_CPU_INLINE float to_compute(Float8E5M2 x) {
  return to_compute(Half{static_cast<std::uint16_t>(x.bits << 8)});
}

// dst[i] = scale * src[i * stride]
template <typename C, typename T>
inline void load_scaled_row(const C* src, std::int64_t stride, int n, T scale, T* dst) {
  if (stride == 1) {
    for (int i = 0; i < n; ++i) dst[i] = static_cast<T>(to_compute(src[i])) * scale;
    return;
  }
  for (int i = 0; i < n; ++i) dst[i] = static_cast<T>(to_compute(src[i * stride])) * scale;
}

// Rounded to nearest even, and to the ends of the range beyond them. int8 has no NaN: it gets 0.
template <typename T>
inline void quantize(T x, Int8* out) {
  const T least = T(-128);
  const T most = T(127);
  const T within = x < least ? least : x > most ? most : x;
  out->value = within == within ? static_cast<std::int8_t>(::nearbyint(within)) : std::int8_t{0};
}

template <typename T, typename Format>
inline void quantize(T x, Format* out) {
  const T largest = T(Format::kLargest);
  const T magnitude = static_cast<T>(::fabs(x));  // of -0 too
  if (magnitude != magnitude) {
    out->bits = Format::kNan;
    return;
  }
  const T within = magnitude < largest ? magnitude : largest;
  // Where within rounds up to the next power of two as a float, it would also do so below.
  const int exponent = static_cast<int>(float_bits(static_cast<float>(within)) >> 23) - 127;
  const int scale = exponent < 1 - Format::kBias ? 1 - Format::kBias : exponent;
  // In units of the last mantissa bit: from `one`, less for subnormals, to twice as many, which
  // carries into the exponent, as it should.
  constexpr int kBits = Format::kMantissaBits;
  constexpr int one = 1 << kBits;
  const float units = bits_float(static_cast<std::uint32_t>(127 + kBits - scale) << 23);
  const int mantissa = static_cast<int>(::nearbyint(within * static_cast<T>(units)));
  const unsigned bits = static_cast<unsigned>((scale + Format::kBias) * one + mantissa - one);
  out->bits = static_cast<std::uint8_t>(bits | (::signbit(x) ? 0x80u : 0u));
}

}  // namespace anyflash::cpu::ANYFLASH_CPU_ISA
