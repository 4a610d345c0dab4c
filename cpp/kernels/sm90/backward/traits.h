// Types and shared memory of the Hopper backward's main kernel.
#pragma once

#include <cstdint>
#include <cute/container/array.hpp>
#include <cute/tensor.hpp>

#include "sm90/accumulator.h"
#include "sm90/backward/config.h"
#include "sm90/backward/query_tile.h"
#include "sm90/backward/variants.h"
#include "sm90/panel_tile.h"
#include "sm90/pipeline.h"
#include "sm90/roles.h"
#include "variant/work_tile.h"

namespace anyflash::sm90 {

template <class Element_, int kHeadDim_, int kHeadDimV_, class Variant_>
struct BackwardTraits : Warpgroups<2> {
  using Element = Element_;
  using Variant = Variant_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kHeadDimV = kHeadDimV_;
  static constexpr BackwardConfig kConfig = backward_config(kHeadDim, kHeadDimV);
  static_assert(kConfig.max_head_dim > 0, "config.h lacks a row that kernels.cmake asks for");
  static constexpr int kBlockM = kConfig.block_m;
  static constexpr int kBlockN = kConfig.block_n;
  static constexpr int kStages = kConfig.stages;
  // dS of a tile is written while that of the one before is read.
  static constexpr int kDsStages = 2;

  static constexpr int kWarpgroupKeys = 64;
  static_assert(kBlockN == kConsumers * kWarpgroupKeys, "each warpgroup has 64 keys");
  static constexpr RegisterSplit kRegisters = register_split<Variant>;

  // Under a causal mask a CTA's first rows see the first half of its keys alone
  // (QueryTileIterator).
  static constexpr int kTopRows = kBlockM;
  static constexpr int kTopKeys = kWarpgroupKeys;

  using TileK = PanelTile<Element, kBlockN, kHeadDim>;
  using TileV = PanelTile<Element, kBlockN, kHeadDimV>;
  using TileQ = PanelTile<Element, kBlockM, kHeadDim>;
  using TileDO = PanelTile<Element, kBlockM, kHeadDimV>;
  using TileDS = PanelTile<Element, kBlockN, kBlockM>;  // dS^T: a row is a key

  using AccS = Accumulator<kBlockM>;  // of S^T and dP^T
  using AccK = Accumulator<kHeadDim>;
  using AccV = Accumulator<kHeadDimV>;

  // Warpgroups share a tile of dQ by rows or, if it has no more than 64, by panels of columns.
  static constexpr int kDqColumns = TileK::kColumns;
  static constexpr bool kSplitsDqRows = kBlockM == 128;
  static constexpr int kDqPartColumns = kSplitsDqRows ? kDqColumns : kDqColumns / kConsumers;
  static_assert(kBlockM == 64 || kSplitsDqRows, "64 rows of dQ a warpgroup");
  static_assert(kDqPartColumns % kPanelColumns == 0, "whole panels of K");
  // Of the second part of columns, what is not beyond the head dim.
  static constexpr int kLastDqColumns = kSplitsDqRows ? kDqPartColumns : kHeadDim - kDqPartColumns;
  using AccQ = Accumulator<kDqPartColumns>;
  static constexpr int kDqWarpElements = kBlockM * kDqColumns / kConsumerWarps;

  static constexpr bool kKeysInRegisters = false;
  static constexpr bool kValuesInRegisters = kConfig.values_in_registers;
  // Kernels of other features have no registers for what follows. Key ranges only change the bits
  // of the mask, so that they keep the plain loop.
  static constexpr bool kHasPlainLoop = Variant::kFeatures == 0 || kHasRanges<Variant>;
  static constexpr bool kLooksAhead = kHasPlainLoop && kConfig.looks_ahead;
  static constexpr bool kPingPong = kHasPlainLoop;  // else the second warpgroup begins later
  // A body of the loop for tiles without masks.
  static constexpr bool kHasPlainSteps = kHasPlainLoop;

  static constexpr bool kIsWide = false;

  static constexpr int kCtas = 1;  // that share the columns of a block

  // Of the workspace.
  static constexpr bool kSplitsLseAndDelta = true;

  struct SharedStorage {
    alignas(1024) cute::array<Element, TileK::kSize> k;
    alignas(1024) cute::array<Element, TileV::kSize> v;
    alignas(1024) cute::array<Element, kStages * TileQ::kSize> q;
    alignas(1024) cute::array<Element, kStages * TileDO::kSize> dout;
    alignas(1024) cute::array<Element, kDsStages * TileDS::kSize> ds;
    // Each warp's sums, in the order of its accumulators, on their way to dq_accum.
    alignas(128) float dq[kConsumerWarps][kDqWarpElements];
    alignas(16) float lse[kStages][kBlockM];
    alignas(16) float delta[kStages][kBlockM];

    Mbarrier k_full;
    Mbarrier v_full;
    Ring<kStages> q_ring;  // Q, with LSE and delta of its rows, and `tiles`
    QueryTileInfo tiles[kStages];
    Ring<kStages> dout_ring;
    Ring<kDsStages> ds_ring;  // filled and read by all consumers

    BackwardWorkTile block;  // the loop needs its registers
    VisibleRows<kHasRanges<Variant> ? 2 : 1> visible[kBlockN];
    // Of each warpgroup's first key: the first row that sees it by position.
    int first_rows[kConsumers];
    // Of a tile: with ALiBi its head's slope, with dropout the head, and with a block mask a bit
    // for each of a key's elements, the same for 64 keys (find_kept_rows).
    float slope_log2[kStages];
    int heads[kStages];
    uint32_t kept[kStages][kBlockN / 64];
    // Of the keys: NaN or infinity was in K. A bit each.
    uint32_t nonfinite_keys[kBlockN / 32];
    // What each warp has found: in its share of K, and of partly hidden tiles of dO.
    int k_is_nonfinite[kConsumerWarps];
    int dout_was_nonfinite[kConsumerWarps];
  };
  static_assert(sizeof(SharedStorage) <= 227 * 1024, "what a CTA may have");
};

}  // namespace anyflash::sm90
