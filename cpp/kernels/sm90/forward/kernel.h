// The Hopper forward kernel: FlashAttention-3 (arXiv 2407.08608) with TMA, wgmma and warpgroups of
// different roles. A CTA takes blocks of query rows, one after the other.
#pragma once

#include "common/launch.h"
#include "sm90/forward/blocks.h"
#include "sm90/forward/epilogue.h"
#include "sm90/forward/launch_params.h"
#include "sm90/forward/load.h"
#include "sm90/forward/mainloop.h"
#include "sm90/pipeline.h"

namespace anyflash::sm90 {

template <class Traits>
ANYFLASH_DEVICE void init_barriers(typename Traits::SharedStorage& smem) {
  for (int warpgroup = 0; warpgroup < Traits::kConsumers; ++warpgroup) {
    smem.q_ring[warpgroup].init(kWarpgroupThreads / 32 +
                                (warpgroup == 0 ? Traits::kGuardWarps : 0));
  }
  smem.k_ring.init(Traits::kConsumerWarps);
  smem.v_ring.init(Traits::kConsumerWarps);
  for (int stage = 0; stage < Traits::kStages; ++stage) smem.v_unguarded[stage].init(1);
  fence_barrier_init();
}

template <class Traits>
ANYFLASH_DEVICE void produce(const ForwardLaunch& params, typename Traits::SharedStorage& smem) {
  const int warp = static_cast<int>(threadIdx.x - Traits::kThreads) / 32;
  if (warp > 0) {
    ValueGuard<Traits>(smem, warp - 1).guard();
  } else if (elect_lane()) {
    TileLoader<Traits> loader(params, smem);
    BlockScheduler<Traits::kBlockM, Traits::kBlockN> scheduler(params);
    scheduler.take(smem.blocks[loader.next_block()]);
    while (smem.blocks[loader.next_block()].exists()) {
      const BlockWork& block = smem.blocks[loader.next_block()];
      loader.load_first(block);
      // Consumers have done with what was there: Q's of two later blocks have been released.
      scheduler.take(smem.blocks[loader.next_block()]);
      loader.load_rest(block);
    }
    loader.end();
  }
}

template <class Traits, class Variant>
ANYFLASH_DEVICE void consume(const ForwardLaunch& params, typename Traits::SharedStorage& smem,
                             int warpgroup) {
  ForwardStages<Traits> stages(smem, warpgroup);
  for (;;) {
    const BlockWork& block = stages.wait_block();
    if (!block.exists()) break;
    typename Traits::AccO acc_o;
    cute::clear(acc_o);
    StagedSoftmax softmax(params.attention.scale_log2);
    const FinishedRows rows = forward_mainloop<Traits>(params, stages, block, acc_o, softmax);
    forward_epilogue<Traits, Variant>(params, block.tile, stages, acc_o, softmax, rows);
    stages.end_block();
  }
  stages.end();
}

template <class Traits, class Variant>
__global__ void __launch_bounds__(Traits::kCtaThreads, 1)
    forward_kernel(const __grid_constant__ ForwardLaunch params) {
  auto& smem = *reinterpret_cast<typename Traits::SharedStorage*>(anyflash_smem);
  if (threadIdx.x == 0) init_barriers<Traits>(smem);
  __syncthreads();
  // Not by run_roles(): nvcc 13.0 then inlines other things, and head dim 128's code grows by 2 %.
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
