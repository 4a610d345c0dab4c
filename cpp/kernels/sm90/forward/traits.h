// Types and shared memory of a Hopper forward kernel.
#pragma once

#include <cutlass/numeric_types.h>

#include <cstdint>
#include <cute/container/array.hpp>
#include <cute/tensor.hpp>

#include "common/macros.h"
#include "common/math.h"
#include "sm90/accumulator.h"
#include "sm90/forward/blocks.h"
#include "sm90/forward/config.h"
#include "sm90/forward/tile_lists.h"
#include "sm90/panel_tile.h"
#include "sm90/pipeline.h"
#include "sm90/roles.h"
#include "variant/forward_variants.h"

namespace anyflash::sm90 {

// What ForwardTraits takes from a table; benchmarks try others.
template <int kHeadDim, int kHeadDimV, class Variant = PlainForward>
struct TableConfig {
  static constexpr ForwardConfig value =
      ((Variant::kFeatures & kBlockMask) != 0
           ? forward_config(forward_configs::kBlocksTable, kHeadDim, kHeadDimV)
           : forward_config(forward_configs::kTable, kHeadDim, kHeadDimV))
          .with_finder(Variant::kSkipsTiles);
  static_assert(value.max_head_dim > 0, "config.h lacks a row that kernels.cmake asks for");
};

// Block_: a block of query rows, which says where its keys lie. A consumer has 64 of them.
template <class Element_, int kHeadDim_, int kHeadDimV_,
          class Config = TableConfig<kHeadDim_, kHeadDimV_>, class Block_ = TensorBlock>
struct ForwardTraits : Warpgroups<Config::value.block_m / 64> {
  using Warpgroups<Config::value.block_m / 64>::kConsumers;
  using Element = Element_;
  using Block = Block_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr ForwardConfig kConfig = Config::value;
  static constexpr int kHeadDimV = kHeadDimV_ / kConfig.passes;  // of one launch
  static constexpr int kBlockM = kConfig.block_m;
  static constexpr int kBlockN = kConfig.block_n;
  static constexpr int kStages = kConfig.stages;
  static constexpr int kQStages = kConfig.q_stages;
  static constexpr int kKeyParts = kConfig.key_parts;

  // The producer's warps: one loads, one may find tiles, and the others guard V.
  static constexpr int kGuardWarps = kConfig.finds_tiles ? 2 : 3;
  // Blocks that are known at a time: the loader's next one, its present one, and those that
  // consumers still work on. A finder is up to three blocks ahead of the loader: one for each list,
  // and the one that it looks at.
  static constexpr int kKnownBlocks = kConfig.finds_tiles ? 8 : 4;
  // Rounded results take Q's place on their way out, where the next Q need not come there.
  static constexpr bool kOutputInQ = kQStages > 1;

  static constexpr int kFewKeys = kConfig.few_keys;

  // A warpgroup's rows.
  static constexpr int kWarpgroupRows = 64;
  using TileQ = PanelTile<Element, kWarpgroupRows, kHeadDim>;
  using TileK = PanelTile<Element, kBlockN, kHeadDim / kKeyParts>;  // a part
  using TileV = PanelTile<Element, kBlockN, kHeadDimV>;

  using AccS = Accumulator<kBlockN>;
  using AccO = Accumulator<kHeadDimV>;

  struct SharedStorage {
    alignas(1024) cute::array<Element, kQStages * kConsumers * TileQ::kSize> q;
    alignas(1024) cute::array<Element, kStages * kKeyParts * TileK::kSize> k;
    alignas(1024) cute::array<Element, kStages * TileV::kSize> v;

    // Of each consumer warpgroup: its rows of Q are there, as the next of `blocks` says; they may
    // be overwritten.
    Ring<kQStages> q_ring[kConsumers];
    Ring<kStages> k_ring[kKeyParts];
    Ring<kStages> v_ring;
    Mbarrier v_unguarded[kStages];        // a tile of V with hidden keys, before the guard
    int v_cleared[kStages][kGuardWarps];  // whether NaN or infinity was in it
    Block blocks[kKnownBlocks];
    // Where a variant leaves tiles out: KeyTile's words of what `k` holds, and what is found.
    int key_tiles[kStages];
    Ring<kTileLists> list_ring;
    TileList tile_lists[kTileLists];

    ANYFLASH_DEVICE Element* queries(int stage, int warpgroup) {
      return q.data() + (stage * kConsumers + warpgroup) * TileQ::kSize;
    }
    ANYFLASH_DEVICE Element* keys(int stage, int part) {
      return k.data() + (stage * kKeyParts + part) * TileK::kSize;
    }
  };
  static_assert(sizeof(SharedStorage) <= 227 * 1024, "what a CTA may have");
  static_assert(kHeadDimV_ % kConfig.passes == 0);
  static_assert(kKeyParts == 1 || kHeadDim == kKeyParts * TileK::kColumns,
                "parts are whole panels");
  static_assert(kKeyParts == 1 || !Block::kLoadsByWarp, "CachedBlock loads whole rows");
};

}  // namespace anyflash::sm90
