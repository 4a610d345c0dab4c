// The two products of attention for one query row: decoding, where a panel of rows (gemm.h) would
// use one lane of each vector. Lanes run along the head dim here, and k and v are read once, in
// order.
//
// Head dims are multiples of the vector length (rows of k, v and q are padded with zeros).
#pragma once

#include <cstdint>

#include "cpu/simd/vector.h"

namespace anyflash::cpu::ANYFLASH_CPU_ISA {

// So few rows go one by one; above, the panel costs less. A panel of up to 16 rows takes 32 ns a
// key, a row here 5 to 6 ns. That is on an AMD EPYC (Zen 4 or later, AVX-512) with 1 thread,
// float32 and head_dim 64.
template <typename T>
inline constexpr int kMaxSingleRows = Simd<T>::kLanes >= 4 ? Simd<T>::kLanes / 4 : 1;

// Keys of a block, row by row: those that lie at one distance (another kind: cpu/decode/keys.h).
template <typename T>
struct KeyRows {
  const T* data;
  std::int64_t ld;

  ANYFLASH_CPU_INLINE const T* row(int j) const { return data + j * ld; }
};

// s[j] = scale * sum_c q[c] k[j][c] for `begin` <= j < `end`. Both ends are rounded outwards to
// whole vectors: keys below `begin` exist, and from `end` on the last key is repeated.
template <typename T, typename Keys>
ANYFLASH_CPU_INLINE void single_row_scores(const T* q, const Keys& k, int head_dim, T scale,
                                           int begin, int end, T* s) {
  using S = Simd<T>;
  using Vec = typename S::Vec;
  constexpr int kGroup = S::kLanes;
  for (int j = begin / kGroup * kGroup; j < end; j += kGroup) {
    const T* row[kGroup];
    for (int i = 0; i < kGroup; ++i) row[i] = k.row(j + i < end ? j + i : end - 1);
    Vec acc[kGroup] = {};
    for (int c = 0; c < head_dim; c += S::kLanes) {
      const Vec a = S::load(q + c);
      ANYFLASH_CPU_UNROLL
      for (int i = 0; i < kGroup; ++i) acc[i] += a * S::load(row[i] + c);
    }
    S::store(s + j, S::sum_each(acc) * scale);
  }
}

// o[c] = alpha o[c] + sum_j p[j] v[j][c] over keys [begin, end) for NV vectors of columns from
// `first` on
template <typename T, int NV, bool kMayHide, typename Keys>
ANYFLASH_CPU_INLINE void single_row_columns(const Keys& v, int first, const T* p, int begin,
                                            int end, T alpha, T* o) {
  using S = Simd<T>;
  using Vec = typename S::Vec;
  Vec acc[NV] = {};
  for (int j = begin; j < end; ++j) {
    if constexpr (kMayHide) {
      if (p[j] < T(0)) continue;  // kHiddenKey
    }
    const Vec a = S::broadcast(p[j]);
    ANYFLASH_CPU_UNROLL
    for (int n = 0; n < NV; ++n) acc[n] += a * S::load(v.row(j) + first + n * S::kLanes);
  }
  ANYFLASH_CPU_UNROLL
  for (int n = 0; n < NV; ++n) {
    T* const at = o + first + n * S::kLanes;
    S::store(at, S::load(at) * alpha + acc[n]);
  }
}

template <bool kMayHide, typename T, typename Keys>
ANYFLASH_CPU_INLINE void single_row_output(const Keys& v, const T* p, int begin, int end, T alpha,
                                           T* o, int head_dim_v) {
  constexpr int kLanes = Simd<T>::kLanes;
  constexpr int kWide = 8;  // sums in registers, also with 16 of them
  int c = 0;
  for (; c + kWide * kLanes <= head_dim_v; c += kWide * kLanes) {
    single_row_columns<T, kWide, kMayHide>(v, c, p, begin, end, alpha, o);
  }
  for (; c + 4 * kLanes <= head_dim_v; c += 4 * kLanes) {
    single_row_columns<T, 4, kMayHide>(v, c, p, begin, end, alpha, o);
  }
  for (; c < head_dim_v; c += kLanes) {
    single_row_columns<T, 1, kMayHide>(v, c, p, begin, end, alpha, o);
  }
}

}  // namespace anyflash::cpu::ANYFLASH_CPU_ISA
