// Tiles of the sm_80 decoding kernels.
#pragma once

#include "kernel_descriptor.h"

namespace anyflash::sm80 {

// Decoding: tiles of 16, 32 or 64 rows, which are queries and heads of one group. Warps that share
// their rows each take some keys of a tile (key_warps). Where the output would not fit their
// registers, each makes some of its columns, and all scores of its keys (column_warps).
struct DecodeConfig {
  Tile tile;
  int row_warps;
  int key_warps;
  int column_warps;
  int stages;  // buffers of K and V
};

// A tile has keys for 32 KB of K and V, or fewer where their scores would fill the registers.
// Buffers have 64 KB: two CTAs fit an A100's SM, one the 99 KB of consumer GPUs. With a tile on its
// way in each CTA, memory is kept busy.
constexpr DecodeConfig decode_tile(int head_dim, int block_m, bool is_8bit) {
  const int key_bytes = 2 * head_dim * (is_8bit ? 1 : 2);
  const int most = block_m == 64 ? 64 : 128;
  const int block_n = 32 * 1024 / key_bytes < most ? 32 * 1024 / key_bytes : most;
  const int buffers = 64 * 1024 / (block_n * key_bytes);
  const int row_warps = block_m / 16;
  const int column_warps = head_dim > 256 ? 4 / row_warps : 1;
  const int most_key_warps = 4 / (row_warps * column_warps);
  const int key_warps = most_key_warps < block_n / 16 ? most_key_warps : block_n / 16;
  const int warps = row_warps * key_warps * column_warps;
  // Registers: 168 a thread with 12 warps an SM, 255 with 8.
  const int sm_warps = block_m <= 32 && head_dim <= 128 && !is_8bit ? 12 : 8;
  DecodeConfig config{};
  config.tile = {block_m, block_n, warps, sm_warps / warps};
  config.row_warps = row_warps;
  config.key_warps = key_warps;
  config.column_warps = column_warps;
  config.stages = buffers < 4 ? buffers : 4;
  return config;
}

// Latent attention (DeepSeek's MLA): a key of 576 columns, whose first 512 are its value. Pairs of
// warps make all scores of their keys, and half of the columns each; with four, scores made four
// times would take as long as memory does. 16 and 32 rows take 90 KB, 64 rows 144.
constexpr DecodeConfig latent_tile(int block_m, bool is_8bit) {
  DecodeConfig config{};
  config.row_warps = block_m / 16;
  config.key_warps = block_m == 16 ? 2 : 1;
  config.column_warps = 2;
  config.stages = block_m == 32 ? 3 : 2;
  const int block_n = (block_m == 32 ? 16 : 32) * (is_8bit ? 2 : 1);
  const int warps = config.row_warps * config.key_warps * config.column_warps;
  config.tile = {block_m, block_n, warps, 8 / warps};
  return config;
}

}  // namespace anyflash::sm80
