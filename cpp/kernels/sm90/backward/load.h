// The producer: TMA brings K and V once, and Q and dO by tiles of rows.
#pragma once

#include <cstdint>
#include <type_traits>

#include "common/dependent_launch.h"
#include "common/macros.h"
#include "cuda/query_tile_iterator.h"
#include "sm90/backward/launch_params.h"
#include "sm90/backward/pair.h"
#include "sm90/backward/query_tile.h"
#include "sm90/backward/variants.h"
#include "sm90/backward/visited_rows.h"
#include "sm90/panel_tile.h"
#include "sm90/pipeline.h"
#include "sm90/seen_elements.h"
#include "sm90/tma.h"
#include "variant/mask.h"
#include "variant/work_tile.h"

namespace anyflash::sm90 {

template <class Traits>
class BackwardLoader {
  using Variant = typename Traits::Variant;

 public:
  // At a tile's barrier of q_ring: for what TMA brings, and for what consumers are told.
  static constexpr int kQArrivals = 2;

  ANYFLASH_DEVICE BackwardLoader(const BackwardLaunch& params, const BackwardWorkTile& block,
                                 typename Traits::SharedStorage& smem)
      : params_(params), block_(block), smem_(smem) {}

  ANYFLASH_DEVICE void load_keys_and_values() {
    load_tile<typename Traits::TileK>(smem_.k.data(), params_.k_map,
                                      key_coordinates(block_, first_column()), smem_.k_full,
                                      L2Hint::kEvictFirst);
    load_tile<typename Traits::TileV>(smem_.v.data(), params_.v_map,
                                      key_coordinates(block_, first_column_v()), smem_.v_full,
                                      L2Hint::kEvictFirst);
  }
  // Nobody else does so if no row sees a key. But the CTA must not end while TMA writes, nor dV go
  // where V has not landed yet.
  ANYFLASH_DEVICE void wait_keys_and_values() {
    smem_.k_full.wait(0);
    smem_.v_full.wait(0);
  }

  // A tile that has been loaded.
  ANYFLASH_DEVICE void skip() {
    q_place_.advance();
    dout_place_.advance();
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
                       row_coordinates(block_, tiles.head(), tiles.row(), first_column()), full,
                       L2Hint::kEvictLast);
    load_bytes(smem_.lse[stage], params_.lse_rows + row, kLseOrDeltaBytes, full.state());
    load_bytes(smem_.delta[stage], params_.delta_rows + row, kLseOrDeltaBytes, full.state());
    if constexpr (kHasAlibi<Variant>) {
      smem_.slope_log2[stage] =
          params_.slopes_log2[block_.batch * params_.attention.heads + tiles.head()];
    }
    if constexpr (kHasDropout<Variant>) smem_.heads[stage] = tiles.head();
    const int flags = flags_of(tiles, mask);
    if (kHasBlocks<Variant> && (flags & QueryTileInfo::kNeedsMask) != 0) tell_kept(tiles);
    tell(QueryTileInfo{params_.dq_accum + row * Traits::kDqColumns, tiles.row(), flags});
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
                      row_coordinates(block_, tiles.head(), tiles.row(), first_column_v()),
                      smem_.dout_ring.full[stage], L2Hint::kEvictLast);
    dout_place_.advance();
  }

 private:
  ANYFLASH_DEVICE static int first_column() { return rank_in_pair<Traits>() * Traits::kHeadDim; }
  ANYFLASH_DEVICE static int first_column_v() { return rank_in_pair<Traits>() * Traits::kHeadDimV; }

  // The second of two arrivals at the tile's barrier.
  ANYFLASH_DEVICE void tell(const QueryTileInfo& tile) {
    smem_.tiles[q_place_.stage()] = tile;
    smem_.q_ring.full[q_place_.stage()].arrive();
    q_place_.advance();
  }

  // What the block mask leaves of the tile, for each 64 keys.
  template <class Tiles>
  ANYFLASH_DEVICE void tell_kept(const Tiles& tiles) const {
    const BlockMask blocks(params_.attention, block_.batch, tiles.head());
    const int end = min(tiles.row() + Traits::kBlockM, block_.sequence.seqlen_q);
    for (int i = 0; i < Traits::kBlockN / 64; ++i) {
      const int key = min(block_.first_key + 64 * i, block_.sequence.seqlen_k - 1);
      smem_.kept[q_place_.stage()][i] = find_kept_rows(blocks, key, tiles.row(), end);
    }
  }

  template <class Tiles>
  ANYFLASH_DEVICE int flags_of(const Tiles& tiles, const Mask& mask) const {
    const int end = tiles.row() + Traits::kBlockM;
    const int seqlen_q = block_.sequence.seqlen_q;
    const auto is_unseen = [&](int row) { return mask.first_key(row) >= mask.end_key(row); };
    int flags = QueryTileInfo::kExists;
    // Rows beyond the sequence's end may be another one's.
    if (tiles.needs_mask() || end > seqlen_q) flags |= QueryTileInfo::kNeedsMask;
    // Rows that see no key are a sequence's first ones and its last ones. Of other rows, consumers
    // look at LSE and delta. With sinks or a softcap these are finite, though Q may be infinite.
    // With sinks they also are where key_ranges or a block mask leave a row no key.
    const bool may_hide = params_.attention.sinks.data != nullptr || kHasSoftcap<Variant>;
    if (is_unseen(tiles.row()) || is_unseen(min(end, seqlen_q) - 1) || may_hide) {
      flags |= QueryTileInfo::kMayBeNonfinite;
    }
    return flags;
  }

  const BackwardLaunch& params_;
  const BackwardWorkTile& block_;
  typename Traits::SharedStorage& smem_;
  RingPlace<Traits::kStages> q_place_;
  RingPlace<Traits::kStages> dout_place_;
};

