// The order of a grid's CTAs, each of which takes a block of one head's rows or keys.
#pragma once

#include <cutlass/fast_math.h>

#include <algorithm>
#include <cstdint>

#include "common/macros.h"

namespace anyflash {

// Heads of all sequences come in sections; within a section all heads' first blocks come before all
// second ones. The divisions that an index takes are prepared on the host: a CTA would wait longer
// for them than for its first loads.
class LptTileScheduler {
 public:
  struct TileCoord {
    int batch;
    int head;
    int group;  // of heads
    int block;
  };

  LptTileScheduler() = default;
  LptTileScheduler(int64_t batch, int heads, int group_heads, int64_t blocks,
                   int heads_per_l2_section)
      : section_heads_(heads_per_l2_section),
        last_section_(static_cast<int>((batch * heads - 1) / heads_per_l2_section)),
        by_section_(divisor(blocks * heads_per_l2_section)),
        by_section_head_(divisor(heads_per_l2_section)),
        by_last_head_(divisor(batch * heads - int64_t{last_section_} * heads_per_l2_section)),
        by_head_(divisor(heads)),
        by_group_head_(divisor(group_heads)) {}

  ANYFLASH_DEVICE TileCoord tile_at(int index) const {
    TileCoord coord;
    int section, in_section, pair;
    by_section_(section, in_section, index);
    if (section == last_section_) by_last_head_(coord.block, pair, in_section);
    else by_section_head_(coord.block, pair, in_section);
    pair += section * section_heads_;
    by_head_(coord.batch, coord.head, pair);
    coord.group = by_group_head_.div(coord.head);
    return coord;
  }

 private:
  // Empty and too large grids are not launched.
  static int divisor(int64_t value) {
    return static_cast<int>(std::clamp<int64_t>(value, 1, INT32_MAX));
  }

  int section_heads_ = 1;
  int last_section_ = 0;
  cutlass::FastDivmod by_section_;
  cutlass::FastDivmod by_section_head_;
  cutlass::FastDivmod by_last_head_;
  cutlass::FastDivmod by_head_;
  cutlass::FastDivmod by_group_head_;
};

}  // namespace anyflash
