// int8, float8_e4m3fn and float8_e5m2 numbers as float16 ones, two at a time. All of them are
// float16 numbers, in which they take fewer instructions than in bfloat16.
#pragma once

#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cmath>
#include <cstdint>

#include "anyflash/tensor_view.h"
#include "common/launch.h"  // emulated: emu.hpp
#include "common/macros.h"

namespace anyflash {

ANYFLASH_DEVICE __half2 half_pair(uint32_t bits) {
  return *reinterpret_cast<const __half2*>(&bits);
}
ANYFLASH_DEVICE uint32_t bits_of(__half2 pair) { return *reinterpret_cast<const uint32_t*>(&pair); }

// 0x6400 + u is 1024 + u, with u = i + 128.
template <int kA, int kB>
ANYFLASH_DEVICE uint32_t int8_pair(uint32_t x) {
  const uint32_t biased = __byte_perm(x ^ 0x80808080u, 0x64646464u, 0x4040 | kB << 8 | kA);
  return bits_of(__hsub2(half_pair(biased), half_pair(0x64806480u)));
}

// float8_e5m2 is the upper half of a float16.
template <int kA, int kB>
ANYFLASH_DEVICE uint32_t e5m2_pair(uint32_t x) {
  return __byte_perm(x, 0u, 0x0404 | kB << 12 | kA << 4);
}

// By the conversion that GPUs have from 8.9 on.
template <int kA, int kB>
ANYFLASH_DEVICE uint32_t converted_e4m3_pair(uint32_t x) {
  const auto bytes = static_cast<__nv_fp8x2_storage_t>(__byte_perm(x, 0u, 0x4400 | kB << 4 | kA));
  return bits_of(__half2(__nv_cvt_fp8x2_to_halfraw2(bytes, __NV_E4M3)));
}

ANYFLASH_DEVICE bool converts_e4m3() {
#if defined(ANYFLASH_EMULATED)
  return emu::options().compute_capability >= 89;
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  return true;
#else
  return false;
#endif
}

// Sign, exponent and mantissa moved to their places, and 2^8 between the exponents' biases.
// Denormal numbers come out right; NaN is what mark_nan() makes of it.
template <int kA, int kB>
ANYFLASH_DEVICE uint32_t e4m3_pair(uint32_t x) {
  if (converts_e4m3()) return converted_e4m3_pair<kA, kB>(x);
  const uint32_t bytes = e5m2_pair<kA, kB>(x);
  const uint32_t moved = (bytes & 0x80008000u) | (bytes & 0x7f007f00u) >> 1;
  return bits_of(__hmul2(half_pair(moved), half_pair(0x5c005c00u)));
}

// Elements kA and kB of the four in x, the first in the low half.
template <DType kStored, int kA, int kB>
ANYFLASH_DEVICE uint32_t dequantize_pair(uint32_t x) {
  if constexpr (kStored == DType::kInt8) return int8_pair<kA, kB>(x);
  else if constexpr (kStored == DType::kFloat8E5M2) return e5m2_pair<kA, kB>(x);
  else return e4m3_pair<kA, kB>(x);
}

// The bytes of x that are not finite, by their highest bits. float8_e4m3fn has NaN, of a mantissa
// of ones, and no infinity.
ANYFLASH_DEVICE uint32_t nonfinite_bytes(uint32_t x, DType dtype) {
  const uint32_t carry = dtype == DType::kFloat8E5M2 ? 0x04040404 : 0x01010101;
  return dtype == DType::kInt8 ? 0 : ((x & 0x7f7f7f7fu) + carry) & 0x80808080u;
}

// Writes 0 over them; returns whether there were any.
ANYFLASH_DEVICE bool clear_nonfinite_bytes(uint32_t& x, DType dtype) {
  const uint32_t nonfinite = nonfinite_bytes(x, dtype);
  if (nonfinite == 0) return false;
  x &= ~((nonfinite >> 7) * 0xffu);
  return true;
}

// Makes NaN of those elements of e4m3_pair<kA, kB>(x) that are; nonfinite: of x.
template <int kA, int kB>
ANYFLASH_DEVICE uint32_t mark_nan(uint32_t pair, uint32_t nonfinite) {
  return pair | e5m2_pair<kA, kB>(nonfinite) >> 2;  // one more bit, and all of the exponent are set
}

// Of one byte: an infinity or NaN, else 0.
ANYFLASH_DEVICE float nonfinite_part(uint32_t x, DType dtype) {
  if ((nonfinite_bytes(x, dtype) & 0x80u) == 0) return 0.0f;
  if ((x & 3u) != 0) return NAN;
  return (x & 0x80u) == 0 ? INFINITY : -INFINITY;
}

}  // namespace anyflash
