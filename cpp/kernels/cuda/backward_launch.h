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

// Divides memory (null: only the size is wanted).
class Places {
 public:
  explicit Places(void* memory) : memory_(static_cast<char*>(memory)) {}

  template <class T>
  void take(T*& at, int64_t count) {
    constexpr std::size_t kAlignment = 256;
    if (memory_ != nullptr) at = reinterpret_cast<T*>(memory_ + used_);
    const std::size_t bytes = static_cast<std::size_t>(count) * sizeof(T);
    used_ += ceil_div(bytes, kAlignment) * kAlignment;
  }
  std::size_t used() const { return used_; }

 private:
  char* memory_;
  std::size_t used_ = 0;
};

// Where each padded row of all heads has its LSE, its delta, and its sums of dQ if the kernel makes
// them.
template <class Traits>
void place_rows(BackwardScratch& p, Places& places) {
  const Attention& a = p.attention;
  const bool packed = a.cu_seqlens_q != nullptr;
  const int64_t rows = p.dq_sums.rows > 0 ? p.dq_sums.rows
                       : packed           ? a.total_q + a.batch * Traits::kBlockM
                                          : a.seqlen_q;
  p.block_m = Traits::kBlockM;
  p.padded_rows = ceil_div(rows, Traits::kBlockM) * Traits::kBlockM;
  p.dq_columns = Traits::kDqColumns;
  const int64_t all_rows = (packed ? 1 : a.batch) * a.heads * p.padded_rows;
  if constexpr (Traits::kSplitsLseAndDelta) {
    places.take(p.lse_rows, all_rows);
    places.take(p.delta_rows, all_rows);
  } else {
    places.take(p.lse_and_delta, all_rows);
  }
  if (!p.deterministic && p.dq_columns > 0) places.take(p.dq_accum, all_rows * p.dq_columns);
}

// Bytes of DqSums, for kernels with dq_accum.
template <class Traits>
std::size_t dq_sums_bytes(const BackwardParams& params) {
  BackwardScratch p{params};
  Places places(nullptr);
  place_rows<Traits>(p, places);
  return places.used();
}

// The call's rows among those of DqSums.
inline void move_to_first_row(BackwardScratch& p) {
  const int64_t first = p.dq_sums.first;
  if (p.lse_and_delta != nullptr) p.lse_and_delta += first;
  if (p.lse_rows != nullptr) p.lse_rows += first;
  if (p.delta_rows != nullptr) p.delta_rows += first;
  p.dq_accum += first * p.dq_columns;
}

// Divides `memory` (null: only the size is wanted) among what the kernels need there. Returns the
// bytes used.
template <class Traits>
std::size_t place_scratch(BackwardScratch& p, char* memory) {
  const Attention& a = p.attention;
  const bool packed = a.cu_seqlens_q != nullptr;
  const int64_t heads = (packed ? 1 : a.batch) * a.heads;
  const int group = a.heads / std::max(a.heads_k, 1);
  p.gqa_splits = gqa_splits(a.heads, a.heads_k);
  p.split_heads = group / p.gqa_splits;
  p.larger_splits = group % p.gqa_splits;
  Places places(memory);
  if (p.dq_sums.data == nullptr) {
    place_rows<Traits>(p, places);
  } else {
    Places kept(p.dq_sums.data);
    place_rows<Traits>(p, kept);
    move_to_first_row(p);
  }
  if (p.dout_dtype == DType::kFloat32) {
    auto* rounded = static_cast<typename Traits::Element*>(nullptr);
    places.take(rounded, heads * (packed ? a.total_q : a.seqlen_q) * rounded_dout_columns(a));
    p.dout_rounded = rounded;
  }
  if (a.key_ranges.data != nullptr) {
    places.take(p.attention.key_range_bounds, KeyRangeTiles(a).count() * a.key_intervals);
  }
  if (a.alibi_slopes.data != nullptr) places.take(p.slopes_log2, a.batch * a.heads);
  if (p.gqa_splits > 1) {
    constexpr int kBlockN = Traits::kBlockN;
    p.key_blocks = packed ? a.total_k / kBlockN + a.batch : ceil_div(a.seqlen_k, kBlockN);
    const int64_t parts =
        (packed ? 1 : a.batch) * a.heads_k * p.key_blocks * p.gqa_splits * Traits::kCtas;
    places.take(p.gqa_partials, parts * kGqaPartialElements<Traits>);
    places.take(p.gqa_nonfinite_dout, parts);
  }
  if (p.dalibi_slopes.data != nullptr) {
    places.take(p.slope_sums, a.batch * a.heads * p.slope_sums_of_head(a.seqlen_q));
  }
  return places.used();
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
                   const LaunchMode& mode = {}) {
  if (blocks == 0) return;
  if (blocks > INT32_MAX) {
    throw Error(ErrorCode::kUnsupported, "the problem needs " + std::to_string(blocks) +
                                             " CTAs; a CUDA grid holds at most 2147483647");
  }
  launch<kKernel>(dim3(static_cast<unsigned>(blocks)), dim3(kThreads), smem_bytes, stream, params,
                  mode);
}

}  // namespace anyflash
