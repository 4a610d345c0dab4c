// The producer warpgroup: one thread has TMA bring Q, K and V; three warps guard V.
#pragma once

#include <cstdint>

#include "common/finite.h"
#include "common/macros.h"
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

  // Q, and the tiles of `range` in its order. K runs one tile ahead of V, as the consumers do; the
  // first K comes before Q, which may have to wait for the block before.
  ANYFLASH_DEVICE void load(const ForwardWorkTile& block, const KRange& range) {
    int tile = range.first();
    if (tile >= 0) load_keys(block, tile);
    load_queries(block);
    while (tile >= 0) {
      const int next = range.next(tile);
      if (next >= 0) load_keys(block, next);
      load_values(block, tile);
      tile = next;
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

  ANYFLASH_DEVICE void load_values(const ForwardWorkTile& block, int tile) {
    const int stage = v_place_.stage();
    smem_.v_ring.empty[stage].wait(v_place_.parity() ^ 1);
    load_tile<typename Traits::TileV>(smem_.v.data() + stage * Traits::TileV::kSize, params_.v_map,
                                      key_tile(block, tile), smem_.v_ring.full[stage],
                                      L2Hint::kEvictLast);
    v_place_.advance();
  }

  ANYFLASH_DEVICE void load_queries(const ForwardWorkTile& block) {
    const int row = static_cast<int>(block.sequence.first_q) + block.first_row;
    smem_.q_empty.wait(q_place_.parity() ^ 1);
    load_tile<typename Traits::TileQ>(smem_.q.data(), params_.q_map,
                                      {0, row, block.head, static_cast<int>(block.sequence.batch)},
                                      smem_.q_full, L2Hint::kEvictFirst);
    q_place_.advance();
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

// Three warps. A masked probability is 0, but 0 * NaN is NaN (common/finite.h): consumers wait for
// the guard where tiles have hidden keys, which are the first of a range.
template <class Traits>
class ValueGuard {
 public:
  ANYFLASH_DEVICE ValueGuard(typename Traits::SharedStorage& smem, int warp)
      : smem_(smem), warp_(warp) {}

  // The tiles without hidden keys go by unseen. Q comes after the consumers have done with the V of
  // the block before, and the next Q waits for the guard. So the parities of V are this block's.
  ANYFLASH_DEVICE void guard(const KRange& range) {
    smem_.q_full.wait(q_place_.parity());
    int visits = range.end - range.begin;
    for (int tile = range.first(); tile >= 0 && range.needs_mask(tile); tile = range.next(tile)) {
      guard_tile();
      v_place_.advance();
      --visits;
    }
    v_place_.advance(visits);
    __syncwarp();
    if (threadIdx.x % 32 == 0) smem_.q_empty.arrive();
    q_place_.advance();
  }

 private:
  ANYFLASH_DEVICE void guard_tile() {
    const int stage = v_place_.stage();
    const int lane = threadIdx.x % 32;
    smem_.v_ring.full[stage].wait(v_place_.parity());
    const bool found =
        clear_values<Traits>(smem_.v.data() + stage * Traits::TileV::kSize, 32 * warp_ + lane);
    if (found) fence_smem_writes();
    const bool any = __any_sync(0xffffffffu, found);
    __syncwarp();  // every lane's zeros are there
    if (lane != 0) return;
    smem_.v_cleared[stage][warp_] = any;
    smem_.v_guarded[stage].arrive();
  }

  typename Traits::SharedStorage& smem_;
  RingPlace<1> q_place_;
  RingPlace<Traits::kStages> v_place_;
  int warp_;
};

}  // namespace anyflash::sm90
