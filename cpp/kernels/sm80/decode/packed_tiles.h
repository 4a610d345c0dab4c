// Tiles of rows of packed queries, numbered without a list of them.
#pragma once

#include <cstdint>

#include "common/macros.h"
#include "common/math.h"
#include "params.h"

namespace anyflash::sm80 {

// A sequence has `group` rows a query, and tiles of kBlockM rows.
// Packed queries: the tiles of sequence b are numbers first_tile(b) to first_tile(b + 1), of which
// the last may be none. They are enough for n rows after c others:
// ceil(n / M) <= floor((c + n) / M) - floor(c / M) + 1.
template <int kBlockM>
ANYFLASH_DEVICE int64_t first_tile(const Attention& a, int64_t group, int64_t b) {
  return a.cu_seqlens_q[b] * group / kBlockM + b;
}

// The last sequence that begins at this tile or before. A warp looks at 32 at once.
template <int kBlockM>
ANYFLASH_DEVICE int64_t sequence_of_tile(const Attention& a, int64_t group, int64_t tile) {
  const int64_t lane = threadIdx.x % 32;
  int64_t low = 0;
  int64_t high = a.batch;
  while (high - low > 1) {
    const int64_t step = ceil_div(high - low, int64_t{32});
    const int64_t at = low + lane * step;
    const bool before = lane == 0 || (at < high && first_tile<kBlockM>(a, group, at) <= tile);
    low += (__popc(__ballot_sync(0xffffffffu, before)) - 1) * step;
    high = min(low + step, high);
  }
  return low;
}

// How many numbers there are.
ANYFLASH_HOST_DEVICE int64_t packed_tiles(const Attention& a, int64_t group, int block_m) {
  return a.total_q * group / block_m + a.batch;
}

}  // namespace anyflash::sm80
