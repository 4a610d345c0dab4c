// What a CTA of either main kernel does before its consumers begin, and who does what then.
#pragma once

#include "common/dependent_launch.h"
#include "common/macros.h"
#include "cuda/backward_grid.h"
#include "sm90/backward/launch_params.h"
#include "sm90/backward/load.h"
#include "sm90/backward/pair.h"
#include "sm90/backward/row_stages.h"
#include "sm90/roles.h"
#include "variant/work_tile.h"

namespace anyflash::sm90 {

// init_barriers() is called by one thread, and consume(warpgroup) by all consumers, which find the
// CTA's block of keys in smem.block.
template <class Traits, class InitBarriers, class Consume>
ANYFLASH_DEVICE void run_key_block(const BackwardLaunch& params,
                                   typename Traits::SharedStorage& smem,
                                   const InitBarriers& init_barriers, const Consume& consume) {
  if (threadIdx.x == 0) prefetch_tensor_maps(params);
  BackwardWorkTile block = backward_block<Traits::kBlockN>(params, work_block<Traits>());
  allow_next_kernel();
  if (block.first_key >= block.sequence.all_keys) {  // shorter than the longest
    wait_previous_kernel();
    return;
  }
  const bool is_loader = loads<Traits>();
  if (is_loader) {
    if (leads<Traits>()) {
      smem.block = block;
      init_barriers();
    }
    load_first<Traits>(params, block, smem);
  }
  __syncthreads();
  meet_peer<Traits>();
  run_roles<Traits>(
      [&] {
        if (is_loader) load_rest<Traits>(params, block, smem);
      },
      [&](int warpgroup) {
        find_visible_rows<Traits>(params, block, smem);
        consume(warpgroup);
      });
}

}  // namespace anyflash::sm90
