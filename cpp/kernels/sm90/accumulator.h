// A warpgroup's accumulators: what they are, where their elements lie, and how they are rounded.
#pragma once

#include <cstdint>
#include <cute/tensor.hpp>

#include "common/convert.h"
#include "common/layout.h"
#include "common/macros.h"
#include "sm90/wgmma.h"

namespace anyflash::sm90 {

// A warpgroup's accumulators for 64 rows and kColumns columns: (MMA, MMA_M, MMA_N) of m16n8 blocks.
template <int kColumns>
using Accumulator =
    decltype(cute::make_tensor<float>(cute::Shape<cute::_4, cute::_1, cute::Int<kColumns / 8>>{}));

inline constexpr int kThreadRows = 2;  // of these 64 rows

// The first row of this warp's, of those of all consumer warpgroups; of this thread's; and its
// first column.
inline constexpr int kWarpRows = 16;
ANYFLASH_DEVICE int warp_row() { return static_cast<int>(threadIdx.x) / 32 * kWarpRows; }
ANYFLASH_DEVICE int thread_row() {
  return static_cast<int>(threadIdx.x) / 32 * kWarpRows + threadIdx.x % 32 / 4;
}
ANYFLASH_DEVICE int thread_column() { return threadIdx.x % 4 * 2; }

// Row and column of each of this thread's accumulators, as accumulator_as_matrix() orders them: row
// within the block, column within the tile.
template <int kColumns>
ANYFLASH_DEVICE auto accumulator_coordinates() {
  using namespace cute;
  return make_tensor(make_inttuple_iter(make_tuple(thread_row(), thread_column())),
                     make_layout(make_shape(_2{}, make_shape(_2{}, Int<kColumns / 8>{})),
                                 make_stride(_8{} * E<0>{}, make_stride(E<1>{}, _8{} * E<1>{}))));
}

// The same for a (row, col) view of accumulators.
template <class Matrix>
ANYFLASH_DEVICE auto coordinates_of(const Matrix&) {
  return accumulator_coordinates<4 *
                                 decltype(cute::size<1>(typename Matrix::layout_type{}))::value>();
}

// Bits of the elements that a row of a thread's accumulators has in columns below `end`, if its
// first one is in column 0: two neighbours in each eight columns.
ANYFLASH_DEVICE int elements_below(int end) { return end / 8 * 2 + min(end % 8, 2); }

// Bits of the elements that a row has in the columns [first, end) of at most 128, if its first one
// is in column 0.
ANYFLASH_DEVICE uint32_t element_bits(int first, int end) {
  const auto below = [](int column) {
    const int elements = elements_below(max(column, 0));
    return elements < 32 ? (1u << elements) - 1 : 0xffffffffu;
  };
  return below(end) & ~below(first);
}

// Where a word has the bit of a row's element i.
struct BitsInOrder {
  ANYFLASH_DEVICE static constexpr int place(int i) { return i; }
};

// Writes `value` over the elements without a bit of a (row, col) view. In order, bits become
// predicates seven at a time (R2P).
template <class Bits = BitsInOrder, class Matrix>
ANYFLASH_DEVICE void fill_others(Matrix& matrix, const uint32_t (&bits)[kThreadRows], float value) {
  constexpr int kElements = decltype(cute::size<1>(matrix))::value;
  static_assert(kElements <= 32);
  CUTE_UNROLL
  for (int row = 0; row < kThreadRows; ++row) {
    CUTE_UNROLL
    for (int i = 0; i < kElements; ++i) {
      if ((bits[row] >> Bits::place(i) & 1) == 0) matrix(row, i) = value;
    }
  }
}

// Writes 0 over the elements without a bit.
template <class Acc>
ANYFLASH_DEVICE void hide(Acc& acc, const uint32_t (&seen)[kThreadRows]) {
  auto matrix = as_matrix(acc);
  fill_others(matrix, seen, 0.0f);
}

// The first columns of an accumulator, which lie in its first registers.
template <int kColumns, class Acc>
ANYFLASH_DEVICE auto leading_columns(Acc& acc) {
  return cute::make_tensor(acc.data(), typename Accumulator<kColumns>::layout_type{});
}

// The compiler may not move reads or writes of these past this place.
template <class Acc>
ANYFLASH_DEVICE void pin(Acc& acc) {
  pin_registers<decltype(cute::size(acc))::value>(acc.data());
}

// Accumulators rounded in pairs: the registers that the next product wants as its operand A.
template <class Element, int kColumns>
struct RoundedAccumulator {
  static constexpr int kWords = kColumns / 4;
  uint32_t words[kWords];

