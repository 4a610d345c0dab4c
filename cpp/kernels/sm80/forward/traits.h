// Types that a forward kernel is made of: layouts in shared memory, tiled copies, tiled MMA.
#pragma once

#include <cutlass/numeric_types.h>

#include <cute/algorithm/copy.hpp>
#include <cute/atom/copy_atom.hpp>
#include <cute/atom/mma_atom.hpp>
#include <cute/tensor.hpp>
#include <type_traits>

#include "common/macros.h"
#include "variant/work_tile.h"
#include "sm80/forward/config.h"

namespace anyflash::sm80 {

template <class Element>
using MmaAtom = cute::MMA_Atom<
    std::conditional_t<std::is_same_v<Element, cutlass::half_t>, cute::SM80_16x8x16_F32F16F16F32_TN,
                       cute::SM80_16x8x16_F32BF16BF16F32_TN>>;

// kWarpsM x kWarpsN warps; each owns kColumns neighbouring columns of every kColumns * kWarpsN.
template <class Element, int kWarpsM, int kWarpsN, int kColumns,
          class WarpStride = cute::Stride<cute::_1, cute::Int<kWarpsM>, cute::_1>>
using WarpGrid = cute::TiledMMA<
    MmaAtom<Element>,
    cute::Layout<cute::Shape<cute::Int<kWarpsM>, cute::Int<kWarpsN>, cute::_1>, WarpStride>,
    cute::Tile<cute::Int<16 * kWarpsM>,
               cute::Layout<cute::Shape<cute::_8, cute::Int<kWarpsN>, cute::Int<kColumns / 8>>,
                            cute::Stride<cute::_1, cute::Int<kColumns>, cute::_8>>,
               cute::_16>>;

// Two groups of kWarpsN warps: the first owns the first half of kRows rows, the other the rest.
template <class Element, int kWarpsN, int kRows, int kColumns>
using HalvesGrid = cute::TiledMMA<
    MmaAtom<Element>,
    cute::Layout<cute::Shape<cute::_2, cute::Int<kWarpsN>, cute::_1>,
                 cute::Stride<cute::Int<kWarpsN>, cute::_1, cute::_1>>,
    cute::Tile<cute::Layout<cute::Shape<cute::_16, cute::_2, cute::Int<kRows / 32>>,
                            cute::Stride<cute::_1, cute::Int<kRows / 2>, cute::_16>>,
               cute::Layout<cute::Shape<cute::_8, cute::Int<kWarpsN>, cute::Int<kColumns / 8>>,
                            cute::Stride<cute::_1, cute::Int<kColumns>, cute::_8>>,
               cute::_16>>;

// A swizzled (kRows, kColumns) tile in shared memory, and its copies from and to global memory.
template <class Element_, int kThreads, int kRows_, int kColumns_>
struct SmemTile {
  using Element = Element_;
  static constexpr int kRows = kRows_;
  static constexpr int kColumns = kColumns_;
  using Shape = cute::Shape<cute::Int<kRows>, cute::Int<kColumns>>;
  // 16 bytes are what cp.async, ldmatrix rows and output stores move.
  static constexpr int kVector = 16 / sizeof(Element);
  // Rows are stored in pages of 64 columns (128 bytes, all 32 banks), or 32 where 64 do not divide.
  static constexpr int kPage = kColumns % 64 == 0 ? 64 : 32;
  static constexpr int kPageElements = kRows * kPage;
  using Atom =
      decltype(cute::composition(cute::Swizzle<(kPage == 64 ? 3 : 2), 3, 3>{},
                                 cute::Layout<cute::Shape<cute::_8, cute::Int<kPage>>,
                                              cute::Stride<cute::Int<kPage>, cute::_1>>{}));
  using Layout =
      decltype(cute::tile_to_shape(Atom{}, cute::Shape<cute::Int<kRows>, cute::Int<kColumns>>{}));

  // What Layout says, in numbers: element (row, column) lies at offset(), as the bits of swizzle()
  // change places within a page.
  ANYFLASH_HOST_DEVICE static constexpr int swizzle(int row) {
    return row * kPage / 64 % (kPage / kVector) * kVector;
  }
  ANYFLASH_HOST_DEVICE static constexpr int page_offset(int row, int column) {
    return column / kPage * kPageElements + row * kPage;
  }
  ANYFLASH_HOST_DEVICE static constexpr int offset(int row, int column) {
    return page_offset(row, column) + (column % kPage ^ swizzle(row));
  }

