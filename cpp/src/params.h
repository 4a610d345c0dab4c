// What a kernel is told: plain data, made by forward.cpp after validation, read by every backend.
#pragma once

#include <climits>
#include <cstdint>

#include "anyflash/tensor_view.h"

namespace anyflash {

// Of the dtypes that a cache may have beside q's.
constexpr bool is_quantized(DType dtype) {
  return dtype == DType::kInt8 || dtype == DType::kFloat8E4M3 || dtype == DType::kFloat8E5M2;
}

// Strides in elements of a (batch, row, head, column) tensor; packed tensors have batch = 0.
struct Strides {
  int64_t batch = 0;
  int64_t row = 0;
  int64_t head = 0;
  int64_t col = 1;
};

// A small tensor that is read element by element; strides of broadcast axes are 0. Null: not used.
struct BroadcastTensor {
  const void* data = nullptr;
  DType dtype = DType::kFloat32;
  Strides stride;
};

// Query i sees the keys j with  i + shift - left <= j <= i + shift + right.  The shift is that of
// its sequence (variant/sequence.h). A negative number is no bound.
struct Window {
  int64_t left = -1;
  int64_t right = -1;
  constexpr bool is_bounded() const { return left >= 0 || right >= 0; }
};

// A number of each sequence: one for all, or read on the device.
struct OfEachSequence {
  int64_t value = 0;
  const int32_t* array = nullptr;  // (batch,); null: value
};

// Where a call's rows and keys lie in the attention that it is a part of. Masks and ALiBi are told
// by the sequence's shift, dropout by all of it.
struct Part {
  OfEachSequence query_start;
  OfEachSequence key_start;
  OfEachSequence diagonal;
  bool is_given = false;  // else the whole attention, aligned at the bottom right
  int64_t batch_start = 0;
  int64_t head_start = 0;
  int64_t total_heads = 0;  // of the whole; 0: the call's
};

// A softcap so large that its 2^-24th part counts.
inline constexpr double kAccurateSoftcap = 256.0;
// Of a block mask whose blocks have at least as many rows, and keys, a kernel with large tiles
// leaves out most of what is hidden.
inline constexpr int kLargeBlock = 128;
// On a GPU, smaller softmax scales count as 0. They would make scores of 16-bit numbers 0 anyway,
// but ScoreMod's units, which are divided by the scale, could become infinite.
inline constexpr double kLeastScale = 1e-20;
constexpr double softmax_scale_on_gpu(double scale) {
  return -kLeastScale < scale && scale < kLeastScale ? 0.0 : scale;
}

struct IntervalBounds;

// What every operation is told: the tensors it reads, their shape,
// and how scores are made, hidden and dropped.
struct Attention {
  const void* q = nullptr;
  const void* k = nullptr;
  const void* v = nullptr;
  Strides q_stride;
  Strides k_stride;
  Strides v_stride;

  int64_t batch = 0;
  int heads = 0;
  int heads_k = 0;
  int seqlen_q = 0;  // packed: an upper bound
  int seqlen_k = 0;
  int head_dim = 0;
  int head_dim_v = 0;

  // Packed sequences (variant/sequence.h); null where there are none.
  const int32_t* cu_seqlens_q = nullptr;
  const int32_t* cu_seqlens_k = nullptr;
  const int32_t* seqused_k = nullptr;  // also of sequences that are not packed
  int64_t total_q = 0;
  int64_t total_k = 0;

  double softmax_scale = 1.0;
  float scale_log2 = 1.0f;       // softmax_scale log2(e), as a kernel's launch wants it
  double softcap = 0.0;          // 0: none
  Window window;                 // causal: right = 0
  BroadcastTensor alibi_slopes;  // (batch, head)
  BroadcastTensor bias;          // (batch, row, head, col); kBool: keys to keep
  BroadcastTensor block_mask;    // (batch, query block, head, key block), kBool
  int block_size_q = 1;
  int block_size_k = 1;
  BroadcastTensor key_ranges;  // (batch, row: key, head: of k, col), kInt32
  int key_intervals = 0;       // of each key: 1 or 2
  // On a GPU, in the workspace (variant/key_range_bounds.h).
  IntervalBounds* key_range_bounds = nullptr;
  BroadcastTensor sinks;  // (head)

  // A probability is dropped if its 16-bit draw is below the threshold; 0: no dropout.
  uint32_t dropout_threshold = 0;
  uint64_t seed = 0;
  uint64_t offset = 0;
  const uint64_t* rng_state = nullptr;  // seed and offset, instead of the two above

