// Key ranges on a tile of scores.
#pragma once

#include <cstdint>
#include <cute/tensor.hpp>

#include "common/macros.h"
#include "sm90/accumulator.h"
#include "variant/key_ranges.h"

namespace anyflash::sm90 {

// Of each row, a bit for each of a thread's elements that the ranges leave. `first_key` is that of
// the first element, and the rows have these places. In a loop: the loads of all columns at a time
// would take the registers of scores.
template <int kElements>
ANYFLASH_DEVICE void find_seen_elements(const KeyRanges& ranges, const int (&places)[kThreadRows],
                                        int first_key, uint32_t (&seen)[kThreadRows]) {
  // Two neighbours in each of some blocks of eight columns.
  constexpr int kStep = kElements % 8 == 0 ? 8 : 4;
  static_assert(kElements % kStep == 0 && kElements <= 32);
  seen[0] = seen[1] = 0;
#pragma unroll 1
  for (int i = 0; i < kElements; i += kStep) {
    CUTE_UNROLL
    for (uint32_t& bits : seen) bits >>= kStep;
    CUTE_UNROLL
    for (int j = 0; j < kStep; ++j) {
      const KeyRanges::Rows rows = ranges.rows_of(first_key + 4 * i + j / 2 * 8 + j % 2);
      CUTE_UNROLL
      for (int row = 0; row < kThreadRows; ++row) {
        if (rows.has(places[row])) seen[row] |= 1u << (kElements - kStep + j);
      }
    }
  }
}

}  // namespace anyflash::sm90
