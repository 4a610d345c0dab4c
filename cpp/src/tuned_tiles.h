// Measured exceptions to the rules of select_gpu.cpp.
#pragma once

#include "kernel_descriptor.h"

namespace anyflash {

// kSmallGrid: CTAs of kGridTile rows (the backward: keys) would leave multiprocessors idle.
// kShort: not so, and a sequence has at most kShortRows of them.
enum class ProblemSize { kSmallGrid, kShort, kLong };
inline constexpr int kGridTile = 128;
inline constexpr int kShortRows = 512;

// Which of a family's plain kernels for these head dims is the fastest on GPUs of a compute
// capability.
struct TunedTile {
  struct Target {
    int compute_capability;  // 90 for 9.0; 0 ends the table
    const char* family;      // KernelFamily::name
  } target;
  struct Kernels {
    Op op;
    int head_dim;
    int head_dim_v;
  } kernels;
  struct Problems {
    bool bounded;  // as Problem's
    ProblemSize size;
  } problems;
  TileConfig tile_config;
};
extern const TunedTile kTunedTiles[];

}  // namespace anyflash
