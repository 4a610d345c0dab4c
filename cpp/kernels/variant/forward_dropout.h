// The forward's dropout, for the kernel that has nothing else.
#pragma once

#include <cstdint>
#include <cute/tensor.hpp>

#include "common/macros.h"
#include "variant/dropout.h"
#include "variant/score_places.h"

namespace anyflash {

// Zeroes the dropped ones of a thread's eight columns from `run` on, in all of its rows. `pairs`
// are a tile's probabilities, rounded, two neighbouring columns each; `layout` leads to one from
// its row and column.
template <class Pairs, class Layout, class Coordinates>
ANYFLASH_DEVICE void drop_run(Pairs& pairs, const Layout& layout, const Dropout& dropout,
                              const ScorePlaces<Coordinates>& places, int run) {
  using namespace cute;
  const auto& coordinates = places.coordinates;
  constexpr int kRows = decltype(size<0>(layout))::value;
  int rows[kRows];
  CUTE_UNROLL
  for (int row = 0; row < kRows; ++row) rows[row] = places.row0 + get<0>(coordinates(row, 0));
  Draws draws[kRows];
  dropout.draws(draws, rows, (places.col0 + get<1>(coordinates(0, run))) / 8);
  CUTE_UNROLL
  for (int row = 0; row < kRows; ++row) {
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) {
      uint32_t& pair = pairs(layout(row, run + 2 * i) / 2);
      pair = dropout.drop(pair, draws[row].word[i]);
    }
  }
}

}  // namespace anyflash