  // The first kLeading columns, and 0 for the others.
  template <int kLeading = kColumns>
  ANYFLASH_DEVICE void round(const Accumulator<kColumns>& acc) {
    CUTE_UNROLL
    for (int i = 0; i < kWords; ++i) {
      words[i] = 0;
      if (i < kLeading / 4) set(i, float2{acc(2 * i), acc(2 * i + 1)});
    }
  }
  ANYFLASH_DEVICE void set(int i, float2 elements) {
    const auto pair = round_pair(elements, Element{});
    words[i] = reinterpret_cast<const uint32_t&>(pair);
  }
};

// As hide() above.
template <class Element, int kColumns>
ANYFLASH_DEVICE void hide(RoundedAccumulator<Element, kColumns>& acc,
                          const uint32_t (&seen)[kThreadRows]) {
  CUTE_UNROLL
  for (int i = 0; i < RoundedAccumulator<Element, kColumns>::kWords; ++i) {
    const uint32_t bits = seen[i % 2] >> (i / 2 * 2);
    acc.words[i] &= ((bits & 1) != 0 ? 0xffffu : 0) | ((bits & 2) != 0 ? 0xffff0000u : 0);
  }
}

// One lane's value, so that the compiler knows that a warp does not diverge.
ANYFLASH_DEVICE int uniform(int x) { return __shfl_sync(0xffffffffu, x, 0); }

// Lanes that are `distance` apart swap words: the first one's `high` and the other one's `low`.
ANYFLASH_DEVICE void exchange_words(uint32_t& low, uint32_t& high, int distance) {
  const bool is_high = (threadIdx.x & distance) != 0;
  const uint32_t got = __shfl_xor_sync(0xffffffffu, is_high ? low : high, distance);
  (is_high ? low : high) = got;
}

// Word j of lane q of each quad becomes word q of lane j.
ANYFLASH_DEVICE void transpose_quads(uint32_t (&words)[4]) {
  exchange_words(words[0], words[1], 1);
  exchange_words(words[2], words[3], 1);
  exchange_words(words[0], words[2], 2);
  exchange_words(words[1], words[3], 2);
}

// The warp's 16 rows from `warp_row` on, rounded, as far as they lie in `rows` rows and `columns`
// columns. `first` is element (0, 0). A lane stores 16 bytes, and a quad 64 of a row.
template <class Element, int kColumns>
ANYFLASH_DEVICE void store_rows(Element* first, int64_t row_stride, int warp_row, int rows,
                                int columns, const Accumulator<kColumns>& acc) {
  constexpr int kLanes = 4;   // of a quad
  constexpr int kVector = 8;  // elements of 16 bytes
  RoundedAccumulator<Element, kColumns> rounded;
  rounded.round(acc);
  const int col0 = threadIdx.x % kLanes * kVector;
  CUTE_UNROLL
  for (int i = 0; i < kThreadRows; ++i) {
    const int row = warp_row + static_cast<int>(threadIdx.x % 32 / 4) + 8 * i;
    Element* const out = first + row * row_stride + col0;
    CUTE_UNROLL
    for (int col = 0; col < kColumns; col += kLanes * kVector) {
      uint32_t words[4];
      CUTE_UNROLL
      for (int j = 0; j < 4; ++j) words[j] = rounded.words[2 * (col / kVector + j) + i];
      transpose_quads(words);
      if (row < rows && col0 + col < columns) {
        *reinterpret_cast<uint4*>(out + col) = uint4{words[0], words[1], words[2], words[3]};
      }
    }
  }
}

}  // namespace anyflash::sm90
