// A vector of the widest kind that this unit's instruction set has, in plain operators.
//
// GCC's and Clang's vector extensions give +, *, <, ?: on vectors, and the compiler picks the
// instructions (x86, NEON, or another CPU's). Without them a vector is one scalar, and the same
// source still compiles.
//
// Each unit is compiled with flags of its own. The linker must never pick an AVX-512 copy of an
// inline function for a unit that runs on an older CPU. So all of this lives in a namespace named
// after the instruction set, and no std:: template is used here.
#pragma once

#include <math.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

#ifndef ANYFLASH_CPU_ISA
#error "define ANYFLASH_CPU_ISA before this header: it names the unit's inner namespace"
#endif

#if defined(__GNUC__) && !defined(ANYFLASH_CPU_SCALAR)
#define ANYFLASH_CPU_VECTORS 1
#else
#define ANYFLASH_CPU_VECTORS 0
#endif

#if defined(__GNUC__)
#define ANYFLASH_CPU_INLINE inline __attribute__((always_inline))
#elif defined(_MSC_VER)
#define ANYFLASH_CPU_INLINE __forceinline
#else
#define ANYFLASH_CPU_INLINE inline
#endif

// Arrays of accumulators stay in registers only where every index is a constant: unroll in full.
// Clang does so unasked.
#if defined(__GNUC__) && !defined(__clang__)
#define ANYFLASH_CPU_UNROLL _Pragma("GCC unroll 16")
#else
#define ANYFLASH_CPU_UNROLL
#endif

namespace anyflash::cpu::ANYFLASH_CPU_ISA {

#if defined(__AVX512F__)
inline constexpr int kVectorBytes = 64;
#elif defined(__AVX__)
inline constexpr int kVectorBytes = 32;
#else
inline constexpr int kVectorBytes = 16;
#endif

#if defined(__AVX512F__) || defined(__aarch64__)
inline constexpr int kVectorRegisters = 32;
#else
inline constexpr int kVectorRegisters = 16;
#endif

inline constexpr float kInfinity = HUGE_VALF;

template <typename T>
struct VectorTypes;

#if ANYFLASH_CPU_VECTORS

template <>
struct VectorTypes<float> {
  using Int = std::int32_t;
  using UInt = std::uint32_t;
  typedef float Vec __attribute__((vector_size(kVectorBytes)));
  typedef Int IntVec __attribute__((vector_size(kVectorBytes)));
  typedef UInt UIntVec __attribute__((vector_size(kVectorBytes)));
};

template <>
struct VectorTypes<double> {
  using Int = std::int64_t;
  using UInt = std::uint64_t;
  typedef double Vec __attribute__((vector_size(kVectorBytes)));
  typedef Int IntVec __attribute__((vector_size(kVectorBytes)));
  typedef UInt UIntVec __attribute__((vector_size(kVectorBytes)));
};

#else

template <>
struct VectorTypes<float> {
  using Int = std::int32_t;
  using UInt = std::uint32_t;
  using Vec = float;
  using IntVec = Int;
  using UIntVec = UInt;
};

template <>
struct VectorTypes<double> {
  using Int = std::int64_t;
  using UInt = std::uint64_t;
  using Vec = double;
  using IntVec = Int;
  using UIntVec = UInt;
};

#endif

// Operations on vectors of T (float or double).
template <typename T>
struct Simd {
  using Int = typename VectorTypes<T>::Int;
  using UInt = typename VectorTypes<T>::UInt;
  using Vec = typename VectorTypes<T>::Vec;
  using IntVec = typename VectorTypes<T>::IntVec;
  using UIntVec = typename VectorTypes<T>::UIntVec;

  static constexpr int kLanes = static_cast<int>(sizeof(Vec) / sizeof(T));

  // memcpy of a constant size is one (unaligned) vector move.
  static ANYFLASH_CPU_INLINE Vec load(const T* p) {
    Vec x;
    std::memcpy(&x, p, sizeof(x));
    return x;
  }

  static ANYFLASH_CPU_INLINE IntVec load(const Int* p) {
    IntVec x;
    std::memcpy(&x, p, sizeof(x));
    return x;
  }

  static ANYFLASH_CPU_INLINE UIntVec load(const UInt* p) {
    UIntVec x;
    std::memcpy(&x, p, sizeof(x));
    return x;
  }

  static ANYFLASH_CPU_INLINE void store(T* p, Vec x) { std::memcpy(p, &x, sizeof(x)); }

  // x - 0 is x for every x (x + 0 is not, for -0), so that this is a plain broadcast.
  static ANYFLASH_CPU_INLINE Vec broadcast(T x) { return x - Vec{}; }
  static ANYFLASH_CPU_INLINE IntVec broadcast_int(Int x) { return x - IntVec{}; }
  static ANYFLASH_CPU_INLINE UIntVec broadcast_uint(UInt x) { return x - UIntVec{}; }

  static ANYFLASH_CPU_INLINE UIntVec bits(Vec x) {
    UIntVec y;
    std::memcpy(&y, &x, sizeof(y));
    return y;
  }

