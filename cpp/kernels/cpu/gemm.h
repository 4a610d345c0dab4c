// The two products of attention on a panel of query rows, with the sums in registers.
//
// Lanes are query rows: a panel holds NV vectors of rows, and the other operand is broadcast, one
// scalar at a time. So S^T = K Q^T and O^T = V^T P^T need no transposed K or V. The softmax runs
// down columns, without operations across lanes. The keys that a row sees are two integers per
// lane.
//
//   q  (head_dim,   NV * lanes)      k  (keys, head_dim)
//   s  (keys,       NV * lanes)      v  (head_dim_v / 8, keys, 8)
//   o  (head_dim_v, NV * lanes)
#pragma once

#include <cstdint>

#include "cpu/amx/tiles.h"
#include "cpu/simd/vector.h"

namespace anyflash::cpu::ANYFLASH_CPU_ISA {

// Register tile: kMaxVectors vectors of rows by scalar_group(NV) keys (or columns of v).
//   32 registers: 24 sums, 3 vectors, 1 scalar; 11 loads for 24 multiply-adds
//   16 registers: 12 sums, 3 vectors, 1 scalar;  7 loads for 12
// All 16 are in use. SSE2 cannot do that: it has no FMA, so each product needs a register too.
// Clang 20 does not do it: it spills a sum in each round. In these two cases there are 8 sums and 2
// vectors. Float32, head_dim 64 and 128, 2048 keys on an AMD EPYC (Zen 4 or later): GCC SSE2 +20 %,
// Clang AVX2 +40 %, but GCC AVX2 -10 %. By tiles (cpu/amx/tiles.h) four sums of two by two take all
// registers.
#if ANYFLASH_CPU_TILES || (ANYFLASH_CPU_VECTORS && defined(__SSE2__) && !defined(__AVX512F__) && \
                           (!defined(__FMA__) || defined(__clang__)))
inline constexpr int kMaxVectors = 2;
#else
inline constexpr int kMaxVectors = 3;
#endif

constexpr int scalar_group(int vectors) { return kVectorRegisters == 32 || vectors == 1 ? 8 : 4; }

// Keys and columns are padded with zeros to a multiple of this, so that a group is always whole.
inline constexpr int kGroupPad = 8;

// Which keys a row sees: all of them (no code), or those of a range of its lane.
struct EveryKey {
  static constexpr bool kAll = true;
  template <typename T>
  ANYFLASH_CPU_INLINE typename Simd<T>::Vec select(int /*vector*/, int /*key*/,
                                                   typename Simd<T>::Vec visible,
                                                   typename Simd<T>::Vec /*hidden*/) const {
    return visible;
  }
};

template <typename I>
struct KeysWithin {
  static constexpr bool kAll = false;
  const I* first;  // one per row of the panel
  const I* end;

  template <typename T>
  ANYFLASH_CPU_INLINE typename Simd<T>::Vec select(int vector, int key,
                                                   typename Simd<T>::Vec visible,
                                                   typename Simd<T>::Vec hidden) const {
    using S = Simd<T>;
    const auto at = S::broadcast_int(key);
    visible = S::load(first + vector * S::kLanes) > at ? hidden : visible;
    return S::load(end + vector * S::kLanes) > at ? visible : hidden;
  }
};

// Keys of a block: the rows of a panel see none outside [begin, end), all see those of
// [full_begin, full_end), which are whole groups of kGroupPad.
struct Zones {
  int begin;
  int full_begin;
  int full_end;
  int end;
};

// What the scores of each row range between: the largest of all, the least of those that no mask by
// position can hide.
template <typename T, int NV>
struct ScoreRange {
  typename Simd<T>::Vec max[NV];
  typename Simd<T>::Vec min[NV];
};

// In place of the probability of a hidden key: even 0 * NaN of its value must not be added.
template <typename T>
inline constexpr T kHiddenKey = T(-1);

// Whether p may hold kHiddenKey.
template <bool kMayHide>
struct Hiding {
  static constexpr bool kValue = kMayHide;
};

// Sums over head_dim run in parts of this many terms, and the parts are added up, because rounding
// errors grow with the length of a chain. At head_dim 128 they are about half of those of one
// chain. The time did not change measurably.
inline constexpr int kChain = 32;

// A register tile of sums.
template <typename T, int NV>
struct Sums {
  typename Simd<T>::Vec at[scalar_group(NV)][NV];
};

// sum over c in [first, last) of k[j][c] q[c][i]. Returned by value: through a reference, Clang 20
// stores all sums in each round (half the speed).
template <typename T, int NV>
ANYFLASH_CPU_INLINE Sums<T, NV> dot_part(const T* k, const T* q, std::int64_t ld, int first,
                                         int last) {
  using S = Simd<T>;
  using Vec = typename S::Vec;
  constexpr int kScalars = scalar_group(NV);
  constexpr int kRows = NV * S::kLanes;
  Sums<T, NV> sums = {};
  for (int c = first; c < last; ++c) {
    Vec b[NV];
    ANYFLASH_CPU_UNROLL
    for (int n = 0; n < NV; ++n) b[n] = S::load(q + c * kRows + n * S::kLanes);
    ANYFLASH_CPU_UNROLL
    for (int r = 0; r < kScalars; ++r) {
      const Vec a = S::broadcast(k[r * ld + c]);
      ANYFLASH_CPU_UNROLL
      for (int n = 0; n < NV; ++n) sums.at[r][n] += a * b[n];
    }
  }
  return sums;
}

