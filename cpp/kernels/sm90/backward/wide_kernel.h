// The Hopper backward's kernel for wide heads: dK and dV of one block of keys a CTA, or a pair of
// them. Registers hold one of them for 64 keys; so a warpgroup sums dV, and another one dK.
#pragma once

#include <cute/tensor.hpp>

#include "common/launch.h"
#include "common/macros.h"
#include "cuda/backward_grid.h"
#include "cuda/gqa_partials.h"
#include "sm90/accumulator.h"
#include "sm90/backward/epilogue.h"
#include "sm90/backward/key_block.h"
#include "sm90/backward/launch_params.h"
#include "sm90/backward/load.h"
#include "sm90/backward/pair.h"
#include "sm90/backward/row_stages.h"
#include "sm90/backward/wide_mainloop.h"
#include "sm90/backward/wide_traits.h"
#include "sm90/pipeline.h"
#include "sm90/wgmma.h"
#include "variant/backward_scratch.h"
#include "variant/work_tile.h"

namespace anyflash::sm90 {

template <class Traits>
ANYFLASH_DEVICE void init_wide(typename Traits::SharedStorage& smem) {
  constexpr int kWarps = kWarpgroupThreads / 32;
  smem.k_full.init(1);
  smem.v_full.init(1);
  smem.q_ring.init(Traits::kConsumerWarps, BackwardLoader<Traits>::kQArrivals);
  smem.dout_ring.init(Traits::kConsumerWarps);
  smem.p_ring.init(kWarps, kWarps);
  if constexpr (Traits::kCtas > 1) {
    smem.from_peer.s_barriers.init();
    smem.from_peer.dp_barriers.init();
  }
  for (int& found : smem.dout_was_nonfinite) found = 0;
  fence_barrier_init();
}

// What a warpgroup sums: its accumulators, where they lie behind a part's first sum, how they are
// computed, and where they go.
template <class Traits_>
struct DvRole {
  using Traits = Traits_;
  using Acc = typename Traits::AccV;
  static constexpr int kColumns = Traits::kHeadDimV;
  static constexpr int kFirstSum = kPartElementsK<Traits>;
  ANYFLASH_DEVICE static void sum(WideStages<Traits>& stages, Acc& acc) { sum_dv(stages, acc); }
  template <class Out>
  ANYFLASH_DEVICE static auto tile(const BackwardScratch& params, const BackwardWorkTile& block) {
    return columns_of_cta<Traits, kColumns>(dv_tile<Out>(params, block));
  }
  ANYFLASH_DEVICE static void finish(const BackwardScratch& params, Acc& acc) {
    using Variant = typename Traits::Variant;
    if constexpr (kScalesP<Variant>) scale(acc, Variant::p_scale(params));
  }
};
template <class Traits_>
struct DkRole {
  using Traits = Traits_;
  using Acc = typename Traits::AccK;
  static constexpr int kColumns = Traits::kHeadDim;
  static constexpr int kFirstSum = 0;
  ANYFLASH_DEVICE static void sum(WideStages<Traits>& stages, Acc& acc) { sum_dk(stages, acc); }
  template <class Out>
  ANYFLASH_DEVICE static auto tile(const BackwardScratch& params, const BackwardWorkTile& block) {
    return columns_of_cta<Traits, kColumns>(dk_tile<Out>(params, block));
  }
  ANYFLASH_DEVICE static void finish(const BackwardScratch& params, Acc& acc) {
    scale(acc, params.ds_scale);
  }
};

// Each CTA of a pair has its own half of a part.
template <class Traits>
ANYFLASH_DEVICE int64_t part_of_cta(int64_t part) {
  return part * Traits::kCtas + rank_in_pair<Traits>();
}
template <class Role>
ANYFLASH_DEVICE float* sums_of_part(const BackwardScratch& params, int64_t part) {
  return params.gqa_partials + part * kGqaPartialElements<typename Role::Traits> + Role::kFirstSum;
}
ANYFLASH_DEVICE unsigned warpgroup_thread() { return threadIdx.x % kWarpgroupThreads; }

// Both warpgroups call it.
template <class Role>
ANYFLASH_DEVICE void write_gradient(const BackwardScratch& params, const BackwardWorkTile& block,
                                    bool nonfinite_dout, typename Role::Acc& acc) {
  using Traits = typename Role::Traits;
  Role::finish(params, acc);
  const int warp_row = static_cast<int>(warpgroup_thread()) / 32 * 16;
  visit_gradient_type<Traits>(params, [&](auto type) {
    using Out = decltype(type);
    store_gradient<Out, Role::kColumns>(Role::template tile<Out>(params, block), warp_row, acc);
    if (nonfinite_dout) {
      restore_dv<Traits>(params, block, DvRole<Traits>::template tile<Out>(params, block),
                         rank_in_pair<Traits>() * Traits::kHeadDimV);
    }
  });
}

template <class Role>
ANYFLASH_DEVICE void consume_wide(const BackwardScratch& params,
                                  typename Role::Traits::SharedStorage& smem) {
  using Traits = typename Role::Traits;
  typename Role::Acc acc;
  cute::clear(acc);
  WideStages<Traits> stages(params, smem);
  Role::sum(stages, acc);
  const BackwardWorkTile& block = smem.block;
  if (params.gqa_partials == nullptr) {
    write_gradient<Role>(params, block, stages.dout_was_nonfinite(), acc);
    return;
  }
  const int64_t part = part_of_cta<Traits>(first_part<Traits>(params, block) + block.gqa_split);
  store_sums(sums_of_part<Role>(params, part), acc, warpgroup_thread(), kWarpgroupThreads);
  if (threadIdx.x == 0) params.gqa_nonfinite_dout[part] = stages.dout_was_nonfinite();
}

// A warpgroup's gradient from the sums of parts of a block's query heads.
template <class Role>
ANYFLASH_DEVICE void reduce_wide(const BackwardScratch& params, const BackwardWorkTile& block) {
  using Traits = typename Role::Traits;
  const int64_t first = first_part<Traits>(params, block);
  typename Role::Acc acc;
  cute::clear(acc);
  bool nonfinite_dout = false;
  for (int split = 0; split < params.gqa_splits; ++split) {
    const int64_t part = part_of_cta<Traits>(first + split);
    add_sums(acc, sums_of_part<Role>(params, part), warpgroup_thread(), kWarpgroupThreads);
    nonfinite_dout |= params.gqa_nonfinite_dout[part];
  }
  write_gradient<Role>(params, block, nonfinite_dout, acc);
}

template <class Traits>
__global__ void __launch_bounds__(Traits::kCtaThreads, 1)
    wide_backward_kernel(const __grid_constant__ BackwardLaunch params) {
  auto& smem = *reinterpret_cast<typename Traits::SharedStorage*>(anyflash_smem);
  run_key_block<Traits>(
      params, smem, [&] { init_wide<Traits>(smem); },
      [&](int warpgroup) {
        if (warpgroup == 0) consume_wide<DvRole<Traits>>(params, smem);
        else consume_wide<DkRole<Traits>>(params, smem);
      });
}

// dK and dV of a block of keys from the sums of parts of their query heads. Grid: x = all blocks of
// keys of all (batch, K/V head) pairs, times the CTAs of a block.
template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    wide_reduce_gqa_partials_kernel(const __grid_constant__ BackwardScratch params) {
  BackwardWorkTile block = key_block_at<Traits::kBlockN>(params, work_block<Traits>());
  if (block.first_key >= block.sequence.all_keys) return;
  find_key_ranges<typename Traits::Variant, Traits::kBlockN>(params.attention, block);
  if (threadIdx.x < kWarpgroupThreads) reduce_wide<DvRole<Traits>>(params, block);
  else reduce_wide<DkRole<Traits>>(params, block);
}

}  // namespace anyflash::sm90
