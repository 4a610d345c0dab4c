// The rows that see a key on a tile of scores, and whether a tile has to be visited.
#pragma once

#include <cmath>
#include <cute/tensor.hpp>

#include "common/macros.h"
#include "variant/key_ranges.h"

namespace anyflash {

// Writes -inf over the scores that the ranges hide. A thread's rows and columns are those of
// `coordinates`, relative to (row0, col0).
template <class Scores, class Coordinates>
ANYFLASH_DEVICE void apply_key_ranges(Scores& scores, const KeyRanges& ranges,
                                      const Coordinates& coordinates, int row0, int col0) {
  using namespace cute;
  CUTE_UNROLL
  for (int col = 0; col < size<1>(scores); ++col) {
    const KeyRanges::Rows seen = ranges.rows_of(col0 + get<1>(coordinates(0, col)));
    CUTE_UNROLL
    for (int row = 0; row < size<0>(scores); ++row) {
      if (!seen.has(row0 + get<0>(coordinates(row, 0)))) scores(row, col) = -INFINITY;
    }
  }
}

// Whether some row of a tile sees some of its keys. Each warp finds out by itself, with a key or
// two a lane. So there is no summary of the ranges that a kernel would have to make first and keep,
// none that a caller could get wrong, and the answer is exact, also where two intervals lie far
// apart. The numbers are in the cache, since the tile's scores ask for them next.
ANYFLASH_DEVICE bool visits_tile(const KeyRanges& ranges, int row0, int rows, int col0, int keys) {
  if (!ranges.active()) return true;
  const int lane = static_cast<int>(threadIdx.x % 32);
  const bool any = ranges.any(row0, row0 + rows - 1, col0 + lane, col0 + keys, 32);
  return __any_sync(0xffffffffu, any) != 0;
}

}  // namespace anyflash
