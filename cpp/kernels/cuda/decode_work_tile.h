// Where a CTA of a decoding kernel works: some rows of a group of heads, some keys.
#pragma once

#include <cutlass/fast_math.h>

#include <cstdint>

#include "common/dependent_launch.h"
#include "common/macros.h"
#include "common/math.h"
#include "cuda/packed_tiles.h"
#include "params.h"
#include "variant/cache.h"
#include "variant/mask.h"
#include "variant/tree_mask.h"

namespace anyflash {

// What a launch is told. What the host can work out is here: a CTA is short, and a division takes
// it 20 instructions.
struct DecodeParams : KvCacheParams {
  bool q_has_vectors = false;  // rows can be copied in pieces of 16 bytes
  cutlass::FastDivmod by_splits;
  cutlass::FastDivmod by_row_tiles;
  cutlass::FastDivmod by_heads_k;
  cutlass::FastDivmod by_group;
};

struct DecodeWorkTile {
  CachedSequence sequence;
  int64_t batch;
  int head_k;
  int split;
  // The heads of a group lie side by side: row r of a (sequence, head of K) is query r / group,
  // head head_k * group + r % group. So neighbouring rows see nearly the same keys.
  cutlass::FastDivmod by_group;
  int first_row;
  int rows;         // of the tile that exist; none: nothing to do
  SplitKeys keys;   // of the split that some row sees
  SplitKeys shown;  // of these, those that all rows see

  ANYFLASH_DEVICE int query(int row) const { return by_group.div(first_row + row); }
  ANYFLASH_DEVICE int head(int row) const {
    return head_k * by_group.divisor + by_group.rem(first_row + row);
  }
  // Of a row in q or in a result. Packed tensors have no stride of the batch.
  ANYFLASH_DEVICE int64_t offset(const Strides& stride, int row) const {
    const int64_t first = stride.batch == 0 ? sequence.first_q : 0;
    return batch * stride.batch + (first + query(row)) * stride.row + head(row) * stride.head;
  }
  ANYFLASH_DEVICE Mask mask(const KvCacheParams& p) const {
    return Mask::at_bottom_right(sequence.seqlen_q, sequence.seqlen_k, p.attention.window);
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

// Whether a tile holds all rows of any sequence that the launch takes.
template <int kBlockM>
ANYFLASH_HOST_DEVICE bool has_tile_per_sequence(const KvCacheParams& p) {
  return int64_t{p.most_queries} * (p.attention.heads / p.attention.heads_k) <= kBlockM;
}

// Grid: x = splits of row tiles of heads of K of sequences, splits fastest. Packed: splits of heads
// of K of sequences, or of tiles of heads of K. By a whole warp.
template <int kBlockM>
ANYFLASH_DEVICE void find_rows(const DecodeParams& p, int index, DecodeWorkTile& block) {
  const Attention& a = p.attention;
  block.by_group = p.by_group;
  const int group = p.by_group.divisor;
  index = p.by_splits.divmod(block.split, index);
  int64_t tile = 0;
  if (a.cu_seqlens_q == nullptr) {
    int row_tile = 0;
    index = p.by_row_tiles.divmod(row_tile, index);
    tile = row_tile;
    block.batch = p.by_heads_k.divmod(block.head_k, index);
  } else if (has_tile_per_sequence<kBlockM>(p)) {
    block.batch = p.by_heads_k.divmod(block.head_k, index);
  } else {
    const PackedTiles<kBlockM> tiles(a, group, p.least_queries);
    const auto count = static_cast<int>(tiles.count());
    block.head_k = index / count;
    block.batch = tiles.sequence_of(index % count);
    tile = index % count - tiles.first(block.batch);
  }
  const int queries = queries_of(p, block.batch);
  const int64_t rest = int64_t{queries} * group - tile * kBlockM;
  const bool takes = p.least_queries <= queries && queries <= p.most_queries && tile >= 0;
  block.rows = takes && rest > 0 ? static_cast<int>(min(rest, int64_t{kBlockM})) : 0;
  block.first_row = block.rows > 0 ? static_cast<int>(tile) * kBlockM : 0;
}

// By every CTA of a kernel launched kWhenAllowed: it waits, but finds its place before.
template <int kBlockM, int kBlockN>
ANYFLASH_DEVICE DecodeWorkTile decode_block(const DecodeParams& p, int index) {
  DecodeWorkTile block;
  if (p.attention.cu_seqlens_q != nullptr) wait_previous_kernel();  // which may have written it
  find_rows<kBlockM>(p, index, block);
  wait_previous_kernel();
  if (block.rows <= 0) return block;
  block.sequence = cached_sequence(p, block.batch);
  const Mask mask = block.mask(p);
  const int first = block.query(0);
  const int last = block.query(block.rows - 1);
  block.keys = split_keys(p, block.split, mask.first_key(first), mask.end_key(last), kBlockN);
  block.shown = {mask.first_key(last), min(mask.end_key(first), block.keys.end)};
  const TreeMask tree(p, block.batch, block.sequence);
  if (tree.active()) block.shown.end = min(block.shown.end, tree.first_key());
  return block;
}

}  // namespace anyflash