// Stores the scores of a vector of rows and a key, -inf where a row does not see it.
template <typename T, int NV, typename Visible>
ANYFLASH_CPU_INLINE void finish_score(typename Simd<T>::Vec score, const Visible& visible,
                                      int vector, int key, T* s, ScoreRange<T, NV>& range) {
  using S = Simd<T>;
  const auto x = visible.template select<T>(vector, key, score, S::broadcast(T(-kInfinity)));
  S::store(s, x);
  range.max[vector] = S::max(x, range.max[vector]);  // leaves out a NaN, which makes its p NaN
  if constexpr (Visible::kAll) range.min[vector] = S::min(x, range.min[vector]);
}

// One group of keys:  s[j][i] = scale * sum_c k[j][c] q[c][i], -inf where row i does not see key j
template <typename T, int NV, typename Visible>
ANYFLASH_CPU_INLINE void score_group(const T* k, const T* q, int head_dim, T scale, int first_key,
                                     const Visible& visible, T* s, ScoreRange<T, NV>& range) {
  using S = Simd<T>;
  using Vec = typename S::Vec;
  constexpr int kScalars = scalar_group(NV);
  constexpr int kRows = NV * S::kLanes;
  int c = 0;
  for (; c + kChain < head_dim; c += kChain) {
    const Sums<T, NV> part = dot_part<T, NV>(k, q, head_dim, c, c + kChain);
    ANYFLASH_CPU_UNROLL
    for (int r = 0; r < kScalars; ++r) {
      ANYFLASH_CPU_UNROLL
      for (int n = 0; n < NV; ++n) {
        T* const at = s + r * kRows + n * S::kLanes;
        S::store(at, c == 0 ? part.at[r][n] : S::load(at) + part.at[r][n]);
      }
    }
  }
  const Sums<T, NV> part = dot_part<T, NV>(k, q, head_dim, c, head_dim);
  ANYFLASH_CPU_UNROLL
  for (int r = 0; r < kScalars; ++r) {
    ANYFLASH_CPU_UNROLL
    for (int n = 0; n < NV; ++n) {
      T* const at = s + r * kRows + n * S::kLanes;
      const Vec dot = c == 0 ? part.at[r][n] : S::load(at) + part.at[r][n];
      finish_score<T, NV>(dot * scale, visible, n, first_key + r, at, range);
    }
  }
}

// One group of columns:  o[c][i] = alpha[i] o[c][i] + sum_j v[j][c] p[j][i]
// over the keys of the zones in their order. Outside the full zone a row leaves out keys whose p is
// kHiddenKey.
template <typename T, int NV>
ANYFLASH_CPU_INLINE void output_group(const T* v, const T* p, const Zones& zones,
                                      const typename Simd<T>::Vec (&alpha)[NV], T* o) {
  using S = Simd<T>;
  using Vec = typename S::Vec;
  constexpr int kScalars = scalar_group(NV);
  constexpr int kRows = NV * S::kLanes;
  Vec acc[kScalars][NV] = {};
  const auto step = [&](int j, auto hiding) {
    Vec b[NV];
    ANYFLASH_CPU_UNROLL
    for (int n = 0; n < NV; ++n) b[n] = S::load(p + j * kRows + n * S::kLanes);
    ANYFLASH_CPU_UNROLL
    for (int r = 0; r < kScalars; ++r) {
      const Vec a = S::broadcast(v[j * kGroupPad + r]);
      ANYFLASH_CPU_UNROLL
      for (int n = 0; n < NV; ++n) {
        const Vec sum = acc[r][n] + a * b[n];
        if constexpr (decltype(hiding)::kValue) {
          acc[r][n] = b[n] < Vec{} ? acc[r][n] : sum;
        } else {
          acc[r][n] = sum;
        }
      }
    }
  };
  int j = zones.begin;
  for (; j < zones.full_begin; ++j) step(j, Hiding<true>{});
  for (; j < zones.full_end; ++j) step(j, Hiding<false>{});
  for (; j < zones.end; ++j) step(j, Hiding<true>{});
  ANYFLASH_CPU_UNROLL
  for (int r = 0; r < kScalars; ++r) {
    ANYFLASH_CPU_UNROLL
    for (int n = 0; n < NV; ++n) {
      T* const at = o + r * kRows + n * S::kLanes;
      S::store(at, S::load(at) * alpha[n] + acc[r][n]);
    }
  }
}

}  // namespace anyflash::cpu::ANYFLASH_CPU_ISA
