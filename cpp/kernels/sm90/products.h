// Products of whole tiles in shared memory (PanelTile), or of registers and a tile: each is a group
// of wgmma that is on its way afterwards.
#pragma once

#include <cstdint>
#include <cute/tensor.hpp>

#include "common/macros.h"
#include "sm90/accumulator.h"
#include "sm90/panel_tile.h"
#include "sm90/wgmma.h"

namespace anyflash::sm90 {

// Where a step of 16 columns begins in a row of panels.
constexpr int step_bytes(int step, int panel_bytes) {
  return step / 4 * panel_bytes + step % 4 * 32;
}

// acc = A B^T of 64 rows of TileA, from `a` on, and all rows of TileB; sums over kColumns columns.
template <class TileA, class TileB, int kColumns, class Acc>
ANYFLASH_DEVICE void issue_transposed(Acc& acc, const typename TileA::Element* a,
                                      const typename TileB::Element* b) {
  using Element = typename TileA::Element;
  constexpr int kPanelA = TileA::kPanelElements * static_cast<int>(sizeof(Element));
  constexpr int kPanelB = TileB::kPanelElements * static_cast<int>(sizeof(Element));
  const OperandDescriptor rows_a(a, kPanelA);
  const OperandDescriptor rows_b(b, kPanelB);
  pin(acc);
  wgmma_fence();
  CUTE_UNROLL
  for (int step = 0; step < kColumns / 16; ++step) {
    Wgmma<Element, TileB::kRows>::template with_smem<Major::kK, Major::kK>(
        acc.data(), rows_a + step_bytes(step, kPanelA), rows_b + step_bytes(step, kPanelB),
        step > 0);
  }
  wgmma_commit();
}

// 64 rows of a tile as operand A in registers: the warp's 16, by steps of 16 columns. Products then
// read B alone from shared memory.
template <class Tile, int kColumns>
struct OperandRows {
  static constexpr int kWords = kColumns / 4;
  uint32_t words[kWords];

  ANYFLASH_DEVICE void load(typename Tile::Element* tile, int warp_row) {
    const int lane = threadIdx.x % 32;
    CUTE_UNROLL
    for (int step = 0; step < kColumns / 16; ++step) {
      load_matrices(words + 4 * step,
                    piece_of<Tile>(tile, warp_row + lane % 16, 2 * step + lane / 16));
    }
  }
};

// acc = A B^T, as above, with A in registers.
template <class TileB, class TileA, int kColumns, class Acc>
ANYFLASH_DEVICE void issue_transposed(Acc& acc, const OperandRows<TileA, kColumns>& a,
                                      const typename TileB::Element* b) {
  using Element = typename TileB::Element;
  constexpr int kPanelB = TileB::kPanelElements * static_cast<int>(sizeof(Element));
  const OperandDescriptor rows_b(b, kPanelB);
  pin(acc);
  wgmma_fence();
  CUTE_UNROLL
  for (int step = 0; step < kColumns / 16; ++step) {
    Wgmma<Element, TileB::kRows>::template with_registers<Major::kK>(
        acc.data(), a.words + 4 * step, rows_b + step_bytes(step, kPanelB), step > 0);
  }
  wgmma_commit();
}

// acc += A B, where A is 64 rows of rounded accumulators, a column for each row of TileB.
template <class TileB, class Acc, class Rounded>
ANYFLASH_DEVICE void issue_accumulation(Acc& acc, const Rounded& a,
                                        const typename TileB::Element* b) {
  using Element = typename TileB::Element;
  constexpr int kPanelB = TileB::kPanelElements * static_cast<int>(sizeof(Element));
  constexpr int kColumns = decltype(cute::size(acc))::value * 2;
  const OperandDescriptor rows_b(b, kPanelB);
  pin(acc);
  wgmma_fence();
  CUTE_UNROLL
  for (int step = 0; step < TileB::kRows / 16; ++step) {
    Wgmma<Element, kColumns>::template with_registers<Major::kMN>(
        acc.data(), a.words + 4 * step, rows_b + step * 16 * kPanelBytes, 1);
  }
  wgmma_commit();
}

}  // namespace anyflash::sm90
