// Dropout on a tile of probabilities.
#pragma once

#include <cute/tensor.hpp>

#include "common/macros.h"
#include "variant/dropout.h"
#include "variant/score_places.h"

namespace anyflash {

// Zeros the dropped ones of `scores`, a (row, col) view of accumulators. Each thread holds whole
// draws: its columns come in runs of eight that begin at multiples of 8.
template <class Scores, class Coordinates>
ANYFLASH_DEVICE void apply_dropout(Scores& scores, const Dropout& dropout,
                                   const ScorePlaces<Coordinates>& places) {
  using namespace cute;
  const auto& coordinates = places.coordinates;
  static_assert(decltype(size<1>(scores))::value % 8 == 0);
  CUTE_UNROLL
  for (int row = 0; row < size<0>(scores); ++row) {
    CUTE_UNROLL
    for (int run = 0; run < size<1>(scores); run += 8) {
      const Draws draws = dropout.draws(places.row0 + get<0>(coordinates(row, 0)),
                                        (places.col0 + get<1>(coordinates(row, run))) / 8);
      CUTE_UNROLL
      for (int i = 0; i < 8; ++i) {
        if (!dropout.keep(draws[i])) scores(row, run + i) = 0.0f;
      }
    }
  }
}

}  // namespace anyflash