  // Neighbouring threads on neighbouring 16-byte pieces of one page.
  static constexpr int kThreadsPerRow = kPage / kVector;
  using Threads =
      cute::Layout<cute::Shape<cute::Int<kThreads / kThreadsPerRow>, cute::Int<kThreadsPerRow>>,
                   cute::Stride<cute::Int<kThreadsPerRow>, cute::_1>>;
  using Vector = cute::Layout<cute::Shape<cute::_1, cute::Int<kVector>>>;
  using Load = decltype(cute::make_tiled_copy(
      cute::Copy_Atom<cute::SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<cute::uint128_t>, Element>{}, Threads{},
      Vector{}));
  using Store = decltype(cute::make_tiled_copy(
      cute::Copy_Atom<cute::UniversalCopy<cute::uint128_t>, Element>{}, Threads{}, Vector{}));
};

// Key j of a tile lies in row KeyOrder(j) of shared memory and is column KeyOrder(j) of the scores.
//
// A lane holds the columns 2 q and 2 q + 1 of each group of eight (q: its place in the quad). With
// keys 8 q to 8 q + 7 there, of every 32, it holds neighbouring keys: one draw of dropout, and
// neighbouring biases. The softmax and P V do not mind the order.
template <int kBlockN>
using QuadKeyOrder =
    cute::Layout<cute::Shape<cute::_2, cute::_4, cute::_4, cute::Int<kBlockN / 32>>,
                 cute::Stride<cute::_1, cute::_8, cute::_2, cute::_32>>;
template <int kBlockN>
using PlainKeyOrder = cute::Layout<cute::Int<kBlockN>>;

template <class Element_, int kHeadDim_, int kHeadDimV_, class Variant, Room kRoom>
struct ForwardTraits {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kHeadDimV = kHeadDimV_;
  static constexpr bool kGeneric = Variant::kGeneric;
  static constexpr ForwardTile kShape =
      kGeneric ? ForwardTile{generic_forward_tile(kHeadDim, kHeadDimV), 1, false, false, false}
      : Variant::kFeatures == kDropout    ? dropout_forward_tile(kHeadDim, kHeadDimV)
      : Variant::kFeatures != kNoFeatures ? scored_forward_tile(kHeadDim, kHeadDimV)
                                          : forward_tile(kHeadDim, kHeadDimV, kRoom);
  static constexpr Tile kTile = kShape.tile;
  static constexpr int kBlockM = kTile.block_m;
  static constexpr int kBlockN = kTile.block_n;
  static constexpr int kWarps = kTile.warps;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr bool kPaired = kShape.paired;
  static constexpr int kKeyWarps = kPaired ? 2 : 1;
  static constexpr int kRowWarps = kWarps / kKeyWarps;
  static constexpr int kStages = kShape.stages;
  static constexpr int kMinCtas = kGeneric ? generic_min_ctas(kHeadDim) : 1;
  using KeyOrder =
      std::conditional_t<Variant::kQuadKeys, QuadKeyOrder<kBlockN>, PlainKeyOrder<kBlockN>>;
  static_assert(kHeadDimV <= kHeadDim, "the output tile lies where Q was");

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
    alignas(128) cute::array<Element, kPaired ? cute::cosize_v<typename TileP::Layout> : 0> p;
    cute::array<float, kPaired ? kKeyWarps * kBlockM : 0> joined;  // (key warp, row)
    ForwardBlock block;
  };

  // A warp owns 16 rows of every 16 * kRowWarps and 16 columns of every 16 * kKeyWarps; all share K
  // and V. Warps with the same rows are neighbours, which different schedulers run.
  using TiledMma = WarpGrid<Element, kRowWarps, kKeyWarps, 16,
                            cute::Stride<cute::Int<kKeyWarps>, cute::_1, cute::_1>>;

  using SmemStore = cute::Copy_Atom<cute::UniversalCopy<cute::uint32_t>, Element>;
};

}  // namespace anyflash::sm80
