// What a kernel is told: plain data, made by forward.cpp after validation, read by every backend.
#pragma once

#include <cstdint>

namespace anyflash {

// Strides in elements of a (batch, row, head, column) tensor; packed tensors have batch = 0.
struct Strides {
  int64_t batch = 0;
  int64_t row = 0;
  int64_t head = 0;
  int64_t col = 1;
};

struct ForwardParams {
  const void* q = nullptr;
  const void* k = nullptr;
  const void* v = nullptr;
  void* out = nullptr;
  float* lse = nullptr;  // null: not wanted

  Strides q_stride;
  Strides k_stride;
  Strides v_stride;
  Strides out_stride;
  Strides lse_stride;  // (batch, row, head); col is not used

  int64_t batch = 0;
  int heads = 0;
  int heads_k = 0;
  int seqlen_q = 0;
  int seqlen_k = 0;
  int head_dim = 0;
  int head_dim_v = 0;

  double softmax_scale = 1.0;
  bool causal = false;

  // Grid order (heuristics.h): so many (batch, head) pairs share one section of the grid.
  int heads_per_section = 1;
};

}  // namespace anyflash
