// 2^x and tanh on vectors.
#pragma once

#include "common/math.h"
#include "cpu/amx/tiles.h"
#include "cpu/simd/vector.h"

namespace anyflash::cpu::ANYFLASH_CPU_ISA {

// 2^f = 1 + f q(f) on [-1/2, 1/2], q minimax for the relative error (Remez, 40 digits). The
// constant term is exactly 1, so that 2^0 is exactly 1: a block without a new maximum leaves the
// sums as they are.
template <typename T>
struct Exp2Constants;

template <>
struct Exp2Constants<float> {
  static constexpr int kMantissaBits = 23;
  static constexpr float kLowest = -127.0f;  // its biased exponent is 0, that is the factor 0
  // x + kMagic has round(x) + 127 in its lowest bits: 1.5 * 2^23, plus the bias.
  static constexpr float kMagic = 12582912.0f + 127.0f;
  static constexpr int kTerms = 6;  // relative error 3.9e-9 before rounding
  static constexpr float kTerm[kTerms] = {
      0.6931472253950111f,   0.24022651084117294f,   0.05550297314199325f,
      0.009618030782505154f, 0.0013410000966100157f, 0.00015469731977475548f,
  };
};

template <>
struct Exp2Constants<double> {
  static constexpr int kMantissaBits = 52;
  static constexpr double kLowest = -1023.0;
  static constexpr double kMagic = 6755399441055744.0 + 1023.0;
  static constexpr int kTerms = 11;  // relative error 1.8e-17 before rounding
  static constexpr double kTerm[kTerms] = {
      0.6931471805599457,     0.24022650695910097,   0.05550410866479039,    0.009618129107607003,
      0.0013333558153440133,  0.0001540353044157236, 1.5252727385038238e-05, 1.3215442675182759e-06,
      1.0180647722118852e-07, 7.072570442467681e-09, 4.078062699466225e-10,
  };
};

// 2^x = 2^n (1 + f q(f)),  n = round(x),  f = x - n,  for x <= 0, -inf and NaN.
template <typename T>
struct Exp2Parts {
  typename Simd<T>::Vec power;  // 2^n; 0 where that is below the normal numbers
  typename Simd<T>::Vec f;
  typename Simd<T>::Vec q;
};

template <typename T>
ANYFLASH_CPU_INLINE typename Simd<T>::Vec polynomial(typename Simd<T>::Vec f) {
  using C = Exp2Constants<T>;
  typename Simd<T>::Vec q = Simd<T>::broadcast(C::kTerm[C::kTerms - 1]);
  ANYFLASH_CPU_UNROLL
  for (int i = C::kTerms - 2; i >= 0; --i) q = q * f + C::kTerm[i];
  return q;
}

template <typename T>
ANYFLASH_CPU_INLINE Exp2Parts<T> exp2_parts(typename Simd<T>::Vec x) {
  using S = Simd<T>;
  using C = Exp2Constants<T>;
  using Vec = typename S::Vec;
  const Vec lowest = S::broadcast(C::kLowest);
  const Vec magic = S::broadcast(C::kMagic);
  x = S::max(lowest, x);  // lowest > NaN is false: NaN passes
  const Vec shifted = x + magic;
  // magic holds the bias too, which cancels here.
  const Vec f = x - (shifted - magic);
  return {S::from_bits(S::bits(shifted) << C::kMantissaBits), f, polynomial<T>(f)};
}

// 2^x for x <= 0, -inf and NaN. Results below the normal numbers are 0; NaN stays NaN, because 2^n
// multiplies 2^f (an addition to the exponent's bits could make a number of it).
#if ANYFLASH_CPU_TILES
// Two instructions of AVX-512 for seven (GCC 12 warns about their forms without a mask). Results
// may be subnormal, which P in bfloat16 is not.
template <typename T>
ANYFLASH_CPU_INLINE Simd<float>::Vec exp2_nonpositive(Simd<float>::Vec x) {
  using Vec = Simd<float>::Vec;
  const Vec f = (Vec)_mm512_maskz_reduce_ps(0xffff, (__m512)x, 0);
  const Vec y = polynomial<float>(f) * f + 1.0f;
  return (Vec)_mm512_maskz_scalef_ps(0xffff, (__m512)y, (__m512)(x - f));
}
#else
template <typename T>
ANYFLASH_CPU_INLINE typename Simd<T>::Vec exp2_nonpositive(typename Simd<T>::Vec x) {
  const Exp2Parts<T> parts = exp2_parts<T>(x);
  return (parts.q * parts.f + T(1)) * parts.power;
}
#endif

// tanh |x| = -e / (2 + e),  e = exp(-2 |x|) - 1 = 2^n f q(f) + (2^n - 1).
// Near 0 n is 0, so that nothing cancels: a few units of the last place for every x.
template <typename T>
ANYFLASH_CPU_INLINE typename Simd<T>::Vec tanh_vector(typename Simd<T>::Vec x) {
  using S = Simd<T>;
  using Vec = typename S::Vec;
  constexpr double kMinus2Log2E = -2 * kLog2EOf<double>;
  const Exp2Parts<T> parts = exp2_parts<T>(S::max(x, -x) * S::broadcast(T(kMinus2Log2E)));
  const Vec e = parts.q * parts.f * parts.power + (parts.power - T(1));
  const Vec size = -e / (e + T(2));
  return x < Vec{} ? -size : size;
}

}  // namespace anyflash::cpu::ANYFLASH_CPU_ISA
