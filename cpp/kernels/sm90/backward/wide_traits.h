// Types and shared memory of the Hopper backward's kernel for wide heads.
#pragma once

#include <cstdint>
#include <cute/container/array.hpp>
#include <cute/tensor.hpp>
#include <type_traits>

#include "sm90/accumulator.h"
#include "sm90/backward/config.h"
#include "sm90/backward/pair.h"
#include "sm90/backward/query_tile.h"
#include "sm90/backward/variants.h"
#include "sm90/panel_tile.h"
#include "sm90/pipeline.h"
#include "sm90/roles.h"
#include "sm90/wgmma.h"
#include "variant/work_tile.h"

namespace anyflash::sm90 {

// The first consumer warpgroup is for dV and the second for dK, of the same keys.
template <class Element_, int kHeadDim_, int kHeadDimV_, class Variant_>
struct WideTraits : Warpgroups<2> {
  using Element = Element_;
  using Variant = Variant_;
  static constexpr int kCtas = ctas_of_block(kHeadDim_, kHeadDimV_);
  static constexpr int kHeadDim = kHeadDim_ / kCtas;  // of a CTA, as all sizes here
  static constexpr int kHeadDimV = kHeadDimV_ / kCtas;
  static constexpr int kBlockM = 64;
  static constexpr int kBlockN = 64;
  static constexpr int kStages = 2;

  // The loader of a pair has columns to count.
  static constexpr RegisterSplit kRegisters =
      kCtas > 1 ? RegisterSplit{40, 232} : register_split<Variant>;

  // Of QueryTileIterator: no half of a tile is left out.
  static constexpr int kTopRows = kBlockM;
  static constexpr int kTopKeys = kBlockN;

  using TileK = PanelTile<Element, kBlockN, kHeadDim>;
  using TileV = PanelTile<Element, kBlockN, kHeadDimV>;
  using TileQ = PanelTile<Element, kBlockM, kHeadDim>;
  using TileDO = PanelTile<Element, kBlockM, kHeadDimV>;
  using AccS = Accumulator<kBlockM>;  // of S^T and dP^T
  using AccK = Accumulator<kHeadDim>;
  using AccV = Accumulator<kHeadDimV>;

  // At 256 registers hold the sums alone, and looking ahead is slower.
  static constexpr bool kKeysInRegisters = kHeadDim <= 192;
  static constexpr bool kValuesInRegisters = kKeysInRegisters;
  static constexpr bool kLooksAhead = kKeysInRegisters;

  static constexpr bool kIsWide = true;

  // Of the workspace.
  static constexpr bool kSplitsLseAndDelta = true;
  static constexpr int kDqColumns = 0;

  // What the other CTA of a pair sends. Of S it comes where P will be.
  struct FromPeer {
    Pieces<AccS> dp;
    PeerBarriers s_barriers;
    PeerBarriers dp_barriers;
  };
  struct NoPeer {};

  struct SharedStorage {
    alignas(1024) cute::array<Element, TileK::kSize> k;
    alignas(1024) cute::array<Element, TileV::kSize> v;
    alignas(1024) cute::array<Element, kStages * TileQ::kSize> q;
    alignas(1024) cute::array<Element, kStages * TileDO::kSize> dout;
    // P^T of a tile, as the threads of the first warpgroup have it and those of the second want it.
    Pieces<AccS> p;
    std::conditional_t<(kCtas > 1), FromPeer, NoPeer> from_peer;
    alignas(16) float lse[kStages][kBlockM];
    alignas(16) float delta[kStages][kBlockM];

    Mbarrier k_full;
    Mbarrier v_full;
    Ring<kStages> q_ring;  // Q, with LSE and delta of its rows, and `tiles`
    QueryTileInfo tiles[kStages];
    Ring<kStages> dout_ring;
    Ring<1> p_ring;  // filled by the first warpgroup, read by the second

    BackwardWorkTile block;  // the loop needs its registers
    VisibleRows<kHasRanges<Variant> ? 2 : 1> visible[kBlockN];
    // Of a tile: with ALiBi its head's slope, with dropout the head, and with a block mask a bit
    // for each of a key's elements, the same for 64 keys (find_kept_rows).
    float slope_log2[kStages];
    int heads[kStages];
    uint32_t kept[kStages][kBlockN / 64];
    int dout_was_nonfinite[kConsumerWarps];  // what each warp has found in partly hidden tiles
  };
  static_assert(sizeof(SharedStorage) <= 227 * 1024, "what a CTA may have");
};

}  // namespace anyflash::sm90
