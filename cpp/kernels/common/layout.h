// Views of an accumulator as a matrix of rows and columns, and as the next product's operand.
//
// An accumulator is blocks of m16n8, four elements a thread each. One mma.sync makes one of them. A
// wgmma makes a row of them for each of its four warps, and so has the same views.
#pragma once

#include <cute/tensor.hpp>

#include "common/macros.h"

namespace anyflash {

// (MMA=(2,2), MMA_M, MMA_N) -> (row=(2, MMA_M), col=(2, MMA_N)): the atom's inner mode runs along a
// row, its outer mode across the two row groups that a thread holds.
template <class Layout>
ANYFLASH_HOST_DEVICE auto accumulator_as_matrix(Layout layout) {
  using namespace cute;
  static_assert(decltype(size<0>(layout))::value == 4 && decltype(rank(layout))::value == 3);
  auto l = logical_divide(layout, Shape<_2>{});  // ((2, 2), MMA_M, MMA_N)
  return make_layout(make_layout(get<0, 1>(l), get<1>(l)), make_layout(get<0, 0>(l), get<2>(l)));
}

// A fragment of an accumulator's shape, as a matrix.
template <class Fragment>
ANYFLASH_HOST_DEVICE auto as_matrix(Fragment&& fragment) {
  return cute::make_tensor(fragment.data(), accumulator_as_matrix(fragment.layout()));
}

// (MMA=4, MMA_M, MMA_N) -> (MMA=(4, 2), MMA_M, MMA_N / 2). Two m16n8 accumulators side by side hold
// what the m16k16 operand A of the next mma.sync wants, in the same registers.
template <class Layout>
ANYFLASH_HOST_DEVICE auto accumulator_as_operand_a(Layout layout) {
  using namespace cute;
  using X = Underscore;
  static_assert(decltype(size<0>(layout))::value == 4 && decltype(rank(layout))::value == 3);
  auto l = logical_divide(layout, Shape<X, X, _2>{});  // (4, MMA_M, (2, MMA_N / 2))
  return make_layout(make_layout(get<0>(l), get<2, 0>(l)), get<1>(l), get<2, 1>(l));
}

// Of a fragment (MMA, MMA_M, ...) the part from kFirst on along MMA_M: kCount, or all the rest.
template <int kFirst, int kCount = -1, class Engine, class Layout>
ANYFLASH_HOST_DEVICE auto fragment_from(cute::Tensor<Engine, Layout>& fragment) {
  using namespace cute;
  const auto layout = fragment.layout();
  constexpr int kRest = decltype(size<1>(layout))::value - kFirst;
  constexpr int kSize = kCount < 0 ? kRest : kCount;
  return make_tensor(fragment.data() + kFirst * stride<1>(layout),
                     replace<1>(layout, make_layout(Int<kSize>{}, stride<1>(layout))));
}

}  // namespace anyflash
