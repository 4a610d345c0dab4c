// Where a CTA of a decoding kernel works: some rows of a group of heads, some keys.
#pragma once

#include <cstdint>

#include "common/macros.h"
#include "common/math.h"
#include "params.h"
#include "variant/cache.h"
#include "variant/mask.h"
#include "variant/tree_mask.h"

namespace anyflash::sm80 {

struct DecodeWorkTile {
  CachedSequence sequence;
  int64_t batch;
  int head_k;
  int split;
  // The heads of a group lie side by side: row r of a (sequence, head of K) is query r / group,
  // head head_k * group + r % group. So neighbouring rows see nearly the same keys.
  int group;
  int first_row;
  int rows;         // of the tile that exist
  SplitKeys keys;   // of the split that some row sees
  SplitKeys shown;  // of these, those that all rows see

  ANYFLASH_DEVICE int query(int row) const { return (first_row + row) / group; }
  ANYFLASH_DEVICE int head(int row) const { return head_k * group + (first_row + row) % group; }
  ANYFLASH_DEVICE Mask mask(const KvCacheParams& p) const {
    return Mask::at_bottom_right(p.attention.seqlen_q, sequence.seqlen_k, p.attention.window);
  }
  // Whether some row does not see some of the keys [begin, end).
  ANYFLASH_DEVICE bool hides(int begin, int end) const {
    return begin < shown.begin || end > shown.end;
  }
  // Keys of this split that a row sees, but for the tree's.
  ANYFLASH_DEVICE SplitKeys seen(const Mask& mask, int row) const {
    if (row >= rows) return {0, 0};
    const int i = query(row);
    return {max(mask.first_key(i), keys.begin), min(mask.end_key(i), keys.end)};
  }
};

// Grid: x = splits of row tiles of heads of K of sequences, splits fastest.
template <int kBlockM, int kBlockN>
ANYFLASH_DEVICE DecodeWorkTile decode_block(const KvCacheParams& p, unsigned index) {
  DecodeWorkTile block;
  block.group = p.attention.heads / p.attention.heads_k;
  const int total_rows = p.attention.seqlen_q * block.group;
  const int row_tiles = ceil_div(total_rows, kBlockM);
  block.split = index % p.num_splits;
  index /= p.num_splits;
  block.first_row = index % row_tiles * kBlockM;
  index /= row_tiles;
  block.head_k = index % p.attention.heads_k;
  block.batch = index / p.attention.heads_k;
  block.rows = min(kBlockM, total_rows - block.first_row);
  block.sequence = cached_sequence(p, block.batch);

  const Mask mask = block.mask(p);
  const int first = block.query(0);
  const int last = block.query(block.rows - 1);
  block.keys = split_keys(p, block.split, mask.first_key(first), mask.end_key(last), kBlockN);
  block.shown = {mask.first_key(last), min(mask.end_key(first), block.keys.end)};
  const TreeMask tree(p, block.batch, block.sequence.seqlen_k);
  if (tree.active()) block.shown.end = min(block.shown.end, tree.first_key());
  return block;
}

}  // namespace anyflash::sm80
