// Products of bfloat16 matrices by AMX: c = a b or c += a b, sums in float32.
//
// A tile is 16 rows of 64 bytes. One instruction multiplies a tile of a, (16, 32), with one of b,
// which holds pairs of rows, (16, 16, 2), and adds to one of c, (16, 16):
//     c[i][j] += sum over t, h of a[i][2 t + h] b[t][j][h]
#pragma once

#include <cstdint>
#include <cstring>

#include "cpu/simd/convert.h"
#include "cpu/simd/vector.h"

#if defined(__AMX_BF16__) && defined(__AVX512BF16__)
#include <immintrin.h>
#define ANYFLASH_CPU_TILES 1
#else
#define ANYFLASH_CPU_TILES 0
#endif

namespace anyflash::cpu::ANYFLASH_CPU_ISA {

inline constexpr bool kHasTiles = ANYFLASH_CPU_TILES;
inline constexpr int kTileRows = 16;
inline constexpr int kTileTerms = 32;

#if ANYFLASH_CPU_TILES

// The shapes of the tile registers, for as long as this lives; of the thread that made it.
class TileRegisters {
 public:
  TileRegisters() {
    struct {
      std::uint8_t palette = 1;
      std::uint8_t start_row = 0;
      std::uint8_t reserved[14] = {};
      std::uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } shapes;
    static_assert(sizeof(shapes) == 64, "what LDTILECFG reads");
    _tile_loadconfig(&shapes);
  }
  ~TileRegisters() { _tile_release(); }
  TileRegisters(const TileRegisters&) = delete;
  TileRegisters& operator=(const TileRegisters&) = delete;
};

// Rounded to nearest even: (low[0], low[1], ..., high[0], ...).
ANYFLASH_CPU_INLINE void store_halves(Simd<float>::Vec low, Simd<float>::Vec high, BFloat16* to) {
  const __m512bh words = _mm512_cvtne2ps_pbh(high, low);
  std::memcpy(to, &words, sizeof(words));
}

// The same in pairs: (low[0], high[0], low[1], high[1], ...).
ANYFLASH_CPU_INLINE void store_pairs(Simd<float>::Vec low, Simd<float>::Vec high, BFloat16* to) {
  typedef std::uint16_t Words __attribute__((vector_size(64)));
  const __m512bh halves = _mm512_cvtne2ps_pbh(high, low);
  Words words;
  static_assert(sizeof(words) == sizeof(halves), "32 numbers");
  std::memcpy(&words, &halves, sizeof(words));
  words = __builtin_shufflevector(words, words, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7,
                                  23, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
  std::memcpy(to, &words, sizeof(words));
}

// (low[0], high[0], low[1], high[1], ...)
ANYFLASH_CPU_INLINE Simd<float>::UIntVec load_pairs(const BFloat16* low, const BFloat16* high) {
  using UIntVec = Simd<float>::UIntVec;
  typedef std::uint16_t Words __attribute__((vector_size(32)));
  Words words[2];
  std::memcpy(&words[0], low, sizeof(words[0]));
  std::memcpy(&words[1], high, sizeof(words[1]));
  return __builtin_convertvector(words[0], UIntVec) | __builtin_convertvector(words[1], UIntVec)
                                                          << 16;
}

// Carries out of exponents of all ones, those of infinities and NaN.
ANYFLASH_CPU_INLINE Simd<float>::UIntVec exponent_carries(Simd<float>::UIntVec pairs) {
  return (pairs & 0x7f807f80u) + 0x00800080u;
}
ANYFLASH_CPU_INLINE bool any_carry(Simd<float>::UIntVec carries) {
  return _mm512_test_epi32_mask((__m512i)carries, _mm512_set1_epi32(0x80008000)) != 0;
}

// Pairs of columns, lines of `ld` and `to_ld` numbers: to[c / 2][r] = from[r][c / 2]; rows and
// pairs are multiples of 16. A pair moves as a float does.
inline void transpose_pairs(const BFloat16* from, std::int64_t ld, int rows, int columns,
                            BFloat16* to, std::int64_t to_ld) {
  transpose_block(reinterpret_cast<const float*>(from), ld / 2, rows, columns / 2,
                  reinterpret_cast<float*>(to), to_ld / 2);
}

#if !defined(__SANITIZE_ADDRESS__)

// One tile of rows of a and c, or two, and as many of columns of b and c.
template <int kRows, int kColumns>
inline void tile_block(const BFloat16* a, std::int64_t lda, const BFloat16* b, std::int64_t ldb,
                       int steps, bool add, float* c, std::int64_t ldc) {
  constexpr bool kDown = kRows == 2;
  constexpr bool kAcross = kColumns == 2;
  const std::int64_t line_a = lda * 2;  // in bytes
  const std::int64_t line_b = ldb * 4;
  const std::int64_t line_c = ldc * 4;
  float* const below = c + kTileRows * ldc;
  if (add) {
    _tile_loadd(0, c, line_c);
    if constexpr (kAcross) _tile_loadd(1, c + kTileRows, line_c);
    if constexpr (kDown) _tile_loadd(2, below, line_c);
    if constexpr (kDown && kAcross) _tile_loadd(3, below + kTileRows, line_c);
  } else {
    _tile_zero(0);
    if constexpr (kAcross) _tile_zero(1);
    if constexpr (kDown) _tile_zero(2);
    if constexpr (kDown && kAcross) _tile_zero(3);
  }
  for (int step = 0; step < steps; ++step) {
    _tile_loadd(6, b, line_b);
    _tile_loadd(4, a, line_a);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (kAcross) {
      _tile_loadd(7, b + 2 * kTileRows, line_b);
      _tile_dpbf16ps(1, 4, 7);
    }
    if constexpr (kDown) {
      _tile_loadd(5, a + kTileRows * lda, line_a);
      _tile_dpbf16ps(2, 5, 6);
      if constexpr (kAcross) _tile_dpbf16ps(3, 5, 7);
    }
    a += kTileTerms;
    b += kTileTerms * ldb;
  }
  _tile_stored(0, c, line_c);
  if constexpr (kAcross) _tile_stored(1, c + kTileRows, line_c);
  if constexpr (kDown) _tile_stored(2, below, line_c);
  if constexpr (kDown && kAcross) _tile_stored(3, below + kTileRows, line_c);
}

#else

// The same without tiles. AddressSanitizer sees no access of theirs: it gets this one.
template <int kRows, int kColumns>
inline void tile_block(const BFloat16* a, std::int64_t lda, const BFloat16* b, std::int64_t ldb,
                       int steps, bool add, float* c, std::int64_t ldc) {
  for (int i = 0; i < kRows * kTileRows; ++i) {
    for (int j = 0; j < kColumns * kTileRows; ++j) {
      float sum = add ? c[i * ldc + j] : 0.0f;
      for (int t = 0; t < steps * kTileTerms; ++t) {
        sum += to_compute(a[i * lda + t]) * to_compute(b[(t / 2 * ldb + j) * 2 + t % 2]);
      }
      c[i * ldc + j] = sum;
    }
  }
}

#endif

// a: (rows, 32 steps), lines of `lda`; b: (16 steps, columns, 2), lines of 2 `ldb`; c: (rows,
// columns), lines of `ldc`. Rows and columns are multiples of 16.
inline void tile_product(const BFloat16* a, std::int64_t lda, int rows, const BFloat16* b,
                         std::int64_t ldb, int columns, int steps, bool add, float* c,
                         std::int64_t ldc) {
  for (int column = 0; column < columns; column += 2 * kTileRows) {
    const bool across = column + kTileRows < columns;
    for (int row = 0; row < rows; row += 2 * kTileRows) {
      const bool down = row + kTileRows < rows;
      const auto block = down ? (across ? tile_block<2, 2> : tile_block<2, 1>)
                              : (across ? tile_block<1, 2> : tile_block<1, 1>);
      block(a + row * lda, lda, b + 2 * column, ldb, steps, add, c + row * ldc + column, ldc);
    }
  }
}

#endif

}  // namespace anyflash::cpu::ANYFLASH_CPU_ISA
