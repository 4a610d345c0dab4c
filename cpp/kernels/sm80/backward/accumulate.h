// What a tile of rows adds to the gradients.
#pragma once

#include <cute/tensor.hpp>

#include "common/finite.h"
#include "common/macros.h"
#include "sm80/gemm.h"

namespace anyflash::sm80 {

// acc_dk += dS^T Q and acc_dv += P^T dO of a whole tile, where groups of warps take turns: with the
// P and dS of `group`, and the Q and dO of `buffer`.
template <class Traits, class AccK, class AccV, class P, class Q, class DO, class Mma>
ANYFLASH_DEVICE void add_tile_to_keys(AccK& acc_dk, AccV& acc_dv, P p_t, P ds_t, Q q_t, DO dout_t,
                                      int group, int buffer, const Mma& mma) {
  constexpr int kP = 2 * cute::cosize_v<typename Traits::TileP::Layout>;  // and dS
  p_t.advance(group * kP);
  ds_t.advance(group * kP);
  q_t.advance(buffer * cute::cosize_v<typename Traits::TileQ::Layout>);
  dout_t.advance(buffer * cute::cosize_v<typename Traits::TileDO::Layout>);
  gemm_smem_smem(acc_dv, acc_dv, p_t.rematerialized(), dout_t.rematerialized(), mma);
  gemm_smem_smem(acc_dk, acc_dk, ds_t.rematerialized(), q_t.rematerialized(), mma);
}

// dq_accum += acc, from kFirst on along MMA_M, in the order of the fragments: element i of all
// threads side by side, so that a warp's atomic addition covers whole lines.
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
