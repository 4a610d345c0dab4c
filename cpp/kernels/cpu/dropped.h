// Dropout of a block's probabilities: p = 0 where it drops. Hidden keys stay hidden. What is kept
// is scaled at the end (query_rows.h).
#pragma once

#include <cstdint>

#include "cpu/gemm.h"
#include "cpu/scratch.h"
#include "cpu/simd/vector.h"
#include "params.h"
#include "variant/dropout.h"

namespace anyflash::cpu::ANYFLASH_CPU_ISA {

// draws of `count` rows from `query` on, for eight columns. GCC turns this loop into vectors.
template <typename T>
inline void draw_rows(const Dropout& dropout, int query, int count, int group,
                      typename Simd<T>::UInt* (&words)[4]) {
  const Dropout d = dropout;
  typename Simd<T>::UInt* const w0 = words[0];
  typename Simd<T>::UInt* const w1 = words[1];
  typename Simd<T>::UInt* const w2 = words[2];
  typename Simd<T>::UInt* const w3 = words[3];
  for (int i = 0; i < count; ++i) {
    const Draws x = d.draws(query + i, group);
    w0[i] = x.word[0];
    w1[i] = x.word[1];
    w2[i] = x.word[2];
    w3[i] = x.word[3];
  }
}

// `count` rows in lanes, keys first_key + [begin, end).
template <typename T, int NV>
inline void drop_panel(const Attention& p, std::int64_t sequence, const QueryRow<T>* rows,
                       int count, int first_key, int begin, int end, T* probability) {
  using S = Simd<T>;
  using UInt = typename S::UInt;
  constexpr int kRows = NV * S::kLanes;
  constexpr int kColumns = 8;
  const auto threshold = S::broadcast_uint(p.dropout_threshold);
  const auto low_half = S::broadcast_uint(0xffffu);
  UInt words[4][kRows] = {};
  for (int first = begin / kColumns * kColumns; first < end; first += kColumns) {
    // Rows of one head follow each other.
    for (int r = 0, run; r < count; r += run) {
      run = count - r;
      while (rows[r + run - 1].head != rows[r].head) --run;
      UInt* to[4] = {words[0] + r, words[1] + r, words[2] + r, words[3] + r};
      draw_rows<T>(Dropout(p, sequence, rows[r].head), rows[r].query, run,
                   (first_key + first) / kColumns, to);
    }
    for (int j = first < begin ? begin : first; j < first + kColumns && j < end; ++j) {
      const int column = j - first;
      for (int n = 0; n < NV; ++n) {
        T* const at = probability + j * kRows + n * S::kLanes;
        const typename S::Vec x = S::load(at);
        const auto draw =
            S::load(words[column / 2] + n * S::kLanes) >> (16 * (column % 2)) & low_half;
        const typename S::Vec dropped = x < typename S::Vec{} ? x : typename S::Vec{};
        S::store(at, draw >= threshold ? x : dropped);
      }
    }
  }
}

// The same for one row.
template <typename T>
inline void drop_row(const Attention& p, std::int64_t sequence, const QueryRow<T>& row,
                     int first_key, int begin, int end, T* probability) {
  constexpr int kColumns = 8;
  const Dropout dropout(p, sequence, row.head);
  for (int first = begin / kColumns * kColumns; first < end; first += kColumns) {
    const Draws draws = dropout.draws(row.query, (first_key + first) / kColumns);
    for (int j = first < begin ? begin : first; j < first + kColumns && j < end; ++j) {
      if (!dropout.keep(draws[j - first]) && !(probability[j] < T(0))) probability[j] = T(0);
    }
  }
}

}  // namespace anyflash::cpu::ANYFLASH_CPU_ISA
