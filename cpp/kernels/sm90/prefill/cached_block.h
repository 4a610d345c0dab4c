// A block of packed query rows whose keys lie in a cache.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <cute/tensor.hpp>

#include "common/macros.h"
#include "cuda/prefill_block.h"
#include "params.h"
#include "sm90/forward/blocks.h"
#include "sm90/forward/launch_params.h"
#include "sm90/panel_tile.h"
#include "sm90/pipeline.h"
#include "sm90/tma.h"
#include "variant/cache.h"

namespace anyflash::sm90 {

struct PrefillLaunch : ForwardLaunch {
  KvCacheParams cache;
  const PackedBlock* row_blocks = nullptr;  // of query rows, by their numbers (list_blocks)
  int box_rows = 0;                         // of k_map and v_map: they divide a page and a tile
};

// In the place of TensorBlock.
struct CachedBlock : BlockWork {
  using Launch = PrefillLaunch;
  static constexpr bool kLoadsByWarp = true;

  CachedSequence sequence;

  template <int kBlockM, int kBlockN>
  ANYFLASH_DEVICE void find(const PrefillLaunch& params, unsigned number) {
    const PrefillNumber of_block(params.cache, number);
    tile = prefill_work_tile<kBlockM, kBlockN>(params.cache, of_block,
                                               params.row_blocks[of_block.row_block], sequence);
  }
  // Queries are packed; what `tile` has for a batch is a split.
  ANYFLASH_DEVICE int batch_of_queries() const { return 0; }

  // A tile comes in boxes: neighbouring rows of one page, or of an unpaged cache. Each lane of the
  // loader's warp looks one up and loads it. Keys that the sequence does not have, and those of no
  // page, lie outside of the map, and become zeros.
  struct Rows {
    int slot;
    int row;
  };
  template <int kBlockN>
  ANYFLASH_DEVICE Rows find_rows(const PrefillLaunch& params, int n) const {
    const int key = n * kBlockN + first_row_of_box(params);
    if (key >= tile.sequence.seqlen_k) return {-1, 0};
    const CacheSlot place = place_of(params.cache, sequence, key);
    return {static_cast<int>(place.slot), place.row};
  }
  template <class Tile>
  ANYFLASH_DEVICE void load(const PrefillLaunch& params, Rows rows, typename Tile::Element* to,
                            const CUtensorMap& map, int, Mbarrier& full) const {
    if (threadIdx.x % 32 == 0) full.arrive_expect(Tile::kBytes);
    __syncwarp();  // the barrier knows of the bytes before they come
    const int first = first_row_of_box(params);
    if (first >= Tile::kRows) return;
    load_panels<Tile>(to + first * kPanelColumns, map, {0, rows.row, tile.head_k, rows.slot}, full,
                      L2Hint::kEvictLast);
  }

  template <class Element>
  ANYFLASH_DEVICE auto values(const PrefillLaunch& params) const {
    const auto* const head = static_cast<const Element*>(params.attention.v) +
                             tile.head_k * params.attention.v_stride.head;
    return [this, &params, head](int key, int x) {
      const Strides& stride = params.attention.v_stride;
      const CacheSlot place = place_of(params.cache, sequence, key);
      if (place.slot < 0) return 0.0f;
      return static_cast<float>(head[place.slot * stride.batch + place.row * stride.row + x]);
    };
  }

 private:
  // This lane's box, in a tile. A tile has at most sixteen.
  ANYFLASH_DEVICE static int first_row_of_box(const PrefillLaunch& params) {
    return static_cast<int>(threadIdx.x) % 32 * params.box_rows;
  }
};

}  // namespace anyflash::sm90
