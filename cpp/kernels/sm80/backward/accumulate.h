// What a tile of rows adds to dq_accum.
#pragma once

#include <cute/tensor.hpp>

#include "common/finite.h"
#include "common/macros.h"

namespace anyflash::sm80 {

// dq_accum += acc, from kFirst on along MMA_M, in the order of the fragments. Element i of all
// threads lies side by side, so that a warp's atomic addition covers whole lines.
template <int kFirst, class Acc>
ANYFLASH_DEVICE void add_to_dq_accum(float* tile, const Acc& acc, unsigned thread, int threads) {
  using namespace cute;
  CUTE_UNROLL
  for (int i = 0; i < size(acc); ++i) {
    if (i / 4 % decltype(size<1>(acc))::value < kFirst) continue;
    atomicAdd(tile + i * threads + thread, acc(i));
  }
}

// dq_accum += dS K of the first kKeys keys, with 0 for NaN and infinity in K. Rare: plain loops
// over shared memory.
template <class Traits, int kKeys>
ANYFLASH_DEVICE void add_finite_to_dq_accum(float* tile, const typename Traits::Element* ds,
                                            const typename Traits::Element* k, int thread) {
  using namespace cute;
  const typename Traits::QueryMma mma;
  const auto tQcQ = mma.get_thread_slice(thread).partition_C(
      make_identity_tensor(Shape<Int<Traits::kBlockM>, Int<Traits::kHeadDim>>{}));
  CUTE_NO_UNROLL
  for (int i = 0; i < size(tQcQ); ++i) {
    const auto [row, col] = tQcQ(i);
    float sum = 0.0f;
    CUTE_NO_UNROLL
    for (int key = 0; key < kKeys; ++key) {
      const auto x = k[Traits::TileK::offset(key, col)];
      const auto d = ds[Traits::TileP::offset(row, key)];
      if (is_finite(x)) sum += static_cast<float>(d) * static_cast<float>(x);
    }
    atomicAdd(tile + i * Traits::kRowThreads + thread, sum);
  }
}

}  // namespace anyflash::sm80
