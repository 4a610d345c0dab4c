// What the backward's launches of all families have in common.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>

#include "anyflash/error.h"
#include "common/launch.h"
#include "common/lpt_tile_scheduler.h"
#include "common/math.h"
#include "cuda/gqa_partials.h"
#include "grid_heuristics.h"
#include "kernel_descriptor.h"
#include "variant/backward_scratch.h"
#include "variant/key_range_bounds.h"

namespace anyflash {

// Of BackwardScratch::dout_rounded: whole vectors of 16 bytes.
inline int64_t rounded_dout_columns(const Attention& a) { return ceil_div(a.head_dim_v, 8) * 8; }

// Divides `memory` (null: only the size is wanted) among what the kernels need there. Returns the
// bytes used.
template <class Traits>
std::size_t place_scratch(BackwardScratch& p, char* memory) {
  const Attention& a = p.attention;
  const bool packed = a.cu_seqlens_q != nullptr;
  const auto padded = [](int64_t rows) {
    return ceil_div(rows, Traits::kBlockM) * Traits::kBlockM;
  };
  const int64_t heads = (packed ? 1 : a.batch) * a.heads;
  const int group = a.heads / std::max(a.heads_k, 1);
  p.gqa_splits = gqa_splits(a.heads, a.heads_k);
  p.split_heads = group / p.gqa_splits;
  p.larger_splits = group % p.gqa_splits;
  p.block_m = Traits::kBlockM;
  p.padded_rows = packed ? padded(a.total_q + a.batch * Traits::kBlockM) : padded(a.seqlen_q);
  p.dq_columns = Traits::kDqColumns;
  std::size_t used = 0;
  const auto take = [&](auto*& at, int64_t count) {
    constexpr std::size_t kAlignment = 256;
    if (memory != nullptr) at = reinterpret_cast<decltype(+at)>(memory + used);
    const std::size_t bytes = static_cast<std::size_t>(count) * sizeof(*at);
    used += ceil_div(bytes, kAlignment) * kAlignment;
  };
  if constexpr (Traits::kSplitsLseAndDelta) {
    take(p.lse_rows, heads * p.padded_rows);
    take(p.delta_rows, heads * p.padded_rows);
  } else {
    take(p.lse_and_delta, heads * p.padded_rows);
  }
  if (!p.deterministic && p.dq_columns > 0) {
    take(p.dq_accum, heads * p.padded_rows * p.dq_columns);
  }
  if (p.dout_dtype == DType::kFloat32) {
    auto* rounded = static_cast<typename Traits::Element*>(nullptr);
    take(rounded, heads * (packed ? a.total_q : a.seqlen_q) * rounded_dout_columns(a));
    p.dout_rounded = rounded;
  }
  if (a.key_ranges.data != nullptr) {
    take(p.attention.key_range_bounds, KeyRangeTiles(a).count() * a.key_intervals);
  }
  if (a.alibi_slopes.data != nullptr) take(p.slopes_log2, a.batch * a.heads);
  if (p.gqa_splits > 1) {
    constexpr int kBlockN = Traits::kBlockN;
    p.key_blocks = packed ? a.total_k / kBlockN + a.batch : ceil_div(a.seqlen_k, kBlockN);
    const int64_t parts = (packed ? 1 : a.batch) * a.heads_k * p.key_blocks * p.gqa_splits;
    take(p.gqa_partials, parts * kGqaPartialElements<Traits>);
    take(p.gqa_nonfinite_dout, parts);
  }
  if (p.dalibi_slopes.data != nullptr) {
    take(p.slope_sums, a.batch * a.heads * p.slope_sums_of_head(a.seqlen_q));
  }
  return used;
}

// The order of blocks of keys; `heads_per_l2_section`: of (batch, K/V head, split) triples.
template <class Traits>
LptTileScheduler key_scheduler_of(const BackwardScratch& p, int heads_per_l2_section) {
  const Attention& a = p.attention;
  return LptTileScheduler(a.batch, a.heads_k * p.gqa_splits, p.gqa_splits,
                          ceil_div(int64_t{a.seqlen_k}, Traits::kBlockN), heads_per_l2_section);
}

template <class Traits>
std::size_t backward_scratch_bytes(const BackwardParams& params, const LaunchContext&) {
  BackwardScratch scratch{params};
  return place_scratch<Traits>(scratch, nullptr);
}

// After the preprocessing: kernels read what it has made of a float32 dO.
inline void use_rounded_dout(BackwardScratch& p) {
  if (p.dout_rounded == nullptr) return;
  const Attention& a = p.attention;
  const int64_t columns = rounded_dout_columns(a);
  const int64_t rows = a.cu_seqlens_q != nullptr ? a.total_q : a.seqlen_q;
  p.dout = p.dout_rounded;
  p.dout_dtype = p.dtype;
  p.dout_stride = Strides{a.heads * rows * columns, columns, rows * columns, 1};
}

// Runs kKernel on `blocks` CTAs, none where there is nothing to do.
template <auto kKernel, class Traits, int kThreads = Traits::kThreads, class Params>
void launch_blocks(int64_t blocks, std::size_t smem_bytes, void* stream, const Params& params,
                   LaunchOrder order = LaunchOrder::kAfterPrevious) {
  if (blocks == 0) return;
  if (blocks > INT32_MAX) {
    throw Error(ErrorCode::kUnsupported, "the problem needs " + std::to_string(blocks) +
                                             " CTAs; a CUDA grid holds at most 2147483647");
  }
  launch<kKernel>(dim3(static_cast<unsigned>(blocks)), dim3(kThreads), smem_bytes, stream, params,
                  order);
}

}  // namespace anyflash
