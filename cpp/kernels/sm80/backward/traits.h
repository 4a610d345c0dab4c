// Types that the backward's main kernel is made of.
#pragma once

#include "common/macros.h"
#include "sm80/backward/config.h"
#include "sm80/backward/pingpong.h"
#include "sm80/smem_tile.h"
#include "sm80/tiled_mma.h"
#include "variant/work_tile.h"

namespace anyflash::sm80 {

// Of a tile of scores: kRows rows from kRow on, and the first kKeys keys.
template <int kRow_, int kRows_, int kKeys_>
struct TileRegion {
  static constexpr int kRow = kRow_;
  static constexpr int kRows = kRows_;
  static constexpr int kKeys = kKeys_;
};

// kGeneric: the tiles of the generic kernel; kKeysInRuns: a thread's keys come in
// runs of eight.
template <class Element_, int kHeadDim_, int kHeadDimV_, bool kGeneric, bool kKeysInRuns,
          TileConfig kTileConfig>
struct BackwardTraits {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kHeadDimV = kHeadDimV_;
  static constexpr BackwardConfig kConfig = backward_config(kHeadDim, kTileConfig, kGeneric);
  static_assert(kConfig.head_dim > 0, "config.h lacks a row that kernels.cmake asks for");
  static constexpr Tile kTile = kConfig.tile;
  static constexpr int kBlockM = kTile.block_m;
  static constexpr int kBlockN = kTile.block_n;
  static constexpr int kWarps = kTile.warps;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr bool kPingPong = kConfig.ping_pong;
  // What an iteration of the loop takes: in ping-pong, a tile of rows for each group of warps.
  static constexpr Tile kRound{kPingPong ? 2 * kBlockM : kBlockM, kBlockN, kWarps, kTile.ctas};
  // Of the workspace.
  static constexpr int kDqColumns = kHeadDim;
  static constexpr bool kSplitsLseAndDelta = false;
  static constexpr int kCtas = 1;  // that share the columns of a block
  // The threads that share a tile of rows.
  static constexpr int kRowThreads = kPingPong ? kThreads / 2 : kThreads;
  static constexpr int kRowWarps = kRowThreads / 32;
  static constexpr int kStages = kConfig.stages;
  static constexpr bool kReloadV = kConfig.reload_v;
  static constexpr int kScoreParts = kConfig.score_parts;
  static constexpr int kQueryParts = kConfig.query_parts;
  static constexpr int kPartKeys = kBlockN / kScoreParts;
  // In registers, or read from shared memory by each use.
  using SequenceInLoop = std::conditional_t<kConfig.keep_sequence, const Sequence, const Sequence&>;
  // A tile on the diagonal of a causal mask, whose first kTopRows rows see no more than its first
  // kTopKeys keys, has these two regions. Products can leave out the rest where each warp has
  // rows, or keys, in both halves.
  static constexpr int kTopRows = kBlockM < kBlockN ? kBlockM : kBlockM / 2;
  static constexpr int kTopKeys = kBlockM > kBlockN ? 0 : kBlockN / 2;
  using All = TileRegion<0, kBlockM, kBlockN>;
  using DiagonalTop = TileRegion<0, kTopRows, kTopKeys>;
  using DiagonalBottom = TileRegion<kTopRows, kBlockM - kTopRows, kBlockN>;
  static constexpr bool kSkipsMaskedHalf =
      kTopKeys % kPartKeys == 0 && kTopKeys % (16 * kConfig.key_warps) == 0 &&
      (kTopRows == kBlockM ||
       (kTopRows % (16 * kConfig.score_warps) == 0 && kTopRows % (16 * kConfig.query_warps) == 0));
  // The columns of dQ, and so of K, that a part of QueryStage takes.
  static constexpr int kPartColumns = kHeadDim / kQueryParts;
  // The columns of dQ that are rounded at a time.
  static constexpr int kChunks = kConfig.chunk_columns == 0 ? 1 : kHeadDim / kConfig.chunk_columns;
  static constexpr int kDqColumnsAtOnce = kHeadDim / kChunks;
  template <int kKeys>
  using OrderOf = std::conditional_t<kKeysInRuns, QuadKeyOrder<kKeys>, PlainKeyOrder<kKeys>>;
  using KeyOrder = OrderOf<kBlockN>;
  using PartKeyOrder = OrderOf<kPartKeys>;

  using TileQ = SmemTile<Element, kRowThreads, kBlockM, kHeadDim>;
  using TileDO = SmemTile<Element, kRowThreads, kBlockM, kHeadDimV>;
  using TileK = SmemTile<Element, kThreads, kBlockN, kHeadDim>;
  using TileV = SmemTile<Element, kThreads, kBlockN, kHeadDimV>;
  using TileDq = SmemTile<Element, kRowThreads, kBlockM, kDqColumnsAtOnce>;
  using TileP = SmemTile<Element, kRowThreads, kBlockM, kBlockN>;
  using PartOfP = SmemTile<Element, kRowThreads, kBlockM, kPartKeys>;
  static_assert(kScoreParts == 1 || kPartKeys % TileP::kPanelColumns == 0,
                "a part is whole panels of P");
  static_assert(kQueryParts == 1 || kPartColumns % TileK::kPanelColumns == 0,
                "a part is whole panels of K");
  template <class Tile>
  using Buffer = cute::array<Element, cute::cosize_v<typename Tile::Layout>>;
  struct SharedStorage {
    alignas(128) cute::array<Buffer<TileQ>, kStages> q;
    alignas(128) cute::array<Buffer<TileDO>, kStages> dout;
    alignas(128) Buffer<TileK> k;  // later dK
    alignas(128) Buffer<TileV> v;  // later dV
    alignas(128) cute::array<Buffer<TileP>, kReloadV ? 0 : kPingPong ? 4 : 2> p_and_ds;
    PingPongBarriers<kPingPong> ping_pong;
    BackwardWorkTile block;
    int nonfinite_keys;  // NaN or infinity is in K
    int nonfinite_dout;  // or was in a tile of dO

    ANYFLASH_DEVICE Element* p(int group = 0) {
      if constexpr (kReloadV) return v.data();
      else return p_and_ds[2 * group].data();
    }
    ANYFLASH_DEVICE Element* ds(int group = 0) {
      return p(group) + cute::cosize_v<typename TileP::Layout>;
    }
  };
  static_assert(!kPingPong || (kStages == 3 && kConfig.key_warps == 2 && kTopRows == kBlockM &&
                               kTopKeys == kBlockN / 2),
                "a group's keys are all of DiagonalTop's, or none");
  static_assert(!kReloadV || 2 * kBlockM <= kHeadDimV, "P and dS fit where V was");

  // A warp owns 32 neighbouring columns of scores, which QuadKeyOrder wants.
  using ScoreMma = WarpGrid<Element, kConfig.score_warps, kRowWarps / kConfig.score_warps, 32>;
  using KeyMma =
      std::conditional_t<kPingPong, HalvesGrid<Element, kRowWarps, kBlockN, 16>,
                         WarpGrid<Element, kConfig.key_warps, kWarps / kConfig.key_warps, 16>>;
  using QueryMma = WarpGrid<Element, kConfig.query_warps, kRowWarps / kConfig.query_warps, 16>;

  using SmemStore = cute::Copy_Atom<cute::UniversalCopy<cute::uint32_t>, Element>;

  // The thread's place among kRowThreads.
  ANYFLASH_DEVICE static unsigned row_thread() {
    return kPingPong ? threadIdx.x % kRowThreads : threadIdx.x;
  }
};

}  // namespace anyflash::sm80