// The tiles of query rows that see the CTA's keys.
template <class Traits>
class RowLoader {
  using Variant = typename Traits::Variant;

 public:
  ANYFLASH_DEVICE RowLoader(const BackwardLaunch& params, const BackwardWorkTile& block)
      : mask_(Mask(block.sequence, params.attention.window).up_to_last_row()),
        tiles_(params, block, mask_) {}

  ANYFLASH_DEVICE bool has_next() const { return tiles_.valid(); }
  ANYFLASH_DEVICE void skip() { tiles_.advance(); }
  ANYFLASH_DEVICE void load_next(BackwardLoader<Traits>& loader) {
    if (leads<Traits>()) {
      loader.load_queries(tiles_, mask_);
      loader.load_dout(tiles_);
    }
    tiles_.advance();
  }

 private:
  Mask mask_;
  std::conditional_t<kSkipsTiles<Variant>, VisitedRows<Traits, Variant>,
                     QueryTileIterator<Traits, QueryTileVariant<Variant>>>
      tiles_;
};

// By one thread, as soon as the CTA begins.
ANYFLASH_DEVICE void prefetch_tensor_maps(const BackwardLaunch& params) {
  prefetch_tensor_map(params.k_map);
  prefetch_tensor_map(params.v_map);
  prefetch_tensor_map(params.q_map);
  prefetch_tensor_map(params.dout_map);
}

// What a CTA waits for longest: K and V, and the first tile of rows unless bounds of key ranges say
// which that is. By those who load, when the barriers have been initialised, before other threads
// know them.
template <class Traits>
ANYFLASH_DEVICE void load_first(const BackwardLaunch& params, const BackwardWorkTile& block,
                                typename Traits::SharedStorage& smem) {
  BackwardLoader<Traits> loader(params, block, smem);
  if (leads<Traits>()) loader.load_keys_and_values();
  if constexpr (kHasRanges<typename Traits::Variant>) return;
  RowLoader<Traits> rows(params, block);
  wait_previous_kernel();  // LSE, delta, dq_accum, and a rounded dO
  if (rows.has_next()) rows.load_next(loader);
}

// The other tiles, or all of them with key ranges, in the order in which consumers visit them.
template <class Traits>
ANYFLASH_DEVICE void load_rest(const BackwardLaunch& params, BackwardWorkTile& block,
                               typename Traits::SharedStorage& smem) {
  constexpr bool kLoadsAll = kHasRanges<typename Traits::Variant>;
  if constexpr (kLoadsAll) {
    wait_previous_kernel();  // and the bounds of ranges
    find_key_ranges<typename Traits::Variant, Traits::kBlockN>(params.attention, block);
    if (leads<Traits>()) smem.block.ranges = block.ranges;  // before consumers are told of a tile
  }
  BackwardLoader<Traits> loader(params, block, smem);
  RowLoader<Traits> rows(params, block);
  if (!rows.has_next()) {
    if (leads<Traits>()) loader.wait_keys_and_values();
  } else if (!kLoadsAll) {
    rows.skip();
    loader.skip();
  }
  while (rows.has_next()) rows.load_next(loader);
  if (leads<Traits>()) loader.end();
}

}  // namespace anyflash::sm90
