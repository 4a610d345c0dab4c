// Tiles in shared memory: their layout, and their copies from global memory.
#pragma once

#include <cute/algorithm/copy.hpp>
#include <cute/atom/copy_atom.hpp>
#include <cute/tensor.hpp>

#include "common/macros.h"

namespace anyflash::sm80 {

// A swizzled (kRows, kColumns) tile in shared memory, and its copies from global memory.
template <class Element_, int kThreads_, int kRows_, int kColumns_>
struct SmemTile {
  using Element = Element_;
  static constexpr int kThreads = kThreads_;
  static constexpr int kRows = kRows_;
  static constexpr int kColumns = kColumns_;
  using Shape = cute::Shape<cute::Int<kRows>, cute::Int<kColumns>>;
  // 16 bytes are what cp.async, ldmatrix rows and output stores move.
  static constexpr int kVector = 16 / sizeof(Element);
  // Rows are stored in panels of 64 columns (128 bytes, all 32 banks), or of 32 where 64 do not
  // divide.
  static constexpr int kPanelColumns = kColumns % 64 == 0 ? 64 : 32;
  static constexpr int kPanelElements = kRows * kPanelColumns;
  using Atom =
      decltype(cute::composition(cute::Swizzle<(kPanelColumns == 64 ? 3 : 2), 3, 3>{},
                                 cute::Layout<cute::Shape<cute::_8, cute::Int<kPanelColumns>>,
                                              cute::Stride<cute::Int<kPanelColumns>, cute::_1>>{}));
  using Layout =
      decltype(cute::tile_to_shape(Atom{}, cute::Shape<cute::Int<kRows>, cute::Int<kColumns>>{}));

  // What Layout says, in numbers: element (row, column) lies at offset(), as the bits of swizzle()
  // change places within a panel.
  ANYFLASH_HOST_DEVICE static constexpr int swizzle(int row) {
    return row * kPanelColumns / 64 % (kPanelColumns / kVector) * kVector;
  }
  ANYFLASH_HOST_DEVICE static constexpr int panel_offset(int row, int column) {
    return column / kPanelColumns * kPanelElements + row * kPanelColumns;
  }
  ANYFLASH_HOST_DEVICE static constexpr int offset(int row, int column) {
    return panel_offset(row, column) + (column % kPanelColumns ^ swizzle(row));
  }

  // Neighbouring threads on neighbouring 16-byte pieces of one panel.
  static constexpr int kThreadsPerRow = kPanelColumns / kVector;
  using Threads =
      cute::Layout<cute::Shape<cute::Int<kThreads / kThreadsPerRow>, cute::Int<kThreadsPerRow>>,
                   cute::Stride<cute::Int<kThreadsPerRow>, cute::_1>>;
  using Vector = cute::Layout<cute::Shape<cute::_1, cute::Int<kVector>>>;
  using Load = decltype(cute::make_tiled_copy(
      cute::Copy_Atom<cute::SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<cute::uint128_t>, Element>{}, Threads{},
      Vector{}));
};

}  // namespace anyflash::sm80
