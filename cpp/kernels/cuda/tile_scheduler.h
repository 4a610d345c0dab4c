// Which block of query rows a CTA takes.
#pragma once

#include "common/lpt_tile_scheduler.h"
#include "common/macros.h"
#include "common/math.h"
#include "params.h"
#include "variant/sequence.h"
#include "variant/work_tile.h"

namespace anyflash {

// A CTA's block of query rows: a head's last ones, which see the most keys, come first.
template <int kBlockM>
ANYFLASH_DEVICE ForwardWorkTile row_block_at(const LptTileScheduler& scheduler,
                                             const Attention& attention, int index) {
  const LptTileScheduler::TileCoord coord = scheduler.tile_at(index);
  const int row_blocks = count_tiles(attention.seqlen_q, kBlockM);
  ForwardWorkTile tile;
  tile.sequence = sequence_of(attention, coord.batch);
  tile.batch = coord.batch;
  tile.head = coord.head;
  tile.head_k = coord.group;
  tile.first_row = (row_blocks - 1 - coord.block) * kBlockM;
  return tile;
}

}  // namespace anyflash
