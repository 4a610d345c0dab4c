// Dropout on a tile of scores: a draw is of eight neighbouring keys, which no thread has alone. So
// lanes draw for each other, and exchange a bit for each probability.
#pragma once

#include <cstdint>

#include "common/macros.h"
#include "sm90/accumulator.h"
#include "sm90/ptx.h"
#include "variant/dropout.h"

namespace anyflash::sm90 {

// The highest `count` bits of each half of `first`, and the others of `second`.
ANYFLASH_DEVICE uint32_t join_halves(int count, uint32_t first, uint32_t second) {
  const uint32_t highest = (0xffff0000u >> count & 0xffffu) * 0x10001u;
  return (first & highest) | (second & ~highest);
}

// Which of eight keys are kept: of key c, bit 15 - c / 2 where c is even, and bit 31 - c / 2 where
// it is odd. The other bits mean nothing.
ANYFLASH_DEVICE uint32_t kept_bits(const Dropout& dropout, const Draws& draws) {
  uint32_t bits = dropout.kept_in_signs(draws.word[0]);
  CUTE_UNROLL
  for (int i = 1; i < 4; ++i) {
    bits = join_halves(i, bits, dropout.kept_in_signs(draws.word[i]) >> i);
  }
  return bits;
}

// A step of a transposition: a bit of a bit's index changes places with a bit of the lane's number,
// `distance`. `lower` are the bits whose index has 0 there; those with 1 are `shift` further to the
// right, modulo 32. A lane keeps the bits whose index has what its own number has, and gets the
// others from its partner.
ANYFLASH_DEVICE uint32_t exchange_bits(uint32_t word, int distance, int shift, uint32_t lower) {
  const bool is_high = (threadIdx.x & distance) != 0;
  const uint32_t own = is_high ? ~lower : lower;
  const uint32_t got = __shfl_xor_sync(0xffffffffu, word, distance);
  const uint32_t moved = __funnelshift_l(got, got, is_high ? shift : 32 - shift);
  return (word & own) | (moved & ~own);
}
// Both bits of c / 2 of kept_bits(): then a lane has what four lanes drew for its own pair of keys.
ANYFLASH_DEVICE uint32_t exchange_pairs(uint32_t word, int distance) {
  word = exchange_bits(word, distance, 1, 0xaaaaaaaau);
  return exchange_bits(word, 2 * distance, 2, 0xccccccccu);
}

// Of each of a thread's rows, a bit for each element that dropout keeps.
struct KeptElements {
  uint32_t words[kThreadRows];

  // Element i's.
  ANYFLASH_DEVICE static constexpr int place(int i) { return (i % 2 == 0 ? 15 : 31) - i / 2; }
};

// Of eight keys each lane of a quad has two: a lane draws for every fourth eight. `first_col` is a
// multiple of eight.
template <int kElements>
ANYFLASH_DEVICE void find_kept_elements(const Dropout& dropout, const int (&rows)[kThreadRows],
                                        int first_col, KeptElements& kept) {
  constexpr int kLanes = 4;
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  CUTE_UNROLL
  for (int begin = 0; begin < kElements / 2; begin += kLanes) {
    Draws draws[kThreadRows];
    dropout.draws(draws, rows, first_col / 8 + begin + lane);
    CUTE_UNROLL
    for (int row = 0; row < kThreadRows; ++row) {
      const uint32_t bits = kept_bits(dropout, draws[row]);
      kept.words[row] = begin == 0 ? bits : join_halves(begin, kept.words[row], bits >> begin);
    }
  }
  CUTE_UNROLL
  for (uint32_t& word : kept.words) word = exchange_pairs(word, 1);
}

// The same for transposed scores: of each of a thread's keys, a bit for each element, which is a
// row's.
struct KeptTransposed {
  uint32_t words[kThreadRows];

  // Rows come in pairs. Pair p of eight is in half p % 2, the (p / 2)-th of a group of four bits.
  // Groups, from the highest bit on: first and second rows of pairs 0 to 7, then of 8 to 15.
  ANYFLASH_DEVICE static constexpr int place(int i) {
    const int pair = i / 2 % 8;
    return (pair % 2 == 0 ? 15 : 31) - pair / 2 - (i / 16 * 2 + i % 2) * 4;
  }
};

// The eight keys of a draw are those of the lanes with the same rows, of which each draws for every
// eighth pair. A thread's keys are those of `first_key` and of the eight behind it.
template <int kElements>
ANYFLASH_DEVICE void find_kept_transposed(const Dropout& dropout, int first_row, int first_key,
                                          KeptTransposed& kept) {
  constexpr int kLanes = 8;  // and pairs of rows
  static_assert(kElements % (2 * kLanes) == 0);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  CUTE_UNROLL
  for (int key = 0; key < kThreadRows; ++key) {
    uint32_t& word = kept.words[key];
    CUTE_UNROLL
    for (int i = 0; i < kElements / kLanes; ++i) {
      const int row = first_row + (i / 2 * kLanes + lane / 4) * 8 + lane % 4 * 2 + i % 2;
      const uint32_t bits = kept_bits(dropout, dropout.draws(row, first_key / 8 + key));
      word = i == 0 ? bits : join_halves(4 * i, word, bits >> (4 * i));
    }
    word = exchange_pairs(exchange_bits(word, 4, 16, 0x0000ffffu), 8);
  }
}

// Writes 0 over the elements that are not kept.
template <class Kept, class Acc>
ANYFLASH_DEVICE void drop(Acc& acc, const Kept& kept) {
  auto matrix = as_matrix(acc);
  fill_others<Kept>(matrix, kept.words, 0.0f);
}
template <class Element, int kColumns>
ANYFLASH_DEVICE void drop(RoundedAccumulator<Element, kColumns>& acc, const KeptElements& kept) {
  CUTE_UNROLL
  for (int i = 0; i < RoundedAccumulator<Element, kColumns>::kWords; ++i) {
    acc.words[i] &= spread_signs(kept.words[i % 2] << (i / 2));
  }
}

}  // namespace anyflash::sm90
