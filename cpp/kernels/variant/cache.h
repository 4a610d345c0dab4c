// Where the keys of a sequence lie in a cache, how many there are, and which queries see them.
#pragma once

#include <cstdint>

#include "common/macros.h"
#include "common/math.h"
#include "params.h"
#include "variant/sequence.h"

namespace ANYFLASH_SHARED_NAMESPACE {

struct CachedSequence {
  int64_t first_q;  // packed queries: row of its first in q and in the results; else 0
  int seqlen_q;
  int seqlen_new;        // keys that are appended
  int64_t first_new;     // packed: row of its first in k_new and v_new; else 0
  const int32_t* pages;  // its row of the block table; null: not paged
  int64_t slot;          // not paged: its place along the cache's first axis, -1 if it has none
  int first_row;         // of key 0
  int keys_before;       // that were there before the append
  int seqlen_k;          // with what was appended
};

// A row of the cache: `slot` is a page or a sequence, -1 if the table points nowhere.
struct CacheSlot {
  int64_t slot;
  int row;
};

// Rows of a packed tensor.
struct PackedRows {
  int64_t first;
  int length;
};

// Those of sequence `index`: no more than `most`, and within the tensor's `total`.
ANYFLASH_HOST_DEVICE PackedRows packed_rows(const int32_t* cu_seqlens, int64_t index, int64_t total,
                                            int most) {
  const int64_t first = clamp_length(cu_seqlens[index], total);
  const int64_t rest = total - first;
  return {first, clamp_length(cu_seqlens[index + 1] - first, rest < most ? rest : most)};
}

// The sequence that a packed row belongs to: the last one that begins there or before.
ANYFLASH_HOST_DEVICE int64_t sequence_of_row(const int32_t* cu_seqlens, int64_t batch,
                                             int64_t row) {
  int64_t low = 0;
  int64_t high = batch;
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    if (cu_seqlens[middle] <= row) low = middle;
    else high = middle;
  }
  return low;
}

// Of all sequences.
ANYFLASH_HOST_DEVICE int64_t rows_of_q(const KvCacheParams& p) {
  const Attention& a = p.attention;
  return a.cu_seqlens_q == nullptr ? a.batch * a.seqlen_q : a.total_q;
}
ANYFLASH_HOST_DEVICE int64_t rows_of_k_new(const KvCacheParams& p) {
  return p.cu_seqlens_k_new == nullptr ? p.attention.batch * p.seqlen_new : p.total_new;
}

// Row `row` of q or of k_new, of all sequences one after the other: packed as they are, else with
// `rows` each.
struct SequenceRow {
  int64_t batch;
  int64_t row;  // of the sequence
  bool exists;  // behind the last sequence there may be rows of none
};

ANYFLASH_HOST_DEVICE SequenceRow sequence_row(const int32_t* cu_seqlens, int64_t batch, int rows,
                                              int64_t row) {
  if (cu_seqlens == nullptr) return {row / rows, row % rows, true};
  const int64_t index = sequence_of_row(cu_seqlens, batch, row);
  const int64_t first = cu_seqlens[index];
  return {index, row - first,
          0 <= first && first <= row && row < cu_seqlens[index + 1] && row - first < rows};
}

// Of sequence `index`.
ANYFLASH_HOST_DEVICE int queries_of(const KvCacheParams& p, int64_t index) {
  const Attention& a = p.attention;
  if (a.cu_seqlens_q == nullptr) return a.seqlen_q;
  return packed_rows(a.cu_seqlens_q, index, a.total_q, a.seqlen_q).length;
}

