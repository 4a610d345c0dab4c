// The rows that see a tile of keys, from the least and the largest ends of its keys' ranges. For
// most tiles that is enough to know that a block of rows sees nothing of it, or all. A GPU's
// kernels ask so (cuda/key_range_bounds.cu makes the bounds); the CPU's ask key by key.
#pragma once

#include <climits>
#include <cstdint>

#include "common/macros.h"
#include "common/math.h"
#include "params.h"
#include "variant/key_ranges.h"
#include "variant/sequence.h"
#include "variant/visibility.h"

namespace anyflash {

// Of one interval of each key.
struct alignas(16) IntervalBounds {
  int least_begin = INT_MAX;
  int largest_begin = INT_MIN;
  int least_end = INT_MAX;
  int largest_end = INT_MIN;

  ANYFLASH_HOST_DEVICE void add(int begin, int end) {
    if (begin < end) {
      add({begin, begin, end, end});
    } else {  // no row sees the key, and so none sees all keys
      largest_begin = INT_MAX;
    }
  }
  ANYFLASH_HOST_DEVICE void add(const IntervalBounds& other) {
    if (other.least_begin < least_begin) least_begin = other.least_begin;
    if (other.largest_begin > largest_begin) largest_begin = other.largest_begin;
    if (other.least_end < least_end) least_end = other.least_end;
    if (other.largest_end > largest_end) largest_end = other.largest_end;
  }
  // meet(): whether some of the places [first, last] may lie in some interval. hold(): whether all
  // of them lie in every interval.
  ANYFLASH_HOST_DEVICE bool meet(int first, int last) const {
    return least_begin <= last && first < largest_end;
  }
  ANYFLASH_HOST_DEVICE bool hold(int first, int last) const {
    return largest_begin <= first && last < least_end;
  }
};

// The bounds in the workspace: of each tile of kKeys keys an IntervalBounds, or two. They have a
// place for each head and sequence that has ranges of its own. Packed sequences begin with a tile
// of their own.
class KeyRangeTiles {
 public:
  static constexpr int kKeys = 64;

  ANYFLASH_HOST_DEVICE explicit KeyRangeTiles(const Attention& p)
      : packed_(p.cu_seqlens_k != nullptr),
        sequences_(packed_                          ? p.batch
                   : p.key_ranges.stride.batch == 0 ? 1
                                                    : p.batch),
        heads_(p.key_ranges.stride.head == 0 ? 1 : p.heads_k),
        of_sequence_(count_tiles(p.seqlen_k, kKeys)),
        of_head_(packed_ ? p.total_k / kKeys + p.batch : of_sequence_) {}

  // Sequences and heads with ranges of their own, and the most tiles of a sequence.
  ANYFLASH_HOST_DEVICE int64_t sequences() const { return sequences_; }
  ANYFLASH_HOST_DEVICE int heads() const { return heads_; }
  ANYFLASH_HOST_DEVICE int of_sequence() const { return of_sequence_; }

  // Of all.
  ANYFLASH_HOST_DEVICE int64_t count() const {
    return (packed_ ? 1 : sequences_) * heads_ * of_head_;
  }
  // The first tile of sequence `index`.
  ANYFLASH_HOST_DEVICE int64_t first(const Sequence& sequence, int64_t index, int head_k) const {
    const int64_t row = packed_ || sequences_ == 1 ? 0 : index;
    const int64_t tile = packed_ ? sequence.first_k / kKeys + index : 0;
    return (row * heads_ + (heads_ == 1 ? 0 : head_k)) * of_head_ + tile;
  }

 private:
  bool packed_;
  int64_t sequences_;
  int heads_;
  int of_sequence_;
  int64_t of_head_;
};

// What is known of the keys of a tile, from its two intervals' bounds. As it is made here, every
// row sees them.
struct KeyRangeBounds {
  IntervalBounds first{INT_MIN, INT_MIN, INT_MAX, INT_MAX};
  IntervalBounds second{INT_MAX, INT_MAX, INT_MAX, INT_MIN};

  ANYFLASH_DEVICE Visibility seen_by(const KeyRanges::Places& rows) const {
    return {first.meet(rows.first, rows.last) || second.meet(rows.first, rows.last),
            first.hold(rows.first, rows.last) || second.hold(rows.first, rows.last)};
  }
};

// The bounds of the tiles of one sequence and one head; without key ranges every row sees all.
class KeyTileBounds {
 public:
  ANYFLASH_DEVICE KeyTileBounds(const Attention& p, const Sequence& sequence, int64_t index,
                                int head_k)
      : attention_(p), all_keys_(sequence.all_keys) {
    if (p.key_ranges.data == nullptr) return;
    tiles_ = p.key_range_bounds + KeyRangeTiles(p).first(sequence, index, head_k) * p.key_intervals;
  }

  // Of `keys` keys from `key` on, and of their neighbours in the same tiles.
  ANYFLASH_DEVICE KeyRangeBounds of(int key, int keys) const {
    constexpr int kKeys = KeyRangeTiles::kKeys;
    KeyRangeBounds bounds;
    if (tiles_ == nullptr) return bounds;
    const int intervals = attention_.key_intervals;
    const IntervalBounds* at = tiles_ + key / kKeys * intervals;
    bounds.first = at[0];
    if (intervals == 2) bounds.second = at[1];
    const int end = min(key + keys, all_keys_);
    int next = (key / kKeys + 1) * kKeys;
    // So many may follow. A known number of steps, so that no load waits for another.
    for (int i = 0; i < ceil_div(keys, kKeys); ++i, next += kKeys) {
      at += intervals;
      if (next >= end) continue;
      bounds.first.add(at[0]);
      if (intervals == 2) bounds.second.add(at[1]);
    }
    return bounds;
  }

 private:
  const Attention& attention_;
  int all_keys_;
  const IntervalBounds* tiles_ = nullptr;
};

// What a block of rows sees of tiles of keys.
class VisibleKeys {
 public:
  ANYFLASH_DEVICE VisibleKeys(const Attention& p, const Sequence& sequence, int64_t index,
                              int head_k, int first_row, int rows)
      : tiles_(p, sequence, index, head_k),
        rows_(KeyRanges(p, sequence, index, head_k).places_of(first_row, rows)) {}

  // As KeyTileBounds::of().
  ANYFLASH_DEVICE Visibility of(int key, int keys) const {
    return tiles_.of(key, keys).seen_by(rows_);
  }

 private:
  KeyTileBounds tiles_;
  KeyRanges::Places rows_;
};

}  // namespace anyflash
