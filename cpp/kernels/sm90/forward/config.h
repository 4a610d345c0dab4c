// Tiles and schedules of the Hopper forward.
#pragma once

#include "common/macros.h"

namespace anyflash::sm90 {

// How a CTA's tensor cores stay busy while its warpgroups compute probabilities.
enum class Schedule {
  // Within a warpgroup: Q K^T of a tile and P V of the tile before run beside the softmax
  // (FlashAttention-3, arXiv 2407.08608, section 3.2).
  kOverlap,
  // The same, and warpgroups issue their products in turns (section 3.1).
  kPingPong,
  // No overlap within a warpgroup; one at a time exponentiates, while the others multiply.
  kExclusive,
};

struct ForwardConfig {
  int block_m = 128;
  int block_n = 128;
  int stages = 2;  // buffers of K and of V
  Schedule schedule = Schedule::kPingPong;
  bool own_output = true;  // a buffer for O beside Q's, so that the next Q may come early
};

// The keys of a tile decide the order of sums, so they depend on the head dims alone.
constexpr ForwardConfig forward_config(int head_dim, int head_dim_v) {
  ForwardConfig config;
  if (head_dim <= 64 && head_dim_v <= 64) {
    config.block_m = 192;
  } else if (head_dim > 128 || head_dim_v > 128) {
    config.block_n = 80;
    config.schedule = Schedule::kOverlap;
    config.own_output = false;
  }
  return config;
}

// Of 64 K registers; setmaxnreg hands them from the producer to the consumers.
struct RegisterSplit {
  int producer;
  int consumer;
};

constexpr RegisterSplit register_split(int consumer_warpgroups) {
  return consumer_warpgroups == 1   ? RegisterSplit{56, 256}
         : consumer_warpgroups == 2 ? RegisterSplit{40, 232}
                                    : RegisterSplit{32, 160};
}

}  // namespace anyflash::sm90
