// The producer warpgroup: one thread has TMA bring Q, K and V; three warps guard V.
#pragma once

#include <cstdint>

#include "common/macros.h"
#include "sm90/forward/blocks.h"
#include "sm90/forward/launch_params.h"
#include "sm90/panel_tile.h"
#include "sm90/pipeline.h"
#include "sm90/tma.h"
#include "variant/mask.h"
#include "variant/work_tile.h"

namespace anyflash::sm90 {

// One thread.
template <class Traits>
class TileLoader {
 public:
  ANYFLASH_DEVICE TileLoader(const ForwardLaunch& params, typename Traits::SharedStorage& smem)
      : params_(params), smem_(smem) {
    prefetch_tensor_map(params.q_map);
    prefetch_tensor_map(params.k_map);
    prefetch_tensor_map(params.v_map);
  }

  // The place of the first block whose Q has not been loaded.
  ANYFLASH_DEVICE int next_block() const { return block_place(q_place_); }

  // Q, and the first tile of the block's range. K comes before Q, which may have to wait for the
  // block before.
  ANYFLASH_DEVICE void load_first(const BlockWork& block) {
    const int tile = block.range.first();
    if (tile >= 0) load_keys(block.tile, tile);
    load_queries(block.tile);
    if (tile >= 0) load_values_of(block, tile);
  }

  // The other tiles in the range's order.
  ANYFLASH_DEVICE void load_rest(const BlockWork& block) {
    const int first = block.range.first();
    if (first < 0) return;
    for (int tile = block.range.next(first); tile >= 0; tile = block.range.next(tile)) {
      load_values_of(block, tile);
    }
  }

  // Consumers and guard are told of a block that does not exist.
  ANYFLASH_DEVICE void end() {
    for (int warpgroup = 0; warpgroup < Traits::kConsumers; ++warpgroup) {
      Ring<Traits::kQStages>& ring = smem_.q_ring[warpgroup];
      ring.empty[q_place_.stage()].wait(q_place_.parity() ^ 1);
      ring.full[q_place_.stage()].arrive();
    }
  }

 private:
  ANYFLASH_DEVICE static TileCoordinates key_tile(const ForwardWorkTile& work_tile, int tile) {
    const int row = static_cast<int>(work_tile.sequence.first_k) + tile * Traits::kBlockN;
    return {0, row, work_tile.head_k, static_cast<int>(work_tile.sequence.batch)};
  }

  ANYFLASH_DEVICE void load_keys(const ForwardWorkTile& work_tile, int tile) {
    const int stage = k_place_.stage();
    smem_.k_ring.empty[stage].wait(k_place_.parity() ^ 1);
    load_tile<typename Traits::TileK>(smem_.k.data() + stage * Traits::TileK::kSize, params_.k_map,
                                      key_tile(work_tile, tile), smem_.k_ring.full[stage],
                                      L2Hint::kEvictLast);
    k_place_.advance();
  }

  // V of a tile, after K of the next: consumers, too, are one tile ahead with K.
  ANYFLASH_DEVICE void load_values_of(const BlockWork& block, int tile) {
    const int next = block.range.next(tile);
    if (next >= 0) load_keys(block.tile, next);
    load_values(block.tile, tile, block.range.needs_mask(tile));
  }

  // Tiles with hidden keys go to the guard first.
  ANYFLASH_DEVICE void load_values(const ForwardWorkTile& work_tile, int tile, bool masked) {
    const int stage = v_place_.stage();
    smem_.v_ring.empty[stage].wait(v_place_.parity() ^ 1);
    load_tile<typename Traits::TileV>(
        smem_.v.data() + stage * Traits::TileV::kSize, params_.v_map, key_tile(work_tile, tile),
        masked ? smem_.v_unguarded[stage] : smem_.v_ring.full[stage], L2Hint::kEvictLast);
    v_place_.advance();
  }

  // Each warpgroup's rows as soon as it has done with those of the block before.
  ANYFLASH_DEVICE void load_queries(const ForwardWorkTile& work_tile) {
    using TileQ = typename Traits::TileQ;
    int row = static_cast<int>(work_tile.sequence.first_q) + work_tile.first_row;
    for (int warpgroup = 0; warpgroup < Traits::kConsumers; ++warpgroup, row += TileQ::kRows) {
      Ring<Traits::kQStages>& ring = smem_.q_ring[warpgroup];
      const int stage = q_place_.stage();
      ring.empty[stage].wait(q_place_.parity() ^ 1);
      load_tile<TileQ>(smem_.queries(stage, warpgroup), params_.q_map,
                       {0, row, work_tile.head, static_cast<int>(work_tile.sequence.batch)},
                       ring.full[stage], L2Hint::kEvictFirst);
    }
    q_place_.advance();
  }

  const ForwardLaunch& params_;
  typename Traits::SharedStorage& smem_;
  RingPlace<Traits::kStages> k_place_;
  RingPlace<Traits::kStages> v_place_;
  RingPlace<Traits::kQStages> q_place_;
};

// The guard has three warps. A masked probability is 0, but 0 * NaN is NaN (common/finite.h). So
// tiles with hidden keys, which are the first of a range, come to the guard, which hands them on to
// the consumers.
template <class Traits>
class ValueGuard {
  static constexpr int kThreads = 32 * Traits::kGuardWarps;

 public:
  ANYFLASH_DEVICE ValueGuard(typename Traits::SharedStorage& smem, int warp)
      : smem_(smem), thread_(32 * warp + static_cast<int>(threadIdx.x) % 32) {}

  // All blocks of the CTA, in turn.
  ANYFLASH_DEVICE void guard() {
    for (;;) {
      Ring<Traits::kQStages>& queries = smem_.q_ring[0];
      const int stage = q_place_.stage();
      queries.full[stage].wait(q_place_.parity());
      const BlockWork& block = smem_.blocks[block_place(q_place_)];
      if (!block.exists()) return;
      const KRange range = block.range;
      __syncwarp();  // every lane has read it
      if (threadIdx.x % 32 == 0) queries.empty[stage].arrive();
      q_place_.advance();
      guard(range);
    }
  }

 private:
  ANYFLASH_DEVICE void guard(const KRange& range) {
    int visits = range.end - range.begin;
    for (int tile = range.first(); tile >= 0 && range.needs_mask(tile); tile = range.next(tile)) {
      guard_tile(v_place_.stage());
      v_place_.advance();
      --visits;
    }
    v_place_.advance(visits);
  }

  ANYFLASH_DEVICE void guard_tile(int stage) {
    smem_.v_unguarded[stage].wait(parities_ >> stage & 1);
    parities_ ^= 1u << stage;
    const bool found = clear_nonfinite_tile<typename Traits::TileV, kThreads>(
        smem_.v.data() + stage * Traits::TileV::kSize, thread_);
    if (found) fence_smem_writes();
    const bool any = __any_sync(0xffffffffu, found);
    if (thread_ % 32 == 0) smem_.v_cleared[stage][thread_ / 32] = any;
    sync_named(static_cast<int>(NamedBarrier::kGuard), kThreads);
    if (thread_ == 0) smem_.v_ring.full[stage].arrive();
  }

  typename Traits::SharedStorage& smem_;
  int thread_;
  RingPlace<Traits::kQStages> q_place_;
  RingPlace<Traits::kStages> v_place_;
  uint32_t parities_ = 0;  // a bit a stage
};

}  // namespace anyflash::sm90
