// The Hopper forward kernel: FlashAttention-3 (arXiv 2407.08608) with TMA, wgmma and warpgroups of
// different roles. A CTA takes blocks of query rows, one after the other.
#pragma once

#include "common/launch.h"
#include "sm90/forward/blocks.h"
#include "sm90/forward/epilogue.h"
#include "sm90/forward/launch_params.h"
#include "sm90/forward/load.h"
#include "sm90/forward/mainloop.h"
#include "sm90/forward/tile_lists.h"
#include "sm90/pipeline.h"

namespace anyflash::sm90 {

template <class Traits>
ANYFLASH_DEVICE void init_barriers(typename Traits::SharedStorage& smem) {
  // The guard learns of blocks with Q, or from the finder's lists.
  constexpr bool kFinds = Traits::kConfig.finds_tiles;
  for (int warpgroup = 0; warpgroup < Traits::kConsumers; ++warpgroup) {
    const bool is_guarded = warpgroup == 0 && !kFinds;
    smem.q_ring[warpgroup].init(kWarpgroupThreads / 32 + (is_guarded ? Traits::kGuardWarps : 0));
  }
  if (kFinds) smem.list_ring.init(Traits::kGuardWarps + 1);
  for (auto& ring : smem.k_ring) ring.init(Traits::kConsumerWarps);
  smem.v_ring.init(Traits::kConsumerWarps);
  for (int stage = 0; stage < Traits::kStages; ++stage) smem.v_unguarded[stage].init(1);
  fence_barrier_init();
}

template <class Traits, class Variant>
ANYFLASH_DEVICE void produce(const typename Traits::Block::Launch& params,
                             typename Traits::SharedStorage& smem) {
  const int warp = static_cast<int>(threadIdx.x - Traits::kThreads) / 32;
  if (warp == 0) {
    if (TileLoader<Traits>::kIsWarp || elect_lane()) TileLoader<Traits>(params, smem).load();
  } else if (warp <= Traits::kGuardWarps) {
    ValueGuard<Traits>(smem, warp - 1).guard();
  } else if constexpr (Traits::kConfig.finds_tiles) {
    TileFinder<Traits, Variant>(params, smem).find();
  }
}

template <class Traits, class Variant>
ANYFLASH_DEVICE void consume(const typename Traits::Block::Launch& params,
                             typename Traits::SharedStorage& smem, int warpgroup) {
  ForwardStages<Traits> stages(smem, warpgroup);
  for (;;) {
    const typename Traits::Block& block = stages.wait_block();
    if (!block.exists()) break;
    typename Traits::AccO acc_o;
    cute::clear(acc_o);
    StagedSoftmax softmax(Variant::scale_log2(params.attention));
    const FinishedRows rows =
        ForwardMainloop<Traits, Variant>(params, stages, block, acc_o, softmax).run();
    forward_epilogue<Traits, Variant>(params, block, stages, acc_o, softmax, rows);
    stages.end_block();
  }
  stages.end();
}

// What all threads of a CTA do.
template <class Traits, class Variant>
ANYFLASH_DEVICE void run_forward(const typename Traits::Block::Launch& params) {
  constexpr RegisterSplit kRegisters =
      register_split(Traits::kConfig, Traits::Block::kLoadsByWarp || Traits::kConfig.finds_tiles);
  auto& smem = *reinterpret_cast<typename Traits::SharedStorage*>(anyflash_smem);
  if (threadIdx.x == 0) init_barriers<Traits>(smem);
  __syncthreads();
  // Not by run_roles(): nvcc 13.0 then inlines other things, and head dim 128's code grows by 2 %.
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / kWarpgroupThreads, 0);
  if (warpgroup == Traits::kConsumers) {
    release_registers<kRegisters.producer>();
    produce<Traits, Variant>(params, smem);
  } else {
    acquire_registers<kRegisters.consumer>();
    consume<Traits, Variant>(params, smem, warpgroup);
  }
}

template <class Traits, class Variant>
__global__ void __launch_bounds__(Traits::kCtaThreads, 1)
    forward_kernel(const __grid_constant__ ForwardLaunch params) {
  run_forward<Traits, Variant>(params);
}

}  // namespace anyflash::sm90
