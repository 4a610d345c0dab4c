// Tiles of the Hopper backward's main kernel: a table.
#pragma once

namespace anyflash::sm90 {

struct BackwardConfig {
  // It serves kernels with at most these head dims.
  int max_head_dim = 0;
  int max_head_dim_v = 0;

  int block_m = 64;   // query rows of a step
  int block_n = 128;  // keys of a CTA, 64 of each consumer warpgroup
  int stages = 2;     // buffers of Q and of dO

  // V is in registers, where there are enough: dP = V dO^T then reads less shared memory.
  bool values_in_registers = false;
  // The next tile's Q and flags are waited for beside this tile's last products.
  bool looks_ahead = false;
};

namespace backward_configs {

constexpr BackwardConfig up_to_64() {
  BackwardConfig c;
  c.max_head_dim = c.max_head_dim_v = 64;
  c.block_m = 128;
  return c;
}

constexpr BackwardConfig up_to_96() {
  BackwardConfig c;
  c.max_head_dim = c.max_head_dim_v = 96;
  c.values_in_registers = true;
  c.looks_ahead = true;
  return c;
}

constexpr BackwardConfig up_to_128() {
  BackwardConfig c;
  c.max_head_dim = c.max_head_dim_v = 128;
  c.looks_ahead = true;
  return c;
}

inline constexpr BackwardConfig kTable[] = {up_to_64(), up_to_96(), up_to_128()};

}  // namespace backward_configs

// The first row of the table that serves the head dims; max_head_dim is 0 if there is none.
constexpr BackwardConfig backward_config(int head_dim, int head_dim_v) {
  for (const BackwardConfig& config : backward_configs::kTable) {
    if (head_dim <= config.max_head_dim && head_dim_v <= config.max_head_dim_v) return config;
  }
  return {};
}

// How many CTAs share the columns of a block (pair.h).
constexpr int ctas_of_block(int head_dim, int head_dim_v) {
  return head_dim > 256 || head_dim_v > 256 ? 2 : 1;
}

// Whether a kernel of its own has the head dims (wide_kernel.h).
constexpr bool is_wide(int head_dim, int head_dim_v) {
  return backward_config(head_dim, head_dim_v).max_head_dim == 0;
}

}  // namespace anyflash::sm90
