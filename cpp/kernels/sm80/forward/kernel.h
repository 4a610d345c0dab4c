// The forward kernel: FlashAttention-2 (arXiv 2307.08691) on mma.sync, one CTA per block of query
// rows.
#pragma once

#include <cute/tensor.hpp>

#include "common/launch.h"
#include "common/math.h"
#include "cuda/tile_scheduler.h"
#include "params.h"
#include "sm80/forward/epilogue.h"
#include "sm80/forward/mainloop.h"
#include "variant/forward_variants.h"
#include "variant/sequence.h"

namespace anyflash::sm80 {

// What the forward kernels are told beside ForwardParams.
struct ForwardLaunch : ForwardParams {
  LptTileScheduler scheduler{};  // of (batch, head) pairs; members of a group share K and V
  float q_factor = 1.0f;  // what Q is multiplied by: 1, or the scale's sign or 0 (scale_log2)
};

// Grid: x = all blocks of query rows, in the order of params.scheduler.
template <class Traits, class Variant>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kConfig.min_ctas)
    forward_kernel(const __grid_constant__ ForwardLaunch params) {
  using namespace cute;
  auto& smem = *reinterpret_cast<typename Traits::SharedStorage*>(anyflash_smem);
  ForwardWorkTile work_tile =
      row_block_at<Traits::kBlockM>(params.scheduler, params.attention, blockIdx.x);
  if (work_tile.first_row >= work_tile.sequence.seqlen_q) return;  // shorter than the longest
  if (threadIdx.x == 0) smem.work_tile = work_tile;
  // Variants that ask about tiles all along find it there: the loop needs the registers.
  if constexpr (Variant::kSkipsTiles) __syncthreads();
  const ForwardWorkTile& in_loop = Variant::kSkipsTiles ? smem.work_tile : work_tile;

  // The softmax wants a positive scale: its sign, or zero, goes into Q, or all of it to the scores.
  const float scale_log2 = Variant::kNaturalUnits ? kLog2E : params.attention.scale_log2;
  const float q_factor = Variant::kNaturalUnits ? 1.0f : params.q_factor;

  typename Traits::AccO acc_o;
  clear(acc_o);
  typename Traits::Softmax softmax(scale_log2, params.max_logits != nullptr);
  const bool found_nonfinite = ForwardMainloop<Traits, Variant>::run(
      params.attention, in_loop, smem, acc_o, softmax, q_factor);
  __syncthreads();             // the work tile is in shared memory, and every warp has done with Q
  work_tile = smem.work_tile;  // from there, because the loop needs the registers
  forward_epilogue<Traits, Variant>(params, work_tile, smem, acc_o, softmax, found_nonfinite,
                                    TensorKeys{});
}

}  // namespace anyflash::sm80
