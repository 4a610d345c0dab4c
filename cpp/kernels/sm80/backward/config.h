// Tiles of the backward's main kernel: a table by head dim and tile config.
#pragma once

#include "kernel_descriptor.h"

namespace anyflash::sm80 {

// A CTA owns block_n keys and visits tiles of block_m query rows.
struct BackwardConfig {
  Tile tile;
  // Warps along the first axis of each product; the others lie along its second axis. With
  // ping_pong, score_warps and query_warps are those of one group.
  int score_warps = 2;  // Q K^T and dO V^T: (block_m, block_n)
  int key_warps = 2;    // dS^T Q and P^T dO: (block_n, head dim)
  int query_warps = 2;  // dS K: (block_m, head dim)
  int stages = 1;       // buffers of Q and of dO
  // For fewer registers: scores are made by so many parts of the keys, and dQ of its columns.
  int score_parts = 1;
  int query_parts = 1;
  bool reload_v = false;   // P and dS lie where V was, which comes again with every tile of rows
  bool ping_pong = false;  // two groups of warps take the tiles alternately (pingpong.h)
  // Q, dO and V come by so many columns, dK and dV by a launch each (column_chunks.h); 0: whole.
  int chunk_columns = 0;
  // What stays in registers, where some are left:
  // - the sequence's lengths; else each use reads them from shared memory;
  // - a thread's addresses in P and dS;
  // - all of its addresses in the products' operands; else each product makes them from one.
  bool keep_sequence = false;
  bool keep_store_addresses = true;
  bool keep_operand_addresses = true;
  // Kernels of the same dtype, head dims and features whose groups are equal give a row the same
  // bits.
  int bits_group = 0;
};

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
constexpr BackwardConfig generic(int key_warps, int stages) {
  BackwardConfig c = one_cta(64, 64);
  c.key_warps = key_warps;
  c.query_warps = key_warps;
  c.stages = stages;
  return c;
}
constexpr BackwardConfig generic_compact(bool reload_v) {
  BackwardConfig c = large(one_cta(64, 32));
  c.tile.warps = 4;
  c.reload_v = reload_v;
  c.bits_group = 1;
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

// Head dim of Q and K, whose shared memory, the plain kernel's tiles or the generic one's.
struct BackwardConfigRow {
  int head_dim;
  TileConfig tile_config;
  bool generic;
  BackwardConfig config;
};

// With a CTA's shared memory; "V 128": where the head dim of V is that.
inline constexpr BackwardConfigRow kBackwardConfigs[] = {
    {32, TileConfig::kDefault, false, two_ctas(64, 128)},                  // 56 KB
    {32, TileConfig::kWide, false, two_ctas(128, 128)},                    // 96 KB
    {64, TileConfig::kDefault, false, two_ctas(64, 128)},                  // 80 KB
    {96, TileConfig::kDefault, false, two_ctas(64, 64)},                   // 64 KB
    {128, TileConfig::kDefault, false, with_stages(one_cta(64, 128), 2)},  // 160 KB
    {128, TileConfig::kWide, false, ping_pong()},                          // 224 KB
    {128, TileConfig::kCompact, false, one_small_cta()},                   // 80 KB
    {192, TileConfig::kDefault, false, large_default(2)},                  // 160 KB, V 128: 136
    {192, TileConfig::kWide, false, large_wide(2, 3)},                     // 176 KB, V 128: 152
    {256, TileConfig::kDefault, false, large_default(1)},                  // 144 KB
    {256, TileConfig::kWide, false, large_wide(4, 4)},                     // 224 KB
    {512, TileConfig::kDefault, false, by_chunks(one_cta(64, 64), 1)},     // 136 KB
    {512, TileConfig::kWide, false, by_chunks(one_cta(64, 64), 2)},        // 200 KB

    {32, TileConfig::kDefault, true, generic(4, 2)},                          // 40 KB
    {64, TileConfig::kDefault, true, generic(4, 2)},                          // 64 KB
    {96, TileConfig::kDefault, true, generic(4, 2)},                          // 88 KB
    {128, TileConfig::kDefault, true, generic(2, 1)},                         // 80 KB
    {192, TileConfig::kDefault, true, large(generic(2, 1))},                  // 112 KB, V 128: 96
    {192, TileConfig::kCompact, true, generic_compact(false)},                // 80 KB
    {256, TileConfig::kDefault, true, large(generic(2, 1))},                  // 144 KB
    {256, TileConfig::kCompact, true, generic_compact(true)},                 // 96 KB
    {512, TileConfig::kDefault, true, by_chunks(generic(2, 1), 1)},           // 136 KB
    {512, TileConfig::kCompact, true, by_chunks(generic_compact(false), 1)},  // 84 KB
};

// The row's config; without tiles if there is none.
constexpr BackwardConfig find_backward_config(int head_dim, TileConfig tile_config, bool generic) {
  for (const BackwardConfigRow& row : kBackwardConfigs) {
    if (row.head_dim == head_dim && row.tile_config == tile_config && row.generic == generic) {
      return row.config;
    }
  }
  return BackwardConfig{};
}

template <int kHeadDim, TileConfig kTileConfig, bool kGeneric>
constexpr BackwardConfig backward_config() {
  constexpr BackwardConfig kConfig = find_backward_config(kHeadDim, kTileConfig, kGeneric);
  static_assert(kConfig.tile.warps > 0, "kBackwardConfigs lacks a row of cmake/kernels.cmake");
  return kConfig;
}

}  // namespace anyflash::sm80
