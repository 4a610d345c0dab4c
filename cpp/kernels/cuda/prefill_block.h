// Which block of packed query rows a CTA of a prefill kernel takes, and which keys it has.
#pragma once

#include <cstdint>

#include "common/macros.h"
#include "cuda/packed_tiles.h"
#include "params.h"
#include "variant/cache.h"
#include "variant/mask.h"
#include "variant/work_tile.h"

namespace anyflash {

// Of a sequence, the keys of a split are a sequence, too: its keys begin later, and the diagonal
// with them.
template <int kBlockN>
ANYFLASH_DEVICE void take_split(const KvCacheParams& p, int split, int rows,
                                ForwardWorkTile& work_tile, CachedSequence& sequence) {
  const Mask mask(work_tile.sequence, p.attention.window);
  const int last_row = min(work_tile.first_row + rows, work_tile.sequence.seqlen_q) - 1;
  const SplitKeys keys =
      split_keys(p, split, mask.first_key(work_tile.first_row), mask.end_key(last_row), kBlockN);
  sequence.first_row += keys.begin;
  sequence.seqlen_k = keys.end - keys.begin;
  work_tile.sequence.seqlen_k = work_tile.sequence.all_keys = sequence.seqlen_k;
  work_tile.sequence.shift -= keys.begin;
  // Along the splits parts are apart; packed queries have no stride of batches.
  work_tile.sequence.batch = split;
}

// A number's parts. Numbers count splits of heads of blocks of query rows of all sequences, splits
// fastest.
struct PrefillNumber {
  int split;
  int head;
  int row_block;

  ANYFLASH_DEVICE PrefillNumber(const KvCacheParams& p, unsigned number)
      : split(static_cast<int>(number % p.num_splits)),
        head(static_cast<int>(number / p.num_splits % p.attention.heads)),
        row_block(static_cast<int>(number / p.num_splits / p.attention.heads)) {}
};

// A block of query rows.
struct PackedBlock {
  int batch;
  int first_row;  // -1: it does not exist, or is another kernel's
};

// By a whole warp. A sequence's last rows, which see the most keys, come first.
template <int kBlockM>
ANYFLASH_DEVICE PackedBlock find_packed_block(const KvCacheParams& p, int row_block) {
  const PackedTiles<kBlockM> tiles(p.attention, 1, p.least_queries);
  const int64_t tile = tiles.count() - 1 - row_block;
  const int64_t batch = tiles.sequence_of(tile);
  const int64_t row = (tile - tiles.first(batch)) * kBlockM;
  const int queries = queries_of(p, batch);
  const bool exists = queries >= p.least_queries && 0 <= row && row < queries;
  return {static_cast<int>(batch), exists ? static_cast<int>(row) : -1};
}

// Where the block's rows and the split's keys lie. Of one that does not exist, that it has no rows.
template <int kBlockM, int kBlockN>
ANYFLASH_DEVICE ForwardWorkTile prefill_work_tile(const KvCacheParams& p,
                                                  const PrefillNumber& number,
                                                  const PackedBlock& block,
                                                  CachedSequence& sequence) {
  const Attention& a = p.attention;
  ForwardWorkTile work_tile;
  work_tile.first_row = work_tile.sequence.seqlen_q = 0;
  if (block.first_row < 0) return work_tile;
  work_tile.batch = block.batch;
  work_tile.first_row = block.first_row;
  work_tile.head = number.head;
  work_tile.head_k = number.head / (a.heads / a.heads_k);
  sequence = cached_sequence(p, block.batch);
  work_tile.sequence.batch = 0;
  work_tile.sequence.first_q = sequence.first_q;
  work_tile.sequence.first_k = 0;
  work_tile.sequence.seqlen_q = sequence.seqlen_q;
  work_tile.sequence.seqlen_k = work_tile.sequence.all_keys = sequence.seqlen_k;
  work_tile.sequence.shift = sequence.seqlen_k - sequence.seqlen_q;
  if (p.num_splits > 1) take_split<kBlockN>(p, number.split, kBlockM, work_tile, sequence);
  return work_tile;
}

}  // namespace anyflash
