// Numbers and formulas that kernels share.
#pragma once

#include "common/macros.h"

namespace ANYFLASH_SHARED_NAMESPACE {

// log2(e) and ln(2), to the precision of T.
template <class T>
inline constexpr T kLog2EOf = T(1.44269504088896340736);
template <class T>
inline constexpr T kLn2Of = T(0.693147180559945309417);

// n / d, rounded up, of numbers that are not negative.
template <class N, class D>
ANYFLASH_HOST_DEVICE constexpr auto ceil_div(N n, D d) {
  return n / d + (n % d != 0);
}

// How many tiles of `tile` rows or keys hold n of them. A GPU takes fewer instructions for it than
// for ceil_div, but n + tile must not overflow.
template <class N>
ANYFLASH_HOST_DEVICE constexpr auto count_tiles(N n, int tile) {
  return (n + tile - 1) / tile;
}

}  // namespace ANYFLASH_SHARED_NAMESPACE
