// A block of packed query rows whose keys lie in a cache.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <cute/tensor.hpp>

#include "common/macros.h"
#include "cuda/prefill_block.h"
#include "params.h"
#include "sm90/cache_boxes.h"
#include "sm90/forward/blocks.h"
#include "sm90/forward/launch_params.h"
#include "sm90/pipeline.h"
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

  using KeyPlace = CacheBox;
  template <int kBlockN>
  ANYFLASH_DEVICE KeyPlace find_keys(const PrefillLaunch& params, int n) const {
    return find_box(params.cache, sequence, n * kBlockN, params.box_rows);
  }
  template <class Tile>
  ANYFLASH_DEVICE void load(const PrefillLaunch& params, KeyPlace place, typename Tile::Element* to,
                            const CUtensorMap& map, int, int, Mbarrier& full) const {
    load_boxes<Tile>(to, map, tile.head_k, place, params.box_rows, full, L2Hint::kEvictLast);
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
};

}  // namespace anyflash::sm90
