// The mask on a tile of scores.
#pragma once

#include <cmath>
#include <cute/tensor.hpp>

#include "common/macros.h"
#include "variant/mask.h"
#include "variant/score_places.h"

namespace anyflash {

// Writes -inf over the scores that the mask removes.
template <class Scores, class Coordinates>
ANYFLASH_DEVICE void apply_mask(Scores& scores, const Mask& mask,
                                const ScorePlaces<Coordinates>& places) {
  using namespace cute;
  CUTE_UNROLL
  for (int row = 0; row < size<0>(scores); ++row) {
    const int i = places.row0 + get<0>(places.coordinates(row, 0));
    const RowBounds bounds = mask.row_bounds(i, places.col0);
    CUTE_UNROLL
    for (int col = 0; col < size<1>(scores); ++col) {
      if (bounds.hides(get<1>(places.coordinates(row, col)))) scores(row, col) = -INFINITY;
    }
  }
}

}  // namespace anyflash
