// The rows that see a key on a tile of scores, and whether a tile has to be visited.
#pragma once

#include <cmath>
#include <cute/tensor.hpp>
#include <type_traits>

#include "common/macros.h"
#include "variant/key_ranges.h"

namespace anyflash {

// Whether each score of a warp is that of a row and of a key that it sees. A lane asks about a few
// keys, in place of all its columns. The warp's rows are whole groups of eight, a row for four
// lanes. Its keys are groups of 32, a run of eight for a lane. So all its lanes know where both
// begin and end.
template <class Coordinates>
ANYFLASH_DEVICE bool shows_all(const KeyRanges& ranges, const Coordinates& coordinates, int row0,
                               int col0) {
  using namespace cute;
  const auto first = coordinates(0, 0);
  const auto last = coordinates(size<0>(coordinates) - 1, size<1>(coordinates) - 1);
  const int lane = static_cast<int>(threadIdx.x % 32);
  const bool all =
      ranges.all(row0 + (get<0>(first) & ~7), row0 + (get<0>(last) | 7),
                 col0 + (get<1>(first) & ~31) + lane, col0 + (get<1>(last) | 31) + 1, 32);
  return __all_sync(0xffffffffu, all) != 0;
}

// Writes -inf over the scores that the ranges hide. A thread's rows and columns are those of
// `coordinates`, relative to (row0, col0).
template <class Scores, class Coordinates>
ANYFLASH_DEVICE void apply_key_ranges(Scores& scores, const KeyRanges& ranges,
                                      const Coordinates& coordinates, int row0, int col0) {
  using namespace cute;
  if (shows_all(ranges, coordinates, row0, col0)) return;
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
        if (!seen.has(places[row])) scores(row, col) = -INFINITY;
      }
    }
  };
  if (ranges.has_two()) hide(std::true_type{});
  else hide(std::false_type{});
}

// Whether some row of a tile sees some of its keys. Each warp finds out by itself, with a key or
// two a lane. So there is no summary of the ranges that a kernel would have to make first and keep,
// and none that a caller could get wrong. The answer is exact, also where two intervals lie far
// apart. The numbers are in the cache, since the tile's scores ask for them next.
ANYFLASH_DEVICE bool visits_tile(const KeyRanges& ranges, int row0, int rows, int col0, int keys) {
  if (!ranges.active()) return true;
  const int lane = static_cast<int>(threadIdx.x % 32);
  const bool any = ranges.any(row0, row0 + rows - 1, col0 + lane, col0 + keys, 32);
  return __any_sync(0xffffffffu, any) != 0;
}

}  // namespace anyflash
