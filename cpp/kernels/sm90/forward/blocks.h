// Blocks of query rows: in which order a CTA takes them, and what its warps are told about each.
#pragma once

#include <cstdint>

#include "common/dependent_launch.h"
#include "common/macros.h"
#include "sm90/forward/launch_params.h"
#include "sm90/pipeline.h"
#include "variant/mask.h"
#include "variant/sequence.h"
#include "variant/work_tile.h"

namespace anyflash::sm90 {

// Blocks that are known at a time: the loader's next one, its present one, and those that consumers
// still work on.
inline constexpr int kKnownBlocks = 4;

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
template <int kQStages>
ANYFLASH_DEVICE int block_place(const RingPlace<kQStages>& queries) {
  return static_cast<int>(queries.count() % kKnownBlocks);
}

// One thread of a CTA.
template <int kBlockM, int kBlockN>
class BlockScheduler {
 public:
  ANYFLASH_DEVICE explicit BlockScheduler(const ForwardLaunch& params)
      : params_(params), next_(blockIdx.x) {
    if (params_.taken != nullptr) wait_previous_kernel();  // which cleared it
  }

  // The next block of this CTA that has rows; one that does not exist after the last.
  ANYFLASH_DEVICE void take(BlockWork& block) {
    for (; next_ < static_cast<unsigned>(params_.blocks); advance()) {
      block.tile =
          row_block_at<kBlockM>(params_.scheduler, params_.attention, static_cast<int>(next_));
      if (block.tile.first_row >= block.tile.sequence.seqlen_q) continue;
      const Mask mask(block.tile.sequence, params_.attention.window);
      block.range = mask.k_range(block.tile.first_row, kBlockM, kBlockN);
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

  const ForwardLaunch& params_;
  unsigned next_;  // a grid's size and the blocks taken may add up to more than 2^31
};

}  // namespace anyflash::sm90
