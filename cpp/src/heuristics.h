// Choices that depend on sizes only: pure functions.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "params.h"

namespace anyflash {

// How many (batch, head) pairs share a section of the forward grid (fwd_kernel.h).
//
// No bound on the right: 1, so that all row blocks of one head, which read the same K and V, run
// side by side. Causal, say: the row blocks of a section start with the heaviest, which evens out
// the end of the grid; a section is as large as its K and V fit in half of the L2 cache.
//
// Packed sequences: as if all were as long as the longest.
inline int heads_per_section(const ForwardParams& params, int bytes_per_element,
                             std::size_t l2_bytes) {
  if (params.window.right < 0) return 1;
  const int64_t group = params.heads / params.heads_k;
  const int64_t kv_bytes =
      int64_t{params.seqlen_k} * (params.head_dim + params.head_dim_v) * bytes_per_element;
  const int64_t fitting = static_cast<int64_t>(l2_bytes / 2) / std::max<int64_t>(kv_bytes, 1);
  const int64_t pairs = params.batch * params.heads;
  // Bounded by what a grid can hold, so that products with row blocks stay within 31 bits.
  return static_cast<int>(std::clamp<int64_t>(fitting * group, 1, std::max<int64_t>(pairs, 1)));
}

// The same for the backward, whose grid is over blocks of keys of (batch, key head) pairs, each of
// which reads the Q and dO of its group of heads and adds to their dQ.
//
// No bound: 1, so that all key blocks of one pair run side by side. Else a section is as large as
// its Q, dO and dQ, which is summed in float32, fit in half of the L2 cache.
inline int heads_per_section_backward(const BackwardParams& params, int bytes_per_element,
                                      std::size_t l2_bytes) {
  const bool bounded = params.window.left >= 0 || params.window.right >= 0;
  if (!bounded || params.batch == 0) return 1;
  const int64_t rows = int64_t{params.seqlen_q} * (params.heads / params.heads_k);
  const int64_t columns = int64_t{params.head_dim} + params.head_dim_v;
  const int64_t row_bytes =
      columns * bytes_per_element + params.head_dim * static_cast<int64_t>(sizeof(float));
  const int64_t fitting =
      static_cast<int64_t>(l2_bytes / 2) / std::max<int64_t>(rows * row_bytes, 1);
  const int64_t pairs = params.batch * params.heads_k;
  return static_cast<int>(std::clamp<int64_t>(fitting, 1, pairs));
}

}  // namespace anyflash
