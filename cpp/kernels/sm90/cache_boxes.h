// Tiles of keys from a cache: TMA boxes of neighbouring rows of a page, or of an unpaged cache.
//
// Each lane of the loader's warp looks up one box of a tile and loads it. A box whose first key the
// sequence does not have, or that has no page, lies outside of the map and becomes zeros. Other
// keys behind the last one may be anything: masks hide them, and NaN among them is taken out.
#pragma once

#include <cuda.h>

#include <algorithm>
#include <cstdint>

#include "common/macros.h"
#include "params.h"
#include "sm90/panel_tile.h"
#include "sm90/pipeline.h"
#include "sm90/tma.h"
#include "variant/cache.h"

namespace anyflash::sm90 {

// Where a box begins; `slot` is -1 if its keys do not exist.
struct CacheBox {
  int slot;
  int row;
};

// This lane's box, in a tile. A tile has at most sixteen.
ANYFLASH_DEVICE int first_row_of_box(int box_rows) {
  return static_cast<int>(threadIdx.x) % 32 * box_rows;
}

// This lane's box of the tile that begins with key `first_key`, which is a multiple of its rows.
ANYFLASH_DEVICE CacheBox find_box(const KvCacheParams& cache, const CachedSequence& sequence,
                                  int first_key, int box_rows) {
  const int key = first_key + first_row_of_box(box_rows);
  if (key >= sequence.seqlen_k) return {-1, 0};
  const CacheSlot place = place_of(cache, sequence, key);
  return {static_cast<int>(place.slot), place.row};
}

// By a warp: the tile's columns, from `first_column` on.
template <class Tile>
ANYFLASH_DEVICE void load_boxes(typename Tile::Element* to, const CUtensorMap& map, int head,
                                CacheBox box, int box_rows, Mbarrier& full, L2Hint hint,
                                int first_column = 0) {
  if (threadIdx.x % 32 == 0) full.arrive_expect(Tile::kBytes);
  __syncwarp();  // the barrier knows of the bytes before they come
  const int first = first_row_of_box(box_rows);
  if (first >= Tile::kRows) return;
  load_panels<Tile>(to + first * Tile::kPanelColumns, map, {first_column, box.row, head, box.slot},
                    full, hint);
}

// Maps of K and V in a cache, for tiles of so many keys. Rows of a box are neighbours: those of a
// page, or of a sequence's place.
template <class Launch>
void make_cache_maps(Launch& launch, const KvCacheParams& cache, DType dtype, int tile_keys) {
  Attention& a = launch.attention;
  TensorMapShape keys = key_shape(a, dtype, tile_keys);
  keys.batch = cache.slots;
  if (cache.block_table != nullptr) {
    keys.rows = int64_t{1} << cache.page_shift;
    const int divides = tile_keys & -tile_keys;  // a power of 2, as a page is
    keys.box_rows = std::min(1 << std::min(cache.page_shift, 16), divides);
  }
  launch.box_rows = keys.box_rows;
  // Of a cache without rows everything lies outside, and its pointers may be anything. An address
  // that a map may have is that of Q, or lies before it: nothing is read there.
  if (keys.rows == 0 || keys.batch == 0) {
    constexpr uintptr_t kAlignment = 16;
    a.k = a.v = reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(a.q) & -kAlignment);
  }
  make_key_maps(launch, keys);
}

}  // namespace anyflash::sm90
