// Rows of float32 in global memory, four columns at a time, straight from accumulators. The four
// lanes of a quad have eight columns of a row, two each, and then another eight. Lanes of a pair
// exchange two of their columns: one has four of the first eight then, and the other one four of
// the second. That takes a quarter of the accesses, and registers, which sm_80's kernels lack.
#pragma once

#include <cstdint>

#include "common/macros.h"
#include "params.h"

namespace anyflash::sm90 {

// Whether four columns from a multiple of four on are one access, in all rows from `first` on.
ANYFLASH_DEVICE bool has_wide_columns(const void* first, const Strides& stride, int columns) {
  return stride.col == 1 && stride.row % 4 == 0 && columns % 4 == 0 &&
         reinterpret_cast<uintptr_t>(first) % sizeof(float4) == 0;
}

// A thread's two columns from `first` on (x, y), and those 8 columns behind them (z, w), of a row
// with `count` columns. All lanes of a warp have to make one, also those whose row does not exist.
class WideColumns {
 public:
  ANYFLASH_DEVICE WideColumns(bool exists, int first, int count)
      : column_(is_odd() ? first + 6 : first), exists_(exists && column_ < count) {}

  ANYFLASH_DEVICE float4 load(const float* row) const {
    float4 values{};
    if (exists_) values = *reinterpret_cast<const float4*>(row + column_);
    return exchange(values);
  }
  ANYFLASH_DEVICE void store(float* row, const float4& values) const {
    const float4 wide = exchange(values);
    if (exists_) *reinterpret_cast<float4*>(row + column_) = wide;
  }
  // Nothing waits for an atomic addition. No other thread has these elements.
  ANYFLASH_DEVICE void add(float* row, const float4& values) const {
    const float4 wide = exchange(values);
    if (exists_) atomicAdd(reinterpret_cast<float4*>(row + column_), wide);
  }

 private:
  ANYFLASH_DEVICE static bool is_odd() { return threadIdx.x % 2 != 0; }
  // Between a thread's two and two columns and its four. It is its own inverse.
  ANYFLASH_DEVICE static float4 exchange(const float4& x) {
    const auto other = [](float to_odd, float to_even) {
      return __shfl_xor_sync(0xffffffffu, is_odd() ? to_even : to_odd, 1);
    };
    const float a = other(x.z, x.x);
    const float b = other(x.w, x.y);
    return is_odd() ? float4{a, b, x.z, x.w} : float4{x.x, x.y, a, b};
  }

  int column_;  // where the four columns of this lane begin
  bool exists_;
};

}  // namespace anyflash::sm90
