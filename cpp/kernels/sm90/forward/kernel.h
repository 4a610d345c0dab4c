// The Hopper forward kernel: FlashAttention-3 (arXiv 2407.08608) with TMA, wgmma and warpgroups of
// different roles. A CTA takes blocks of query rows, one after the other.
#pragma once

#include "common/launch.h"
#include "sm90/forward/epilogue.h"
#include "sm90/forward/launch_params.h"
#include "sm90/forward/load.h"
#include "sm90/forward/mainloop.h"
#include "sm90/pipeline.h"
#include "variant/mask.h"
#include "variant/sequence.h"
#include "variant/work_tile.h"

namespace anyflash::sm90 {

// A head's last row blocks, which see the most keys, come first.
template <int kBlockM>
ANYFLASH_DEVICE ForwardWorkTile forward_block(const ForwardLaunch& params, int index) {
  const LptTileScheduler::TileCoord place = params.scheduler.tile_at(index);
  const int row_blocks = (params.attention.seqlen_q + kBlockM - 1) / kBlockM;
  return ForwardWorkTile{sequence_of(params.attention, place.batch), place.batch, place.head,
                         place.group, (row_blocks - 1 - place.block) * kBlockM};
}

// Calls work(block, mask, range) for each of this CTA's blocks of rows, in the same order for all
// of its warps. Unsigned: the last index and a grid's size may add up to more than 2^31.
template <class Traits, class Work>
ANYFLASH_DEVICE void for_each_block(const ForwardLaunch& params, const Work& work) {
  const auto blocks = static_cast<unsigned>(params.blocks);
  for (unsigned index = blockIdx.x; index < blocks; index += gridDim.x) {
    const ForwardWorkTile block = forward_block<Traits::kBlockM>(params, static_cast<int>(index));
    const Sequence& sequence = block.sequence;
    if (block.first_row >= sequence.seqlen_q) continue;  // shorter than the longest
    const Mask mask(sequence.seqlen_q, sequence.seqlen_k, params.attention.window);
    work(block, mask, mask.k_range(block.first_row, Traits::kBlockM, Traits::kBlockN));
  }
}

template <class Traits>
ANYFLASH_DEVICE void init_barriers(typename Traits::SharedStorage& smem) {
  smem.q_full.init(1);
  smem.q_empty.init(Traits::kConsumerWarps + Traits::kGuardWarps);
  smem.k_ring.init(Traits::kConsumerWarps);
  smem.v_ring.init(Traits::kConsumerWarps);
  for (int stage = 0; stage < Traits::kStages; ++stage) {
    smem.v_guarded[stage].init(Traits::kGuardWarps);
  }
  fence_barrier_init();
}

template <class Traits>
ANYFLASH_DEVICE void produce(const ForwardLaunch& params, typename Traits::SharedStorage& smem) {
  const int warp = static_cast<int>(threadIdx.x - Traits::kThreads) / 32;
  if (warp > 0) {
    ValueGuard<Traits> guard(smem, warp - 1);
    for_each_block<Traits>(params, [&](const ForwardWorkTile&, const Mask&, const KRange& range)
                                       ANYFLASH_INLINE_LAMBDA { guard.guard(range); });
  } else if (elect_lane()) {
    TileLoader<Traits> loader(params, smem);
    for_each_block<Traits>(params,
                           [&](const ForwardWorkTile& block, const Mask&, const KRange& range)
                               ANYFLASH_INLINE_LAMBDA { loader.load(block, range); });
  }
}

template <class Traits, class Variant>
ANYFLASH_DEVICE void consume(const ForwardLaunch& params, typename Traits::SharedStorage& smem,
                             int warpgroup) {
  ForwardStages<Traits> stages(smem, warpgroup);
  OutputRows<Traits> output(smem);
  for_each_block<Traits>(params, [&](const ForwardWorkTile& block, const Mask& mask,
                                     const KRange& range) ANYFLASH_INLINE_LAMBDA {
    typename Traits::AccO acc_o;
    cute::clear(acc_o);
    StagedSoftmax softmax(params.attention.scale_log2);
    stages.wait_queries();
    forward_mainloop<Traits>(stages, VisibleKeys(mask, block.first_row), range, acc_o, softmax);
    forward_epilogue<Traits, Variant>(params, block, stages, output, acc_o, softmax);
  });
  stages.end_ping_pong();
  output.wait_read();  // shared memory is given back at the end
}

template <class Traits, class Variant>
__global__ void __launch_bounds__(Traits::kCtaThreads, 1)
    forward_kernel(const __grid_constant__ ForwardLaunch params) {
  auto& smem = *reinterpret_cast<typename Traits::SharedStorage*>(anyflash_smem);
  if (threadIdx.x == 0) init_barriers<Traits>(smem);
  __syncthreads();
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / kWarpgroupThreads, 0);
  if (warpgroup == Traits::kConsumers) {
    release_registers<Traits::kRegisters.producer>();
    produce<Traits>(params, smem);
  } else {
    acquire_registers<Traits::kRegisters.consumer>();
    consume<Traits, Variant>(params, smem, warpgroup);
  }
}

}  // namespace anyflash::sm90
