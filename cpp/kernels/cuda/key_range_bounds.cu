// See key_range_bounds.h. One warp a tile of keys.
#include <algorithm>
#include <cstdint>

#include "common/dependent_launch.h"
#include "common/launch.h"
#include "cuda/key_range_bounds.h"
#include "variant/key_range_bounds.h"
#include "variant/key_ranges.h"

namespace anyflash {

namespace {

constexpr int kWarps = 4;

ANYFLASH_DEVICE int of_lane(int x, int distance) {
  return __shfl_xor_sync(0xffffffffu, x, distance);
}

// All lanes together.
ANYFLASH_DEVICE void add_over_warp(IntervalBounds& bounds) {
  for (int distance = 16; distance > 0; distance /= 2) {
    bounds.add({of_lane(bounds.least_begin, distance), of_lane(bounds.largest_begin, distance),
                of_lane(bounds.least_end, distance), of_lane(bounds.largest_end, distance)});
  }
}

struct Launch {
  Attention attention;
  unsigned* counter;
};

// It allows the next kernel before it waits. So that one has to wait before it reads anything.
__global__ void key_range_bounds_kernel(const __grid_constant__ Launch launch) {
  allow_next_kernel();
  wait_previous_kernel();
  if (launch.counter != nullptr && blockIdx.x == 0 && threadIdx.x == 0) *launch.counter = 0;
  const Attention& p = launch.attention;
  const KeyRangeTiles tiles(p);
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int64_t units = tiles.sequences() * tiles.heads() * tiles.of_sequence();
  const int64_t step = int64_t{gridDim.x} * kWarps;
  for (int64_t i = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32; i < units; i += step) {
    const int tile = static_cast<int>(i % tiles.of_sequence());
    const int head_k = static_cast<int>(i / tiles.of_sequence() % tiles.heads());
    const int64_t index = i / tiles.of_sequence() / tiles.heads();
    // Not only the keys that are used: sequences that share their ranges may use others.
    Sequence sequence = sequence_of(p, index);
    sequence.seqlen_k = sequence.all_keys;
    const KeyRanges ranges(p, sequence, index, head_k);
    const int end = min((tile + 1) * KeyRangeTiles::kKeys, sequence.all_keys);
    if (tile * KeyRangeTiles::kKeys >= end) continue;

    IntervalBounds first;
    IntervalBounds second;
    for (int key = tile * KeyRangeTiles::kKeys + lane; key < end; key += 32) {
      const KeyRanges::Rows rows = ranges.rows_of(key);
      first.add(rows.begin, rows.end);
      second.add(rows.second_begin, rows.second_end);
    }
    add_over_warp(first);
    add_over_warp(second);
    if (lane != 0) continue;
    IntervalBounds* const target =
        p.key_range_bounds + (tiles.first(sequence, index, head_k) + tile) * p.key_intervals;
    target[0] = first;
    if (p.key_intervals == 2) target[1] = second;
  }
}

}  // namespace

std::size_t key_range_bounds_bytes(const Attention& attention) {
  if (attention.key_ranges.data == nullptr) return 0;
  const int64_t count = KeyRangeTiles(attention).count() * attention.key_intervals;
  return static_cast<std::size_t>(count) * sizeof(IntervalBounds);
}

void make_key_range_bounds(const Attention& attention, void* stream, unsigned* counter) {
  if (attention.key_ranges.data == nullptr) return;
  const KeyRangeTiles tiles(attention);
  const int64_t units = tiles.sequences() * tiles.heads() * tiles.of_sequence();
  // One CTA at least, if there is a counter to clear.
  launch_grid_stride<key_range_bounds_kernel>(std::max(units, int64_t{counter != nullptr}), kWarps,
                                              32 * kWarps, 0, stream, Launch{attention, counter},
                                              LaunchOrder::kWhenAllowed);
}

}  // namespace anyflash
