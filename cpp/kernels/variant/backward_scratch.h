// What the backward's kernels are told beside BackwardParams: their places in the workspace.
//
// Query rows are padded: each sequence begins at a multiple of the main kernel's block_m and has
// room for whole tiles, so that a tile's numbers lie in one piece. Linear in the lengths.
#pragma once

#include <cstdint>

#include "common/lpt_tile_scheduler.h"
#include "common/macros.h"
#include "common/math.h"
#include "params.h"
#include "variant/sequence.h"

namespace anyflash {

// The LSE of a row that does not exist and is read as zeros: its probabilities are 0. The largest
// finite number, which no row that exists has.
inline constexpr float kFarLse = 0x1.fffffep127f;

// Of one query row.
struct alignas(8) LseAndDelta {
  float lse;    // times BackwardScratch::lse_unit; +inf where the row sees no key
  float delta;  // rowsum(dO * out) - dlse
};

struct BackwardScratch : BackwardParams {
  DType dtype = DType::kFloat16;  // of q, k and v
  // CTAs that split the query heads of a K/V head: each has split_heads of them, and the first
  // larger_splits one more.
  int gqa_splits = 1;
  int split_heads = 1;
  int larger_splits = 0;
  LptTileScheduler key_scheduler{};  // of (batch, K/V head, split) triples and blocks of keys
  int block_m = 0;                   // a power of two
  int64_t padded_rows = 0;           // of one head; packed: of all sequences together
  // (batch or 1, heads, padded_rows): these, or else the two arrays.
  LseAndDelta* lse_and_delta = nullptr;
  float* lse_rows = nullptr;
  float* delta_rows = nullptr;
  float* dq_accum = nullptr;     // (batch or 1, heads, padded_rows, kernel's head dim); null: none
  int64_t dq_columns = 0;        // the kernel's head dim; 0: it needs no dq_accum
  void* dout_rounded = nullptr;  // float32 dout as the kernels' type, (batch or 1, padded_rows,
                                 // heads, head_dim_v rounded up); null: dout is read as it is
  int dq_first_column = 0;       // of a launch that makes some of dQ's columns
  float* slope_sums = nullptr;   // (batch, heads, slope_sums_of_head)
  float* slopes_log2 = nullptr;  // ALiBi's, times log2(e), (batch, heads); null: there are none
  // Where groups come in parts (sm80/backward/gqa_partials.h), else null.
  float* gqa_partials = nullptr;  // (batch or 1, heads_k, key_blocks, parts, elements of dK and dV)
  bool* gqa_nonfinite_dout = nullptr;  // of each part, as SharedStorage::nonfinite_dout
  int64_t key_blocks = 0;              // of one head; packed: of all sequences together
  float lse_unit = 1.0f;
  float ds_scale = 1.0f;  // of sums of dS: softmax_scale, and what Scores leave out of dS

  // Each sum for the gradient of ALiBi's slopes is that of kSlopeSumRows query rows.
  static constexpr int kSlopeSumRows = 64;
  ANYFLASH_HOST_DEVICE static int64_t slope_sums_of_head(int seqlen_q) {
    return count_tiles(int64_t{seqlen_q}, kSlopeSumRows);
  }

  // Of a padded row.
  ANYFLASH_DEVICE void set_lse_and_delta(int64_t row, const LseAndDelta& values) const {
    if (lse_and_delta != nullptr) {
      lse_and_delta[row] = values;
    } else {
      lse_rows[row] = values.lse;
      delta_rows[row] = values.delta;
    }
  }
  ANYFLASH_DEVICE LseAndDelta lse_and_delta_of(int64_t row) const {
    if (lse_and_delta != nullptr) return lse_and_delta[row];
    return {lse_rows[row], delta_rows[row]};
  }

  // Padded row of the sequence's row 0, counted over batch and heads.
  ANYFLASH_HOST_DEVICE int64_t first_row(const Sequence& sequence, int64_t index, int head) const {
    const int64_t first = attention.cu_seqlens_q == nullptr
                              ? 0
                              : (sequence.first_q + index * block_m) & -int64_t{block_m};
    return (sequence.batch * attention.heads + head) * padded_rows + first;
  }
  // The sequence's first block of keys, counted over batch and heads.
  ANYFLASH_HOST_DEVICE int64_t first_block(const Sequence& sequence, int64_t index, int head_k,
                                           int block_n) const {
    const int64_t first =
        attention.cu_seqlens_k == nullptr ? 0 : sequence.first_k / block_n + index;
    return (sequence.batch * attention.heads_k + head_k) * key_blocks + first;
  }
};

}  // namespace anyflash
