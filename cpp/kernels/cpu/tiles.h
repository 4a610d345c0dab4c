// Products of bfloat16 matrices by AMX: c = a b or c += a b, sums in float32.
//
// A tile is 16 rows of 64 bytes. One instruction multiplies a tile of a, (16, 32), with one of b,
// which holds pairs of rows, (16, 16, 2), and adds to one of c, (16, 16):
//     c[i][j] += sum over t, h of a[i][2 t + h] b[t][j][h]
#pragma once

#include <cstdint>
#include <cstring>

#include "cpu/convert.h"
#include "cpu/simd.h"

#if defined(__AMX_BF16__) && defined(__AVX512BF16__)
#include <immintrin.h>

#define ANYFLASH_CPU_TILES 1

namespace anyflash::cpu::ANYFLASH_CPU_ISA {

inline constexpr int kTileRows = 16;
inline constexpr int kTileTerms = 32;

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

// Rounded to nearest even: (low[0], high[0], low[1], high[1], ...).
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

#if !defined(__SANITIZE_ADDRESS__)

// One tile of rows of a and c, or two.
template <int NV, bool kTwo>
inline void tile_rows(const BFloat16* a, std::int64_t lda, const BFloat16* b, int steps, bool add,
                      float* c) {
  constexpr int kColumns = NV * kTileRows;
  constexpr int kLine = kColumns * 4;  // bytes, of b and c
  float* const next = c + kTileRows * kColumns;
  if (add) {
    _tile_loadd(0, c, kLine);
    if constexpr (NV > 1) _tile_loadd(1, c + 16, kLine);
    if constexpr (kTwo) _tile_loadd(2, next, kLine);
    if constexpr (kTwo && NV > 1) _tile_loadd(3, next + 16, kLine);
  } else {
    _tile_zero(0);
    if constexpr (NV > 1) _tile_zero(1);
    if constexpr (kTwo) _tile_zero(2);
    if constexpr (kTwo && NV > 1) _tile_zero(3);
  }
  for (int step = 0; step < steps; ++step) {
    _tile_loadd(6, b, kLine);
    _tile_loadd(4, a, lda * 2);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (NV > 1) {
      _tile_loadd(7, b + 32, kLine);
      _tile_dpbf16ps(1, 4, 7);
    }
    if constexpr (kTwo) {
      _tile_loadd(5, a + kTileRows * lda, lda * 2);
      _tile_dpbf16ps(2, 5, 6);
      if constexpr (NV > 1) _tile_dpbf16ps(3, 5, 7);
    }
    a += kTileTerms;
    b += kTileTerms * kColumns;
  }
  _tile_stored(0, c, kLine);
  if constexpr (NV > 1) _tile_stored(1, c + 16, kLine);
  if constexpr (kTwo) _tile_stored(2, next, kLine);
  if constexpr (kTwo && NV > 1) _tile_stored(3, next + 16, kLine);
}

// a: (rows, 32 steps), rows a multiple of 16, lines of `lda`; b: (16 steps, 16 NV, 2);
// c: (rows, 16 NV).
template <int NV>
inline void tile_product(const BFloat16* a, std::int64_t lda, int rows, const BFloat16* b,
                         int steps, bool add, float* c) {
  static_assert(NV <= 2, "eight registers: 2 NV sums, NV of b, two of a");
  int row = 0;
  for (; row + 2 * kTileRows <= rows; row += 2 * kTileRows) {
    tile_rows<NV, true>(a + row * lda, lda, b, steps, add, c + row * NV * kTileRows);
  }
  if (row < rows) tile_rows<NV, false>(a + row * lda, lda, b, steps, add, c + row * NV * kTileRows);
}

#else

// The same without tiles. AddressSanitizer sees no access of theirs: it gets this one.
template <int NV>
inline void tile_product(const BFloat16* a, std::int64_t lda, int rows, const BFloat16* b,
                         int steps, bool add, float* c) {
  constexpr int kColumns = NV * kTileRows;
  for (int i = 0; i < rows; ++i) {
    for (int j = 0; j < kColumns; ++j) {
      float sum = add ? c[i * kColumns + j] : 0.0f;
      for (int t = 0; t < steps * kTileTerms; ++t) {
        sum += to_compute(a[i * lda + t]) * to_compute(b[(t / 2 * kColumns + j) * 2 + t % 2]);
      }
      c[i * kColumns + j] = sum;
    }
  }
}

#endif

}  // namespace anyflash::cpu::ANYFLASH_CPU_ISA

#endif
