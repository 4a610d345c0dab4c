// The producer warpgroup: one thread has TMA bring Q, K and V; three warps guard V.
#pragma once

#include <cstdint>

#include "common/finite.h"
#include "common/macros.h"
#include "sm90/forward/blocks.h"
#include "sm90/forward/launch_params.h"
#include "sm90/pipeline.h"
#include "sm90/tma.h"
#include "variant/mask.h"
#include "variant/work_tile.h"

namespace anyflash::sm90 {

// All panels of a tile of `Tile::kRows` rows from `first` on.
template <class Tile>
ANYFLASH_DEVICE void load_tile(typename Tile::Element* to, const CUtensorMap& map,
                               TileCoordinates first, Mbarrier& full, L2Hint hint) {
  full.arrive_expect(Tile::kBytes);
  CUTE_UNROLL
  for (int panel = 0; panel < Tile::kPanels; ++panel) {
    load_box(to + panel * Tile::kPanelElements, map, first, full.state(), hint);
    first.column += kPanelColumns;
  }
}

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

  // The first K comes before Q, which may have to wait for the block before.
  ANYFLASH_DEVICE void load_first(const BlockWork& block) {
    const int tile = block.range.first();
    if (tile >= 0) load_keys(block.tile, tile);
    load_queries(block);
  }

  // The other tiles of the block's range in its order. K runs one tile ahead of V, as the consumers
  // do.
  ANYFLASH_DEVICE void load_rest(const BlockWork& block) {
    const KRange range = block.range;
    int tile = range.first();
    while (tile >= 0) {
      const int next = range.next(tile);
      if (next >= 0) load_keys(block.tile, next);
      load_values(block.tile, tile, range.needs_mask(tile));
      tile = next;
    }
  }

  // All warps go home after `none`, which does not exist.
  ANYFLASH_DEVICE void end(const BlockWork& none) {
    for (int warpgroup = 0; warpgroup < Traits::kConsumers; ++warpgroup) {
      tell(none, warpgroup);
      smem_.q_full[warpgroup].arrive();
    }
  }

 private:
  ANYFLASH_DEVICE static TileCoordinates key_tile(const ForwardWorkTile& block, int tile) {
    const int row = static_cast<int>(block.sequence.first_k) + tile * Traits::kBlockN;
    return {0, row, block.head_k, static_cast<int>(block.sequence.batch)};
  }

  ANYFLASH_DEVICE void load_keys(const ForwardWorkTile& block, int tile) {
    const int stage = k_place_.stage();
    smem_.k_ring.empty[stage].wait(k_place_.parity() ^ 1);
    load_tile<typename Traits::TileK>(smem_.k.data() + stage * Traits::TileK::kSize, params_.k_map,
                                      key_tile(block, tile), smem_.k_ring.full[stage],
                                      L2Hint::kEvictLast);
    k_place_.advance();
  }

  // Tiles with hidden keys go to the guard first.
  ANYFLASH_DEVICE void load_values(const ForwardWorkTile& block, int tile, bool masked) {
    const int stage = v_place_.stage();
    smem_.v_ring.empty[stage].wait(v_place_.parity() ^ 1);
    load_tile<typename Traits::TileV>(smem_.v.data() + stage * Traits::TileV::kSize, params_.v_map,
                                      key_tile(block, tile),
                                      masked ? smem_.v_unguarded[stage] : smem_.v_ring.full[stage],
                                      L2Hint::kEvictLast);
    v_place_.advance();
  }

  // Each warpgroup's rows as soon as it has done with those of the block before.
  ANYFLASH_DEVICE void load_queries(const BlockWork& block) {
    using TileQ = typename Traits::TileQ;
    const Sequence& sequence = block.tile.sequence;
    int row = static_cast<int>(sequence.first_q) + block.tile.first_row;
    for (int warpgroup = 0; warpgroup < Traits::kConsumers; ++warpgroup, row += TileQ::kRows) {
      tell(block, warpgroup);
      load_tile<TileQ>(smem_.q.data() + warpgroup * TileQ::kSize, params_.q_map,
                       {0, row, block.tile.head, static_cast<int>(sequence.batch)},
                       smem_.q_full[warpgroup], L2Hint::kEvictFirst);
    }
    q_place_.advance();
  }

  // A warpgroup, and with the first one the guard, sees it when its Q is full.
  ANYFLASH_DEVICE void tell(const BlockWork& block, int warpgroup) {
    smem_.q_empty[warpgroup].wait(q_place_.parity() ^ 1);
    smem_.blocks[q_place_.parity()][warpgroup] = block;
  }

  const ForwardLaunch& params_;
  typename Traits::SharedStorage& smem_;
  RingPlace<Traits::kStages> k_place_;
  RingPlace<Traits::kStages> v_place_;
  RingPlace<1> q_place_;
};

// Writes 0 over NaN and infinity in a tile, all warps of the guard together; returns whether this
// thread found any.
template <class Traits>
ANYFLASH_DEVICE bool clear_values(typename Traits::Element* values, int thread) {
  using namespace cute;
  constexpr int kVector = 8;
  bool found = false;
  for (int i = thread; i < Traits::TileV::kSize / kVector; i += 32 * Traits::kGuardWarps) {
    auto piece = make_tensor(make_smem_ptr(values + i * kVector), Int<kVector>{});
    found |= clear_nonfinite(piece);
  }
  return found;
}

// Three warps. A masked probability is 0, but 0 * NaN is NaN (common/finite.h): tiles with hidden
// keys, which are the first of a range, come to the guard, which hands them on to the consumers.
template <class Traits>
class ValueGuard {
  static constexpr int kThreads = 32 * Traits::kGuardWarps;

 public:
  ANYFLASH_DEVICE ValueGuard(typename Traits::SharedStorage& smem, int warp)
      : smem_(smem), thread_(32 * warp + static_cast<int>(threadIdx.x) % 32) {}

  // All blocks of the CTA, in turn.
  ANYFLASH_DEVICE void guard() {
    for (;;) {
      smem_.q_full[0].wait(q_place_.parity());
      const BlockWork& block = smem_.blocks[q_place_.parity()][0];
      if (!block.exists()) return;
      const KRange range = block.range;
      __syncwarp();  // every lane has read it
      if (threadIdx.x % 32 == 0) smem_.q_empty[0].arrive();
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
    const bool found =
        clear_values<Traits>(smem_.v.data() + stage * Traits::TileV::kSize, thread_);
    if (found) fence_smem_writes();
    const bool any = __any_sync(0xffffffffu, found);
    if (thread_ % 32 == 0) smem_.v_cleared[stage][thread_ / 32] = any;
    sync_named(static_cast<int>(NamedBarrier::kGuard), kThreads);
    if (thread_ == 0) smem_.v_ring.full[stage].arrive();
  }

  typename Traits::SharedStorage& smem_;
  int thread_;
  RingPlace<1> q_place_;
  RingPlace<Traits::kStages> v_place_;
  uint32_t parities_ = 0;  // a bit a stage
};

}  // namespace anyflash::sm90
