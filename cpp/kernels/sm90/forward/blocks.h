// Blocks of query rows: in which order a CTA takes them, and what its warps are told about each.
#pragma once

#include <cstdint>

#include "common/dependent_launch.h"
#include "common/macros.h"
#include "cuda/epilogue.h"
#include "sm90/forward/launch_params.h"
#include "sm90/panel_tile.h"
#include "sm90/pipeline.h"
#include "sm90/tma.h"
#include "variant/mask.h"
#include "variant/sequence.h"
#include "variant/work_tile.h"

namespace anyflash::sm90 {

// A block of query rows. One thread works it out, and all warps of the CTA read it.
struct BlockWork {
  ForwardWorkTile tile;
  KRange range;
  // Row i of the block sees the keys [first_key + i, end_key + i), as far as there are such.
  int first_key;
  int end_key;

  // After the last block comes one that does not exist.
  ANYFLASH_DEVICE bool exists() const { return tile.first_row >= 0; }
};

// Where the block is described whose Q is at this place of its ring.
template <class Traits>
ANYFLASH_DEVICE int block_place(const RingPlace<Traits::kQStages>& queries) {
  return static_cast<int>(queries.count() % Traits::kKnownBlocks);
}

// A block of query rows whose keys lie in tensors. (In a cache: prefill/cached_block.h.)
struct TensorBlock : BlockWork {
  using Launch = ForwardLaunch;
  static constexpr bool kLoadsByWarp = false;  // by one thread

  // Finds where the block with this number lies.
  template <int kBlockM, int kBlockN>
  ANYFLASH_DEVICE void find(const ForwardLaunch& params, unsigned number) {
    tile = row_block_at<kBlockM>(params.scheduler, params.attention, static_cast<int>(number));
  }
  // In q's tensor map.
  ANYFLASH_DEVICE int batch_of_queries() const { return static_cast<int>(tile.sequence.batch); }

  // What is looked up of a tile of keys, before its place in shared memory is free.
  struct KeyPlace {};
  template <int kBlockN>
  ANYFLASH_DEVICE KeyPlace find_keys(const ForwardLaunch&, int) const {
    return {};
  }
  // Tile n of the block's keys, or of their values, from a column on.
  template <class Tile>
  ANYFLASH_DEVICE void load(const ForwardLaunch&, KeyPlace, typename Tile::Element* to,
                            const CUtensorMap& map, int n, int column, Mbarrier& full) const {
    const int row = static_cast<int>(tile.sequence.first_k) + n * Tile::kRows;
    load_tile<Tile>(to, map, {column, row, tile.head_k, static_cast<int>(tile.sequence.batch)},
                    full, L2Hint::kEvictLast);
  }
  // Reads elements of V, (key, column), as floats.
  template <class Element>
  ANYFLASH_DEVICE auto values(const ForwardLaunch& params) const {
    return tensor_values<Element>(params.attention, tile);
  }
};

// One thread of a CTA takes blocks.
template <class Traits>
class BlockScheduler {
  using Block = typename Traits::Block;

 public:
  ANYFLASH_DEVICE explicit BlockScheduler(const typename Block::Launch& params)
      : params_(params), next_(blockIdx.x) {
    wait_previous_kernel();
  }

  // The next block of this CTA that has rows; one that does not exist after the last.
  ANYFLASH_DEVICE void take(Block& block) {
    constexpr int kBlockM = Traits::kBlockM;
    for (; next_ < static_cast<unsigned>(params_.blocks); advance()) {
      block.template find<kBlockM, Traits::kBlockN>(params_, next_);
      if (block.tile.first_row >= block.tile.sequence.seqlen_q) continue;
      const Mask mask(block.tile.sequence, params_.attention.window);
      block.range = mask.k_range(block.tile.first_row, kBlockM, Traits::kBlockN);
      block.first_key = mask.unclamped_first_key(block.tile.first_row, kBlockM);
      block.end_key = mask.unclamped_end_key(block.tile.first_row, kBlockM);
      advance();  // a counter answers while the block is loaded
      return;
    }
    block.tile.first_row = -1;
  }

 private:
  ANYFLASH_DEVICE void advance() {
    if (params_.taken == nullptr) next_ = static_cast<unsigned>(params_.blocks);
    else next_ = gridDim.x + atomicAdd(params_.taken, 1u);
  }

  const typename Block::Launch& params_;
  unsigned next_;  // a grid's size and the blocks taken may add up to more than 2^31
};

}  // namespace anyflash::sm90
