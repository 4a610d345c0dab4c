// Tiles of the Hopper decoding kernels: a table.
#pragma once

namespace anyflash::sm90 {

// Keys of a tile: the rows of a wgmma.
inline constexpr int kDecodeKeys = 64;

struct DecodeConfig {
  // Which kernels have it.
  int head_dim = 0;
  int least_rows = 0;  // of their tiles
  bool is_8bit = false;

  int buffers = 2;     // for a tile of K or of V
  int ctas = 1;        // for which an SM has registers
  int warpgroups = 1;  // which share tiles of keys
};

namespace decode_configs {

constexpr DecodeConfig config(int head_dim, int least_rows, int buffers, int ctas,
                              int warpgroups = 1) {
  DecodeConfig c;
  c.head_dim = head_dim;
  c.least_rows = least_rows;
  c.buffers = buffers;
  c.ctas = ctas;
  c.warpgroups = warpgroups;
  return c;
}

constexpr DecodeConfig of_8bit(DecodeConfig c) {
  c.is_8bit = true;
  return c;
}

// A CTA has 48 KB or more of buffers, so that an SM's memory is kept busy while it computes. With
// a third CTA an SM, an H200 reads 16-bit caches 5 % slower. Of 8 bits a CTA waits for conversions,
// so that a third one gains where there are registers for it. Head dim 512
// has one tile of K and one of V, 64 KB each. Latent attention has tiles of 72 KB, or of 40, which
// are those of V, too.
inline constexpr DecodeConfig kTable[] = {
    config(64, 64, 8, 2),
    config(64, 16, 10, 2),
    config(128, 64, 4, 2),
    config(128, 16, 5, 2),
    config(256, 64, 5, 1, 2),
    config(256, 16, 5, 1),
    config(512, 64, 2, 1, 2),
    config(512, 16, 2, 1),
    config(576, 64, 2, 1, 2),
    config(576, 16, 2, 1),

    of_8bit(config(64, 64, 16, 1, 2)),
    of_8bit(config(64, 32, 10, 2)),
    of_8bit(config(64, 16, 6, 3)),
    of_8bit(config(128, 64, 16, 1, 2)),
    of_8bit(config(128, 32, 10, 2)),
    of_8bit(config(128, 16, 6, 3)),
    of_8bit(config(256, 64, 8, 1, 2)),
    of_8bit(config(256, 32, 10, 1)),
    of_8bit(config(256, 16, 4, 2)),
    of_8bit(config(512, 64, 4, 1, 2)),
    of_8bit(config(512, 16, 4, 1)),
    of_8bit(config(576, 64, 1, 1, 2)),
    of_8bit(config(576, 16, 4, 1)),
};

}  // namespace decode_configs

constexpr DecodeConfig decode_config(int head_dim, int rows, bool is_8bit) {
  for (const DecodeConfig& c : decode_configs::kTable) {
    if (c.head_dim == head_dim && c.is_8bit == is_8bit && rows >= c.least_rows) return c;
  }
  return {};
}

}  // namespace anyflash::sm90
