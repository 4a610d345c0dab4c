// Tiles of the sm_80 decoding kernels: a table.
#pragma once

#include "kernel_descriptor.h"

namespace anyflash::sm80 {

// A tile has 16, 32 or 64 rows, which are queries and heads of one group. Each warp has 16 of them.
struct DecodeConfig {
  // Which kernels have it.
  int head_dim = 0;
  bool is_8bit = false;  // the cache
  bool latent = false;

  Tile tile;
  int key_warps = 1;     // with the same rows, each of which takes some keys of a tile
  int column_warps = 1;  // with the same rows and keys, each of which makes some columns of O
  int stages = 2;        // buffers of K and V
};

namespace decode_configs {

// 255 registers a thread allow eight warps an SM.
constexpr DecodeConfig four_warps(int head_dim, int block_m, int block_n) {
  DecodeConfig c;
  c.head_dim = head_dim;
  c.tile.block_m = block_m;
  c.tile.block_n = block_n;
  c.tile.warps = 4;
  c.tile.ctas = 2;
  c.key_warps = 64 / block_m;
  return c;
}

// With 168 registers a thread.
constexpr DecodeConfig three_ctas(DecodeConfig c) {
  c.tile.ctas = 3;
  return c;
}

constexpr DecodeConfig four_buffers(DecodeConfig c) {
  c.stages = 4;
  return c;
}

// For tiles of 16 rows and 32 keys.
constexpr DecodeConfig two_warps(int head_dim) {
  DecodeConfig c = four_warps(head_dim, 16, 32);
  c.tile.warps = 2;
  c.tile.ctas = 4;
  c.key_warps = 2;
  return c;
}

// Where the output would not fit the registers of warps that each make all of its columns.
constexpr DecodeConfig split_columns(DecodeConfig c) {
  c.column_warps = c.key_warps;
  c.key_warps = 1;
  return c;
}

constexpr DecodeConfig of_8bit(DecodeConfig c) {
  c.is_8bit = true;
  return c;
}

// Latent attention (DeepSeek's MLA): a key of 576 columns, whose first 512 are its value. Pairs of
// warps make all scores of their keys, and half of the columns each; with four, scores made four
// times would take as long as memory does.
constexpr DecodeConfig latent(int block_m, int block_n) {
  DecodeConfig c = four_warps(576, block_m, block_n);
  c.latent = true;
  c.column_warps = 2;
  c.key_warps = block_m == 16 ? 2 : 1;
  return c;
}
constexpr DecodeConfig latent_16(int block_n) { return latent(16, block_n); }
constexpr DecodeConfig latent_32(int block_n) {
  DecodeConfig c = latent(32, block_n);
  c.stages = 3;
  return c;
}
constexpr DecodeConfig latent_64(int block_n) {
  DecodeConfig c = latent(64, block_n);
  c.tile.warps = 8;
  c.tile.ctas = 1;
  return c;
}

// A tile has keys for 32 KB of K and V, or fewer where their scores would fill the registers.
// Buffers have 64 KB: two CTAs fit an A100's SM, one the 99 KB of consumer GPUs. With a tile on its
// way in each CTA, memory is kept busy. Latent attention takes 90 KB with 16 and 32 rows, and
// 144 KB with 64.
inline constexpr DecodeConfig kTable[] = {
    three_ctas(four_warps(64, 16, 128)),
    three_ctas(four_buffers(four_warps(64, 32, 64))),
    four_buffers(four_warps(64, 64, 64)),
    three_ctas(four_warps(128, 16, 64)),
    four_warps(128, 32, 64),
    four_warps(128, 64, 64),
    two_warps(256),
    four_warps(256, 32, 32),
    four_warps(256, 64, 32),
    split_columns(four_warps(512, 16, 16)),
    split_columns(four_warps(512, 32, 16)),
    latent_16(32),
    latent_32(16),
    latent_64(32),

    of_8bit(four_buffers(four_warps(64, 16, 128))),
    of_8bit(four_buffers(four_warps(64, 32, 128))),
    of_8bit(four_buffers(four_warps(64, 64, 64))),
    of_8bit(four_warps(128, 16, 128)),
    of_8bit(four_buffers(four_warps(128, 32, 64))),
    of_8bit(four_buffers(four_warps(128, 64, 64))),
    of_8bit(four_warps(256, 16, 64)),
    of_8bit(four_warps(256, 32, 64)),
    of_8bit(four_warps(256, 64, 64)),
    of_8bit(split_columns(four_warps(512, 16, 32))),
    of_8bit(split_columns(four_warps(512, 32, 32))),
    of_8bit(latent_16(64)),
    of_8bit(latent_32(32)),
    of_8bit(latent_64(64)),
};

}  // namespace decode_configs

// The row of the table; head_dim is 0 if there is none.
constexpr DecodeConfig decode_config(int head_dim, int block_m, bool is_8bit, bool latent) {
  for (const DecodeConfig& c : decode_configs::kTable) {
    if (c.head_dim == head_dim && c.tile.block_m == block_m && c.is_8bit == is_8bit &&
        c.latent == latent) {
      return c;
    }
  }
  return {};
}

}  // namespace anyflash::sm80
