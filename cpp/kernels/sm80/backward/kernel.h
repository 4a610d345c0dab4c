// The backward's main kernel: dK and dV of one block of keys a CTA, and what it adds to dQ.
#pragma once

#include <cute/tensor.hpp>

#include "common/launch.h"
#include "cuda/backward_grid.h"
#include "sm80/backward/epilogue.h"
#include "sm80/backward/gqa_partials.h"
#include "sm80/backward/mainloop.h"
#include "sm80/backward/mainloop_pingpong.h"
#include "sm80/forward/traits.h"
#include "variant/backward_scratch.h"
#include "variant/sequence.h"
#include "variant/work_tile.h"

namespace anyflash::sm80 {

template <class Traits, class Variant>
__global__ void __launch_bounds__(Traits::kThreads)
    backward_kernel(const __grid_constant__ BackwardScratch params) {
  using namespace cute;
  auto& smem = *reinterpret_cast<typename Traits::SharedStorage*>(anyflash_smem);
  BackwardWorkTile here = backward_block<Traits::kBlockN>(params, blockIdx.x);
  if (here.first_key >= here.sequence.all_keys) return;  // shorter than the longest
  if (threadIdx.x == 0) {
    find_key_ranges<Variant, Traits::kBlockN>(params.attention, here);
    smem.block = here;
    smem.nonfinite_keys = smem.nonfinite_dout = 0;
    smem.ping_pong.init(Traits::kRowThreads, Traits::kThreads);
  }
  __syncthreads();  // read from there, because the loop needs the registers
  const BackwardWorkTile& block = smem.block;

  const typename Traits::KeyMma mma;
  auto acc_dk = partition_fragment_C(mma, Shape<Int<Traits::kBlockN>, Int<Traits::kHeadDim>>{});
  auto acc_dv = partition_fragment_C(mma, Shape<Int<Traits::kBlockN>, Int<Traits::kHeadDimV>>{});
  clear(acc_dk);  // (MMA, MMA_N, MMA_D)
  clear(acc_dv);  // (MMA, MMA_N, MMA_D)
  if constexpr (Traits::kPingPong) {
    pingpong_mainloop<Traits, Variant>(params, block, smem, acc_dk, acc_dv);
  } else {
    backward_mainloop<Traits, Variant>(params, block, smem, acc_dk, acc_dv);
  }

  cp_async_wait<0>();
  __syncthreads();  // every warp has done with K and V, and nothing is on its way there
  const bool nonfinite_dout = smem.nonfinite_dout != 0;
  if (params.gqa_partials != nullptr) {
    store_part<Traits>(params, block, nonfinite_dout, acc_dk, acc_dv);
  } else {
    write_key_gradients<Traits, Variant>(params, block, smem, nonfinite_dout, acc_dk, acc_dv);
  }
}

// dQ = ds_scale * dq_accum, rounded. Grid: x = all tiles of block_m rows of all (batch, head)
// pairs.
template <class Traits>
__global__ void __launch_bounds__(Traits::kRowThreads)
    postprocess_dq_kernel(const __grid_constant__ BackwardScratch params) {
  using namespace cute;
  using Tile = typename Traits::TileDq;
  auto& smem = *reinterpret_cast<typename Traits::template Buffer<Tile>*>(anyflash_smem);
  const ForwardWorkTile block = row_block_at(params, Traits::kBlockM, blockIdx.x);
  const Sequence& sequence = block.sequence;
  if (block.first_row >= sequence.seqlen_q) return;

  const typename Traits::QueryMma mma;
  const float* const sums =
      params.dq_accum +
      (params.first_row(sequence, block.batch, block.head) + block.first_row) * Traits::kHeadDim;
  CUTE_UNROLL
  for (int column = 0; column < Traits::kHeadDim; column += Tile::kColumns) {
    auto acc = partition_fragment_C(mma, typename Tile::Shape{});
    const float* const tile = sums + column * Traits::kBlockM;
    CUTE_UNROLL
    for (int i = 0; i < size(acc); ++i) {
      acc(i) = tile[i * Traits::kRowThreads + threadIdx.x] * params.ds_scale;
    }
    if (column > 0) __syncthreads();  // every thread has read its pieces
    visit_gradient_type<Traits>(params, [&](auto type) {
      const auto target =
          gradient_tile<decltype(type)>(params.dq, params.dq_stride,
                                        query_rows(sequence, block.head, block.first_row),
                                        params.attention.head_dim, params.accumulates_dq)
              .from_column(column);
      store_gradient<Tile, PlainKeyOrder<Traits::kBlockM>>(target, mma, acc, smem);
    });
  }
}

}  // namespace anyflash::sm80
