// Groups of query heads that several CTAs share. Each CTA computes dK and dV of its own part of the
// heads, in float32. Another kernel adds them up, in the order of the parts.
//
// The main kernel would need a memory fence for that. With one, ptxas makes its atomicAdd()s to dQ
// return their results: on an H200 it then runs at 0.69 to 0.92 of its speed.
#pragma once

#include <cute/tensor.hpp>

#include "common/launch.h"
#include "common/macros.h"
#include "cuda/backward_grid.h"
#include "cuda/gqa_partials.h"
#include "sm80/backward/epilogue.h"
#include "variant/backward_scratch.h"
#include "variant/work_tile.h"

namespace anyflash::sm80 {

template <class Traits>
struct GqaPartialsStorage {
  alignas(128) typename Traits::template Buffer<typename Traits::TileK> k;
  alignas(128) typename Traits::template Buffer<typename Traits::TileV> v;
};

// dK and dV of a block of keys from their parts. Grid: x = all blocks of keys of all (batch, K/V
// head) pairs.
template <class Traits, class Variant>
__global__ void __launch_bounds__(Traits::kThreads)
    reduce_gqa_partials_kernel(const __grid_constant__ BackwardScratch params) {
  using namespace cute;
  auto& smem = *reinterpret_cast<GqaPartialsStorage<Traits>*>(anyflash_smem);
  BackwardWorkTile block = key_block_at<Traits::kBlockN>(params, blockIdx.x);
  if (block.first_key >= block.sequence.all_keys) return;
  find_key_ranges<Variant, Traits::kBlockN>(params.attention, block);

  const typename Traits::KeyMma mma;
  auto acc_dk = partition_fragment_C(mma, Shape<Int<Traits::kBlockN>, Int<Traits::kHeadDim>>{});
  auto acc_dv = partition_fragment_C(mma, Shape<Int<Traits::kBlockN>, Int<Traits::kHeadDimV>>{});
  clear(acc_dk);  // (MMA, MMA_N, MMA_D)
  clear(acc_dv);  // (MMA, MMA_N, MMA_D)
  const bool nonfinite_dout = add_parts<Traits>(params, block, acc_dk, acc_dv);
  write_key_gradients<Traits, Variant>(params, block, smem, nonfinite_dout, acc_dk, acc_dv);
}

}  // namespace anyflash::sm80
