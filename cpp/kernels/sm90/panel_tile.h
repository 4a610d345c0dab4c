// Tiles in shared memory as TMA brings them and wgmma reads them.
#pragma once

#include <cute/tensor.hpp>

#include "common/finite.h"
#include "common/macros.h"
#include "common/math.h"
#include "sm90/panel.h"
#include "sm90/pipeline.h"
#include "sm90/tma.h"

namespace anyflash::sm90 {

// A tile of at least kMinColumns columns in shared memory: panels, each row 128 bytes, swizzled.
template <class Element_, int kRows_, int kMinColumns>
struct PanelTile {
  using Element = Element_;
  static constexpr int kRows = kRows_;
  static constexpr int kPanelColumns = kPanelBytes / static_cast<int>(sizeof(Element));
  static constexpr int kPanels = ceil_div(kMinColumns, kPanelColumns);
  static constexpr int kColumns = kPanels * kPanelColumns;
  static constexpr int kPanelElements = kRows * kPanelColumns;
  static constexpr int kSize = kRows * kColumns;
  static constexpr int kBytes = kSize * static_cast<int>(sizeof(Element));
  static_assert(kPanelElements * sizeof(Element) % 1024 == 0, "whole swizzle atoms");
};

// Sixteen bytes of a row, as the swizzle places them.
template <class Tile>
ANYFLASH_DEVICE typename Tile::Element* piece_of(typename Tile::Element* tile, int row,
                                                 int vector) {
  constexpr int kVector = 16 / static_cast<int>(sizeof(typename Tile::Element));
  constexpr int kInPanel = Tile::kPanelColumns / kVector;
  return tile + vector / kInPanel * Tile::kPanelElements + row * Tile::kPanelColumns +
         (vector % kInPanel ^ row % 8) * kVector;
}

// Sixteen bytes of a tile, as they lie in memory.
template <class Tile>
ANYFLASH_DEVICE auto vector_of(typename Tile::Element* tile, int i) {
  constexpr int kVector = 8;
  return cute::make_tensor(cute::make_smem_ptr(tile + i * kVector), cute::Int<kVector>{});
}

// Whether there is NaN or infinity in this thread's share of a tile, of kThreads threads.
template <class Tile, int kThreads>
ANYFLASH_DEVICE bool has_nonfinite_tile(typename Tile::Element* tile, int thread) {
  bool found = false;
#if defined(__CUDACC__)
#pragma unroll 4  // loads in flight: others may be waiting
#endif
  for (int i = thread; i < Tile::kSize / 8; i += kThreads) {
    found |= !all_finite(vector_of<Tile>(tile, i));
  }
  return found;
}

// Writes 0 over NaN and infinity in this thread's share; returns whether there were any.
template <class Tile, int kThreads>
ANYFLASH_DEVICE bool clear_nonfinite_tile(typename Tile::Element* tile, int thread) {
  if (!has_nonfinite_tile<Tile, kThreads>(tile, thread)) return false;
  for (int i = thread; i < Tile::kSize / 8; i += kThreads) {
    auto vector = vector_of<Tile>(tile, i);
    clear_nonfinite(vector);
  }
  return true;
}

// All panels of a tile of `Tile::kRows` rows from `first` on; `full` expects their bytes.
template <class Tile>
ANYFLASH_DEVICE void load_panels(typename Tile::Element* to, const CUtensorMap& map,
                                 TileCoordinates first, Mbarrier& full, L2Hint hint) {
  CUTE_UNROLL
  for (int panel = 0; panel < Tile::kPanels; ++panel) {
    load_box(to + panel * Tile::kPanelElements, map, first, full.state(), hint);
    first.column += Tile::kPanelColumns;
  }
}

// The same, when nothing else is to come to `full`.
template <class Tile>
ANYFLASH_DEVICE void load_tile(typename Tile::Element* to, const CUtensorMap& map,
                               const TileCoordinates& first, Mbarrier& full, L2Hint hint) {
  full.arrive_expect(Tile::kBytes);
  load_panels<Tile>(to, map, first, full, hint);
}

}  // namespace anyflash::sm90
