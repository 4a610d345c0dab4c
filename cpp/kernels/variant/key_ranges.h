// Which rows see a key, by one interval or two for each key: documents, trees, prefixes.
#pragma once

#include <cstdint>

#include "common/macros.h"
#include "params.h"
#include "variant/sequence.h"

namespace ANYFLASH_SHARED_NAMESPACE {

// Rows count from the first of the sequence, or of the whole attention where the call is a part of
// one: that is a row's place. Intervals may be any numbers. Rows that only round up a tile have a
// place that none holds, and nothing here leads to an address.
class KeyRanges {
 public:
  // The places [begin, end) and [second_begin, second_end).
  struct Rows {
    int begin;
    int end;
    int second_begin;
    int second_end;

    ANYFLASH_HOST_DEVICE bool has(int place) const {
      return (begin <= place && place < end) || (second_begin <= place && place < second_end);
    }
    // Some of the places [first, last].
    ANYFLASH_HOST_DEVICE bool has_any(int first, int last) const {
      return meets(begin, end, first, last) || meets(second_begin, second_end, first, last);
    }

   private:
    ANYFLASH_HOST_DEVICE static bool meets(int begin, int end, int first, int last) {
      return begin < end && begin <= last && first < end;
    }
  };

  // [first, last], of neighbouring rows.
  struct Places {
    int first;
    int last;
  };

  KeyRanges() = default;
  ANYFLASH_HOST_DEVICE KeyRanges(const Attention& p, const Sequence& sequence, int64_t index,
                                 int head_k)
      : data_(p.key_ranges.data == nullptr ? nullptr
                                           : static_cast<const int32_t*>(p.key_ranges.data) +
                                                 sequence.batch * p.key_ranges.stride.batch +
                                                 head_k * p.key_ranges.stride.head +
                                                 sequence.first_k * p.key_ranges.stride.row),
        key_stride_(p.key_ranges.stride.row),
        stride_(p.key_ranges.stride.col),
        has_two_(p.key_intervals == 2),
        keys_(sequence.seqlen_k),
        start_(clamp_length(number_of(p.part.query_start, index), kMaxShift)),
        rows_(sequence.seqlen_q < kNowhere - start_ ? sequence.seqlen_q : kNowhere - start_) {}

  ANYFLASH_HOST_DEVICE bool active() const { return data_ != nullptr; }
  ANYFLASH_HOST_DEVICE bool has_two() const { return has_two_; }

  ANYFLASH_HOST_DEVICE int place_of(int row) const { return row < rows_ ? start_ + row : kNowhere; }
  // Of those of the rows [row, row + rows) that exist; the first does.
  ANYFLASH_HOST_DEVICE Places places_of(int row, int rows) const {
    return {start_ + row, start_ + (row + rows < rows_ ? row + rows : rows_) - 1};
  }

  // The row with this place, but none before `first` and none behind `end`.
  ANYFLASH_HOST_DEVICE int row_at(int place, int first, int end) const {
    const int64_t row = int64_t{place} - start_;
    return row < first ? first : row < end ? static_cast<int>(row) : end;
  }

  // Of a key; behind the last one, of that.
  ANYFLASH_HOST_DEVICE Rows rows_of(int key) const { return rows_of(key, has_two_); }
  ANYFLASH_HOST_DEVICE Rows rows_of(int key, bool two) const {
    const int32_t* const at = data_ + (key < keys_ ? key : keys_ - 1) * key_stride_;
    Rows rows{at[0], at[stride_], 0, 0};
    if (two) {
      rows.second_begin = at[2 * stride_];
      rows.second_end = at[3 * stride_];
    }
    return rows;
  }

  ANYFLASH_HOST_DEVICE bool keep(int row, int key) const {
    return data_ == nullptr || rows_of(key).has(place_of(row));
  }

  // Whether some of the rows [first, last] see some of the keys [first_key, end_key).
  ANYFLASH_HOST_DEVICE bool any(int first, int last, int first_key, int end_key) const {
    const int end = end_key < keys_ ? end_key : keys_;
    const Places places = places_of(first, last - first + 1);
    for (int key = first_key; key < end; ++key) {
      if (rows_of(key).has_any(places.first, places.last)) return true;
    }
    return false;
  }

 private:
  static constexpr int kNowhere = 0x7fffffff;  // less than no end

  const int32_t* data_ = nullptr;
  int64_t key_stride_ = 0;
  int64_t stride_ = 0;  // from one number of a key to the next
  bool has_two_ = false;
  int keys_ = 0;
  int start_ = 0;  // of the first row
  int rows_ = 0;
};

}  // namespace ANYFLASH_SHARED_NAMESPACE
