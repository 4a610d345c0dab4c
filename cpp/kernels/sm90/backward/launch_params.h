// What the Hopper backward's main kernel is told beside BackwardScratch.
#pragma once

#include <cuda.h>

#include "variant/backward_scratch.h"

namespace anyflash::sm90 {

struct BackwardLaunch : BackwardScratch {
  CUtensorMap q_map;
  CUtensorMap k_map;
  CUtensorMap v_map;
  CUtensorMap dout_map;
};

}  // namespace anyflash::sm90
