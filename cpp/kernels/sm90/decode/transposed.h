// Where a thread's elements of transposed accumulators lie: their rows are keys or columns of V,
// and their columns the rows of Q. A thread has the rows lane / 4 and lane / 4 + 8 of its warp's
// sixteen, and two of every eight columns.
#pragma once

#include <cstdint>

#include "common/macros.h"
#include "sm90/accumulator.h"

namespace anyflash::sm90 {

ANYFLASH_DEVICE int lane_row() { return static_cast<int>(threadIdx.x) % 32 / 4; }
// The row of Q that this thread's c-th column is, of the warpgroup's.
ANYFLASH_DEVICE int query_of_column(int c) { return c / 2 * 8 + thread_column() + c % 2; }

// Column c, of the upper or the lower eight of a warp's rows.
template <class Acc>
ANYFLASH_DEVICE float& element(Acc& acc, int c, int half) {
  return acc(c / 2 * 4 + half * 2 + c % 2);
}

template <class Op>
ANYFLASH_DEVICE float over_lanes(float x, Op op) {  // with the same columns
  ANYFLASH_UNROLL
  for (int distance = 4; distance < 32; distance *= 2) {
    x = op(x, __shfl_xor_sync(0xffffffffu, x, distance));
  }
  return x;
}

ANYFLASH_DEVICE float larger(float a, float b) { return fmaxf(a, b); }

}  // namespace anyflash::sm90
