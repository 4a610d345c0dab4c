// The producer warpgroup: one warp has TMA bring Q, K and V, and others guard V. (A third kind:
// tile_lists.h.)
#pragma once

#include <cstdint>

#include "common/macros.h"
#include "sm90/forward/blocks.h"
#include "sm90/forward/key_tiles.h"
#include "sm90/forward/launch_params.h"
#include "sm90/forward/tile_lists.h"
#include "sm90/panel_tile.h"
#include "sm90/pipeline.h"
#include "sm90/tma.h"
#include "sm90/visited_tiles.h"
#include "variant/forward_variants.h"
#include "variant/mask.h"
#include "variant/work_tile.h"

namespace anyflash::sm90 {

// One thread, or a warp where tiles come in several boxes: lanes load one each.
template <class Traits>
class TileLoader {
  using Block = typename Traits::Block;
  using Launch = typename Block::Launch;
  using KeyPlace = typename Block::KeyPlace;
  static constexpr bool kFinds = Traits::kConfig.finds_tiles;

 public:
  static constexpr bool kIsWarp = Block::kLoadsByWarp;

  ANYFLASH_DEVICE TileLoader(const Launch& params, typename Traits::SharedStorage& smem)
      : params_(params), smem_(smem) {
    prefetch_tensor_map(params.q_map);
    prefetch_tensor_map(params.k_map);
    prefetch_tensor_map(params.v_map);
  }

  // All blocks of the CTA, in turn.
  ANYFLASH_DEVICE void load() {
    if constexpr (kFinds) {
      ListedTiles<Traits> tiles(smem_);
      while (tiles.begin_block()) load_block(tiles, [] {});
    } else {
      BlockScheduler<Traits> scheduler(params_);
      take_next(scheduler);
      while (next_block().exists()) {
        auto tiles = tiles_of_next_;
        load_block(tiles, [&] { take_next(scheduler); });
      }
    }
    if (leads()) end();
  }

 private:
  // Whether this thread tells, and loads what comes in one box.
  ANYFLASH_DEVICE static bool leads() { return !kIsWarp || threadIdx.x % 32 == 0; }
  ANYFLASH_DEVICE static bool loads_keys() { return Block::kLoadsByWarp || leads(); }

  // The first block whose Q has not been loaded.
  ANYFLASH_DEVICE Block& next_block() { return smem_.blocks[block_place<Traits>(q_place_)]; }
  template <class Scheduler>
  ANYFLASH_DEVICE void take_next(Scheduler& scheduler) {
    Block& block = next_block();
    if (leads()) scheduler.take(block);
    if (kIsWarp) __syncwarp();
    if (block.exists()) tiles_of_next_.begin(params_.attention, block.tile, block.range);
  }

