// The forward kernel: FlashAttention-2 (arXiv 2307.08691) on mma.sync, one CTA per block of query
// rows.
#pragma once

#include <cute/tensor.hpp>

#include "common/launch.h"
#include "common/softmax.h"
#include "params.h"
#include "sm80/fwd_epilogue.h"
#include "sm80/fwd_mainloop.h"
#include "sm80/variants.h"
#include "variant/sequence.h"

namespace anyflash::sm80 {

// Grid: x = all blocks of query rows of all (batch, head) pairs. Pairs come in sections of
// heads_per_section; within a section the last row blocks, which see the most keys, start first.
template <int kBlockM>
ANYFLASH_DEVICE ForwardBlock forward_block(const ForwardParams& params, int index) {
  const int row_blocks = (params.seqlen_q + kBlockM - 1) / kBlockM;
  const int pairs = static_cast<int>(params.batch) * params.heads;
  const int section = index / (params.heads_per_section * row_blocks);
  const int first_pair = section * params.heads_per_section;
  const int section_pairs = min(params.heads_per_section, pairs - first_pair);
  const int rest = index - first_pair * row_blocks;
  const int pair = first_pair + rest % section_pairs;
  const int head = pair % params.heads;
  return ForwardBlock{sequence_of(params, pair / params.heads), pair / params.heads, head,
                      head / (params.heads / params.heads_k),
                      (row_blocks - 1 - rest / section_pairs) * kBlockM};
}

template <class Traits, class Variant>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kMinCtas)
    forward_kernel(const __grid_constant__ ForwardParams params) {
  using namespace cute;
  auto& smem = *reinterpret_cast<typename Traits::SharedStorage*>(anyflash_smem);
  ForwardBlock block = forward_block<Traits::kBlockM>(params, blockIdx.x);
  if (block.first_row >= block.sequence.seqlen_q) return;  // shorter than the longest
  if (threadIdx.x == 0) smem.block = block;

  // The softmax wants a positive scale: its sign, or zero, goes into Q, or all of it to the scores.
  const float scale_log2 = Variant::kGeneric ? kLog2E : params.scale_log2;
  const double scale = Variant::kGeneric ? 1.0 : params.softmax_scale;
  const float q_factor = scale > 0.0 ? 1.0f : scale < 0.0 ? -1.0f : 0.0f;

  auto acc_o = partition_fragment_C(typename Traits::TiledMma{},
                                    Shape<Int<Traits::kBlockM>, Int<Traits::kHeadDimV>>{});
  clear(acc_o);  // (MMA, MMA_M, MMA_N)
  OnlineSoftmax<2 * decltype(size<1>(acc_o))::value, Traits::kShape.lazy_rescale> softmax(
      scale_log2, params.max_logits != nullptr);
  const bool found_nonfinite =
      forward_mainloop<Traits, Variant>(params, block, smem, acc_o, softmax, q_factor);
  __syncthreads();     // the block is in shared memory, and every warp has done with Q
  block = smem.block;  // from there, because the loop needs the registers
  forward_epilogue<Traits, Variant>(params, block, smem, acc_o, softmax, found_nonfinite);
}

}  // namespace anyflash::sm80
