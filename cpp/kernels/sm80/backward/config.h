// Tiles of the backward's main kernel: a table by head dim and tile config.
#pragma once

#include "kernel_descriptor.h"

namespace anyflash::sm80 {

// A CTA owns block_n keys and visits tiles of block_m query rows.
struct BackwardConfig {
  // Which kernels have it.
  int head_dim = 0;  // of Q and K
  TileConfig tile_config = TileConfig::kDefault;
  bool generic = false;  // else plain, or for one feature

  Tile tile;
  // Warps along the first axis of each product; the others lie along its second axis. With
  // ping_pong, score_warps and query_warps are those of one group.
  int score_warps = 2;  // Q K^T and dO V^T: (block_m, block_n)
  int key_warps = 2;    // dS^T Q and P^T dO: (block_n, head dim)
  int query_warps = 2;  // dS K: (block_m, head dim)
  int stages = 1;       // buffers of Q and of dO
  // For fewer registers: the parts of the keys by which scores are made, and of the columns of dQ.
  int score_parts = 1;
  int query_parts = 1;
  bool reload_v = false;   // P and dS lie where V was, which comes again with every tile of rows
  bool ping_pong = false;  // two groups of warps take the tiles alternately (pingpong.h)
  // Columns of Q, dO and V that come at a time, with a launch each for dK and dV (column_chunks.h).
  // 0: all columns.
  int chunk_columns = 0;
  // What stays in registers, where some are left.
  bool keep_sequence = false;          // its lengths; else each use reads shared memory
  bool keep_store_addresses = true;    // a thread's in P and dS
  bool keep_operand_addresses = true;  // in the products' operands; else each product makes them
  // Kernels of the same dtype, head dims and features whose groups are equal give a row the same
  // bits.
  int bits_group = 0;
};

namespace backward_configs {

// Two CTAs of four warps, which wait at different times, where an A100's 164 KB of shared memory or
// a wide GPU's 228 KB hold the tiles of two.
constexpr BackwardConfig two_ctas(int block_m, int block_n) {
  BackwardConfig c;
  c.tile.block_m = block_m;
  c.tile.block_n = block_n;
  c.tile.warps = 4;
  c.tile.ctas = 2;
  c.score_parts = block_n / 64;
  return c;
}

// What a consumer GPU's 99 KB hold: one CTA of four warps.
constexpr BackwardConfig one_small_cta() {
  BackwardConfig c = two_ctas(64, 64);
  c.tile.ctas = 1;
  return c;
}

// One CTA of eight warps, where the tiles of two would be too small for what their products read in
// shared memory.
constexpr BackwardConfig one_cta(int block_m, int block_n) {
  BackwardConfig c;
  c.tile.block_m = block_m;
  c.tile.block_n = block_n;
  c.tile.warps = 8;
  c.score_warps = block_n == 128 ? 2 : 4;
  return c;
}

constexpr BackwardConfig with_stages(BackwardConfig c, int stages) {
  c.stages = stages;
  return c;
}

constexpr BackwardConfig ping_pong() {
  BackwardConfig c = one_cta(64, 128);
  c.stages = 3;
  c.score_parts = 2;
  c.ping_pong = true;
  c.keep_operand_addresses = false;  // two groups of warps leave few registers
  return c;
}

// Above head dim 128 accumulators take most registers.
constexpr BackwardConfig large(BackwardConfig c) {
  c.keep_store_addresses = false;
  return c;
}
constexpr BackwardConfig large_default(int stages) {
  BackwardConfig c = large(one_cta(64, 64));
  c.stages = stages;
  c.keep_sequence = true;
  return c;
}
constexpr BackwardConfig large_wide(int query_warps, int query_parts) {
  BackwardConfig c = large(one_cta(128, 64));
  c.query_warps = query_warps;
  c.query_parts = query_parts;
  return c;
}

// Tiles of the generic kernel are 64 by 64, because blocks of block-sparse attention are multiples
// of that. They are so small that head dims up to 128 fit the 99 KB of consumer GPUs.
constexpr BackwardConfig small_tiles(int key_warps, int stages) {
  BackwardConfig c = one_cta(64, 64);
  c.key_warps = key_warps;
  c.query_warps = key_warps;
  c.stages = stages;
  return c;
}
constexpr BackwardConfig small_tiles_compact() {
  BackwardConfig c = large(one_cta(64, 32));
  c.tile.warps = 4;
  c.bits_group = 1;
  return c;
}
constexpr BackwardConfig with_reloaded_v(BackwardConfig c) {
  c.reload_v = true;
  return c;
}

// Head dim 512: of K alone a CTA holds all columns.
constexpr BackwardConfig by_chunks(BackwardConfig c, int stages) {
  c.chunk_columns = 256;
  c.stages = stages;
  c.score_warps = 4;
  c.query_parts = c.tile.block_n == 64 ? 4 : 8;
  c.bits_group = c.tile.block_n == 64 ? 0 : 1;
  return large(c);
}

// Rows of the table: of the plain kernel and of those for one feature, or of the generic one.
constexpr BackwardConfig plain(int head_dim, TileConfig tile_config, BackwardConfig c) {
  c.head_dim = head_dim;
  c.tile_config = tile_config;
  return c;
}
constexpr BackwardConfig generic(int head_dim, TileConfig tile_config, BackwardConfig c) {
  c.generic = true;
  return plain(head_dim, tile_config, c);
}

// With a CTA's shared memory; "V 128": where the head dim of V is that.
inline constexpr BackwardConfig kTable[] = {
    plain(32, TileConfig::kDefault, two_ctas(64, 128)),                  // 56 KB
    plain(32, TileConfig::kWide, two_ctas(128, 128)),                    // 96 KB
    plain(64, TileConfig::kDefault, two_ctas(64, 128)),                  // 80 KB
    plain(96, TileConfig::kDefault, two_ctas(64, 64)),                   // 64 KB
    plain(128, TileConfig::kDefault, with_stages(one_cta(64, 128), 2)),  // 160 KB
    plain(128, TileConfig::kWide, ping_pong()),                          // 224 KB
    plain(128, TileConfig::kCompact, one_small_cta()),                   // 80 KB
    plain(192, TileConfig::kDefault, large_default(2)),                  // 160 KB, V 128: 136
    plain(192, TileConfig::kWide, large_wide(2, 3)),                     // 176 KB, V 128: 152
    plain(256, TileConfig::kDefault, large_default(1)),                  // 144 KB
    plain(256, TileConfig::kWide, large_wide(4, 4)),                     // 224 KB
    plain(512, TileConfig::kDefault, by_chunks(one_cta(64, 64), 1)),     // 136 KB
    plain(512, TileConfig::kWide, by_chunks(one_cta(64, 64), 2)),        // 200 KB

    generic(32, TileConfig::kDefault, small_tiles(4, 2)),          // 40 KB
    generic(64, TileConfig::kDefault, small_tiles(4, 2)),          // 64 KB
    generic(96, TileConfig::kDefault, small_tiles(4, 2)),          // 88 KB
    generic(128, TileConfig::kDefault, small_tiles(2, 1)),         // 80 KB
    generic(192, TileConfig::kDefault, large(small_tiles(2, 1))),  // 112 KB, V 128: 96
    generic(192, TileConfig::kCompact, small_tiles_compact()),     // 80 KB
    generic(256, TileConfig::kDefault, large(small_tiles(2, 1))),  // 144 KB
    generic(256, TileConfig::kCompact, with_reloaded_v(small_tiles_compact())),  // 96 KB
    generic(512, TileConfig::kDefault, by_chunks(small_tiles(2, 1), 1)),         // 136 KB
    generic(512, TileConfig::kCompact, by_chunks(small_tiles_compact(), 1)),     // 84 KB
};

}  // namespace backward_configs

// The row of the table; head_dim is 0 if there is none.
constexpr BackwardConfig backward_config(int head_dim, TileConfig tile_config, bool generic) {
  for (const BackwardConfig& c : backward_configs::kTable) {
    if (c.head_dim == head_dim && c.tile_config == tile_config && c.generic == generic) return c;
  }
  return {};
}

}  // namespace anyflash::sm80
