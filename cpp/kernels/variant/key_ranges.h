// Which rows see a key, by one interval or two for each key: documents, trees, prefixes.
#pragma once

#include <cstdint>

#include "common/macros.h"
#include "params.h"
#include "variant/sequence.h"

namespace ANYFLASH_SHARED_NAMESPACE {

// Rows count from the first of the sequence, or of the whole attention where the call is a part of
// one. Intervals may be any numbers: what lies outside the rows that exist is cut off, so that rows
// which only round up a tile see nothing, and nothing here leads to an address.
class KeyRanges {
 public:
  // The rows [begin, end) and [second_begin, second_end).
  struct Rows {
    int begin;
    int end;
    int second_begin;
    int second_end;

    ANYFLASH_HOST_DEVICE bool has(int row) const {
      return (begin <= row && row < end) || (second_begin <= row && row < second_end);
    }
    // Whether some of the rows [first, last] are there.
    ANYFLASH_HOST_DEVICE bool has_any(int first, int last) const {
      return meets(begin, end, first, last) || meets(second_begin, second_end, first, last);
    }

   private:
    ANYFLASH_HOST_DEVICE static bool meets(int begin, int end, int first, int last) {
      return begin < end && begin <= last && first < end;
    }
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
        two_(p.key_intervals == 2),
        keys_(sequence.seqlen_k),
        start_(static_cast<int>(number_of(p.part.query_start, index))),
        end_(start_ < kMost - sequence.seqlen_q ? start_ + sequence.seqlen_q : kMost) {}

  ANYFLASH_HOST_DEVICE bool active() const { return data_ != nullptr; }

  // Of a key, and for tiles that end behind the last key, of that one in place of those behind it.
  // In rows of the call.
  ANYFLASH_HOST_DEVICE Rows rows_of(int key) const {
    const int32_t* const at = data_ + (key < keys_ ? key : keys_ - 1) * key_stride_;
    Rows rows{row(at[0]), row(at[stride_]), 0, 0};
    if (two_) {
      rows.second_begin = row(at[2 * stride_]);
      rows.second_end = row(at[3 * stride_]);
    }
    return rows;
  }

  ANYFLASH_HOST_DEVICE bool keep(int row, int key) const {
    return data_ == nullptr || rows_of(key).has(row);
  }

  // Whether some of the rows [first, last] see some of the keys [first_key, end_key). A thread asks
  // about each `step`-th key from the first-th on.
  ANYFLASH_HOST_DEVICE bool any(int first, int last, int first_key, int end_key,
                                int step = 1) const {
    const int end = end_key < keys_ ? end_key : keys_;
    for (int key = first_key; key < end; key += step) {
      if (rows_of(key).has_any(first, last)) return true;
    }
    return false;
  }

 private:
  static constexpr int kMost = 0x7fffffff;

  ANYFLASH_HOST_DEVICE int row(int x) const {
    return (x < start_ ? start_ : x < end_ ? x : end_) - start_;
  }

  const int32_t* data_ = nullptr;
  int64_t key_stride_ = 0;
  int64_t stride_ = 0;  // from one number of a key to the next
  bool two_ = false;
  int keys_ = 0;
  int start_ = 0;  // rows of the call are [start_, end_) of the whole
  int end_ = 0;
};

}  // namespace ANYFLASH_SHARED_NAMESPACE
