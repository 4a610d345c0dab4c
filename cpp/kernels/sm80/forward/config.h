// Which tiles the sm_80 forward kernels have: a table.
#pragma once

#include "kernel_descriptor.h"

namespace anyflash::sm80 {

// A TileConfig (kernel_descriptor.h) says whose shared memory a kernel is made for. kDefault is for
// an A100's 164 KB. kCompact is for the 100 KB of consumer GPUs (compute capability 8.6, 8.9 and
// 12.0). kWide is for the 228 KB of 9.0 and 10.0. What fits little memory also serves small
// problems: select_gpu.cpp takes the forward's smaller tiles where larger ones would leave
// multiprocessors idle. It also takes any that was measured to be faster.
struct ForwardConfig {
  // It serves kernels with these features and at most this head dim.
  int max_head_dim = 0;
  unsigned features = kNoFeatures;
  TileConfig tile_config = TileConfig::kDefault;

  Tile tile;
  int stages = 1;                     // buffers of K and of V
  bool queries_in_registers = false;  // all the time, where shared memory would be read too often
  // Whether the output is rescaled only where a maximum has grown much: pays where the output is
  // large, and there are registers for it.
  bool lazy_rescale = false;
  // Without that ptxas spills more; where it does not, a commit costs time.
  bool commits_after_k = false;
  // Pairs of warps share 32 rows. Each multiplies them with half of a tile's keys and makes half of
  // the output's columns. So it reads half of K and V: shared memory bounds large head dims.
  bool split_keys_across_warps = false;
  // Launches that each make some of the output's columns, and all scores. There are several where
  // the accumulators of all columns would not fit the registers.
  int passes = 1;
  int min_ctas = 1;  // that an SM must hold: bounds registers
  // Kernels of one operation, dtype, head dims and features whose groups are equal give a row the
  // same bits: their tiles hold as many keys, and they rescale alike.
  int bits_group = 0;
};

namespace forward_configs {

// 16 rows a warp where 32 would not leave eight warps an SM: their accumulators fill the registers,
// or two CTAs the shared memory.
constexpr ForwardConfig plain_64() {
  ForwardConfig c;
  c.max_head_dim = 64;
  c.tile.block_m = 128;
  c.tile.block_n = 64;
  c.tile.warps = 4;
  c.tile.ctas = 2;
  c.stages = 2;
  c.queries_in_registers = true;  // a warp reads 128 bytes an mma instead of 160
  return c;
}

constexpr ForwardConfig plain_128() {
  ForwardConfig c;
  c.max_head_dim = 128;
  c.tile.block_m = 128;
  c.tile.block_n = 64;
  c.tile.warps = 4;
  c.tile.ctas = 2;
  c.lazy_rescale = true;
  return c;
}

constexpr ForwardConfig plain_256() {
  ForwardConfig c;
  c.max_head_dim = 256;
  c.tile.block_m = 128;
  c.tile.block_n = 64;
  c.tile.warps = 8;
  c.tile.ctas = 1;
  c.commits_after_k = true;
  return c;
}

// Half the rows of `c`, 16 a warp.
constexpr ForwardConfig compact(ForwardConfig c, int ctas) {
  c.tile_config = TileConfig::kCompact;
  c.tile.block_m = 64;
  c.tile.block_n = 64;
  c.tile.warps = 4;
  c.tile.ctas = ctas;
  c.stages = 1;
  c.queries_in_registers = false;
  c.commits_after_k = false;
  return c;
}

constexpr ForwardConfig wide_128() {
  ForwardConfig c = plain_128();
  c.tile_config = TileConfig::kWide;
  c.stages = 2;
  return c;
}

constexpr ForwardConfig wide_256() {
  ForwardConfig c;
  c.max_head_dim = 256;
  c.tile_config = TileConfig::kWide;
  c.tile.block_m = 64;
  c.tile.block_n = 64;
  c.tile.warps = 4;
  c.tile.ctas = 2;
  c.lazy_rescale = true;
  c.split_keys_across_warps = true;
  c.bits_group = 1;  // two warps add up a row's probabilities
  return c;
}

// Two CTAs wait at different times where an SM holds the tiles of two. Where it holds one, an
// A100's, that has two buffers.
constexpr ForwardConfig wide_512() {
  ForwardConfig c;
  c.max_head_dim = 512;
  c.tile_config = TileConfig::kWide;
  c.tile.block_m = 64;
  c.tile.block_n = 32;
  c.tile.warps = 4;
  c.tile.ctas = 2;
  c.passes = 2;
  return c;
}

constexpr ForwardConfig plain_512() {
  ForwardConfig c = wide_512();
  c.tile_config = TileConfig::kDefault;
  c.tile.ctas = 1;
  c.stages = 2;
  return c;
}

constexpr ForwardConfig compact_512(ForwardConfig c) {
  c.tile_config = TileConfig::kCompact;
  c.tile.block_m = 32;
  c.tile.block_n = 32;
  c.tile.warps = 2;
  c.tile.ctas = 1;
  c.stages = 1;
  return c;
}

// With softcap and ALiBi, which want registers of their own.
constexpr ForwardConfig scored(const ForwardConfig& plain) {
  ForwardConfig c;
  c.max_head_dim = plain.max_head_dim;
  c.features = kSoftcap | kLargeSoftcap | kAlibi;
  c.tile = plain.tile;
  return c;
}

// With dropout, whose draws want registers, too.
constexpr ForwardConfig dropout(int max_head_dim, const ForwardConfig& plain) {
  ForwardConfig c = scored(plain);
  c.max_head_dim = max_head_dim;
  c.features = kDropout;
  return c;
}

constexpr ForwardConfig dropout_128() {
  ForwardConfig c = dropout(128, plain_128());
  c.tile.block_n = 32;  // the draws of half as many keys
  c.lazy_rescale = true;
  return c;
}

constexpr ForwardConfig dropout_256() {
  ForwardConfig c = dropout(256, plain_256());
  c.commits_after_k = true;
  return c;
}

// With key ranges, which the plain kernel's loop knows nothing of. Head dim 128 has no wide tiles:
// with key ranges they are slower than the smaller ones, by the registers that they spill.
constexpr ForwardConfig ranges(ForwardConfig plain) {
  plain.features = kKeyRanges;
  return plain;
}

// A warp has 16 rows, because the features need registers of their own. A CTA has 64: blocks of
// block-sparse attention are multiples of 64, so that a tile lies in one. Small head dims hide
// latencies with three CTAs an SM; the others cannot afford it.
constexpr ForwardConfig generic(int max_head_dim, int block_n, int min_ctas) {
  ForwardConfig c;
  c.max_head_dim = max_head_dim;
  c.features = kAllFeatures;
  c.tile.block_m = 64;
  c.tile.block_n = block_n;
  c.tile.warps = 4;
  c.min_ctas = min_ctas;
  return c;
}

constexpr ForwardConfig generic_512() {
  ForwardConfig c = generic(512, 32, 1);
  c.passes = 2;
  return c;
}

inline constexpr ForwardConfig kTable[] = {
    plain_64(),
    plain_128(),
    plain_256(),
    plain_512(),
    compact(plain_64(), 2),
    compact(plain_128(), 2),
    compact(plain_256(), 1),
    wide_128(),
    wide_256(),
    compact_512(plain_512()),
    wide_512(),
    scored(plain_64()),
    scored(plain_128()),
    scored(plain_256()),
    compact(scored(plain_128()), 2),  // of prefill alone
    dropout(96, plain_128()),
    dropout_128(),
    dropout_256(),
    ranges(plain_64()),
    ranges(plain_128()),
    ranges(plain_256()),
    ranges(wide_256()),
    generic(64, 64, 3),
    generic(128, 64, 2),
    generic(256, 32, 2),
    generic_512(),
    compact_512(generic_512()),
};

}  // namespace forward_configs

// The first row of the table that serves the head dims, of Q and K, and of V; max_head_dim is 0 if
// there is none.
constexpr ForwardConfig forward_config(int head_dim, int head_dim_v, unsigned features,
                                       TileConfig tile_config) {
  for (const ForwardConfig& c : forward_configs::kTable) {
    if (head_dim <= c.max_head_dim && head_dim_v <= c.max_head_dim && features == c.features &&
        tile_config == c.tile_config) {
      return c;
    }
  }
  return {};
}

constexpr Tile generic_forward_tile(int head_dim, int head_dim_v) {
  return forward_config(head_dim, head_dim_v, kAllFeatures, TileConfig::kDefault).tile;
}

}  // namespace anyflash::sm80
