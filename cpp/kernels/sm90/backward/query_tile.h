// What is known of a tile of query rows, and of the rows that see a key.
#pragma once

#include <cstdint>

#include "common/macros.h"
#include "sm90/accumulator.h"

namespace anyflash::sm90 {

// The rows that see a key: in one interval, or two. The loop needs its registers: these numbers lie
// in shared memory.
template <int kIntervals>
struct VisibleRows {
  int first[kIntervals];
  int end[kIntervals];

  // Which of a thread's elements of the key are seen, in the tile that begins at `row`: a bit each.
  ANYFLASH_DEVICE uint32_t bits(int row) const {
    const int first_row = row + static_cast<int>(threadIdx.x) % 4 * 2;
    uint32_t seen = 0;
    CUTE_UNROLL
    for (int i = 0; i < kIntervals; ++i)
      seen |= element_bits(first[i] - first_row, end[i] - first_row);
    return seen;
  }
};

// A tile of query rows, as the producer tells the consumers.
struct QueryTileInfo {
  static constexpr int kExists = 1;     // not after the last one
  static constexpr int kNeedsMask = 2;  // some row may not see some key
  // LSE and delta of some row may be finite, or may not count, though its Q or dO is not finite.
  static constexpr int kMayBeNonfinite = 4;
  float* dq;  // its place in dq_accum
  int row;    // its first one, of the sequence
  int flags;
};

}  // namespace anyflash::sm90
