// Tiles and schedules of the Hopper forward: a table.
#pragma once

#include <cstddef>

#include "sm90/roles.h"

namespace anyflash::sm90 {

struct ForwardConfig {
  // It serves kernels with at most these head dims.
  int max_head_dim = 0;
  int max_head_dim_v = 0;

  int block_m = 128;
  // The keys of a tile decide the order of sums, so they depend on head dims and variant alone.
  int block_n = 128;
  // Where a warpgroup sees at most so many keys of its first tile, scores are of those alone.
  int few_keys = 64;
  int stages = 2;    // buffers of K and of V
  int q_stages = 1;  // of Q: with two, the next block's comes early
  // K of a tile comes in so many parts, by columns, a buffer each: the next tile's first part then
  // comes while the second one is multiplied.
  int key_parts = 1;
  // Launches, each of which makes some columns of the results (cuda/column_pass.h).
  int passes = 1;
  // Whether warpgroups ping-pong: each multiplies while another makes its softmax
  // (FlashAttention-3, arXiv 2407.08608, section 3.1). In any case Q K^T of a tile and P V of the
  // tile before run beside the softmax (3.2).
  bool ping_pong = false;
  // Whether P V of the tile before lands between the exponentials of a thread's two rows, or behind
  // them all (mainloop.h).
  bool lands_between_rows = true;
  // Whether the shared memory that the results of the block before leave from is given back behind
  // this block's first products: they take a while to leave.
  bool late_release = true;
  // Whether a warp of the producer finds the tiles of keys that are not left out.
  bool finds_tiles = false;

  constexpr ForwardConfig with_finder(bool finds) const {
    ForwardConfig config = *this;
    config.finds_tiles = finds;
    return config;
  }
};

namespace forward_configs {

// 64 rows a warpgroup: three of them share each tile of K and V.
constexpr ForwardConfig up_to_64() {
  ForwardConfig c;
  c.max_head_dim = c.max_head_dim_v = 64;
  c.block_m = 192;
  c.stages = 3;
  c.q_stages = 2;
  c.ping_pong = true;
  c.lands_between_rows = false;  // 3 % slower otherwise, without a mask
  c.late_release = false;        // 1 % slower otherwise, from 4096 keys on
  return c;
}

constexpr ForwardConfig up_to_128() {
  ForwardConfig c;
  c.max_head_dim = c.max_head_dim_v = 128;
  c.q_stages = 2;
  c.ping_pong = true;
  return c;
}

constexpr ForwardConfig up_to_192_128() {
  ForwardConfig c;
  c.max_head_dim = 192;
  c.max_head_dim_v = 128;
  c.ping_pong = true;
  return c;
}

// What 227 KB hold with two buffers of K and V.
constexpr ForwardConfig up_to_192() {
  ForwardConfig c;
  c.max_head_dim = c.max_head_dim_v = 192;
  c.block_n = c.few_keys = 112;
  c.ping_pong = true;
  return c;
}

constexpr ForwardConfig up_to_256() {
  ForwardConfig c;
  c.max_head_dim = c.max_head_dim_v = 256;
  c.block_n = 80;
  c.few_keys = 48;  // ping-pong gains nothing
  return c;
}

// Q has 128 KB, and registers hold 256 columns of a warpgroup's output.
constexpr ForwardConfig up_to_512() {
  ForwardConfig c;
  c.max_head_dim = c.max_head_dim_v = 512;
  c.block_n = c.few_keys = 64;
  c.stages = 1;
  c.key_parts = 2;
  c.passes = 2;
  return c;
}

inline constexpr ForwardConfig kTable[] = {up_to_64(),  up_to_128(), up_to_192_128(),
                                           up_to_192(), up_to_256(), up_to_512()};

// With a block mask: fewer tiles have parts of several blocks if they are not larger than most
// blocks.
inline constexpr ForwardConfig kBlocksTable[] = {up_to_128(), up_to_256()};

}  // namespace forward_configs

// The first row of a table that serves the head dims; max_head_dim is 0 if there is none.
template <std::size_t kRows>
constexpr ForwardConfig forward_config(const ForwardConfig (&table)[kRows], int head_dim,
                                       int head_dim_v) {
  for (const ForwardConfig& config : table) {
    if (head_dim <= config.max_head_dim && head_dim_v <= config.max_head_dim_v) return config;
  }
  return {};
}

// A producer whose warps find tiles, or look up pages, needs more, where consumers can spare them.
constexpr RegisterSplit register_split(const ForwardConfig& config, bool looks_up) {
  if (config.block_m == 192) return RegisterSplit{32, 160};
  return looks_up && config.max_head_dim <= 128 ? RegisterSplit{56, 224} : RegisterSplit{40, 232};
}

}  // namespace anyflash::sm90
