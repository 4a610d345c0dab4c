// What the Hopper backward's main kernel is told beside BackwardScratch.
#pragma once

#include <cuda.h>

#include "common/macros.h"
#include "sm90/ptx.h"
#include "variant/backward_scratch.h"
#include "variant/work_tile.h"

namespace anyflash::sm90 {

struct BackwardLaunch : BackwardScratch {
  CUtensorMap q_map;
  CUtensorMap k_map;
  CUtensorMap v_map;
  CUtensorMap dout_map;
  // By a warp's rows; unless gradients are float32, or come in parts.
  CUtensorMap dk_map;
  CUtensorMap dv_map;
};

// Where a block's tiles begin in the tensors of keys, and in those of rows.
ANYFLASH_DEVICE TileCoordinates key_coordinates(const BackwardWorkTile& block, int column = 0) {
  return {column, static_cast<int>(block.sequence.first_k) + block.first_key, block.head_k,
          static_cast<int>(block.sequence.batch)};
}
ANYFLASH_DEVICE TileCoordinates row_coordinates(const BackwardWorkTile& block, int head, int row,
                                                int column = 0) {
  return {column, static_cast<int>(block.sequence.first_q) + row, head,
          static_cast<int>(block.sequence.batch)};
}

}  // namespace anyflash::sm90
