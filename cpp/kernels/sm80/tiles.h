// Tile shapes of the sm_80 kernels, one row per head dim.
#pragma once

#include "kernel.h"

namespace anyflash::sm80 {

constexpr Tile forward_tile(int head_dim) {
  if (head_dim <= 64) return {128, 64, 4};
  if (head_dim <= 128) return {128, 64, 4};
  return {128, 64, 8};
}

}  // namespace anyflash::sm80
