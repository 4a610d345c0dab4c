// The Hopper backward's main kernel, with TMA, wgmma and warpgroups of different roles: dK and dV
// of one block of keys a CTA, and what it adds to dQ.
#pragma once

#include <cute/tensor.hpp>

#include "common/dependent_launch.h"
#include "common/launch.h"
#include "cuda/backward_grid.h"
#include "cuda/gqa_partials.h"
#include "sm90/backward/epilogue.h"
#include "sm90/backward/key_block.h"
#include "sm90/backward/launch_params.h"
#include "sm90/backward/load.h"
#include "sm90/backward/mainloop.h"
#include "sm90/backward/traits.h"
#include "sm90/pipeline.h"
#include "sm90/ptx.h"
#include "sm90/roles.h"
#include "variant/backward_scratch.h"
#include "variant/sequence.h"
#include "variant/work_tile.h"

namespace anyflash::sm90 {

template <class Traits>
ANYFLASH_DEVICE void init_backward(typename Traits::SharedStorage& smem) {
  smem.k_full.init(1);
  smem.v_full.init(1);
  smem.q_ring.init(Traits::kConsumerWarps, BackwardLoader<Traits>::kQArrivals);
  smem.dout_ring.init(Traits::kConsumerWarps);
  smem.ds_ring.init(Traits::kConsumerWarps, Traits::kConsumerWarps);
  for (uint32_t& keys : smem.nonfinite_keys) keys = 0;
  for (int& found : smem.dout_was_nonfinite) found = 0;
  fence_barrier_init();
}

template <class Traits, bool kAddsToDq>
ANYFLASH_DEVICE void consume_rows(const BackwardLaunch& params,
                                  typename Traits::SharedStorage& smem, int warpgroup) {
  typename Traits::AccK acc_dk;
  typename Traits::AccV acc_dv;
  cute::clear(acc_dk);
  cute::clear(acc_dv);
  BackwardStages<Traits> stages(params, smem, warpgroup);
  backward_mainloop<Traits, kAddsToDq>(stages, acc_dk, acc_dv);
  if (kAddsToDq) add_last_dq(stages);
  using Variant = typename Traits::Variant;
  if constexpr (kScalesP<Variant>) scale(acc_dv, Variant::p_scale(params));
  const bool nonfinite_dout = stages.dout_was_nonfinite();
  const BackwardWorkTile& block = smem.block;
  const bool is_part = params.gqa_partials != nullptr;
  const bool is_staged = !is_part && params.grad_dtype != DType::kFloat32;
  if (is_staged) {
    stage_key_gradients<Traits>(params, block, smem, stages.free_rows(), acc_dk, acc_dv);
  } else if (is_part) {
    store_part<Traits>(params, block, nonfinite_dout, acc_dk, acc_dv);
  } else {
    write_key_gradients<Traits, float>(params, block, nonfinite_dout, acc_dk, acc_dv);
  }
  if (is_staged && nonfinite_dout) {
    if (threadIdx.x % 32 == 0) wait_stores();
    fence_all_writes();
    restore_dv<Traits>(params, block, dv_tile<typename Traits::Element>(params, block));
  }
  if (threadIdx.x % 32 == 0) wait_stores_read();  // the CTA's shared memory goes to another one
}

template <class Traits, bool kAddsToDq>
__global__ void __launch_bounds__(Traits::kCtaThreads, 1)
    backward_kernel(const __grid_constant__ BackwardLaunch params) {
  auto& smem = *reinterpret_cast<typename Traits::SharedStorage*>(anyflash_smem);
  run_key_block<Traits>(
      params, smem, [&] { init_backward<Traits>(smem); },
      [&](int warpgroup) { consume_rows<Traits, kAddsToDq>(params, smem, warpgroup); });
}

// dK and dV of a block of keys from the sums of parts of their query heads. Grid: x = all blocks of
// keys of all (batch, K/V head) pairs.
template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    reduce_gqa_partials_kernel(const __grid_constant__ BackwardScratch params) {
  BackwardWorkTile block = key_block_at<Traits::kBlockN>(params, blockIdx.x);
  if (block.first_key >= block.sequence.all_keys) return;
  find_key_ranges<typename Traits::Variant, Traits::kBlockN>(params.attention, block);
  typename Traits::AccK acc_dk;
  typename Traits::AccV acc_dv;
  cute::clear(acc_dk);
  cute::clear(acc_dv);
  const bool nonfinite_dout = add_parts<Traits>(params, block, acc_dk, acc_dv);
  visit_gradient_type<Traits>(params, [&](auto type) {
    write_key_gradients<Traits, decltype(type)>(params, block, nonfinite_dout, acc_dk, acc_dv);
  });
}

// dQ = ds_scale * dq_accum, rounded. Grid: x = all tiles of block_m rows of all (batch, head)
// pairs.
template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads)
    postprocess_dq_kernel(const __grid_constant__ BackwardScratch params) {
  const ForwardWorkTile block = row_block_at(params, Traits::kBlockM, blockIdx.x);
  const Sequence& sequence = block.sequence;
  wait_previous_kernel();
  if (block.first_row >= sequence.seqlen_q) return;

  typename Traits::AccQ acc;
  const int64_t first_row = params.first_row(sequence, block.batch, block.head) + block.first_row;
  const float* const sums =
      params.dq_accum + first_row * Traits::kDqColumns + threadIdx.x / 32 * Traits::kDqWarpElements;
  CUTE_UNROLL
  for (int i = 0; i < size(acc); i += 4) {
    const float4 four = reinterpret_cast<const float4*>(sums + 32 * i)[threadIdx.x % 32];
    acc(i) = four.x * params.ds_scale;
    acc(i + 1) = four.y * params.ds_scale;
    acc(i + 2) = four.z * params.ds_scale;
    acc(i + 3) = four.w * params.ds_scale;
  }
  const int warp = threadIdx.x / 32;
  const int first_column = Traits::kSplitsDqRows ? 0 : warp / 4 * Traits::kDqPartColumns;
  const int warp_row = (Traits::kSplitsDqRows ? warp : warp % 4) * 16;
  visit_gradient_type<Traits>(params, [&](auto type) {
    const auto target =
        gradient_tile<decltype(type)>(params.dq, params.dq_stride,
                                      query_rows(sequence, block.head, block.first_row),
                                      params.attention.head_dim, params.accumulates_dq)
            .from_column(first_column);
    store_dq<decltype(type), Traits::kDqPartColumns>(target, warp_row, acc);
  });
}

}  // namespace anyflash::sm90
