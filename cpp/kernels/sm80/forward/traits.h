// Types that a forward kernel is made of: layouts in shared memory, tiled copies, tiled MMA.
#pragma once

#include <cute/tensor.hpp>
#include <type_traits>

#include "common/softmax.h"
#include "sm80/forward/config.h"
#include "sm80/smem_tile.h"
#include "sm80/tiled_mma.h"
#include "variant/work_tile.h"

namespace anyflash::sm80 {

template <class Element_, int kHeadDim_, int kHeadDimV_, class Variant, TileConfig kTileConfig>
struct ForwardTraits {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr ForwardConfig kConfig =
      forward_config(kHeadDim, kHeadDimV_, Variant::kFeatures, kTileConfig);
  static_assert(kConfig.max_head_dim > 0, "config.h lacks a row that kernels.cmake asks for");
  static constexpr int kHeadDimV = kHeadDimV_ / kConfig.passes;  // of one launch
  static constexpr Tile kTile = kConfig.tile;
  static constexpr int kBlockM = kTile.block_m;
  static constexpr int kBlockN = kTile.block_n;
  static constexpr int kWarps = kTile.warps;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr bool kSplitKeysAcrossWarps = kConfig.split_keys_across_warps;
  static constexpr int kKeyWarps = kSplitKeysAcrossWarps ? 2 : 1;
  static constexpr int kRowWarps = kWarps / kKeyWarps;
  static constexpr int kStages = kConfig.stages;
  // Keys that only the later half of the rows sees, as under a causal mask, are multiplied with it:
  // where a warp has rows in both halves.
  static constexpr bool kSkipsMaskedHalf = kBlockM == 32 * kRowWarps && kBlockM >= 2 * kBlockN;
  static constexpr int kBottomRows = kSkipsMaskedHalf ? kBlockM / 2 : kBlockM;
  using KeyOrder =
      std::conditional_t<Variant::kKeysInRuns, QuadKeyOrder<kBlockN>, PlainKeyOrder<kBlockN>>;
  static_assert(kHeadDimV <= kHeadDim, "the output tile lies where Q was");
  static_assert(!kSplitKeysAcrossWarps || (Variant::kFeatures & ~kKeyRanges) == 0,
                "row_exchange.h");

  using TileQ = SmemTile<Element, kThreads, kBlockM, kHeadDim>;
  using TileK = SmemTile<Element, kThreads, kBlockN, kHeadDim>;
  using TileV = SmemTile<Element, kThreads, kBlockN, kHeadDimV>;
  using TileP = SmemTile<Element, kThreads, kBlockM, kBlockN>;
  using TileO = SmemTile<Element, kThreads, kBlockM, kHeadDimV>;

  struct SharedStorage {
    alignas(
        128) cute::array<Element, cute::cosize_v<typename TileQ::Layout>> q;  // later the output
    alignas(128) cute::array<Element, kStages * cute::cosize_v<typename TileK::Layout>> k;
    alignas(128) cute::array<Element, kStages * cute::cosize_v<typename TileV::Layout>> v;
    alignas(128)
        cute::array<Element, kSplitKeysAcrossWarps ? cute::cosize_v<typename TileP::Layout> : 0> p;
    cute::array<float, kSplitKeysAcrossWarps ? kKeyWarps * kBlockM : 0>
        row_exchange;  // (key warp, row)
    ForwardWorkTile work_tile;
  };

  // A warp owns 16 rows of every 16 * kRowWarps and 16 columns of every 16 * kKeyWarps; all share K
  // and V. Warps with the same rows are neighbours, which different schedulers run.
  using TiledMma = WarpGrid<Element, kRowWarps, kKeyWarps, 16,
                            cute::Stride<cute::Int<kKeyWarps>, cute::_1, cute::_1>>;

  using AccO = decltype(cute::partition_fragment_C(
      TiledMma{}, cute::Shape<cute::Int<kBlockM>, cute::Int<kHeadDimV>>{}));  // (MMA, MMA_M, MMA_N)
  using Softmax = OnlineSoftmax<2 * decltype(cute::size<1>(AccO{}))::value, kConfig.lazy_rescale>;

  using SmemStore = cute::Copy_Atom<cute::UniversalCopy<cute::uint32_t>, Element>;
};

}  // namespace anyflash::sm80
