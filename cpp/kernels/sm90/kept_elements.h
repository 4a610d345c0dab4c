// Dropout on a tile of scores: a draw is of eight neighbouring keys, which no thread has alone. So
// lanes draw for each other.
#pragma once

#include <cstdint>

#include "common/macros.h"
#include "sm90/accumulator.h"
#include "variant/dropout.h"

namespace anyflash::sm90 {

// Of each of a thread's rows, a bit for each element that dropout keeps. Of eight keys each lane of
// a quad has two: a lane draws for every fourth eight. `first_col` is a multiple of eight.
template <int kElements>
ANYFLASH_DEVICE void find_kept_elements(const Dropout& dropout, const int (&rows)[kThreadRows],
                                        int first_col, uint32_t (&kept)[kThreadRows]) {
  constexpr int kLanes = 4;
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  for (int row = 0; row < kThreadRows; ++row) kept[row] = 0;
  CUTE_UNROLL
  for (int begin = 0; begin < kElements / 2; begin += kLanes) {
    Draws draws[kThreadRows];
    dropout.draws(draws, rows, first_col / 8 + begin + lane);
    CUTE_UNROLL
    for (int row = 0; row < kThreadRows; ++row) {
      transpose_quads(draws[row].word);
      CUTE_UNROLL
      for (int i = 0; i < 2 * kLanes; ++i) {
        if (dropout.keep(draws[row], i)) kept[row] |= 1u << (2 * begin + i);
      }
    }
  }
}

// Half h of the words of lane 4 * g + q becomes half g of those of lane 4 * h + q.
ANYFLASH_DEVICE void transpose_halves(uint32_t (&words)[4]) {
  exchange_words(words[0], words[2], 16);
  exchange_words(words[1], words[3], 16);
  exchange_words(words[0], words[1], 8);
  exchange_words(words[2], words[3], 8);
  const bool is_high = (threadIdx.x & 4) != 0;
  CUTE_UNROLL
  for (uint32_t& word : words) {
    const uint32_t got = __shfl_xor_sync(0xffffffffu, word, 4);
    word = is_high ? __byte_perm(got, word, 0x7632) : __byte_perm(word, got, 0x5410);
  }
}

// The same for transposed scores: of each of a thread's keys, a bit for each element. The eight
// keys of a draw are those of the lanes with the same rows, of which each draws for every eighth
// pair. A thread's keys are those of `first_key` and of the eight behind it.
template <int kElements>
ANYFLASH_DEVICE void find_kept_transposed(const Dropout& dropout, int first_row, int first_key,
                                          uint32_t (&kept)[kThreadRows]) {
  constexpr int kLanes = 8;  // and pairs of rows
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int key = 0; key < kThreadRows; ++key) kept[key] = 0;
  CUTE_UNROLL
  for (int begin = 0; begin < kElements / 2; begin += kLanes) {
    const int row = first_row + (begin + lane / 4) * 8 + lane % 4 * 2;
    CUTE_UNROLL
    for (int key = 0; key < kThreadRows; ++key) {
      CUTE_UNROLL
      for (int of_pair = 0; of_pair < 2; ++of_pair) {
        Draws draws = dropout.draws(row + of_pair, first_key / 8 + key);
        transpose_halves(draws.word);
        CUTE_UNROLL
        for (int i = 0; i < kLanes; ++i) {
          if (dropout.keep(draws, i)) kept[key] |= 1u << (2 * (begin + i) + of_pair);
        }
      }
    }
  }
}

}  // namespace anyflash::sm90
