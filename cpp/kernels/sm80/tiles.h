// Tile shapes of the sm_80 kernels.
#pragma once

#include "kernel.h"

namespace anyflash::sm80 {

// Head dims are those of Q and K, and of V. 16 rows a warp where 32 would not leave eight warps an
// SM: their accumulators fill the registers, or two CTAs the shared memory.
constexpr Tile forward_tile(int head_dim, int head_dim_v) {
  return head_dim <= 128 && head_dim_v <= 128 ? Tile{128, 64, 4} : Tile{128, 64, 8};
}

// 16 rows a warp, because the features need registers of their own, and 64 a CTA: blocks of block-
// sparse attention are multiples of 64, so that a tile lies in one.
constexpr Tile generic_forward_tile(int head_dim, int head_dim_v) {
  return head_dim <= 128 && head_dim_v <= 128 ? Tile{64, 64, 4} : Tile{64, 32, 4};
}

// CTAs that an SM must hold, which bounds registers: small head dims hide latencies with three, the
// others cannot afford it.
constexpr int generic_min_ctas(int head_dim) { return head_dim <= 64 ? 3 : 2; }

}  // namespace anyflash::sm80
