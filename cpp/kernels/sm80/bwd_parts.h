// Groups of query heads that several CTAs share: each computes dK and dV of its own part of the
// heads, in float32, and the last to arrive adds them up, in the order of the parts.
#pragma once

#include <cute/tensor.hpp>

#include "common/macros.h"
#include "sm80/bwd_block.h"
#include "sm80/bwd_params.h"

namespace anyflash::sm80 {

// Calls f(address, four neighbouring elements of acc) with the float4 that belongs to the thread
// and to them: side by side in a warp.
template <class Acc, class F>
ANYFLASH_DEVICE void for_each_quad(float* tile, Acc& acc, int threads, const F& f) {
  static_assert(decltype(cute::size(acc))::value % 4 == 0, "whole pieces of 16 bytes");
  CUTE_UNROLL
  for (int i = 0; i < cute::size(acc); i += 4) {
    f(reinterpret_cast<float4*>(tile + i * threads) + threadIdx.x, &acc(i));
  }
}

// Whether this CTA is the last of those that share a block of keys. Its accumulators and
// smem.nonfinite_dout are then those of the whole group. All threads have done with the main loop.
template <class Traits, class AccK, class AccV>
ANYFLASH_DEVICE bool sum_parts(const BackwardScratch& params, const BackwardBlock& block,
                               typename Traits::SharedStorage& smem, AccK& acc_dk, AccV& acc_dv) {
  constexpr int kNonfinite = 1 << 16;  // in a state, whose lower half counts parts
  constexpr int kElementsK = Traits::kBlockN * Traits::kHeadDim;
  constexpr int kElements = kElementsK + Traits::kBlockN * Traits::kHeadDimV;
  constexpr int kThreads = Traits::kThreads;
  const int64_t tile =
      params.first_block(block.sequence, block.batch, block.head_k, Traits::kBlockN) +
      block.first_key / Traits::kBlockN;
  float* const sums = params.part_sums + tile * params.group_parts * kElements;

  float* const own = sums + block.part * int64_t{kElements};
  const auto store = [](float4* to, const float* x) { *to = float4{x[0], x[1], x[2], x[3]}; };
  for_each_quad(own, acc_dk, kThreads, store);
  for_each_quad(own + kElementsK, acc_dv, kThreads, store);
  __threadfence();
  __syncthreads();  // all of it is there, before the part counts as done
  bool last = false;
  if (threadIdx.x == 0) {
    const int mine = 1 + (smem.nonfinite_dout != 0 ? kNonfinite : 0);
    const int state = atomicAdd(params.part_states + tile, mine) + mine;
    last = state % kNonfinite == params.group_parts;
    smem.nonfinite_dout = state >= kNonfinite;
    __threadfence();
  }
  if (!__syncthreads_or(last)) return false;

  cute::clear(acc_dk);
  cute::clear(acc_dv);
  const auto add = [](const float4* from, float* x) {
    const float4 sum = __ldcg(from);
    x[0] += sum.x;
    x[1] += sum.y;
    x[2] += sum.z;
    x[3] += sum.w;
  };
  for (int part = 0; part < params.group_parts; ++part) {
    float* const other = sums + part * int64_t{kElements};
    for_each_quad(other, acc_dk, kThreads, add);
    for_each_quad(other + kElementsK, acc_dv, kThreads, add);
  }
  return true;
}

}  // namespace anyflash::sm80
