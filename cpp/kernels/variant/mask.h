// Which scores count by their position: both which K tiles to visit and which elements to keep.
// Pure integer code.
#pragma once

#include <cstdint>

#include "common/macros.h"
#include "common/math.h"
#include "params.h"
#include "variant/sequence.h"

namespace ANYFLASH_SHARED_NAMESPACE {

// Tiles of keys that one block of query rows visits. [unmasked_begin, unmasked_end) need no mask;
// [begin, unmasked_begin) and [unmasked_end, end) need one; the rest is skipped. The order is
// [unmasked_end, end), [begin, unmasked_begin), [unmasked_begin, unmasked_end), each from its last
// tile to its first. Only tile end - 1 can hold keys that do not exist. If it does, it is masked,
// and so the first.
struct KRange {
  int begin;
  int unmasked_begin;
  int unmasked_end;
  int end;

  ANYFLASH_HOST_DEVICE bool needs_mask(int tile) const {
    return tile < unmasked_begin || tile >= unmasked_end;
  }
  ANYFLASH_HOST_DEVICE int first() const {
    return end > unmasked_end              ? end - 1
           : unmasked_begin > begin        ? unmasked_begin - 1
           : unmasked_end > unmasked_begin ? unmasked_end - 1
                                           : -1;
  }
  ANYFLASH_HOST_DEVICE int size() const { return end - begin; }
  // The tile at this place of the order, which counts from 0.
  ANYFLASH_HOST_DEVICE int at(int place) const {
    const int from_end = end - 1 - place;
    if (from_end >= unmasked_end) return from_end;
    const int unmasked = unmasked_end - unmasked_begin;
    const int tile = from_end - unmasked;  // as if the unmasked ones were not there
    return tile >= begin ? tile : tile + unmasked + (unmasked_begin - begin);
  }
  // The tile after `tile`, -1 after the last.
  ANYFLASH_HOST_DEVICE int next(int tile) const {
    if (tile > unmasked_end || (tile < unmasked_begin && tile > begin) ||
        (tile < unmasked_end && tile > unmasked_begin)) {
      return tile - 1;
    }
    if (tile == unmasked_end && unmasked_begin > begin) return unmasked_begin - 1;
    if (tile >= unmasked_end || tile < unmasked_begin)
      return unmasked_end > unmasked_begin ? unmasked_end - 1 : -1;
    return -1;
  }
};

// Tiles of query rows that see one block of keys. [unmasked_begin, unmasked_end) need no mask;
// [begin, unmasked_begin) and [unmasked_end, end) need one; the rest is skipped. A tile may hold
// rows beyond the last one.
struct MRange {
  int begin;
  int unmasked_begin;
  int unmasked_end;
  int end;

  ANYFLASH_HOST_DEVICE bool needs_mask(int tile) const {
    return tile < unmasked_begin || tile >= unmasked_end;
  }
};

// The columns [first, end) of a tile of keys that a row sees.
struct RowBounds {
  int first;
  int end;

  ANYFLASH_HOST_DEVICE bool hides(int col) const { return col < first || col >= end; }
};

// A window around the diagonal:
//   keep(i, j)  <=>  0 <= j < seqlen_k  and  i + shift - left <= j <= i + shift + right.
// There is no bound where left or right is negative. So each row sees a range of keys, whose ends
// do not decrease from row to row. The diagonal ends at the bottom right, where shift = seqlen_k -
// seqlen_q. It may end anywhere where the sequence is a part of a longer one: then the first rows,
// or the last, may see nothing.
class Mask {
 public:
  ANYFLASH_HOST_DEVICE Mask(int seqlen_q, int seqlen_k, int64_t shift, const Window& window)
      : seqlen_q_(seqlen_q),
        seqlen_k_(seqlen_k),
        // Without a bound: as if every row were the first, or the last, to see all.
        first_(window.left < 0 ? -kFar : shift - bounded(window.left)),
        last_(window.right < 0 ? kFar : shift + bounded(window.right)) {}
  ANYFLASH_HOST_DEVICE Mask(const Sequence& sequence, const Window& window)
      : Mask(sequence.seqlen_q, sequence.seqlen_k, sequence.shift, window) {}
  ANYFLASH_HOST_DEVICE static Mask at_bottom_right(int seqlen_q, int seqlen_k,
                                                   const Window& window) {
    return Mask(seqlen_q, seqlen_k, int64_t{seqlen_k} - seqlen_q, window);
  }

  // The same, with keys behind those of the last row as if there were none. For sums over rows:
  // one that only rounds up a tile then sees no key that no row sees.
  ANYFLASH_HOST_DEVICE Mask up_to_last_row() const {
    Mask mask = *this;
    const int64_t seen = seqlen_q_ + last_;
    mask.seqlen_k_ = seen < 0 ? 0 : seen < seqlen_k_ ? static_cast<int>(seen) : seqlen_k_;
    return mask;
  }

