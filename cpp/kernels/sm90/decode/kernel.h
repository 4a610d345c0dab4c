// Decoding on Hopper: attention of a few queries to a cache of keys and values (Flash-Decoding,
// https://crfm.stanford.edu/2023/10/12/flashdecoding.html). One warp has TMA bring K and V, and one
// or two warpgroups compute.
#pragma once

#include <type_traits>

#include "common/dependent_launch.h"
#include "common/launch.h"
#include "cuda/decode_work_tile.h"
#include "sm90/decode/converted_tiles.h"
#include "sm90/decode/epilogue.h"
#include "sm90/decode/loader.h"
#include "sm90/decode/mainloop.h"
#include "sm90/decode/paired_tiles.h"
#include "sm90/decode/traits.h"
#include "sm90/pipeline.h"
#include "sm90/ptx.h"
#include "sm90/roles.h"

namespace anyflash::sm90 {

template <class Traits>
ANYFLASH_DEVICE void init_barriers(typename Traits::SharedStorage& smem) {
  if constexpr (Traits::kPairsTiles) {
    for (auto& tile : smem.of_tiles) {
      for (auto& part : tile) part.init(kWarpgroupThreads / 32);
    }
  } else {
    smem.ring.init(Traits::kConsumerWarps);
  }
}

template <class Traits>
using ComputingWarpgroup = std::conditional_t<
    Traits::kPairsTiles, PairedTiles<Traits>,
    std::conditional_t<Traits::kSharesRows, ConvertedTiles<Traits>, DecodeWarpgroup<Traits>>>;

// By the loader's warp: the block, which it tells the others, and its tiles.
template <class Traits>
ANYFLASH_DEVICE void load_split(const DecodeLaunch& params, typename Traits::SharedStorage& smem) {
  const bool leads = threadIdx.x % 32 == 0;
  if (leads) {
    prefetch_tensor_map(params.k_map);
    if (!Traits::kLatent) prefetch_tensor_map(params.v_map);
    init_barriers<Traits>(smem);
  }
  const DecodeWorkTile block =
      decode_block<Traits::kBlockM, Traits::kBlockN>(params, static_cast<int>(blockIdx.x));
  if (leads) {
    if constexpr (Traits::kJoinsInCluster) {
      if (params.splits_in_cluster && block.rows > 0) {
        smem.inbox.arrived.expect(inbox_bytes<Traits>(params, block));
      }
    }
    smem.block = block;
    fence_barrier_init();
  }
  __syncwarp();  // the block is in shared memory, and barriers are ready
  arrive_named(static_cast<int>(NamedBarrier::kBlock), Traits::kConsumerThreads + 32);
  if (params.splits_in_cluster) cluster_arrive();
  if (block.rows <= 0) return;
  if constexpr (Traits::kPairsTiles) load_pairs<Traits>(params, block, smem);
  else load_keys_and_values<Traits>(params, block, smem);
  allow_next_kernel();  // not earlier: CTAs that wait for this kernel take places on SMs
  if (params.splits_in_cluster) cluster_wait();
}

// The result of a cluster's splits.
template <class Traits>
ANYFLASH_DEVICE void join_cluster(const DecodeLaunch& params,
                                  typename Traits::SharedStorage& smem) {
  if (params.out_dtype == DType::kFloat32) join_splits<Traits, float>(params, smem.block, smem);
  else join_splits<Traits, typename Traits::Element>(params, smem.block, smem);
}

// By the other warps: attention of their rows to the split's keys.
template <class Traits>
ANYFLASH_DEVICE void compute_split(const DecodeLaunch& params,
                                   typename Traits::SharedStorage& smem) {
  if (params.splits_in_cluster) cluster_arrive();
  sync_named(static_cast<int>(NamedBarrier::kBlock), Traits::kConsumerThreads + 32);
  const DecodeWorkTile& block = smem.block;
  if (block.rows <= 0) return;
  const bool is_part = params.num_splits > 1 && !params.splits_in_cluster;
  if (is_part && block.keys.begin >= block.keys.end) {
    store_nothing<Traits>(params, block);
    return;
  }
  {
    ComputingWarpgroup<Traits> warpgroup(params, smem);
    warpgroup.load_queries();
    warpgroup.run();
  }
  if (params.splits_in_cluster) {
    if constexpr (Traits::kJoinsInCluster) {
      cluster_wait();  // all inboxes are ready
      send_result<Traits>(params, block, smem);
    }
  } else if (params.out_dtype == DType::kFloat32) {
    store_result<Traits, float>(params, block, smem);
  } else {
    store_result<Traits, typename Traits::Element>(params, block, smem);
  }
}

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kConfig.ctas)
    decode_kernel(const __grid_constant__ DecodeLaunch params) {
  auto& smem = *reinterpret_cast<typename Traits::SharedStorage*>(anyflash_smem);
  const auto load = [&] {
    if (threadIdx.x / 32 == Traits::kConsumerWarps) load_split<Traits>(params, smem);
  };
  const auto compute = [&](int) { compute_split<Traits>(params, smem); };
  if constexpr (Traits::kHandsRegistersOver) run_roles<Traits>(load, compute);
  else if (threadIdx.x < Traits::kConsumerThreads) compute(0);
  else load();
  if constexpr (Traits::kJoinsInCluster) {
    if (params.splits_in_cluster && smem.block.rows > 0) join_cluster<Traits>(params, smem);
  }
}

}  // namespace anyflash::sm90
