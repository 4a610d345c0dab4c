// int8 and float8_e4m3fn numbers as 16-bit ones, two at a time; exact.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cutlass/numeric_types.h>

#include <cstdint>

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

// Sign, exponent and mantissa moved to their places; the exponents' biases differ by 8 (float16)
// and 120 (bfloat16). Denormal numbers come out right.
template <int kA, int kB>
ANYFLASH_DEVICE uint32_t e4m3_pair(uint32_t x, cutlass::half_t) {
  const uint32_t bytes = bytes_above_zero<kA, kB>(x);
  const uint32_t moved = (bytes & 0x80008000u) | (bytes & 0x7f007f00u) >> 1;
  return bits_of(__hmul2(pair_of<__half2>(moved), pair_of<__half2>(0x5c005c00u)));
}
template <int kA, int kB>
ANYFLASH_DEVICE uint32_t e4m3_pair(uint32_t x, cutlass::bfloat16_t) {
  const uint32_t bytes = bytes_above_zero<kA, kB>(x);
  const uint32_t moved = (bytes & 0x80008000u) | (bytes & 0x7f007f00u) >> 4;
  return bits_of(__hmul2(pair_of<__nv_bfloat162>(moved), pair_of<__nv_bfloat162>(0x7b807b80u)));
}

// The bytes of x that are NaN as float8_e4m3fn (all bits but the sign), by their highest bits.
ANYFLASH_DEVICE uint32_t e4m3_nans(uint32_t x) {
  return ((x & 0x7f7f7f7fu) + 0x01010101u) & 0x80808080u;
}

// Elements kA and kB of the four in x; float8_e4m3fn's NaN becomes 480 or -480 (see restore_nans).
template <class Element, bool kInt8, int kA, int kB>
ANYFLASH_DEVICE uint32_t dequantize_pair(uint32_t x) {
  if constexpr (kInt8) return int8_pair<kA, kB>(x, Element{});
  else return e4m3_pair<kA, kB>(x, Element{});
}

// Makes NaN of those elements of dequantize_pair<.., kA, kB>(x) that are.
template <int kA, int kB>
ANYFLASH_DEVICE void restore_nans(uint32_t x, uint32_t& pair) {
  const uint32_t nans = e4m3_nans(x);
  if ((nans >> (8 * kA + 7) & 1) != 0) pair |= 0x00007fffu;
  if ((nans >> (8 * kB + 7) & 1) != 0) pair |= 0x7fff0000u;
}

}  // namespace anyflash
