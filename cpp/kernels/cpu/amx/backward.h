// The operands of the backward's products by tiles (tiles.h), for bfloat16 and a processor that has
// them. With keys, or rows, as rows of a and lines of c:
//   S^T  = K Q^T        a = k            b = q_across
//   dP^T = V dO^T       a = v            b = dout_across
//   dV  += P^T dO       a = p            b = dout
//   dK  += dS0^T Q      a = ds           b = q
//   dQ  += dS0 K        a = ds_across    b = k_pairs
// P and dS0 are rounded to bfloat16, as on a GPU. What is not there is zero.
#pragma once

#include <cstdint>
#include <cstring>

#include "cpu/amx/tiles.h"
#include "cpu/scratch.h"
#include "cpu/simd/convert.h"
#include "cpu/simd/vector.h"
#include "cpu/tasks.h"

namespace anyflash::cpu::ANYFLASH_CPU_ISA {

inline constexpr int kTileBlock = 64;  // rows, and keys, of a block

// Lines of whole terms of a product.
constexpr int tile_line(int columns) { return round_up(columns, kTileTerms); }

struct QueryTiles {
  BFloat16* q;            // (rows / 2, head_dim, 2)
  BFloat16* dout;         // (rows / 2, head_dim_v, 2)
  BFloat16* q_across;     // (head_dim / 2, rows, 2)
  BFloat16* dout_across;  // (head_dim_v / 2, rows, 2)

  void carve(Carver& carver, int line, int line_v) {
    carver.take(q, kTileBlock * line);
    carver.take(dout, kTileBlock * line_v);
    carver.take(q_across, kTileBlock * line);
    carver.take(dout_across, kTileBlock * line_v);
  }
};

struct KeyTiles {
  BFloat16* k;        // (keys, head_dim)
  BFloat16* v;        // (keys, head_dim_v)
  BFloat16* k_pairs;  // (keys / 2, head_dim, 2)

  void carve(Carver& carver, int line, int line_v) {
    carver.take(k, kTileBlock * line);
    carver.take(v, kTileBlock * line_v);
    carver.take(k_pairs, kTileBlock * line);
  }
};

struct ProductTiles {
  BFloat16* p;          // (keys, rows)
  BFloat16* ds;         // (keys, rows)
  BFloat16* ds_across;  // (rows, keys)
  BFloat16* pairs;      // (keys / 2, rows, 2)
  BFloat16* block;      // rows of any tensor

  void carve(Carver& carver, int line, int line_v) {
    for (BFloat16** const tile : {&p, &ds, &ds_across, &pairs}) {
      carver.take(*tile, kTileBlock * kTileBlock);
    }
    carver.take(block, kTileBlock * (line > line_v ? line : line_v));
  }
};

#if ANYFLASH_CPU_TILES

// `count` rows of a tensor, zeros behind them up to a whole block. Whether all of it is finite.
inline bool load_block(const BFloat16* from, const Strides& stride, int count, int columns,
                       BFloat16* to) {
  using UIntVec = Simd<float>::UIntVec;
  const int line = tile_line(columns);
  std::memset(to, 0, sizeof(*to) * kTileBlock * line);
  for (int r = 0; r < count; ++r) {
    copy_row(from + r * stride.row, stride.col, columns, to + r * line);
  }
  UIntVec exponents = {};
  for (int i = 0; i < count * line; i += kTileTerms) {
    UIntVec pair;
    std::memcpy(&pair, to + i, sizeof(pair));
    exponents |= exponent_carries(pair);
  }
  return !any_carry(exponents);
}

// (rows, columns) as (rows / 2, columns, 2)
inline void pair_rows(const BFloat16* from, int columns, BFloat16* to) {
  const int line = tile_line(columns);
  for (int r = 0; r < kTileBlock; r += 2) {
    for (int c = 0; c < line; c += kTileRows) {
      const auto pair = load_pairs(from + r * line + c, from + (r + 1) * line + c);
      std::memcpy(to + r * line + 2 * c, &pair, sizeof(pair));
    }
  }
}

// (rows, columns) as (columns / 2, rows, 2)
inline void pair_columns(const BFloat16* from, int columns, BFloat16* to) {
  transpose_pairs(from, tile_line(columns), kTileBlock, tile_line(columns), to, 2 * kTileBlock);
}

// A tile of float32, (keys, rows), of which the first ones are used, as bfloat16.
inline void pack_tile(const float* from, int keys, int rows, BFloat16* to) {
  using S = Simd<float>;
  const std::size_t line = sizeof(*to) * kTileBlock;
  for (int j = 0; j < keys; ++j) {
    const float* const row = from + j * kTileBlock;
    for (int lane = 0; lane < kTileBlock; lane += kTileTerms) {
      const auto at = [&](int i) { return i < rows ? S::load(row + i) : S::Vec{}; };
      store_halves(at(lane), at(lane + S::kLanes), to + j * kTileBlock + lane);
    }
  }
  std::memset(to + keys * kTileBlock, 0, line * (kTileBlock - keys));
}

// The same as (keys / 2, rows, 2), and as (rows, keys).
inline void pack_tile_across(const float* from, int keys, int rows, const ProductTiles& tiles) {
  using S = Simd<float>;
  for (int j = 0; j < kTileBlock; j += 2) {
    for (int lane = 0; lane < rows; lane += S::kLanes) {
      const auto at = [&](int key) {
        return key < keys ? S::load(from + key * kTileBlock + lane) : S::Vec{};
      };
      store_pairs(at(j), at(j + 1), tiles.pairs + j * kTileBlock + 2 * lane);
    }
  }
  transpose_pairs(tiles.pairs, 2 * kTileBlock, kTileBlock / 2, 2 * rows, tiles.ds_across,
                  kTileBlock);
}

#endif

}  // namespace anyflash::cpu::ANYFLASH_CPU_ISA
