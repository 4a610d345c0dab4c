// Tile shapes of the sm_80 kernels.
#pragma once

#include "kernel.h"

namespace anyflash::sm80 {

// A Room (kernel.h) is whose shared memory a kernel is made for: an A100's 164 KB, the 100 KB of
// consumer GPUs (compute capability 8.6, 8.9 and 12.0), or the 228 KB of 9.0 and 10.0. What fits
// little memory also serves small problems: dispatch.cpp takes the forward's smaller tiles where
// larger ones would leave multiprocessors idle, and any that was measured to be faster.

struct ForwardTile {
  Tile tile;
  int stages;                 // buffers of K and of V
  bool queries_in_registers;  // all the time, where shared memory would be read too often
  // Whether the output is rescaled only where a maximum has grown much: pays where the output is
  // large, and there are registers for it.
  bool lazy_rescale;
  bool fence;  // after loads of K: without one, ptxas spills more; where not so, it slows the loop
  // Pairs of warps share 32 rows. Each multiplies them with half of a tile's keys and makes half of
  // the output's columns. So it reads half of K and V: shared memory bounds large head dims.
  bool paired = false;
};

// Head dims are those of Q and K, and of V. 16 rows a warp where 32 would not leave eight warps an
// SM: their accumulators fill the registers, or two CTAs the shared memory. Tiles that a GPU takes
// by turns hold as many keys and rescale alike, so that a row has the same bits in each.
constexpr ForwardTile forward_tile(int head_dim, int head_dim_v, Room room) {
  const bool small = head_dim <= 64 && head_dim_v <= 64;
  const bool large = head_dim > 128 || head_dim_v > 128;
  const bool lazy = !small && !large;
  if (room == Room::kCompact) return {{64, 64, 4, large ? 1 : 2}, 1, false, lazy, false};
  if (small) return {{128, 64, 4, 2}, 2, true, lazy, false};
  if (large && room == Room::kWide) return {{64, 64, 4, 2}, 1, false, true, false, true};
  if (large) return {{128, 64, 8, 1}, 1, false, lazy, true};
  return {{128, 64, 4, 2}, room == Room::kWide ? 2 : 1, false, lazy, false};
}

// With softcap and ALiBi, which want registers of their own.
constexpr ForwardTile scored_forward_tile(int head_dim, int head_dim_v) {
  return {forward_tile(head_dim, head_dim_v, Room::kUsual).tile, 1, false, false, false};
}

// With dropout, whose draws want registers, too: at head dim 128, those of half a tile's keys.
constexpr ForwardTile dropout_forward_tile(int head_dim, int head_dim_v) {
  ForwardTile shape = scored_forward_tile(head_dim, head_dim_v);
  const bool large = head_dim > 128 || head_dim_v > 128;
  if (large) {
    shape.fence = true;
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

// The backward's main kernel: a CTA owns block_n keys and visits tiles of block_m query rows.
struct BackwardTile {
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
  bool turns = false;  // two groups of warps take the tiles in turns; warps of score_warps and
                       // query_warps are those of one group
};

// Two CTAs of four warps, which wait at different times, where an A100's 164 KB of shared memory or
// a wide GPU's 228 KB hold the tiles of two; one of eight where these would be too small for what
// their products read there.
constexpr BackwardTile backward_tile(int head_dim, Room room) {
  if (room == Room::kWide) {
    if (head_dim <= 32) return {{128, 128, 4, 2}, 2, 2, 2, 1, false, 2};
    if (head_dim <= 128) return {{64, 128, 8}, 2, 2, 2, 3, false, 2, 1, true};
    return {{128, 64, 8}, 4, 2, head_dim <= 192 ? 2 : 4, 1, false, 1, head_dim / 64};
  }
  if (room == Room::kCompact) return {{64, 64, 4}, 2, 2, 2, 1};
  if (head_dim <= 64) return {{64, 128, 4, 2}, 2, 2, 2, 1, false, 2};
  if (head_dim <= 96) return {{64, 64, 4, 2}, 2, 2, 2, 1};
  if (head_dim <= 128) return {{64, 128, 8}, 2, 2, 2, 2};
  return {{64, 64, 8}, 4, 2, 2, head_dim <= 192 ? 2 : 1};
}

// 64 by 64, because blocks of block-sparse attention are multiples of that, and so small that head
// dims up to 128 fit the 99 KB of consumer GPUs; for 192 and 256 there are tiles that do.
constexpr BackwardTile generic_backward_tile(int head_dim, Room room) {
  if (room == Room::kCompact) return {{64, 32, 4}, 4, 2, 2, 1, head_dim > 192};
  const int key_warps = head_dim <= 96 ? 4 : 2;
  return {{64, 64, 8}, 4, key_warps, key_warps, head_dim <= 96 ? 2 : 1};
}

// Decoding: tiles of 16, 32 or 64 rows, which are queries and heads of one group. Warps that share
// their rows (key_warps) each take some keys of a tile.
struct DecodeTile {
  Tile tile;
  int row_warps;
  int key_warps;
  int stages;  // buffers of K and V
};

// Keys for 32 KB of K and V, or fewer where their scores would fill the registers, and buffers of
// 64 KB: two CTAs fit an A100's SM, one the 99 KB of consumer GPUs, and with a tile on its way in
// each, memory is kept busy.
constexpr DecodeTile decode_tile(int head_dim, int block_m, bool is_8bit) {
  const int key_bytes = 2 * head_dim * (is_8bit ? 1 : 2);
  const int most = block_m == 64 ? 64 : 128;
  const int block_n = 32 * 1024 / key_bytes < most ? 32 * 1024 / key_bytes : most;
  const int buffers = 64 * 1024 / (block_n * key_bytes);
  const int row_warps = block_m / 16;
  const int key_warps = 4 / row_warps < block_n / 16 ? 4 / row_warps : block_n / 16;
  const int warps = row_warps * key_warps;
  // Registers: 168 a thread with 12 warps an SM, 255 with 8.
  const int sm_warps = block_m <= 32 && head_dim <= 128 && !is_8bit ? 12 : 8;
  return {
      {block_m, block_n, warps, sm_warps / warps}, row_warps, key_warps, buffers < 4 ? buffers : 4};
}

}  // namespace anyflash::sm80