  // Q, and K and V of all tiles. K comes before Q, which may have to wait for the block before, and
  // V after K of the next tile: consumers, too, are one tile ahead with K. Calls take_next() in the
  // middle.
  template <class Tiles, class TakeNext>
  ANYFLASH_DEVICE void load_block(Tiles& tiles, const TakeNext& take_next) {
    Block& block = next_block();
    KeyTile tile;
    KeyPlace place;
    for (int i = 0;; ++i) {
      const KeyTile next = tiles.next(params_.attention, block.tile, block.range);
      KeyPlace next_place{};
      if (next.exists()) {
        next_place = block.template find_keys<Traits::kBlockN>(params_, next.n);
        load_keys(block, next, next_place);
      }
      if (i > 0) load_values(block, tile, place);
      else load_queries(block);
      // It takes the place of block k - 3, if k is the one that is loaded. Consumers have released
      // Q of block k - 2, and so have done with the one before it.
      if (i == 1 || (i == 0 && !next.exists())) take_next();
      if (!next.exists()) return;
      tile = next;
      place = next_place;
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

  ANYFLASH_DEVICE void load_keys(const Block& block, const KeyTile& tile, KeyPlace place) {
    using TileK = typename Traits::TileK;
    if (!loads_keys()) return;
    const int stage = k_place_.stage();
    for (int part = 0; part < Traits::kKeyParts; ++part) {
      Ring<Traits::kStages>& ring = smem_.k_ring[part];
      ring.empty[stage].wait(k_place_.parity() ^ 1);
      if (kFinds && part == 0) smem_.key_tiles[stage] = tile.packed();
      block.template load<TileK>(params_, place, smem_.keys(stage, part), params_.k_map, tile.n,
                                 part * TileK::kColumns, ring.full[stage]);
    }
    k_place_.advance();
  }

  // Tiles with hidden keys go to the guard first.
  ANYFLASH_DEVICE void load_values(const Block& block, const KeyTile& tile, KeyPlace place) {
    if (!loads_keys()) return;
    const int stage = v_place_.stage();
    smem_.v_ring.empty[stage].wait(v_place_.parity() ^ 1);
    block.template load<typename Traits::TileV>(
        params_, place, smem_.v.data() + stage * Traits::TileV::kSize, params_.v_map, tile.n, 0,
        tile.needs_mask ? smem_.v_unguarded[stage] : smem_.v_ring.full[stage]);
    v_place_.advance();
  }

  // Each warpgroup's rows as soon as it has done with those of the block before.
  ANYFLASH_DEVICE void load_queries(const Block& block) {
    using TileQ = typename Traits::TileQ;
    const ForwardWorkTile& work_tile = block.tile;
    int row = static_cast<int>(work_tile.sequence.first_q) + work_tile.first_row;
    for (int warpgroup = 0; warpgroup < Traits::kConsumers; ++warpgroup, row += TileQ::kRows) {
      Ring<Traits::kQStages>& ring = smem_.q_ring[warpgroup];
      const int stage = q_place_.stage();
      if (!leads()) break;
      ring.empty[stage].wait(q_place_.parity() ^ 1);
      load_tile<TileQ>(smem_.queries(stage, warpgroup), params_.q_map,
                       {0, row, work_tile.head, block.batch_of_queries()}, ring.full[stage],
                       L2Hint::kEvictFirst);
    }
    q_place_.advance();
  }

  const Launch& params_;
  typename Traits::SharedStorage& smem_;
  RingPlace<Traits::kStages> k_place_;
  RingPlace<Traits::kStages> v_place_;
  RingPlace<Traits::kQStages> q_place_;
  VisitedTiles<Traits, PlainForward> tiles_of_next_;  // next_block()'s, without a finder
};

// The guard has two or three warps. A masked probability is 0, but 0 * NaN is NaN
// (common/finite.h). So tiles with hidden keys come to the guard, which hands them on to the
// consumers.
template <class Traits>
class ValueGuard {
  static constexpr int kThreads = 32 * Traits::kGuardWarps;

 public:
  ANYFLASH_DEVICE ValueGuard(typename Traits::SharedStorage& smem, int warp)
      : smem_(smem), thread_(32 * warp + static_cast<int>(threadIdx.x) % 32) {}

  // All blocks of the CTA, in turn.
  ANYFLASH_DEVICE void guard() {
    if constexpr (Traits::kConfig.finds_tiles) guard_lists();
    else guard_ranges();
  }

 private:
  ANYFLASH_DEVICE void guard_ranges() {
    for (;;) {
      Ring<Traits::kQStages>& queries = smem_.q_ring[0];
      const int stage = q_place_.stage();
      queries.full[stage].wait(q_place_.parity());
      const BlockWork& block = smem_.blocks[block_place<Traits>(q_place_)];
      if (!block.exists()) return;
      const KRange range = block.range;
      __syncwarp();  // every lane has read it
      if (threadIdx.x % 32 == 0) queries.empty[stage].arrive();
      q_place_.advance();
      guard_first(range);
    }
  }
  // Tiles with hidden keys are the first of a range.
  ANYFLASH_DEVICE void guard_first(const KRange& range) {
    int visits = range.end - range.begin;
    for (int tile = range.first(); tile >= 0 && range.needs_mask(tile); tile = range.next(tile)) {
      guard_tile(v_place_.stage());
      v_place_.advance();
      --visits;
    }
    v_place_.advance(visits);
  }

  // With a finder they are anywhere.
  ANYFLASH_DEVICE void guard_lists() {
    for (RingPlace<kTileLists> place;; place.advance()) {
      smem_.list_ring.full[place.stage()].wait(place.parity());
      const TileList& list = smem_.tile_lists[place.stage()];
      if (list.count == TileList::kNoMoreBlocks) return;
      for (int i = 0; i < list.count; ++i) {
        if (KeyTile::unpacked(list.words[i]).needs_mask) guard_tile(v_place_.stage());
        v_place_.advance();
      }
      __syncwarp();  // every lane has read it
      release(smem_.list_ring.empty[place.stage()]);
    }
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
