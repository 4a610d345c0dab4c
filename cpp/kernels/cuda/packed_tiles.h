// Tiles of rows of packed queries, numbered without a list of them.
#pragma once

#include <cstdint>

#include "common/macros.h"
#include "common/math.h"
#include "params.h"

namespace anyflash {

// Of the sequences with at least `least` queries, of `group` rows each, in tiles of kBlockM rows.
//
// The tiles of sequence b are numbers first(b) to first(b + 1), of which some may be none. There
// are c queries before it and n of its own; a query has g rows, and a tile M. The numbers are
// enough: what is rounded down grows by at least floor(n g / M + 1) >= ceil(n g / M). Two formulas
// do that, the second because n >= least.
//   first(b) = floor(c g / M) + b
//   first(b) = floor(c (g / M + 1 / least))
// The one with fewer numbers in all is taken.
template <int kBlockM>
struct PackedTiles {
  const int32_t* cu_seqlens;
  int64_t batch;
  int64_t total;
  int64_t group;
  int64_t least;

  ANYFLASH_HOST_DEVICE PackedTiles(const Attention& a, int64_t rows_per_query, int least_queries)
      : cu_seqlens(a.cu_seqlens_q),
        batch(a.batch),
        total(a.total_q),
        group(rows_per_query),
        least(least_queries < 1 ? 1 : least_queries) {}

  ANYFLASH_HOST_DEVICE int64_t count() const { return number(total, batch); }

  ANYFLASH_DEVICE int64_t first(int64_t b) const { return number(cu_seqlens[b], b); }

  // The last sequence that begins at this tile or before. A warp looks at 32 at once.
  ANYFLASH_DEVICE int64_t sequence_of(int64_t tile) const {
    const int64_t lane = threadIdx.x % 32;
    int64_t low = 0;
    int64_t high = batch;
    while (high - low > 1) {
      const int64_t step = ceil_div(high - low, int64_t{32});
      const int64_t at = low + lane * step;
      const bool before = lane == 0 || (at < high && first(at) <= tile);
      low += (__popc(__ballot_sync(0xffffffffu, before)) - 1) * step;
      high = min(low + step, high);
    }
    return low;
  }

 private:
  ANYFLASH_HOST_DEVICE int64_t number(int64_t queries, int64_t sequences) const {
    if (total / least >= batch) return queries * group / kBlockM + sequences;
    return queries * (group * least + kBlockM) / (kBlockM * least);
  }
};

}  // namespace anyflash
