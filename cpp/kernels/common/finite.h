// NaN and infinity in 16-bit tiles.
//
// A masked probability is 0, but 0 * NaN is NaN. So in a tile that is only partly visible, a NaN or
// an infinity in V would reach rows that do not see it. Such elements are taken out of the tile,
// and added to the finished output of the rows that do see them.
#pragma once

#include <cutlass/numeric_types.h>

#include <cstdint>
#include <cute/tensor.hpp>

#include "common/macros.h"

namespace anyflash {

// The bits of the exponent, all ones in NaN and infinity.
template <class Element>
inline constexpr uint16_t kExponentBits = 0;
template <>
inline constexpr uint16_t kExponentBits<cutlass::half_t> = 0x7c00;
template <>
inline constexpr uint16_t kExponentBits<cutlass::bfloat16_t> = 0x7f80;

template <class Element>
ANYFLASH_DEVICE bool is_finite(Element x) {
  return (x.storage & kExponentBits<Element>) != kExponentBits<Element>;
}

template <class Engine, class Layout>
ANYFLASH_DEVICE bool all_finite(const cute::Tensor<Engine, Layout>& tensor) {
  using Element = typename Engine::value_type;
  // Adding the exponent's lowest bit to its bits carries into the sign's place if they are all
  // ones.
  constexpr uint32_t kBits = kExponentBits<Element> * 0x10001u;
  constexpr uint32_t kOne = (0x8000u - kExponentBits<Element>)*0x10001u;
  auto copy = cute::make_fragment_like(tensor);
  cute::copy(cute::AutoVectorizingCopy{}, tensor, copy);
  auto words = cute::recast<const uint32_t>(copy);
  uint32_t seen = 0;
  CUTE_UNROLL
  for (int i = 0; i < cute::size(words); ++i) seen |= (words(i) & kBits) + kOne;
  return (seen & 0x80008000u) == 0;
}

// Writes 0 over NaN and infinity; returns whether there were any.
template <class Engine, class Layout>
ANYFLASH_DEVICE bool clear_nonfinite(cute::Tensor<Engine, Layout>& tensor) {
  using Element = typename Engine::value_type;
  if (all_finite(tensor)) return false;
#if defined(__CUDACC__)
#pragma unroll 1  // rare: not worth the code
#endif
  for (int i = 0; i < cute::size(tensor); ++i) {
    if (!is_finite(Element(tensor(i)))) tensor(i) = Element(0);
  }
  return true;
}

}  // namespace anyflash