  static ANYFLASH_CPU_INLINE Vec from_bits(UIntVec x) {
    Vec y;
    std::memcpy(&y, &x, sizeof(y));
    return y;
  }

  // The larger, the smaller of both; `b` where one is NaN.
  static ANYFLASH_CPU_INLINE Vec max(Vec a, Vec b) { return a > b ? a : b; }
  static ANYFLASH_CPU_INLINE Vec min(Vec a, Vec b) { return a < b ? a : b; }

  static ANYFLASH_CPU_INLINE bool any_equal(Vec x, T value) {
    T lane[kLanes];
    store(lane, x);
    bool any = false;
    for (int i = 0; i < kLanes; ++i) any |= lane[i] == value;
    return any;
  }

  // Sums of neighbours: (a0 + a1, a2 + a3, ..., b0 + b1, ...).
  static ANYFLASH_CPU_INLINE Vec add_pairs(Vec a, Vec b) {
#if ANYFLASH_CPU_VECTORS
    if constexpr (kLanes == 2) {
      return __builtin_shufflevector(a, b, 0, 2) + __builtin_shufflevector(a, b, 1, 3);
    } else if constexpr (kLanes == 4) {
      return __builtin_shufflevector(a, b, 0, 2, 4, 6) + __builtin_shufflevector(a, b, 1, 3, 5, 7);
    } else if constexpr (kLanes == 8) {
      return __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14) +
             __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15);
    } else {
      return __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28,
                                     30) +
             __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29,
                                     31);
    }
#else
    return a + b;
#endif
  }

  // Lane i of the result is the sum of the lanes of x[i]: log2(kLanes) rounds of add_pairs.
  static ANYFLASH_CPU_INLINE Vec sum_each(Vec (&x)[kLanes]) {
    ANYFLASH_CPU_UNROLL
    for (int count = kLanes; count > 1; count /= 2) {
      ANYFLASH_CPU_UNROLL
      for (int i = 0; i < count / 2; ++i) x[i] = add_pairs(x[2 * i], x[2 * i + 1]);
    }
    return x[0];
  }

  // (a0, b0, a1, b1, ...) of the lower, of the upper halves.
  static ANYFLASH_CPU_INLINE Vec interleave_low(Vec a, [[maybe_unused]] Vec b) {
#if ANYFLASH_CPU_VECTORS
    if constexpr (kLanes == 2) {
      return __builtin_shufflevector(a, b, 0, 2);
    } else if constexpr (kLanes == 4) {
      return __builtin_shufflevector(a, b, 0, 4, 1, 5);
    } else if constexpr (kLanes == 8) {
      return __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11);
    } else {
      return __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    }
#else
    return a;
#endif
  }

  static ANYFLASH_CPU_INLINE Vec interleave_high(Vec a, [[maybe_unused]] Vec b) {
#if ANYFLASH_CPU_VECTORS
    if constexpr (kLanes == 2) {
      return __builtin_shufflevector(a, b, 1, 3);
    } else if constexpr (kLanes == 4) {
      return __builtin_shufflevector(a, b, 2, 6, 3, 7);
    } else if constexpr (kLanes == 8) {
      return __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
    } else {
      return __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15,
                                     31);
    }
#else
    return a;
#endif
  }

  // Lane i of x[j] changes places with lane j of x[i]. Each round moves the top bit of the vector's
  // number to the bottom of the lane's number, and the other way round.
  static ANYFLASH_CPU_INLINE void transpose(Vec (&x)[kLanes]) {
    ANYFLASH_CPU_UNROLL
    for (int size = kLanes; size > 1; size /= 2) {
      Vec y[kLanes];
      ANYFLASH_CPU_UNROLL
      for (int i = 0; i < kLanes / 2; ++i) {
        y[2 * i] = interleave_low(x[i], x[i + kLanes / 2]);
        y[2 * i + 1] = interleave_high(x[i], x[i + kLanes / 2]);
      }
      ANYFLASH_CPU_UNROLL
      for (int i = 0; i < kLanes; ++i) x[i] = y[i];
    }
  }
};

// to[c][r] = from[r][c]; both counts are multiples of the vector length.
template <typename T>
inline void transpose_block(const T* from, std::int64_t from_ld, int rows, int columns, T* to,
                            std::int64_t to_ld) {
  using S = Simd<T>;
  for (int r = 0; r < rows; r += S::kLanes) {
    for (int c = 0; c < columns; c += S::kLanes) {
      typename S::Vec x[S::kLanes];
      ANYFLASH_CPU_UNROLL
      for (int i = 0; i < S::kLanes; ++i) x[i] = S::load(from + (r + i) * from_ld + c);
      S::transpose(x);
      ANYFLASH_CPU_UNROLL
      for (int i = 0; i < S::kLanes; ++i) S::store(to + (c + i) * to_ld + r, x[i]);
    }
  }
}

}  // namespace anyflash::cpu::ANYFLASH_CPU_ISA
