// Copies of (rows, head_dim) tiles between global and shared memory, guarded at the tensor's edges.
#pragma once

#include <cute/tensor.hpp>

#include "common/macros.h"

namespace anyflash::sm80 {

// Which columns of a tile exist, for this thread's pieces of a row. Pieces are whole vectors: the
// head dim of what reaches a kernel is a multiple of 16 bytes.
template <int kPages>
struct ColumnGuard {
  bool ok[kPages];

  template <class Coordinates>
  ANYFLASH_DEVICE ColumnGuard(const Coordinates& tXcX, int columns) {  // (VECTOR, ROWS, PAGES)
    CUTE_UNROLL
    for (int page = 0; page < kPages; ++page) {
      ok[page] = cute::get<1>(tXcX(0, 0, page)) < columns;
    }
  }
};

// Asynchronous load by cp.async. Columns that do not exist are filled with zeros, and so are rows at
// and beyond `rows` where kGuardRows says that there may be such.
template <bool kGuardRows, class CopyAtom, class Gmem, class Smem, class Coordinates, int kPages>
ANYFLASH_DEVICE void load_tile(const CopyAtom& atom, const Gmem& tXgX, Smem&& tXsX,
                               const Coordinates& tXcX, const ColumnGuard<kPages>& columns,
                               int rows) {
  using namespace cute;
  static_assert(decltype(size<2>(tXsX))::value == kPages);
  CUTE_UNROLL
  for (int row = 0; row < size<1>(tXsX); ++row) {
    const bool row_ok = !kGuardRows || get<0>(tXcX(0, row, 0)) < rows;
    CUTE_UNROLL
    for (int page = 0; page < kPages; ++page) {
      copy(atom.with(row_ok && columns.ok[page]), tXgX(_, row, page), tXsX(_, row, page));
    }
  }
}

// Store of the rows below `rows` and the columns that exist, 16 bytes a thread.
template <class Fragment, class Gmem, class Coordinates, int kPages>
ANYFLASH_DEVICE void store_tile(const Fragment& tXrX, Gmem&& tXgX, const Coordinates& tXcX,
                                const ColumnGuard<kPages>& columns, int rows) {
  using namespace cute;
  using Vector = Copy_Atom<UniversalCopy<uint128_t>, typename Fragment::value_type>;
  CUTE_UNROLL
  for (int row = 0; row < size<1>(tXrX); ++row) {
    if (get<0>(tXcX(0, row, 0)) >= rows) continue;
    CUTE_UNROLL
    for (int page = 0; page < kPages; ++page) {
      if (columns.ok[page]) copy(Vector{}, tXrX(_, row, page), tXgX(_, row, page));
    }
  }
}

}  // namespace anyflash::sm80
