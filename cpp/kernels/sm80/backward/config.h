// Tiles of the sm_80 backward kernels.
#pragma once

#include "kernel_descriptor.h"

namespace anyflash::sm80 {

// The backward's main kernel: a CTA owns block_n keys and visits tiles of block_m query rows.
struct BackwardConfig {
  Tile tile;
  // Warps along the first axis of each product; the others lie along its second axis.
  int score_warps;        // Q K^T and dO V^T: (block_m, block_n)
  int key_warps;          // dS^T Q and P^T dO: (block_n, head dim)
  int query_warps;        // dS K: (block_m, head dim)
  int stages;             // buffers of Q and of dO
  bool reload_v = false;  // P and dS lie where V was, which comes again with every tile of rows
  // For fewer registers: scores are made by so many parts of the keys, and dQ of its columns.
  int score_parts = 1;
  int query_parts = 1;
  // Two groups of warps take the tiles in turns: score_warps and query_warps are one group's.
  bool ping_pong = false;
};

// Two CTAs of four warps, which wait at different times, where an A100's 164 KB of shared memory or
// a wide GPU's 228 KB hold the tiles of two; one of eight where these would be too small for what
// their products read there.
constexpr BackwardConfig backward_tile(int head_dim, TileConfig tile_config) {
  if (tile_config == TileConfig::kWide) {
    if (head_dim <= 32) return {{128, 128, 4, 2}, 2, 2, 2, 1, false, 2};
    if (head_dim <= 128) return {{64, 128, 8}, 2, 2, 2, 3, false, 2, 1, true};
    return {{128, 64, 8}, 4, 2, head_dim <= 192 ? 2 : 4, 1, false, 1, head_dim / 64};
  }
  if (tile_config == TileConfig::kCompact) return {{64, 64, 4}, 2, 2, 2, 1};
  if (head_dim <= 64) return {{64, 128, 4, 2}, 2, 2, 2, 1, false, 2};
  if (head_dim <= 96) return {{64, 64, 4, 2}, 2, 2, 2, 1};
  if (head_dim <= 128) return {{64, 128, 8}, 2, 2, 2, 2};
  return {{64, 64, 8}, 4, 2, 2, head_dim <= 192 ? 2 : 1};
}

// 64 by 64, because blocks of block-sparse attention are multiples of that, and so small that head
// dims up to 128 fit the 99 KB of consumer GPUs; for 192 and 256 there are tiles that do.
constexpr BackwardConfig generic_backward_tile(int head_dim, TileConfig tile_config) {
  if (tile_config == TileConfig::kCompact) return {{64, 32, 4}, 4, 2, 2, 1, head_dim > 192};
  const int key_warps = head_dim <= 96 ? 4 : 2;
  return {{64, 64, 8}, 4, key_warps, key_warps, head_dim <= 96 ? 2 : 1};
}

}  // namespace anyflash::sm80