  Part part;
};

// The result and the LSE of the same rows over other keys, which a call's are joined with
// (common/merge.h). Null: none.
struct Prior {
  const void* out = nullptr;
  const void* lse = nullptr;
  DType out_dtype = DType::kFloat32;  // on the CPU also kFloat64
  DType lse_dtype = DType::kFloat32;  // on the CPU also kFloat64
  Strides out_stride;
  Strides lse_stride;  // (batch, row, head); col is not used
  int columns = 0;     // of out, also where the call's own are rounded up
};

struct ForwardParams {
  Attention attention;
  void* out = nullptr;
  DType out_dtype = DType::kFloat32;
  void* lse = nullptr;                // null: not wanted
  DType lse_dtype = DType::kFloat32;  // on the CPU also kFloat64
  float* max_logits = nullptr;  // null: not wanted; else filled with -inf before the kernel runs
  Strides out_stride;
  Strides lse_stride;         // (batch, row, head); col is not used
  Strides max_logits_stride;  // (batch, head)
  Prior prior;
};

// A gradient that is written element by element; strides of broadcast axes, which it is summed
// over, are 0. Null: not wanted.
struct GradientOutput {
  void* data = nullptr;
  DType dtype = DType::kFloat32;
  Strides stride;
};

// BackwardOptions::dq_sums.
struct DqSums {
  void* data = nullptr;  // null: the call keeps nothing
  int64_t bytes = 0;
  int64_t first = 0;  // the call's rows begin there,
  int64_t rows = 0;   // of so many
  bool begin = false;
  bool end = false;
};

// All gradients are written whole, or added to what is there.
struct BackwardParams {
  Attention attention;
  const void* out = nullptr;  // the forward's result
  DType out_dtype = DType::kFloat32;
  Strides out_stride;
  const float* lse = nullptr;
  Strides lse_stride;  // (batch, row, head)
  const void* dout = nullptr;
  DType dout_dtype = DType::kFloat32;  // q's or float32
  Strides dout_stride;
  const float* dlse = nullptr;  // null: zero
  Strides dlse_stride;          // (batch, row, head)

  void* dq = nullptr;
  void* dk = nullptr;
  void* dv = nullptr;
  DType grad_dtype = DType::kFloat32;  // of these three: q's or float32
  Strides dq_stride;
  Strides dk_stride;
  Strides dv_stride;
  bool accumulates_dq = false;
  bool accumulates_dkv = false;
  DqSums dq_sums;

  GradientOutput dbias;    // (batch, row, head, col)
  int64_t dbias_rows = 0;  // extents of its last axes
  int64_t dbias_columns = 0;
  int64_t dbias_batch = 0;
  int dbias_heads = 0;
  GradientOutput dsinks;         // (head)
  GradientOutput dalibi_slopes;  // (batch, head); batch stride 0: (heads,) or batch 1
  bool deterministic = false;

  // Whether the call is the first, or the last, of those whose sums of dq are one.
  bool begins_dq() const { return dq_sums.data == nullptr || dq_sums.begin; }
  bool ends_dq() const { return dq_sums.data == nullptr || dq_sums.end; }
};

// Every GPU that has thread block clusters has room for one of so many CTAs.
inline constexpr int kLargestCluster = 8;

// Attention to a cache (attention.h: KvCachePlan). k and v are the cache, their strides'
// `batch` that of a page or of a sequence; seqlen_k is the capacity, a bound of every length.
// variant/cache.h says where a key lies, and which rows of packed queries are a sequence's.
struct KvCacheParams {
  Attention attention;
  // A launch takes the sequences whose queries number from least_queries to most_queries. Packed
  // queries have several launches.
  int least_queries = 0;
  int most_queries = INT_MAX;
  bool packed_parts = false;  // parts of split keys are packed as queries are (cuda/combine.h)
  void* out = nullptr;
  DType out_dtype = DType::kFloat32;
  float* lse = nullptr;  // null: not wanted
  Strides out_stride;
  Strides lse_stride;  // (batch, row, head)

  DType cache_dtype = DType::kFloat32;  // q's, or is_quantized()
  // Whether that is float8_e5m2. Of a choice between three values of cache_dtype the compiler would
  // make a jump through a table, in the decoding loop.
  bool cache_is_e5m2 = false;
  int64_t slots = 0;                         // extent of the cache's first axis
  const int32_t* cache_seqlens = nullptr;    // null: the capacity
  const int32_t* cache_batch_idx = nullptr;  // null: the sequence's number
  const int32_t* cache_leftpad = nullptr;    // null: 0
  const int32_t* block_table = nullptr;      // null: not paged
  Strides block_table_stride;                // (batch, col)
  int page_shift = 0;                        // a page has 2^page_shift rows
  BroadcastTensor k_scale;                   // (batch: slot, row, head), float32; null: 1
  BroadcastTensor v_scale;
  BroadcastTensor tree_mask;  // (batch, row, col), kBool; packed queries: (row, col)
  int tree_columns = 0;
  bool latent = false;  // v is the first columns of k: nothing is appended to it

  int num_splits = 1;
  int split_size = 0;              // keys of a split; 0: a sequence's keys are shared out evenly
  bool splits_in_cluster = false;  // the CTAs of a tile's splits are a cluster, which joins them

  // Appended before attention; q has then been rotated.
  int seqlen_new = 0;                         // packed: an upper bound
  const int32_t* cu_seqlens_k_new = nullptr;  // null: not packed
  int64_t total_new = 0;
  const void* k_new = nullptr;
  const void* v_new = nullptr;
  Strides k_new_stride;
  Strides v_new_stride;
};

// What is done before attention: the new rows are written to the cache, and q is rotated.
struct AppendParams {
  KvCacheParams cache;            // q as given
  DType dtype = DType::kFloat32;  // of q, k_new and v_new
  void* k_cache = nullptr;        // the cache's, to write to; null: there is nothing to append
  void* v_cache = nullptr;
  BroadcastTensor rotary_cos;  // (row, col); null: no rotation
  BroadcastTensor rotary_sin;
  int64_t rotary_rows = 0;
  const int32_t* rotary_seqlens = nullptr;  // null: the keys before the append
  int rotary_dim = 0;
  bool rotary_interleaved = true;
  bool rotary_steps = false;  // query i is rotated by row n + i, not n
  void* rotated_q = nullptr;  // q's dtype; null: no rotation
  Strides rotated_q_stride;
};

}  // namespace anyflash
