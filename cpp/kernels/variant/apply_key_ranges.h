// The rows that see a key on a tile of scores.
#pragma once

#include <cmath>
#include <cute/tensor.hpp>
#include <type_traits>

#include "common/macros.h"
#include "variant/key_ranges.h"

namespace anyflash {

// Writes `hidden` over the scores that the ranges hide. A thread's rows and columns are those of
// `coordinates`, relative to (row0, col0).
template <class Scores, class Coordinates>
ANYFLASH_DEVICE void apply_key_ranges(Scores& scores, const KeyRanges& ranges,
                                      const Coordinates& coordinates, int row0, int col0,
                                      float hidden = -INFINITY) {
  using namespace cute;
  constexpr int kRows = decltype(size<0>(scores))::value;
  int places[kRows];
  CUTE_UNROLL
  for (int row = 0; row < kRows; ++row) {
    places[row] = ranges.place_of(row0 + get<0>(coordinates(row, 0)));
  }
  const auto hide = [&](auto two) ANYFLASH_INLINE_LAMBDA {
    CUTE_UNROLL
    for (int col = 0; col < size<1>(scores); ++col) {
      const int key = col0 + get<1>(coordinates(0, col));
      const KeyRanges::Rows seen = ranges.rows_of(key, decltype(two)::value);
      CUTE_UNROLL
      for (int row = 0; row < kRows; ++row) {
        if (!seen.has(places[row])) scores(row, col) = hidden;
      }
    }
  };
  if (ranges.has_two()) hide(std::true_type{});
  else hide(std::false_type{});
}

}  // namespace anyflash