// Lengths that do not fit the tensors are clamped to what does.
ANYFLASH_HOST_DEVICE CachedSequence cached_sequence(const KvCacheParams& p, int64_t index) {
  CachedSequence s;
  s.first_q = s.first_new = 0;
  s.seqlen_q = p.attention.seqlen_q;
  s.seqlen_new = p.seqlen_new;
  if (p.attention.cu_seqlens_q != nullptr) {
    const PackedRows rows =
        packed_rows(p.attention.cu_seqlens_q, index, p.attention.total_q, p.attention.seqlen_q);
    s.first_q = rows.first;
    s.seqlen_q = rows.length;
  }
  if (p.cu_seqlens_k_new != nullptr) {
    const PackedRows rows = packed_rows(p.cu_seqlens_k_new, index, p.total_new, p.seqlen_new);
    s.first_new = rows.first;
    s.seqlen_new = rows.length;
  }
  s.pages = nullptr;
  s.slot = p.cache_batch_idx == nullptr ? index : int64_t{p.cache_batch_idx[index]};
  if (p.block_table != nullptr) s.pages = p.block_table + index * p.block_table_stride.batch;
  else if (s.slot < 0 || s.slot >= p.slots) s.slot = -1;
  const int capacity = p.attention.seqlen_k - s.seqlen_new;
  const int filled =
      p.cache_seqlens == nullptr ? capacity : clamp_length(p.cache_seqlens[index], capacity);
  s.first_row = p.cache_leftpad == nullptr ? 0 : clamp_length(p.cache_leftpad[index], filled);
  s.keys_before = filled - s.first_row;
  s.seqlen_k = s.keys_before + s.seqlen_new;
  return s;
}

// What the block table says of key j, 0 <= j < seqlen_k: a page, if there is such a one. Without a
// table, the sequence's place (there are fewer than 2^31: a grid holds no more).
ANYFLASH_HOST_DEVICE int table_entry(const KvCacheParams& p, const CachedSequence& s, int key) {
  if (p.block_table == nullptr) return static_cast<int>(s.slot);
  return s.pages[((s.first_row + key) >> p.page_shift) * p.block_table_stride.col];
}

ANYFLASH_HOST_DEVICE bool is_slot(const KvCacheParams& p, int64_t entry) {
  return entry >= 0 && entry < p.slots;
}

// Of key j, 0 <= j < seqlen_k, whose entry table_entry() has said.
ANYFLASH_HOST_DEVICE CacheSlot place_of_entry(const KvCacheParams& p, const CachedSequence& s,
                                              int key, int entry) {
  const int row = s.first_row + key;
  const int slot = is_slot(p, entry) ? entry : -1;
  return {slot, p.block_table == nullptr ? row : row & ((1 << p.page_shift) - 1)};
}
ANYFLASH_HOST_DEVICE CacheSlot place_of(const KvCacheParams& p, const CachedSequence& s, int key) {
  return place_of_entry(p, s, key, table_entry(p, s, key));
}

// Of the scale of a row's elements in a cache of 8 bits.
ANYFLASH_HOST_DEVICE int64_t scale_index(const BroadcastTensor& scale, const CacheSlot& place,
                                         int64_t head) {
  return place.slot * scale.stride.batch + place.row * scale.stride.row + head * scale.stride.head;
}

// The row of the rotary tables that turns new row `step` of a sequence. One that the tables do not
// have is clamped to one that they have.
ANYFLASH_HOST_DEVICE int64_t rotary_row(const AppendParams& p, const CachedSequence& s,
                                        int64_t index, int step) {
  int64_t row = p.rotary_seqlens == nullptr ? s.keys_before : p.rotary_seqlens[index];
  if (row < 0) row = 0;
  row += step;
  return row < p.rotary_rows ? row : p.rotary_rows - 1;
}

// The keys [begin, end) of split `split` of a sequence that has seqlen_k, where those that count
// lie in [first, last): in whole blocks of block_n keys.
struct SplitKeys {
  int begin;
  int end;
};

ANYFLASH_HOST_DEVICE SplitKeys split_keys(const KvCacheParams& p, int split, int first, int last,
                                          int block_n) {
  if (last <= first) return {0, 0};
  const int first_block = first / block_n;
  int64_t begin = int64_t{split} * p.split_size;
  int64_t end = begin + p.split_size;
  if (p.split_size == 0) {
    const int blocks = ceil_div(last, block_n) - first_block;
    const int64_t each = ceil_div(blocks, p.num_splits);  // of 32 bits: it is done in each CTA
    begin = (first_block + split * each) * block_n;
    end = begin + each * block_n;
  }
  if (begin < first_block * block_n) begin = first_block * block_n;
  if (end > last) end = last;
  return begin < end ? SplitKeys{static_cast<int>(begin), static_cast<int>(end)} : SplitKeys{0, 0};
}

}  // namespace ANYFLASH_SHARED_NAMESPACE
