// The memory of the backward, all of it slices of LaunchContext::scratch. Each thread has what it
// needs for a task, whose size grows with the head dims only. Each row has two or three numbers.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/amx/backward.h"
#include "cpu/scratch.h"
#include "cpu/simd/vector.h"
#include "cpu/tasks.h"
#include "params.h"
#include "variant/sequence.h"

namespace anyflash::cpu::ANYFLASH_CPU_ISA {

// Rows of a tile of scores; its keys are kBlockN. Blocks of a block mask are multiples of both, so
// that one of its elements decides on a whole tile.
inline constexpr int kBlockM = 64;
static_assert(kBlockM == kTileBlock && kBlockN == kTileBlock);

// Blocks of a task: each block of the other kind that it visits is packed once for all of them.
inline constexpr int kTaskBlocks = kHasTiles ? 4 : 2;

// What a row adds to all its tiles: (heads, rows of all sequences).
template <typename T>
struct RowSums {
  T* lse;         // +inf where the row sees no key
  T* delta;       // rowsum(dO out) - dlse
  double* slope;  // the row's part of its head's dalibi_slopes; null: not wanted
  std::int64_t rows = 0;

  static RowSums carve(const BackwardParams& p, Carver& carver) {
    RowSums x;
    x.rows = p.attention.cu_seqlens_q != nullptr ? p.attention.total_q
                                                 : p.attention.batch * p.attention.seqlen_q;
    x.slope = nullptr;
    carver.take(x.lse, p.attention.heads * x.rows);
    carver.take(x.delta, p.attention.heads * x.rows);
    if (p.dalibi_slopes.data != nullptr) carver.take(x.slope, p.attention.heads * x.rows);
    return x;
  }

  // Where the rows of a sequence and head begin.
  std::int64_t offset(const BackwardParams& p, const Sequence& sequence, int head) const {
    return head * rows + sequence.batch * p.attention.seqlen_q + sequence.first_q;
  }
};

// A block of query rows of one head; rows of `ld` or `ld_v`, zeros behind the last row and column.
template <typename T>
struct RowBlock {
  using Int = typename Simd<T>::Int;

  T* q;            // (kBlockM, ld)
  T* dout;         // (kBlockM, ld_v)
  T* q_across;     // (ld, kBlockM): rows in lanes
  T* dout_across;  // (ld_v, kBlockM)
  T* dq;           // (kBlockM, ld)
  // Of each row. What lies behind the last one sees no key.
  T* lse;
  T* delta;
  T* diagonal;  // the key at distance 0
  Int* first;   // it sees the keys [first, end)
  Int* end;
  QueryRow<T>* rows;
  double* slope_sum;

  int head;
  int first_row;
  int count;
  int width;  // `count` in whole vectors and whole groups
  // Keys that all of them see.
  int full_first;
  int full_end;

  QueryTiles tiles;
  bool in_tiles;   // where there are tiles: q and dout are in them
  bool in_floats;  // q, dout, q_across and dout_across hold them
};

// A block of keys of one kv head, and its gradients.
template <typename T>
struct KeyBlock {
  T* k;   // (kBlockN, ld)
  T* v;   // (kBlockN, ld_v)
  T* dk;  // (kBlockN, ld)
  T* dv;  // (kBlockN, ld_v)

  int first_key;
  int head_k;
  int count;  // keys that are used
  int padded;

  KeyTiles tiles;
  bool in_tiles;
  bool in_floats;
};

template <typename T>
struct BackwardScratch {
  RowBlock<T> row_blocks[kTaskBlocks];
  KeyBlock<T> key_blocks[kTaskBlocks];
  // Tiles (kBlockN, kBlockM), rows in lanes.
  T* s;     // scores, then probabilities
  T* ds;    // dO V^T, then the scores' gradients
  T* bias;  // if there is one
  T* kept;  // what dropout multiplies probabilities by, if there is dropout
  T* sum;   // of dbias, if it is wanted
  T* dq;    // (whole_rows, ld)
  ProductTiles tiles;
  std::int64_t ld;
  std::int64_t ld_v;
  std::size_t size;

  static std::size_t bytes(const BackwardParams& p, std::int64_t whole_rows) {
    return carve(p, whole_rows, nullptr).size;
  }

  static BackwardScratch carve(const BackwardParams& p, std::int64_t whole_rows, char* base) {
    Carver carver(base);
    BackwardScratch x;
    x.ld = round_up(p.attention.head_dim, kColumnPad<T>);
    x.ld_v = round_up(p.attention.head_dim_v, kColumnPad<T>);
    const int line = tile_line(p.attention.head_dim);
    const int line_v = tile_line(p.attention.head_dim_v);
    for (RowBlock<T>& block : x.row_blocks) {
      carver.take(block.q, kBlockM * x.ld);
      carver.take(block.dout, kBlockM * x.ld_v);
      carver.take(block.q_across, kBlockM * x.ld);
      carver.take(block.dout_across, kBlockM * x.ld_v);
      carver.take(block.dq, kBlockM * x.ld);
      carver.take(block.lse, kBlockM);
      carver.take(block.delta, kBlockM);
      carver.take(block.diagonal, kBlockM);
      carver.take(block.first, kBlockM);
      carver.take(block.end, kBlockM);
      carver.take(block.rows, kBlockM);
      carver.take(block.slope_sum, kBlockM);
      if (kHasTiles) block.tiles.carve(carver, line, line_v);
    }
    for (KeyBlock<T>& block : x.key_blocks) {
      carver.take(block.k, kBlockN * x.ld);
      carver.take(block.v, kBlockN * x.ld_v);
      carver.take(block.dk, kBlockN * x.ld);
      carver.take(block.dv, kBlockN * x.ld_v);
      if (kHasTiles) block.tiles.carve(carver, line, line_v);
    }
    constexpr int kTile = kBlockM * kBlockN;
    carver.take(x.s, kTile);
    carver.take(x.ds, kTile);
    const bool bias = p.attention.bias.data != nullptr || p.attention.key_ranges.data != nullptr;
    carver.take(x.bias, bias ? kTile : 0);
    carver.take(x.kept, p.attention.dropout_threshold != 0 ? kTile : 0);
    carver.take(x.sum, p.dbias.data != nullptr ? kTile : 0);
    carver.take(x.dq, whole_rows * x.ld);
    if (kHasTiles) x.tiles.carve(carver, line, line_v);
    x.size = carver.size();
    return x;
  }
};

}  // namespace anyflash::cpu::ANYFLASH_CPU_ISA
