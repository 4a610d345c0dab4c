// What the Hopper forward kernels are told beside ForwardParams.
#pragma once

#include <cuda.h>

#include "cuda/tile_scheduler.h"
#include "params.h"

namespace anyflash::sm90 {

struct ForwardLaunch : ForwardParams {
  LptTileScheduler scheduler{};  // of (batch, head) pairs; members of a group share K and V
  int blocks = 0;                // of query rows, of all heads
  // How many blocks have been taken, beyond the one that each CTA begins with. Null where a CTA
  // takes every gridDim.x-th block.
  unsigned* taken = nullptr;
  bool ping_pong = false;  // where the configuration has it
  CUtensorMap q_map;
  CUtensorMap k_map;
  CUtensorMap v_map;
};

}  // namespace anyflash::sm90
