// Tiles of the sm_80 forward kernels.
#pragma once

#include "kernel_descriptor.h"

namespace anyflash::sm80 {

// A TileConfig (kernel_descriptor.h) says whose shared memory a kernel is made for: an A100's 164
// KB, the 100 KB of consumer GPUs (compute capability 8.6, 8.9 and 12.0), or the 228 KB of 9.0 and
// 10.0. What fits little memory also serves small problems: dispatch.cpp takes the forward's
// smaller tiles where larger ones would leave multiprocessors idle, and any that was measured to be
// faster.

struct ForwardConfig {
  Tile tile;
  int stages;                 // buffers of K and of V
  bool queries_in_registers;  // all the time, where shared memory would be read too often
  // Whether the output is rescaled only where a maximum has grown much: pays where the output is
  // large, and there are registers for it.
  bool lazy_rescale;
  bool commits_after_k;  // without that ptxas spills more; where it does not, a commit costs time
  // Pairs of warps share 32 rows. Each multiplies them with half of a tile's keys and makes half of
  // the output's columns. So it reads half of K and V: shared memory bounds large head dims.
  bool split_keys_across_warps = false;
};

// Head dims are those of Q and K, and of V. 16 rows a warp where 32 would not leave eight warps an
// SM: their accumulators fill the registers, or two CTAs the shared memory. Tiles that a GPU takes
// by turns hold as many keys and rescale alike, so that a row has the same bits in each.
constexpr ForwardConfig forward_tile(int head_dim, int head_dim_v, TileConfig tile_config) {
  const bool small = head_dim <= 64 && head_dim_v <= 64;
  const bool large = head_dim > 128 || head_dim_v > 128;
  const bool lazy = !small && !large;
  if (tile_config == TileConfig::kCompact)
    return {{64, 64, 4, large ? 1 : 2}, 1, false, lazy, false};
  if (small) return {{128, 64, 4, 2}, 2, true, lazy, false};
  if (large && tile_config == TileConfig::kWide)
    return {{64, 64, 4, 2}, 1, false, true, false, true};
  if (large) return {{128, 64, 8, 1}, 1, false, lazy, true};
  return {{128, 64, 4, 2}, tile_config == TileConfig::kWide ? 2 : 1, false, lazy, false};
}

// With softcap and ALiBi, which want registers of their own.
constexpr ForwardConfig scored_forward_tile(int head_dim, int head_dim_v) {
  return {forward_tile(head_dim, head_dim_v, TileConfig::kDefault).tile, 1, false, false, false};
}

// With dropout, whose draws want registers, too: at head dim 128, those of half a tile's keys.
constexpr ForwardConfig dropout_forward_tile(int head_dim, int head_dim_v) {
  ForwardConfig shape = scored_forward_tile(head_dim, head_dim_v);
  const bool large = head_dim > 128 || head_dim_v > 128;
  if (large) {
    shape.commits_after_k = true;
  } else if (head_dim > 96 || head_dim_v > 96) {
    shape.tile.block_n = 32;
    shape.lazy_rescale = true;
  }
  return shape;
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
