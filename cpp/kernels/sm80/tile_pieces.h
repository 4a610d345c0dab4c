// A result's way from an accumulator through shared to global memory, where it is written by pieces
// of 16 bytes.
//
// CuTe's partitions by TiledCopy are the same pieces, by thousands of instantiations each. Stores
// of gradients by them were a third of what the compiler's front end did for a backward kernel.
#pragma once

#include <cstdint>
#include <cute/tensor.hpp>

#include "common/macros.h"

namespace anyflash::sm80 {

// Writes a rounded accumulator to a SmemTile at `smem`. `places` are the coordinates of its
// elements, of which each two are neighbouring columns.
//
// An element's place differs from the thread's first one by a constant, which has no bits in common
// with that one's column in the panel. So a swizzled address is the first one XOR a constant.
template <class Tile, class Rounded, class Places>
ANYFLASH_DEVICE void accumulator_to_smem(typename Tile::Element* smem, const Rounded& rounded,
                                         const Places& places) {
  const auto pairs = cute::recast<const uint32_t>(rounded);
  const int row0 = cute::get<0>(places(0));
  const int column0 = cute::get<1>(places(0));
  const int first = Tile::offset(row0, column0);
  CUTE_UNROLL
  for (int i = 0; i < cute::size(pairs); ++i) {
    const int row = cute::get<0>(places(2 * i)) - row0;
    const int column = cute::get<1>(places(2 * i)) - column0;
    const int in_panel = column % Tile::kPanelColumns;
    auto* const at = smem + (first ^ in_panel) + Tile::offset(row, column - in_panel);
    *reinterpret_cast<uint32_t*>(at) = pairs(i);
  }
}

// What one thread stores of a SmemTile at `smem` to a tile in global memory at `gmem`, of which
// `rows` rows and `columns` columns exist. Row r lies in row Order(r) of shared memory.
template <class Tile, class Order>
ANYFLASH_DEVICE void store_pieces(typename Tile::Element* gmem, int row_stride, int rows,
                                  int columns, const typename Tile::Element* smem, int thread) {
  using Vector = cute::uint128_t;
  // The rows of a panel that all threads together store at once, neighbours side by side.
  constexpr int kPass = Tile::kThreads / Tile::kThreadsPerRow;
  constexpr int kRows = Tile::kRows / kPass;
  constexpr int kPanels = Tile::kColumns / Tile::kPanelColumns;
  static_assert(Tile::kRows % kPass == 0);
  const int first_row = thread / Tile::kThreadsPerRow;
  const int first_column = thread % Tile::kThreadsPerRow * Tile::kVector;

  Vector pieces[kRows][kPanels];
  CUTE_UNROLL
  for (int i = 0; i < kRows; ++i) {
    const int row = Order{}(first_row + i * kPass);
    CUTE_UNROLL
    for (int panel = 0; panel < kPanels; ++panel) {
      const int column = first_column + panel * Tile::kPanelColumns;
      pieces[i][panel] = *reinterpret_cast<const Vector*>(smem + Tile::offset(row, column));
    }
  }
  CUTE_UNROLL
  for (int i = 0; i < kRows; ++i) {
    const int row = first_row + i * kPass;
    if (row >= rows) continue;
    CUTE_UNROLL
    for (int panel = 0; panel < kPanels; ++panel) {
      const int column = first_column + panel * Tile::kPanelColumns;
      if (column >= columns) continue;
      *reinterpret_cast<Vector*>(gmem + row * row_stride + column) = pieces[i][panel];
    }
  }
}

}  // namespace anyflash::sm80
