// Loads of (rows, head_dim) tiles from global to shared memory, guarded at the tensor's edges.
#pragma once

#include <cute/tensor.hpp>
#include <type_traits>

#include "common/macros.h"
#include "params.h"
#include "variant/sequence.h"

namespace anyflash::sm80 {

// The (rows, head_dim) tile of one head that begins at `first_row`. Offsets within a tile fit in 32
// bits (repack.cpp copies other tensors), which saves registers. Its address is computed in 64.
template <class Element, class Tile, class Data>
ANYFLASH_HOST_DEVICE auto gmem_tile(Tile tile, Data* data, const Strides& stride, int64_t batch,
                                    int head, int64_t first_row) {
  using namespace cute;
  using Target = std::conditional_t<std::is_const_v<Data>, const Element, Element>;
  auto* const first = static_cast<Target*>(data) + batch * stride.batch + head * stride.head +
                      first_row * stride.row;
  return make_tensor(make_gmem_ptr(first), tile, make_stride(static_cast<int>(stride.row), _1{}));
}

// Which columns of a tile exist, for this thread's pieces of a row. Pieces are whole vectors: the
// head dim of what reaches a kernel is a multiple of 16 bytes.
template <int kPanels>
struct ColumnGuard {
  bool ok[kPanels];

  template <class Coordinates>
  ANYFLASH_DEVICE ColumnGuard(const Coordinates& tXcX, int columns) {  // (VECTOR, ROWS, PANELS)
    CUTE_UNROLL
    for (int panel = 0; panel < kPanels; ++panel) {
      ok[panel] = cute::get<1>(tXcX(0, 0, panel)) < columns;
    }
  }
};

// Asynchronous load by cp.async. Columns that do not exist are filled with zeros, and so are rows
// at and beyond `rows` where kGuardRows says that there may be such.
template <bool kGuardRows, class CopyAtom, class Gmem, class Smem, class Coordinates, int kPanels>
ANYFLASH_DEVICE void load_tile(const CopyAtom& atom, const Gmem& tXgX, Smem&& tXsX,
                               const Coordinates& tXcX, const ColumnGuard<kPanels>& columns,
                               int rows) {
  using namespace cute;
  static_assert(decltype(size<2>(tXsX))::value == kPanels);
  CUTE_UNROLL
  for (int row = 0; row < size<1>(tXsX); ++row) {
    const bool row_ok = !kGuardRows || get<0>(tXcX(0, row, 0)) < rows;
    CUTE_UNROLL
    for (int panel = 0; panel < kPanels; ++panel) {
      copy(atom.with(row_ok && columns.ok[panel]), tXgX(_, row, panel), tXsX(_, row, panel));
    }
  }
}

}  // namespace anyflash::sm80