  // Row i sees the keys [first_key(i), end_key(i)); none where that is empty.
  ANYFLASH_HOST_DEVICE int first_key(int64_t row) const { return clamp(row + first_); }
  ANYFLASH_HOST_DEVICE int end_key(int64_t row) const { return clamp(row + last_ + 1); }

  // first_key(row + i) and end_key(row + i) without 64-bit sums, for 0 <= i < rows: these plus i,
  // but at least 0 and at most seqlen_k.
  ANYFLASH_HOST_DEVICE int unclamped_first_key(int64_t row, int rows) const {
    return saturate(row + first_, rows);
  }
  ANYFLASH_HOST_DEVICE int unclamped_end_key(int64_t row, int rows) const {
    return saturate(row + last_ + 1, rows);
  }

  // The same, relative to the tile that begins at col0.
  ANYFLASH_HOST_DEVICE RowBounds row_bounds(int row, int col0) const {
    return RowBounds{first_key(row) - col0, end_key(row) - col0};
  }

  ANYFLASH_HOST_DEVICE bool keep(int64_t row, int64_t col) const {
    return first_key(row) <= col && col < end_key(row);
  }

  // Tiles of block_n keys for the rows [first_row, first_row + rows) that exist.
  ANYFLASH_HOST_DEVICE KRange k_range(int64_t first_row, int rows, int block_n) const {
    const int64_t end_row = first_row + rows < seqlen_q_ ? first_row + rows : seqlen_q_;
    const int first = first_key(first_row);
    const int end = end_key(end_row - 1);
    if (end_row <= first_row || end <= first) return KRange{0, 0, 0, 0};
    KRange range;
    range.begin = first / block_n;
    range.end = ceil_div(end, block_n);
    // Tiles that the last row sees from their beginning, and the first row to their end.
    range.unmasked_begin = ceil_div(first_key(end_row - 1), block_n);
    range.unmasked_end = end_key(first_row) / block_n;
    if (range.unmasked_begin >= range.unmasked_end)
      range.unmasked_begin = range.unmasked_end = range.begin;
    return range;
  }

  // Tiles of block_m rows that see some of the keys [first_key, first_key + keys). A mask is needed
  // where not all rows see all of these keys, also because there are fewer.
  ANYFLASH_HOST_DEVICE MRange m_range(int64_t first_key, int keys, int block_m) const {
    const int64_t end_key = first_key + keys;
    const int64_t last = end_key < seqlen_k_ ? end_key : seqlen_k_;  // of the keys that exist
    // A row's keys begin at row + first_ and end at row + last_.
    const int64_t begin = row_clamp(first_key - last_);
    const int64_t end = row_clamp(last - first_);
    if (last <= first_key || end <= begin) return MRange{0, 0, 0, 0};
    MRange range;
    range.begin = static_cast<int>(begin / block_m);
    range.end = ceil_div(static_cast<int>(end), block_m);
    // Rows that see all.
    int64_t full = row_clamp(end_key - 1 - last_);
    int64_t full_end = row_clamp(first_key - first_ + 1);
    if (end_key > seqlen_k_ || full_end < full) full = full_end = begin;
    range.unmasked_begin = ceil_div(static_cast<int>(full), block_m);
    range.unmasked_end = static_cast<int>(full_end == seqlen_q_ ? range.end : full_end / block_m);
    if (range.unmasked_begin >= range.unmasked_end)
      range.unmasked_begin = range.unmasked_end = range.begin;
    return range;
  }

 private:
  static constexpr int64_t kFar = int64_t{1} << 40;  // beyond every row and key

  ANYFLASH_HOST_DEVICE static int64_t bounded(int64_t width) { return width < kFar ? width : kFar; }
  // Differs from `key` only where all of key, ..., key + rows - 1 are below 0, or beyond seqlen_k.
  ANYFLASH_HOST_DEVICE int saturate(int64_t key, int rows) const {
    return key < -rows ? -rows : key < seqlen_k_ ? static_cast<int>(key) : seqlen_k_;
  }
  ANYFLASH_HOST_DEVICE int clamp(int64_t key) const {
    return key < 0 ? 0 : key < seqlen_k_ ? static_cast<int>(key) : seqlen_k_;
  }

  ANYFLASH_HOST_DEVICE int64_t row_clamp(int64_t row) const {
    return row < 0 ? 0 : row < seqlen_q_ ? row : seqlen_q_;
  }

  int seqlen_q_;
  int seqlen_k_;
  int64_t first_;
  int64_t last_;
};

}  // namespace ANYFLASH_SHARED_NAMESPACE
