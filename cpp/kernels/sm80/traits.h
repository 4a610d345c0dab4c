// Types that a forward kernel is made of: layouts in shared memory, tiled copies, tiled MMA.
#pragma once

#include <cutlass/numeric_types.h>

#include <cute/algorithm/copy.hpp>
#include <cute/atom/copy_atom.hpp>
#include <cute/atom/mma_atom.hpp>
#include <cute/tensor.hpp>
#include <type_traits>

#include "sm80/tiles.h"

namespace anyflash::sm80 {

template <class Element>
using MmaAtom = cute::MMA_Atom<
    std::conditional_t<std::is_same_v<Element, cutlass::half_t>, cute::SM80_16x8x16_F32F16F16F32_TN,
                       cute::SM80_16x8x16_F32BF16BF16F32_TN>>;

template <class Element_, int kHeadDim_>
struct ForwardTraits {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr Tile kTile = forward_tile(kHeadDim);
  static constexpr int kBlockM = kTile.block_m;
  static constexpr int kBlockN = kTile.block_n;
  static constexpr int kWarps = kTile.warps;
  static constexpr int kThreads = 32 * kWarps;

  // 16 bytes are what cp.async, ldmatrix rows and output stores move.
  static constexpr int kVector = 16 / sizeof(Element);
  // Rows are stored in pages of 64 columns (128 bytes, all 32 banks), or 32 where 64 do not divide.
  static constexpr int kPage = kHeadDim % 64 == 0 ? 64 : 32;
  using SmemAtom =
      decltype(cute::composition(cute::Swizzle<(kPage == 64 ? 3 : 2), 3, 3>{},
                                 cute::Layout<cute::Shape<cute::_8, cute::Int<kPage>>,
                                              cute::Stride<cute::Int<kPage>, cute::_1>>{}));
  template <int kRows>
  using SmemTile = decltype(cute::tile_to_shape(
      SmemAtom{}, cute::Shape<cute::Int<kRows>, cute::Int<kHeadDim>>{}));
  using SmemQ = SmemTile<kBlockM>;
  using SmemKV = SmemTile<kBlockN>;
  // V as the (head_dim, key) operand of P V: the same memory, read by transposing ldmatrix.
  using SmemVt = decltype(cute::composition(
      SmemKV{}, cute::make_layout(cute::Shape<cute::Int<kHeadDim>, cute::Int<kBlockN>>{},
                                  cute::GenRowMajor{})));

  struct SharedStorage {
    alignas(128) cute::array<Element, cute::cosize_v<SmemQ>> q;  // later the output tile
    alignas(128) cute::array<Element, cute::cosize_v<SmemKV>> k;
    alignas(128) cute::array<Element, cute::cosize_v<SmemKV>> v;
  };

  // Each warp owns 16 rows of every 16 * kWarps; K and V are shared by all warps.
  using TiledMma = cute::TiledMMA<MmaAtom<Element>,
                                  cute::Layout<cute::Shape<cute::Int<kWarps>, cute::_1, cute::_1>>,
                                  cute::Tile<cute::Int<16 * kWarps>, cute::_16, cute::_16>>;

  using LoadMatrix = cute::Copy_Atom<cute::SM75_U32x4_LDSM_N, Element>;
  using LoadMatrixTransposed = cute::Copy_Atom<cute::SM75_U16x8_LDSM_T, Element>;

  // Global <-> shared: neighbouring threads on neighbouring 16-byte pieces of one page.
  static constexpr int kThreadsPerRow = kPage / kVector;
  using GmemThreads =
      cute::Layout<cute::Shape<cute::Int<kThreads / kThreadsPerRow>, cute::Int<kThreadsPerRow>>,
                   cute::Stride<cute::Int<kThreadsPerRow>, cute::_1>>;
  using GmemVector = cute::Layout<cute::Shape<cute::_1, cute::Int<kVector>>>;
  using GmemLoad = decltype(cute::make_tiled_copy(
      cute::Copy_Atom<cute::SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<cute::uint128_t>, Element>{},
      GmemThreads{}, GmemVector{}));
  using GmemStore = decltype(cute::make_tiled_copy(
      cute::Copy_Atom<cute::UniversalCopy<cute::uint128_t>, Element>{}, GmemThreads{},
      GmemVector{}));
  using SmemStore = cute::Copy_Atom<cute::UniversalCopy<cute::uint32_t>, Element>;
};

}  // namespace anyflash::sm80
