// Which block of keys, or of query rows, a CTA of the backward has.
#pragma once

#include <cstdint>

#include "common/macros.h"
#include "common/math.h"
#include "variant/backward_scratch.h"
#include "variant/sequence.h"
#include "variant/work_tile.h"

namespace anyflash {

// Grid: x = all blocks of keys of all (batch, K/V head, part) triples. These come in sections of
// heads_per_l2_section; within a section the first blocks, which most rows see, start first. (The
// forward's LptTileScheduler gains nothing here.)
template <int kBlockN>
ANYFLASH_DEVICE BackwardWorkTile backward_block(const BackwardScratch& params, int index) {
  const int key_blocks = count_tiles(params.attention.seqlen_k, kBlockN);
  const int heads = params.attention.heads_k * params.gqa_splits;
  const int triples = static_cast<int>(params.attention.batch) * heads;
  const int section = index / (params.heads_per_l2_section * key_blocks);
  const int first = section * params.heads_per_l2_section;
  const int section_triples = min(params.heads_per_l2_section, triples - first);
  const int rest = index - first * key_blocks;
  const int triple = first + rest % section_triples;
  const int64_t batch = triple / heads;
  const int head = triple % heads;
  BackwardWorkTile tile;
  tile.sequence = sequence_of(params.attention, batch);
  tile.batch = batch;
  tile.head_k = head / params.gqa_splits;
  tile.gqa_split = head % params.gqa_splits;
  tile.first_key = rest / section_triples * kBlockN;
  return tile;
}

// Grid: x = all blocks of keys of all (batch, K/V head) pairs.
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

// Grid: x = all blocks of query rows of all (batch, head) pairs.
template <int kBlockM>
ANYFLASH_DEVICE ForwardWorkTile row_block_at(const BackwardScratch& params, int index) {
  const int row_blocks = count_tiles(params.attention.seqlen_q, kBlockM);
  const int pair = index / row_blocks;
  const int64_t batch = pair / params.attention.heads;
  const int group = params.attention.heads / params.attention.heads_k;
  ForwardWorkTile tile;
  tile.sequence = sequence_of(params.attention, batch);
  tile.batch = batch;
  tile.head = pair % params.attention.heads;
  tile.head_k = tile.head / group;
  tile.first_row = index % row_blocks * kBlockM;
  return tile;
}

}  // namespace anyflash
