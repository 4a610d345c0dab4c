// Results on their way from registers to global memory: rounded, through shared memory, by TMA.
#pragma once

#include <cstdint>

#include "common/macros.h"
#include "sm90/accumulator.h"
#include "sm90/panel_tile.h"
#include "sm90/ptx.h"
#include "sm90/tma.h"

namespace anyflash::sm90 {

inline constexpr int kStagedRows = 16;  // of a warp

// Where a warp's rows go: its first row, of which `rows` and `columns` exist.
template <class Element>
struct StagedTarget {
  Element* data;
  int64_t row_stride;
  int rows;
  int columns;
};

// A warp's 16 rows of a tile in shared memory. No other warp has to be waited for.
template <class Tile>
class StagedRows {
  using Element = typename Tile::Element;
  static constexpr int kVector = 8;  // elements of 16 bytes

 public:
  ANYFLASH_DEVICE StagedRows(Element* tile, int first_row)
      : lane_(threadIdx.x % 32), rows_(tile + first_row * kPanelColumns) {}

  // Before publish().
  template <class Acc>
  ANYFLASH_DEVICE void write(const Acc& acc) {
    constexpr int kColumns = 2 * decltype(cute::size(acc))::value;
    static_assert(kColumns <= Tile::kColumns);
    RoundedAccumulator<Element, kColumns> rounded;
    rounded.round(acc);
    const int row = lane_ % kStagedRows;
    // As piece_of() has it: the swizzle flips bits of a vector's number, and so does a step by two.
    const int place = row * kPanelColumns + (lane_ / kStagedRows ^ row % kVector) * kVector;
    CUTE_UNROLL
    for (int i = 0; i < kColumns / 16; ++i) {
      Element* const panel = rows_ + 16 * i / kPanelColumns * Tile::kPanelElements;
      store_matrices(panel + (place ^ 16 * i % kPanelColumns), rounded.words + 4 * i);
    }
  }
  // What this warp has written may be stored.
  ANYFLASH_DEVICE static void publish() {
    fence_smem_writes();
    __syncwarp();  // all rows are there
  }

  // Rows that do not exist are not written: by TMA where the tensor ends there. `packed`: they may
  // be another sequence's. `to`: the first row.
  ANYFLASH_DEVICE void store(const CUtensorMap& map, TileCoordinates to, bool packed,
                             const StagedTarget<Element>& target) {
    if (target.rows <= 0) return;
    if (target.rows < kStagedRows && packed) {
      copy(target);
      return;
    }
    if (lane_ != 0) return;
    CUTE_UNROLL
    for (int panel = 0; panel < Tile::kPanels; ++panel) {
      store_box(map, to, rows_ + panel * Tile::kPanelElements);
      to.column += kPanelColumns;
    }
    commit_stores();
  }

 private:
  ANYFLASH_DEVICE void copy(const StagedTarget<Element>& target) {
    constexpr int kVectors = Tile::kColumns / kVector;
    for (int i = lane_; i < target.rows * kVectors; i += 32) {
      const int row = i / kVectors;
      const int vector = i % kVectors;
      if (vector * kVector >= target.columns) continue;
      *reinterpret_cast<uint4*>(target.data + row * target.row_stride + vector * kVector) =
          *reinterpret_cast<const uint4*>(piece_of<Tile>(rows_, row, vector));
    }
  }

  int lane_;
  Element* rows_;
};

}  // namespace anyflash::sm90
