// What the Hopper forward kernels are told beside ForwardParams.
#pragma once

#include <cuda.h>

#include "cuda/tile_scheduler.h"
#include "params.h"

namespace anyflash::sm90 {

struct ForwardLaunch : ForwardParams {
  LptTileScheduler scheduler{};  // of (batch, head) pairs; members of a group share K and V
  int blocks = 0;                // of query rows, of all heads
  // How many blocks have been taken, beyond the one that each CTA begins with. Null if there are no
  // more.
  unsigned* taken = nullptr;
  CUtensorMap q_map;
  CUtensorMap k_map;
  CUtensorMap v_map;
  CUtensorMap out_map;  // 16-bit outputs by way of shared memory: boxes of a warp's 16 rows
};

}  // namespace anyflash::sm90
