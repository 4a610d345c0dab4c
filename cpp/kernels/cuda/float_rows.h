// Rows of float32 in global memory, read and written straight from accumulators of matrix products.
// The four lanes of a quad have eight columns of a row, two each, and then another eight. Where
// four columns are one access, lanes of a pair exchange two of their columns: one has four of the
// first eight then, and the other one four of the second.
#pragma once

#include <cstdint>

#include "common/macros.h"
#include "params.h"

namespace anyflash {

// Whether four floats are added by one instruction.
#if defined(ANYFLASH_EMULATED) || (defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900)
inline constexpr bool kAddsFour = true;
ANYFLASH_DEVICE void add_four(float* to, const float4& values) {
  atomicAdd(reinterpret_cast<float4*>(to), values);
}
#else
inline constexpr bool kAddsFour = false;
ANYFLASH_DEVICE void add_four(float*, const float4&) {}
#endif

// A thread's columns of a row: the one given first and its neighbour (x, y), and so the second one
// (z, w). All lanes of a warp have to call these, also those whose row does not exist.
struct FloatColumns {
  int64_t stride;
  int count;

  template <bool kWide>
  ANYFLASH_DEVICE float4 load(const float* row, bool exists, int first, int second) const {
    if constexpr (!kWide) {
      const auto one = [&](int column) {
        return exists && column < count ? row[column * stride] : 0.0f;
      };
      return {one(first), one(first + 1), one(second), one(second + 1)};
    }
    const int column = wide_column(first, second);
    float4 values{};
    if (exists && column < count) values = *reinterpret_cast<const float4*>(row + column);
    return exchange(values);
  }

  template <bool kWide>
  ANYFLASH_DEVICE void store(float* row, bool exists, int first, int second,
                             const float4& values) const {
    if constexpr (kWide) {
      const int column = wide_column(first, second);
      const float4 wide = exchange(values);
      if (exists && column < count) *reinterpret_cast<float4*>(row + column) = wide;
    } else {
      for_each(exists, first, second, values,
               [&](int column, float value) { row[column * stride] = value; });
    }
  }

  // Nothing waits for an atomic addition. No other thread has these elements.
  template <bool kWide>
  ANYFLASH_DEVICE void add(float* row, bool exists, int first, int second,
                           const float4& values) const {
    if constexpr (kWide && kAddsFour) {
      const int column = wide_column(first, second);
      const float4 wide = exchange(values);
      if (exists && column < count) add_four(row + column, wide);
    } else {
      for_each(exists, first, second, values,
               [&](int column, float value) { atomicAdd(row + column * stride, value); });
    }
  }

 private:
  template <class Visit>
  ANYFLASH_DEVICE void for_each(bool exists, int first, int second, const float4& values,
                                const Visit& visit) const {
    if (!exists) return;
    if (first < count) visit(first, values.x);
    if (first + 1 < count) visit(first + 1, values.y);
    if (second < count) visit(second, values.z);
    if (second + 1 < count) visit(second + 1, values.w);
  }
  ANYFLASH_DEVICE static bool is_odd() { return threadIdx.x % 2 != 0; }
  // Where the four columns of this lane begin.
  ANYFLASH_DEVICE static int wide_column(int first, int second) {
    return is_odd() ? second - 2 : first;
  }
  // Between a thread's two and two columns and its four. It is its own inverse.
  ANYFLASH_DEVICE static float4 exchange(const float4& x) {
    const auto other = [](float to_odd, float to_even) {
      return __shfl_xor_sync(0xffffffffu, is_odd() ? to_even : to_odd, 1);
    };
    const float a = other(x.z, x.x);
    const float b = other(x.w, x.y);
    return is_odd() ? float4{a, b, x.z, x.w} : float4{x.x, x.y, a, b};
  }
};

// Whether four columns from a multiple of four on are one access, in all rows from `first` on.
ANYFLASH_DEVICE bool has_wide_columns(const void* first, const Strides& stride, int columns) {
  return stride.col == 1 && stride.row % 4 == 0 && columns % 4 == 0 &&
         reinterpret_cast<uintptr_t>(first) % sizeof(float4) == 0;
}

}  // namespace anyflash
