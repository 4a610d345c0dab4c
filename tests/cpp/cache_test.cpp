// variant/cache.h: where keys lie, and how they are shared out between splits.
#include "variant/cache.h"

#include <climits>
#include <cstdint>
#include <vector>

#include "check.h"

using anyflash::AppendParams;
using anyflash::cached_sequence;
using anyflash::CachedSequence;
using anyflash::CacheSlot;
using anyflash::is_slot;
using anyflash::KvCacheParams;
using anyflash::place_of;
using anyflash::rotary_row;
using anyflash::split_keys;
using anyflash::SplitKeys;
using anyflash::table_entry;

namespace {

// Three sequences of a cache of 4 with room for 20 rows, 3 of which are appended.
KvCacheParams params() {
  KvCacheParams p;
  p.attention.batch = 3;
  p.slots = 4;
  p.attention.seqlen_k = 20;
  p.seqlen_new = 3;
  return p;
}

void check_lengths() {
  KvCacheParams p = params();
  const CachedSequence all = cached_sequence(p, 2);  // no lengths: everything
  CHECK(all.pages == nullptr && all.slot == 2 && all.first_row == 0);
  CHECK(all.keys_before == 17 && all.seqlen_k == 20);

  // What does not fit is clamped.
  const int32_t given[] = {0, 5, 17, 18, INT_MAX, -1, INT_MIN};
  const int filled[] = {0, 5, 17, 17, 17, 0, 0};
  const int32_t given_pads[] = {0, 5, 6, -3, INT_MAX};
  for (int i = 0; i < 7; ++i) {
    p.cache_seqlens = &given[i];
    p.cache_leftpad = nullptr;
    CHECK_EQ(cached_sequence(p, 0).keys_before, filled[i]);
    CHECK_EQ(cached_sequence(p, 0).seqlen_k, filled[i] + 3);
    for (const int32_t& pad : given_pads) {
      p.cache_leftpad = &pad;
      const CachedSequence s = cached_sequence(p, 0);
      const int first = pad < 0 ? 0 : pad < filled[i] ? pad : filled[i];
      CHECK_EQ(s.first_row, first);
      CHECK_EQ(s.keys_before, filled[i] - first);
      CHECK_EQ(s.seqlen_k, filled[i] - first + 3);
    }
  }
}

void check_rotations() {
  AppendParams p;
  p.cache = params();
  const int32_t length = 9, pad = 4;
  p.cache.cache_seqlens = &length;
  p.cache.cache_leftpad = &pad;
  p.rotary_rows = 12;
  const CachedSequence s = cached_sequence(p.cache, 0);
  for (int step = 0; step < 15; ++step) {  // by the number of keys, or the last row
    CHECK_EQ(rotary_row(p, s, 0, step), step < 7 ? 5 + step : 11);
  }
  const int32_t given[] = {0, 8, 11, 12, INT_MAX, -1, INT_MIN};
  const int first[] = {0, 8, 11, 11, 11, 0, 0};
  p.rotary_seqlens = given;
  for (int i = 0; i < 7; ++i) {
    CHECK_EQ(rotary_row(p, s, i, 0), first[i]);
    CHECK_EQ(rotary_row(p, s, i, 3), first[i] + 3 < 12 ? first[i] + 3 : 11);
  }
}

void check_places() {
  KvCacheParams p = params();
  const std::vector<int32_t> lengths = {9, 4, 17};
  const std::vector<int32_t> pads = {2, 0, 17};
  const std::vector<int32_t> places = {3, -1, 4};
  p.cache_seqlens = lengths.data();
  p.cache_leftpad = pads.data();
  CHECK_EQ(place_of(p, cached_sequence(p, 1), 6).slot, 1);
  p.cache_batch_idx = places.data();
  const CachedSequence first = cached_sequence(p, 0);
  for (int key = 0; key < first.seqlen_k; ++key) {
    const CacheSlot place = place_of(p, first, key);
    CHECK_EQ(place.slot, 3);
    CHECK_EQ(place.row, key + 2);
    CHECK_EQ(table_entry(p, first, key), 3);
  }
  CHECK_EQ(place_of(p, cached_sequence(p, 1), 0).slot, -1);
  CHECK_EQ(place_of(p, cached_sequence(p, 2), 0).slot, -1);
  p.slots = 0;
  CHECK_EQ(cached_sequence(p, 0).slot, -1);
}

void check_slots() {
  KvCacheParams p = params();
  for (const int64_t entry : {0, 1, 3}) CHECK(is_slot(p, entry));
  for (const int64_t entry : {-1, 4, INT_MIN, INT_MAX}) CHECK(!is_slot(p, entry));
  p.slots = 0;
  CHECK(!is_slot(p, 0));
}

// Pages of every size, in a table with strides, of which one entry is broken.
void check_pages() {
  for (int shift = 0; shift < 6; ++shift) {
    KvCacheParams p = params();
    const int size = 1 << shift;
    const int pages = 20 / size + 1;
    p.attention.seqlen_k = pages * size;
    p.page_shift = shift;
    p.slots = 3 * pages;
    std::vector<int32_t> table(static_cast<std::size_t>(3 * pages * 2), 1 << 20);
    p.block_table_stride = {1, 0, 0, -6};  // columns backwards, two apart
    int32_t* const last_column = table.data() + 6 * (pages - 1);
    for (int b = 0; b < 3; ++b) {
      for (int i = 0; i < pages; ++i) {
        *(last_column + b - 6 * i) = (7 * (b * pages + i) + 1) % (3 * pages);
      }
    }
    *(last_column + 1) = p.slots;
    p.block_table = last_column;
    const std::vector<int32_t> lengths = {9, 4, 0};
    const std::vector<int32_t> pads = {2, 0, 0};
    p.cache_seqlens = lengths.data();
    p.cache_leftpad = pads.data();
    for (int b = 0; b < 3; ++b) {
      const CachedSequence s = cached_sequence(p, b);
      CHECK(s.slot == -1 || s.pages != nullptr);
      for (int key = 0; key < s.seqlen_k; ++key) {
        const int row = key + pads[static_cast<std::size_t>(b)];
        const CacheSlot place = place_of(p, s, key);
        const bool broken = b == 1 && row / size == 0;
        const int page = (7 * (b * pages + row / size) + 1) % (3 * pages);
        CHECK_EQ(table_entry(p, s, key), broken ? p.slots : page);  // as it stands there
        CHECK_EQ(place.slot, broken ? -1 : page);
        CHECK_EQ(place.row, row % size);
      }
    }
  }
}

// The splits' keys are [first, last), each once and in order, and split in front of whole blocks.
void check_cover(const KvCacheParams& p, int first, int last, int block_n) {
  int next = first / block_n * block_n;  // masks hide what lies before `first`
  bool ended = false;
  for (int split = 0; split < p.num_splits; ++split) {
    const SplitKeys keys = split_keys(p, split, first, last, block_n);
    CHECK(keys.begin <= keys.end);
    if (keys.begin == keys.end) {
      CHECK(keys.begin == 0);
      continue;
    }
    CHECK(!ended);
    CHECK_EQ(keys.begin, next);
    CHECK_EQ(keys.begin % block_n, 0);
    CHECK(keys.end == last || keys.end % block_n == 0);
    next = keys.end;
    ended = keys.end == last;
  }
  CHECK(last <= first ? !ended : ended);
}

constexpr int kLengths[] = {0, 1, 63, 64, 65, 128, 129, 500, 1000};

void check_even_splits() {
  KvCacheParams p;
  for (const int block_n : {32, 64}) {
    for (const int splits : {1, 2, 3, 7, 8, 100, 1000}) {
      p.num_splits = splits;
      for (const int first : kLengths) {
        for (const int last : kLengths) check_cover(p, first, last, block_n);
      }
    }
  }
  // Evenly: no two differ by more than what the last one lacks.
  p.num_splits = 4;
  const int borders[] = {0, 192, 384, 576, 700};
  for (int split = 0; split < 4; ++split) {
    const SplitKeys keys = split_keys(p, split, 0, 700, 64);
    CHECK(keys.begin == borders[split] && keys.end == borders[split + 1]);
  }
  // At the end of what 32 bits can count.
  p.num_splits = 3;
  CHECK_EQ(split_keys(p, 2, 0, INT_MAX - 4095, 64).end, INT_MAX - 4095);
  p.num_splits = 65535;
  CHECK_EQ(split_keys(p, 65408, 0, INT_MAX - 4095, 64).end, INT_MAX - 4095);  // of 513 blocks each
  CHECK_EQ(split_keys(p, 65534, 0, INT_MAX - 4095, 64).end, 0);
}

// Borders at multiples of the size, wherever the keys begin and end.
void check_fixed_splits() {
  KvCacheParams p;
  for (const int size : {64, 128, 192, 1024}) {
    p.split_size = size;
    p.num_splits = 1000 / size + 1;
    for (const int block_n : {32, 64}) {
      for (const int first : kLengths) {
        for (const int last : kLengths) {
          check_cover(p, first, last, block_n);
          for (int split = 0; split < p.num_splits; ++split) {
            const SplitKeys keys = split_keys(p, split, first, last, block_n);
            if (keys.begin == keys.end) continue;
            CHECK(keys.begin / size == split && (keys.end - 1) / size == split);
            CHECK(keys.end == last || keys.end == (split + 1) * size);
            CHECK(keys.begin == first / block_n * block_n || keys.begin == split * size);
          }
        }
      }
    }
  }
}

}  // namespace

int main() {
  check_lengths();
  check_rotations();
  check_places();
  check_slots();
  check_pages();
  check_even_splits();
  check_fixed_splits();
  return check::report();
}
