// Which block of keys, or of query rows, a CTA of the backward has.
#pragma once

#include <cstdint>

#include "common/macros.h"
#include "common/math.h"
#include "variant/backward_scratch.h"
#include "variant/sequence.h"
#include "variant/work_tile.h"

namespace anyflash {

// `index`: of all blocks of keys of all (batch, K/V head, split of its query heads) triples, in the
// order of key_scheduler: a triple's first blocks, which most rows see, start first.
template <int kBlockN>
ANYFLASH_DEVICE BackwardWorkTile backward_block(const BackwardScratch& params, int index) {
  const LptTileScheduler::TileCoord coord = params.key_scheduler.tile_at(index);
  BackwardWorkTile tile;
  tile.sequence = sequence_of(params.attention, coord.batch);
  tile.batch = coord.batch;
  tile.head_k = coord.group;
  tile.gqa_split = coord.head - coord.group * params.gqa_splits;
  tile.first_key = coord.block * kBlockN;
  return tile;
}

// `index`: of all blocks of keys of all (batch, K/V head) pairs.
template <int kBlockN>
ANYFLASH_DEVICE BackwardWorkTile key_block_at(const BackwardScratch& params, int index) {
  const int key_blocks = count_tiles(params.attention.seqlen_k, kBlockN);
  const int pair = index / key_blocks;
  const int64_t batch = pair / params.attention.heads_k;
  BackwardWorkTile tile{};  // gqa_split 0
  tile.sequence = sequence_of(params.attention, batch);
  tile.batch = batch;
  tile.head_k = pair % params.attention.heads_k;
  tile.first_key = index % key_blocks * kBlockN;
  return tile;
}

// `index`: of all blocks of block_m query rows of all (batch, head) pairs.
ANYFLASH_DEVICE ForwardWorkTile row_block_at(const BackwardScratch& params, int block_m,
                                             int index) {
  const int row_blocks = count_tiles(params.attention.seqlen_q, block_m);
  const int pair = index / row_blocks;
  const int64_t batch = pair / params.attention.heads;
  const int group = params.attention.heads / params.attention.heads_k;
  ForwardWorkTile tile;
  tile.sequence = sequence_of(params.attention, batch);
  tile.batch = batch;
  tile.head = pair % params.attention.heads;
  tile.head_k = tile.head / group;
  tile.first_row = index % row_blocks * block_m;
  return tile;
}

}  // namespace anyflash
