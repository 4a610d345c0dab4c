// Key ranges and block masks on a tile of scores.
#pragma once

#include <cstdint>
#include <cute/tensor.hpp>

#include "common/macros.h"
#include "sm90/accumulator.h"
#include "variant/block_mask.h"
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

// The same for a block mask: a warp's 16 rows lie in one block, and so do eight neighbouring
// columns. `row` is one of the rows, and [first_key, end_key) are the tile's keys.
ANYFLASH_DEVICE uint32_t find_kept_keys(const BlockMask& blocks, int row, int first_key,
                                        int end_key) {
  uint32_t kept = 0;
  blocks.visit_keys(row, first_key, end_key, [&](int begin, int end) {
    kept |= element_bits(begin - first_key, end - first_key);
  });
  return kept;
}
// For transposed scores: a warpgroup's 64 keys lie in one block, and are asked by one of them.
ANYFLASH_DEVICE uint32_t find_kept_rows(const BlockMask& blocks, int key, int first_row,
                                        int end_row) {
  uint32_t kept = 0;
  blocks.visit_rows(key, first_row, end_row, [&](int begin, int end) {
    kept |= element_bits(begin - first_row, end - first_row);
  });
  return kept;
}

}  // namespace anyflash::sm90
