// Types that a Hopper decoding kernel is made of.
#pragma once

#include <cutlass/numeric_types.h>

#include <cstdint>
#include <type_traits>

#include "common/math.h"
#include "cuda/decode_work_tile.h"
#include "kernel_descriptor.h"
#include "params.h"
#include "sm90/accumulator.h"
#include "sm90/cluster_inbox.h"
#include "sm90/decode/config.h"
#include "sm90/panel_tile.h"
#include "sm90/pipeline.h"
#include "sm90/roles.h"
#include "sm90/wgmma.h"

namespace anyflash::sm90 {

// Rows are queries and heads that share a head of K. Keys are the rows of the products, and these
// the columns: S^T = K Q^T, O^T = V^T P^T. With two head dims attention is latent: V is the first
// columns of K, and comes with it.
template <class Element_, int kHeadDim_, int kHeadDimV_, int kBlockM_, bool k8Bit_>
struct DecodeTraits {
  using Element = Element_;  // of Q and of results
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kHeadDimV = kHeadDimV_;
  static constexpr bool kLatent = kHeadDim != kHeadDimV;
  static constexpr bool kSharesRows = false;
  static constexpr bool kPairsTiles = false;
  static constexpr bool k8Bit = k8Bit_;  // the cache's elements have 8 bits (is_quantized)
  using Operand = std::conditional_t<k8Bit, cutlass::half_t, Element>;  // of the products
  using Stored = std::conditional_t<k8Bit, uint8_t, Element>;           // in the cache
  static constexpr bool kConvertsQ = !std::is_same_v<Operand, Element>;
  static constexpr DecodeConfig kConfig = decode_config(kHeadDim, kBlockM_, k8Bit);
  static_assert(kConfig.head_dim > 0, "config.h lacks a row that kernels.cmake asks for");
  static constexpr int kBlockM = kBlockM_;
  static constexpr int kBlockN = kDecodeKeys;
  static constexpr int kBuffers = kConfig.buffers;
  static constexpr int kWarpgroups = kConfig.warpgroups;
  static constexpr int kRows = kBlockM / kWarpgroups;  // of a warpgroup
  static constexpr int kConsumers = kWarpgroups;
  static constexpr int kConsumerThreads = kWarpgroups * kWarpgroupThreads;
  static constexpr int kConsumerWarps = kConsumerThreads / 32;
  // The loader is a warp. Beside two warpgroups it has one for itself, which leaves them registers.
  static constexpr bool kHandsRegistersOver = kWarpgroups > 1;
  static constexpr RegisterSplit kRegisters = {40, 232};
  static constexpr int kThreads = kConsumerThreads + (kHandsRegistersOver ? kWarpgroupThreads : 32);
  static constexpr bool kOwnsSm = kConfig.ctas == 1;
  static constexpr Tile kTile = {kBlockM, kBlockN, kThreads / 32, kConfig.ctas};

  using TileQ = PanelTile<Operand, kRows, kHeadDim>;
  using TileK = PanelTile<Stored, kBlockN, kHeadDim>;
  using TileV = PanelTile<Stored, kBlockN, kHeadDimV>;  // latent: the first panels of K's
  using TileP = PanelTile<Operand, kRows, kBlockN>;
  using Scores = Accumulator<kRows>;                          // transposed, as the output
  static constexpr int kOutBlocks = ceil_div(kHeadDimV, 64);  // of a wgmma's rows each
  static constexpr int kThreadColumns = kRows / 4;            // of an accumulator's

  // The CTAs of a cluster each join some columns of all splits, by slabs of sixteen: a warp's.
  static constexpr int kSlabs = kHeadDimV / 16;
  static constexpr bool kJoinsInCluster = kBlockM <= 16;
  // A CTA's own slabs of all splits, at most.
  static constexpr int kInboxSlabs = [] {
    int most = 0;
    for (int splits = 2; splits <= kLargestCluster; ++splits) {
      const int slabs = ceil_div(kSlabs, splits) * splits;
      if (slabs > most) most = slabs;
    }
    return most;
  }();
  struct Inbox {
    alignas(16) float parts[kInboxSlabs][kBlockM][16];
    float lse[kLargestCluster][kBlockM];
    ClusterInbox arrived;
  };
  struct NoInbox {};

  // What belongs to a cache of 8 bits.
  struct Scales {
    float q_factor[kBlockM];           // what rows' scores have to be multiplied by
    float k_scale[kBuffers][kBlockN];  // of the keys of a tile of K, where keys have their own
    float v_scale[kBuffers][kBlockN];  // of their values
    float units_of_warps[4][kBlockM];
    float unit[kBlockM];  // in which a row's result counts
  };
  struct NoScales {};

  // Rows of O are padded so that what a warp writes at once lies in different banks.
  static constexpr int kOutStride = kHeadDimV + 4;
  struct SharedStorage {
    union {
      alignas(1024) Stored tiles[kBuffers][TileK::kSize];
      float result[kBlockM][kOutStride];  // after the loop, not yet divided by the sums
    };
    alignas(1024) Operand q[kWarpgroups][TileQ::kSize];
    alignas(1024) Operand p[kWarpgroups][TileP::kSize];
    std::conditional_t<kJoinsInCluster, Inbox, NoInbox> inbox;
    std::conditional_t<k8Bit, Scales, NoScales> scales;
    Ring<kBuffers> ring;
    float of_warps[4][kBlockM];           // maxima or sums of each warp's keys
    float maximum[kBlockM];               // of products
    SplitKeys seen[kBlockM];              // by each row, of the split
    bool found_by_warps[kConsumerWarps];  // NaN or infinity in V
    DecodeWorkTile block;
  };
  static_assert(sizeof(SharedStorage) <= 227 * 1024, "what a CTA may have");
  static_assert(kConfig.ctas * (sizeof(SharedStorage) + 1024) <= 228 * 1024, "what an SM has");
};

}  // namespace anyflash::sm90
