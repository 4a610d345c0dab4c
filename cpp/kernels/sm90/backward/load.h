// The producer: one thread has TMA bring K and V once, and Q and dO by tiles of rows.
#pragma once

#include <cstdint>

#include "common/macros.h"
#include "cuda/query_tile_iterator.h"
#include "sm90/backward/launch_params.h"
#include "sm90/backward/query_tile.h"
#include "sm90/panel_tile.h"
#include "sm90/pipeline.h"
#include "sm90/ptx.h"
#include "sm90/tma.h"
#include "variant/backward_variants.h"
#include "variant/mask.h"
#include "variant/work_tile.h"

namespace anyflash::sm90 {

template <class Traits>
class BackwardLoader {
 public:
  // At a tile's barrier of q_ring: for what TMA brings, and for what consumers are told.
  static constexpr int kQArrivals = 2;

  ANYFLASH_DEVICE BackwardLoader(const BackwardLaunch& params, const BackwardWorkTile& block,
                                 typename Traits::SharedStorage& smem)
      : params_(params), block_(block), smem_(smem) {}

  ANYFLASH_DEVICE void load_keys_and_values() {
    load_tile<typename Traits::TileK>(smem_.k.data(), params_.k_map, keys(), smem_.k_full,
                                      L2Hint::kEvictFirst);
    load_tile<typename Traits::TileV>(smem_.v.data(), params_.v_map, keys(), smem_.v_full,
                                      L2Hint::kEvictFirst);
  }
  // Nobody else does so if no row sees a key; but the CTA must not end while TMA writes.
  ANYFLASH_DEVICE void wait_keys_and_values() {
    smem_.k_full.wait(0);
    smem_.v_full.wait(0);
  }

  // Q, LSE and delta of a tile. They are on their way while what consumers are told is worked out.
  template <class Tiles>
  ANYFLASH_DEVICE void load_queries(const Tiles& tiles, const Mask& mask) {
    using TileQ = typename Traits::TileQ;
    constexpr int kLseOrDeltaBytes = Traits::kBlockM * static_cast<int>(sizeof(float));
    const int stage = q_place_.stage();
    const int64_t row =
        params_.first_row(block_.sequence, block_.batch, tiles.head()) + tiles.row();
    Mbarrier& full = smem_.q_ring.full[stage];
    smem_.q_ring.empty[stage].wait(q_place_.parity() ^ 1);
    full.arrive_expect(TileQ::kBytes + 2 * kLseOrDeltaBytes);
    load_panels<TileQ>(smem_.q.data() + stage * TileQ::kSize, params_.q_map,
                       rows(tiles.head(), tiles.row()), full, L2Hint::kEvictLast);
    load_bytes(smem_.lse[stage], params_.lse_rows + row, kLseOrDeltaBytes, full.state());
    load_bytes(smem_.delta[stage], params_.delta_rows + row, kLseOrDeltaBytes, full.state());
    tell(QueryTileInfo{params_.dq_accum + row * Traits::kDqColumns, tiles.row(),
                       flags_of(tiles, mask)});
  }
  // Consumers are told that there are no more.
  ANYFLASH_DEVICE void end() {
    const int stage = q_place_.stage();
    smem_.q_ring.empty[stage].wait(q_place_.parity() ^ 1);
    smem_.q_ring.full[stage].arrive();
    tell(QueryTileInfo{nullptr, 0, 0});
  }

  template <class Tiles>
  ANYFLASH_DEVICE void load_dout(const Tiles& tiles) {
    using TileDO = typename Traits::TileDO;
    const int stage = dout_place_.stage();
    smem_.dout_ring.empty[stage].wait(dout_place_.parity() ^ 1);
    load_tile<TileDO>(smem_.dout.data() + stage * TileDO::kSize, params_.dout_map,
                      rows(tiles.head(), tiles.row()), smem_.dout_ring.full[stage],
                      L2Hint::kEvictLast);
    dout_place_.advance();
  }

 private:
  // The second of two arrivals at the tile's barrier.
  ANYFLASH_DEVICE void tell(const QueryTileInfo& tile) {
    smem_.tiles[q_place_.stage()] = tile;
    smem_.q_ring.full[q_place_.stage()].arrive();
    q_place_.advance();
  }

  template <class Tiles>
  ANYFLASH_DEVICE int flags_of(const Tiles& tiles, const Mask& mask) const {
    const int end = tiles.row() + Traits::kBlockM;
    const int seqlen_q = block_.sequence.seqlen_q;
    const auto is_unseen = [&](int row) { return mask.first_key(row) >= mask.end_key(row); };
    int flags = QueryTileInfo::kExists;
    // Rows beyond the sequence's end may be another one's.
    if (tiles.needs_mask() || end > seqlen_q) flags |= QueryTileInfo::kNeedsMask;
    // Such rows are a sequence's first ones and its last ones.
    if (is_unseen(tiles.row()) || is_unseen(min(end, seqlen_q) - 1)) {
      flags |= QueryTileInfo::kHasUnseen;
    }
    return flags;
  }

  ANYFLASH_DEVICE TileCoordinates keys() const {
    return {0, static_cast<int>(block_.sequence.first_k) + block_.first_key, block_.head_k,
            static_cast<int>(block_.sequence.batch)};
  }
  ANYFLASH_DEVICE TileCoordinates rows(int head, int row) const {
    return {0, static_cast<int>(block_.sequence.first_q) + row, head,
            static_cast<int>(block_.sequence.batch)};
  }

  const BackwardLaunch& params_;
  const BackwardWorkTile& block_;
  typename Traits::SharedStorage& smem_;
  RingPlace<Traits::kStages> q_place_;
  RingPlace<Traits::kStages> dout_place_;
};

// The thread that initialises barriers, before other threads know them. What follows takes a while
// to compute: meanwhile K and V are on their way.
template <class Traits>
ANYFLASH_DEVICE void load_first(const BackwardLaunch& params, const BackwardWorkTile& block,
                                typename Traits::SharedStorage& smem) {
  BackwardLoader<Traits>(params, block, smem).load_keys_and_values();
  prefetch_tensor_map(params.q_map);
  prefetch_tensor_map(params.dout_map);
}

// The same thread. Q and dO come in the order in which consumers visit the tiles.
template <class Traits>
ANYFLASH_DEVICE void produce_rows(const BackwardLaunch& params, const BackwardWorkTile& block,
                                  typename Traits::SharedStorage& smem) {
  const Mask mask = Mask(block.sequence, params.attention.window).up_to_last_row();
  QueryTileIterator<Traits, PlainBackward> tiles(params, block, mask);
  BackwardLoader<Traits> loader(params, block, smem);
  wait_previous_kernel();  // LSE, delta, dq_accum, and a rounded dO
  if (!tiles.valid()) loader.wait_keys_and_values();
  for (; tiles.valid(); tiles.advance()) {
    loader.load_queries(tiles, mask);
    loader.load_dout(tiles);
  }
  loader.end();
}

}  // namespace anyflash::sm90
