// Groups of query heads that several CTAs share. Each CTA computes dK and dV of its own part of the
// heads, in float32. Another kernel adds them up, in the order of the parts.
//
// The main kernel would need a memory fence for that. With one, ptxas makes its atomicAdd()s to dQ
// return their results: on an H200 it then runs at 0.69 to 0.92 of its speed.
#pragma once

#include <cute/tensor.hpp>

#include "common/launch.h"
#include "common/macros.h"
#include "sm80/backward/epilogue.h"
#include "variant/backward_scratch.h"
#include "variant/work_tile.h"

namespace anyflash::sm80 {

// A thread's elements lie in pieces of four, side by side in a warp.
template <class Acc>
ANYFLASH_DEVICE void store_sums(float* tile, const Acc& acc, int threads) {
  CUTE_UNROLL
  for (int i = 0; i < cute::size(acc); i += 4) {
    const float4 sums{acc(i), acc(i + 1), acc(i + 2), acc(i + 3)};
    reinterpret_cast<float4*>(tile + i * threads)[threadIdx.x] = sums;
  }
}
template <class Acc>
ANYFLASH_DEVICE void add_sums(Acc& acc, const float* tile, int threads) {
  CUTE_UNROLL
  for (int i = 0; i < cute::size(acc); i += 4) {
    const float4 sums = reinterpret_cast<const float4*>(tile + i * threads)[threadIdx.x];
    acc(i) += sums.x;
    acc(i + 1) += sums.y;
    acc(i + 2) += sums.z;
    acc(i + 3) += sums.w;
  }
}

// Elements of dK and dV of a block of keys.
template <class Traits>
inline constexpr int kPartElementsK = Traits::kBlockN * Traits::kHeadDim;
template <class Traits>
inline constexpr int kGqaPartialElements =
    kPartElementsK<Traits> + Traits::kBlockN * Traits::kHeadDimV;

// Of the first part of a block of keys, counted over all.
template <class Traits>
ANYFLASH_DEVICE int64_t first_part(const BackwardScratch& params, const BackwardWorkTile& block) {
  const int64_t first =
      params.first_block(block.sequence, block.batch, block.head_k, Traits::kBlockN);
  return (first + block.first_key / Traits::kBlockN) * params.gqa_splits;
}

template <class Traits, class AccK, class AccV>
ANYFLASH_DEVICE void store_part(const BackwardScratch& params, const BackwardWorkTile& block,
                                bool nonfinite_dout, const AccK& acc_dk, const AccV& acc_dv) {
  const int64_t part = first_part<Traits>(params, block) + block.gqa_split;
  float* const sums = params.gqa_partials + part * kGqaPartialElements<Traits>;
  store_sums(sums, acc_dk, Traits::kThreads);
  store_sums(sums + kPartElementsK<Traits>, acc_dv, Traits::kThreads);
  if (threadIdx.x == 0) params.gqa_nonfinite_dout[part] = nonfinite_dout;
}

template <class Traits>
struct GqaPartialsStorage {
  alignas(128) typename Traits::template Buffer<typename Traits::TileK> k;
  alignas(128) typename Traits::template Buffer<typename Traits::TileV> v;
};

// dK and dV of a block of keys from their parts. Grid: x = all blocks of keys of all (batch, K/V
// head) pairs.
template <class Traits, class Scores>
__global__ void __launch_bounds__(Traits::kThreads)
    reduce_gqa_partials_kernel(const __grid_constant__ BackwardScratch params) {
  using namespace cute;
  auto& smem = *reinterpret_cast<GqaPartialsStorage<Traits>*>(anyflash_smem);
  const int key_blocks = (params.attention.seqlen_k + Traits::kBlockN - 1) / Traits::kBlockN;
  const int pair = static_cast<int>(blockIdx.x) / key_blocks;
  const int64_t batch = pair / params.attention.heads_k;
  const BackwardWorkTile block{sequence_of(params.attention, batch), batch,
                               pair % params.attention.heads_k, 0,
                               static_cast<int>(blockIdx.x) % key_blocks * Traits::kBlockN};
  if (block.first_key >= block.sequence.all_keys) return;

  const typename Traits::KeyMma mma;
  auto acc_dk = partition_fragment_C(mma, Shape<Int<Traits::kBlockN>, Int<Traits::kHeadDim>>{});
  auto acc_dv = partition_fragment_C(mma, Shape<Int<Traits::kBlockN>, Int<Traits::kHeadDimV>>{});
  clear(acc_dk);  // (MMA, MMA_N, MMA_D)
  clear(acc_dv);  // (MMA, MMA_N, MMA_D)
  const int64_t first = first_part<Traits>(params, block);
  bool nonfinite_dout = false;
  for (int64_t part = first; part < first + params.gqa_splits; ++part) {
    const float* const sums = params.gqa_partials + part * kGqaPartialElements<Traits>;
    add_sums(acc_dk, sums, Traits::kThreads);
    add_sums(acc_dv, sums + kPartElementsK<Traits>, Traits::kThreads);
    nonfinite_dout |= params.gqa_nonfinite_dout[part];
  }
  write_key_gradients<Traits, Scores>(params, block, smem, nonfinite_dout, acc_dk, acc_dv);
}

}  // namespace anyflash::sm80
