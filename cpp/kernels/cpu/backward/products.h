// The products of the backward: c += a b, with columns of b and c in lanes and elements of a as
// scalars, the sums in registers.
#pragma once

#include <cstdint>

#include "cpu/gemm.h"
#include "cpu/simd/vector.h"

namespace anyflash::cpu::ANYFLASH_CPU_ISA {

// a[row][term] of a matrix whose rows lie one after the other, and of one whose columns do.
template <typename T>
struct RowMajor {
  const T* data;
  std::int64_t ld;

  ANYFLASH_CPU_INLINE T at(int row, int term) const { return data[row * ld + term]; }
  ANYFLASH_CPU_INLINE RowMajor from(int row, int term) const {
    return {data + row * ld + term, ld};
  }
};

template <typename T>
struct ColumnMajor {
  const T* data;
  std::int64_t ld;

  ANYFLASH_CPU_INLINE T at(int row, int term) const { return data[term * ld + row]; }
  ANYFLASH_CPU_INLINE ColumnMajor from(int row, int term) const {
    return {data + term * ld + row, ld};
  }
};

// Whole vectors of columns, rows of `ld`.
template <typename T>
struct Columns {
  const T* data;
  std::int64_t ld;
  int count;
};

// Terms of one chain of additions; longer sums are made of parts.
inline constexpr int kProductChain = 64;

// sum over t in [0, terms) of a[r][t] b[t][x] for a register tile. By value: see dot_part().
template <typename T, int NV, typename A>
ANYFLASH_CPU_INLINE Sums<T, NV> product_part(const A& a, const T* b, std::int64_t ld, int terms) {
  using S = Simd<T>;
  using Vec = typename S::Vec;
  constexpr int kScalars = scalar_group(NV);
  Sums<T, NV> sums = {};
  for (int t = 0; t < terms; ++t) {
    Vec x[NV];
    ANYFLASH_CPU_UNROLL
    for (int n = 0; n < NV; ++n) x[n] = S::load(b + t * ld + n * S::kLanes);
    ANYFLASH_CPU_UNROLL
    for (int r = 0; r < kScalars; ++r) {
      const Vec scalar = S::broadcast(a.at(r, t));
      ANYFLASH_CPU_UNROLL
      for (int n = 0; n < NV; ++n) sums.at[r][n] += scalar * x[n];
    }
  }
  return sums;
}

// NV vectors of columns of c, which is `add`ed to or overwritten.
template <typename T, int NV, typename A>
void product_columns(const A& a, int rows, int terms, const T* b, std::int64_t ldb, bool add, T* c,
                     std::int64_t ldc) {
  using S = Simd<T>;
  constexpr int kScalars = scalar_group(NV);
  for (int r = 0; r < rows; r += kScalars) {
    for (int t = 0; t < terms; t += kProductChain) {
      const int part = terms - t < kProductChain ? terms - t : kProductChain;
      const Sums<T, NV> sums = product_part<T, NV>(a.from(r, t), b + t * ldb, ldb, part);
      ANYFLASH_CPU_UNROLL
      for (int i = 0; i < kScalars; ++i) {
        ANYFLASH_CPU_UNROLL
        for (int n = 0; n < NV; ++n) {
          T* const at = c + (r + i) * ldc + n * S::kLanes;
          S::store(at, add || t > 0 ? S::load(at) + sums.at[i][n] : sums.at[i][n]);
        }
      }
    }
  }
}

// c = a b, or c += a b. a and c have rows up to a multiple of kGroupPad.
template <typename T, typename A>
void product(const A& a, int rows, int terms, const Columns<T>& b, bool add, T* c,
             std::int64_t ldc) {
  constexpr int kLanes = Simd<T>::kLanes;
  for (int x = 0; x < b.count;) {
    // Two vectors keep the arithmetic as busy as three do, and a last one alone does not.
    const int left = (b.count - x) / kLanes;
    const T* const from = b.data + x;
    if (left >= kMaxVectors && left != 4) {
      product_columns<T, kMaxVectors>(a, rows, terms, from, b.ld, add, c + x, ldc);
      x += kMaxVectors * kLanes;
    } else if (left >= 2) {
      product_columns<T, 2>(a, rows, terms, from, b.ld, add, c + x, ldc);
      x += 2 * kLanes;
    } else {
      product_columns<T, 1>(a, rows, terms, from, b.ld, add, c + x, ldc);
      x += kLanes;
    }
  }
}

// The probability of a hidden key: 0 to the products, and no other probability is -0.
template <typename T>
inline constexpr T kHiddenProbability = T(-0.0);

template <typename T>
inline bool is_hidden(T probability) {
  return probability == T(0) && T(1) / probability < T(0);
}

// c += a b without the terms that p, laid out like a, calls hidden. It is used where b holds NaN or
// infinity, which must not meet the zeros that stand for hidden keys.
template <typename T, typename A>
void visible_product(const A& a, const A& p, int rows, int terms, const Columns<T>& b, T* c,
                     std::int64_t ldc) {
  for (int r = 0; r < rows; ++r) {
    for (int t = 0; t < terms; ++t) {
      if (is_hidden(p.at(r, t))) continue;
      const T scalar = a.at(r, t);
      const T* const from = b.data + t * b.ld;
      T* const to = c + r * ldc;
      for (int x = 0; x < b.count; ++x) to[x] += scalar * from[x];
    }
  }
}

template <typename T>
inline bool all_finite(const Columns<T>& x, int rows) {
  using S = Simd<T>;
  typename S::Vec sum = {};
  for (int r = 0; r < rows; ++r) {
    for (int c = 0; c < x.count; c += S::kLanes) {
      const typename S::Vec y = S::load(x.data + r * x.ld + c);
      sum += y - y;  // 0, or NaN
    }
  }
  T lane[S::kLanes];
  S::store(lane, sum);
  bool finite = true;
  for (int i = 0; i < S::kLanes; ++i) finite &= lane[i] == T(0);
  return finite;
}

}  // namespace anyflash::cpu::ANYFLASH_CPU_ISA
