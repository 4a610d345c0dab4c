// Operands of mma.m16n8k16 that ldmatrix brings from tiles in shared memory.
//
// CuTe's partitions by TiledCopy are the same views, by thousands of instantiations each: with them
// nvcc took twice the time and memory.
#pragma once

#include <cstdint>
#include <cute/arch/copy_sm75.hpp>
#include <cute/tensor.hpp>
#include <type_traits>

#include "common/macros.h"

namespace anyflash::sm80 {

// Of a product A B^T: rows of A are rows of the product, rows of B its columns.
enum class Side { kA, kB };

// The rows of one warp, in groups of 16, and blocks of 16 along the sum. They lie in the first
// kTileRows rows and kTileColumns columns of a Tile at `tile`; if kTransposed, the tile's columns
// are the operand's rows.
template <class Mma, Side kSide, class Tile, bool kTransposed = false, int kTileRows = Tile::kRows,
          int kTileColumns = Tile::kColumns>
class LdmatrixOperand {
  static constexpr bool kIsA = kSide == Side::kA;
  static constexpr int kWarpsM = decltype(cute::size<1>(typename Mma::ThrLayoutVMNK{}))::value;
  static constexpr int kWarpsN = decltype(cute::size<2>(typename Mma::ThrLayoutVMNK{}))::value;
  static constexpr int kWarps = kIsA ? kWarpsM : kWarpsN;
  // Whether neighbouring warps have different rows of this operand.
  static constexpr bool kInnermost =
      kWarps > 1 &&
      decltype(cute::stride<kIsA ? 1 : 2>(typename Mma::ThrLayoutVMNK{}))::value == 32;
  static constexpr int kMmaRows = decltype(cute::tile_size<kIsA ? 0 : 1>(Mma{}))::value;
  static constexpr int kWarpRows = kMmaRows / kWarps;  // neighbouring rows of one warp
  static constexpr int kRows = kTransposed ? kTileColumns : kTileRows;
  static constexpr int kDepth = kTransposed ? kTileRows : kTileColumns;
  static constexpr int kRowGroups = kRows / (16 * kWarps);
  static constexpr int kAtomRows = kIsA ? 16 : 8;
  static_assert(kWarpRows % 16 == 0 && kRows % kMmaRows == 0 && kDepth % 16 == 0);

 public:
  using Element = typename Tile::Element;
  static constexpr int kBlocks = kDepth / 16;

  ANYFLASH_DEVICE LdmatrixOperand(const Element* tile, int thread) {
    const int lane = thread % 32;
    const int warp = thread / 32;
    const int first =
        (kInnermost ? warp % kWarps : warp / (kWarpsM * kWarpsN / kWarps)) * kWarpRows;
    // Each lane names a row of eight elements: lanes 8 m to 8 m + 7 those of 8x8 matrix m. Where
    // the four matrices begin, as (row of A or column of B, element of the sum):
    //   m    0       1       2       3
    //   A    (0, 0)  (8, 0)  (0, 8)  (8, 8)
    //   B    (0, 0)  (0, 8)  (8, 0)  (8, 8)
    const int low = lane % 16;
    const int high = lane % 8 + lane / 16 * 8;
    const bool rows_first = kIsA != kTransposed;
    const int row = (rows_first ? low : high) + (kTransposed ? 0 : first);
    const int column = (rows_first ? lane / 16 : lane / 8 % 2) * 8 + (kTransposed ? first : 0);
    CUTE_UNROLL
    for (int i = 0; i < kInPanel; ++i) at_[i] = tile + Tile::offset(row, column ^ 16 * i);
  }

  // Registers for all of it: (MMA, MMA_M or MMA_N, MMA_K).
  ANYFLASH_HOST_DEVICE static auto fragment() {
    using Rows = cute::Int<kRowGroups * 16 / kAtomRows>;
    return cute::make_tensor<Element>(
        cute::Shape<cute::Int<kAtomRows / 2>, Rows, cute::Int<kBlocks>>{});
  }

  // Loads block `k` of the sum.
  template <class Fragment>
  ANYFLASH_DEVICE void load(Fragment& fragment, int k) const {
    auto* const words = reinterpret_cast<uint32_t*>(fragment.data()) + k * kRowGroups * 4;
    CUTE_UNROLL
    for (int group = 0; group < kRowGroups; ++group) {
      const int first = 16 * group % kWarpRows + 16 * group / kWarpRows * kMmaRows;
      const int row = kTransposed ? 16 * k : first;
      const int column = kTransposed ? first : 16 * k;
      const Element* const from = at_[column / 16 % kInPanel] + Tile::panel_offset(row, column);
      uint32_t* const to = words + group * 4;
      LoadMatrix::copy(*reinterpret_cast<const cute::uint128_t*>(from), to[0], to[1], to[2], to[3]);
    }
  }

  // The same of a region of the tile: kCountRows rows and kCountColumns columns, which begin at
  // (kRow, kColumn).
  template <int kRow, int kCountRows, int kColumn, int kCountColumns>
  ANYFLASH_DEVICE auto region() const {
    static_assert(kRow % 8 == 0 && kColumn % Tile::kPanelColumns == 0,
                  "where the swizzle begins anew");
    auto result = LdmatrixOperand<Mma, kSide, Tile, kTransposed, kCountRows, kCountColumns>(at_);
    result.advance(Tile::panel_offset(kRow, kColumn));
    return result;
  }

  // The same, with its addresses made here from the first, for loops that lack registers for all.
  ANYFLASH_DEVICE LdmatrixOperand rematerialized() const {
    LdmatrixOperand result = *this;
#if !defined(ANYFLASH_EMULATED)
    auto first = static_cast<uint32_t>(__cvta_generic_to_shared(at_[0]));
    asm volatile("" : "+r"(first));  // not known before
    CUTE_UNROLL
    for (int i = 0; i < kInPanel; ++i) {
      result.at_[i] = static_cast<const Element*>(__cvta_shared_to_generic(first ^ 32 * i));
    }
#endif
    return result;
  }

  // Goes on to a tile that lies `elements` elements behind this one.
  ANYFLASH_DEVICE void advance(int elements) {
    CUTE_UNROLL
    for (int i = 0; i < kInPanel; ++i) at_[i] += elements;
  }

 private:
  template <class, Side, class, bool, int, int>
  friend class LdmatrixOperand;
  using LoadMatrix =
      std::conditional_t<kTransposed, cute::SM75_U16x8_LDSM_T, cute::SM75_U32x4_LDSM_N>;
  static constexpr int kInPanel = Tile::kPanelColumns / 16;

  ANYFLASH_DEVICE explicit LdmatrixOperand(const Element* const (&at)[kInPanel]) {
    CUTE_UNROLL
    for (int i = 0; i < kInPanel; ++i) at_[i] = at[i];
  }

  const Element* at_[kInPanel];  // the first row's columns 0, 16, ..., as the swizzle places them
};

}  // namespace anyflash::sm80
