// Options of the C++ API. Every field has the default that an empty `ForwardOptions{}` means.
#pragma once

#include <array>
#include <cstdint>
#include <optional>

#include "anyflash/tensor_view.h"

namespace anyflash {

// Instruction sets of the CPU kernels. kAuto takes the best that is built and that the CPU has.
// kAmx has the forward and the backward of bfloat16 and takes kAvx512's kernels for the rest.
enum class CpuIsa : int { kAuto, kBaseline, kAvx2, kAvx512, kNeon, kAmx };

// In this order a score of query i and key j is made:
//
//   s = softmax_scale * q_i.k_j
//   s = softcap * tanh(s / softcap)                              if softcap > 0
//   s = s + bias_ij - alibi_slope * |i + shift - j|
//   s = -inf where a mask hides j from i: window, causal, a boolean bias, block_mask, key_ranges,
//       lengths
//   p = exp(s) / (exp(sink) + sum_j exp(s))
//   p = 0 with probability dropout_p, else p / (1 - dropout_p)
//
// Rows, columns and blocks count from the beginning of their own sequence. Row i and key i + shift
// are on the diagonal, from which causal masks and windows count, too. shift is seqlen_k -
// seqlen_q, so that the diagonal ends at the bottom right, unless query_start says otherwise. A
// bias of -inf is a mask too: NaN and infinity in masked keys and values reach nothing.
//
// Tensors are optional (null: not used) and lie on the device of q. They may have any strides, with
// two exceptions: one-dimensional integers are contiguous, and on a GPU the stride of bias along
// the keys fits 32 bits. An axis of extent 1 where n is written as "n or 1" is broadcast.
struct ForwardOptions {
  // Factor on q.k; any finite number. Not set: 1 / sqrt(head_dim).
  std::optional<double> softmax_scale;
  // Query i sees keys j <= i + shift.
  bool causal = false;
  // Query i sees keys i + shift - window_left <= j <= i + shift + window_right; -1: no bound on
  // that side. causal bounds window_right by 0.
  int64_t window_left = -1;
  int64_t window_right = -1;
  // 0: none.
  double softcap = 0.0;
  // (heads,) or (batch or 1, heads): float32, float16, bfloat16; CPU also float64.
  const TensorView* alibi_slopes = nullptr;
  // (batch or 1, heads or 1, seqlen_q or 1, seqlen_k or 1). float32, float16, bfloat16 (CPU also
  // float64): added to the score. bool: keys to keep. Packed sequences: max_seqlen_q, max_seqlen_k.
  const TensorView* bias = nullptr;
  // (batch or 1, heads or 1, query blocks, key blocks) bool: blocks to keep. Block (a, b) holds the
  // rows and columns [a, a + 1) * block_size[0], [b, b + 1) * block_size[1]; sizes are multiples
  // of 64.
  const TensorView* block_mask = nullptr;
  std::array<int64_t, 2> block_size{128, 128};
  // (batch or 1, heads_k or 1, seqlen_k, 2 or 4) int32. Key j is seen by the rows [a, b) that its
  // two numbers say. Four numbers say the rows of [a, b) and of [c, d). Packed sequences: (heads_k
  // or 1, total_k, 2 or 4). Any numbers are allowed: an interval without rows is empty, and what
  // lies outside the sequence's rows is cut off. Rows count from the sequence's first, wherever the
  // diagonal is; with query_start, from the whole's first.
  const TensorView* key_ranges = nullptr;
  // (heads,): a logit that takes part in the denominator only; types as for alibi_slopes.
  const TensorView* sinks = nullptr;

  // Rounded to a multiple of 2^-16; 0 <= dropout_p < 1. What is dropped follows from seed, offset,
  // batch, head, row and column alone (kernels/variant/dropout.h).
  double dropout_p = 0.0;
  std::uint64_t seed = 0;
  std::uint64_t offset = 0;
  // (2,) int64: seed and offset, read on the device instead of the two above.
  const TensorView* rng_state = nullptr;
  // Output (batch, heads, seqlen_q, seqlen_k) bool: true where a probability is kept, false where
  // it is dropped, whether or not a mask hides it or a sequence is that long. Packed sequences:
  // max_seqlen_q, max_seqlen_k.
  const TensorView* dropout_mask = nullptr;
  // Output (batch, heads) float32: the largest score that no mask removed, -inf if there is none.
  const TensorView* max_logits = nullptr;

  // Packed sequences: q, out (total_q, heads, head_dim), k, v (total_k, heads_k, head_dim), lse
  // (heads, total_q), and sequence b is rows [cu_seqlens[b], cu_seqlens[b + 1]). (batch + 1,) int32
  // each; both or none.
  const TensorView* cu_seqlens_q = nullptr;
  const TensorView* cu_seqlens_k = nullptr;
  // Upper bounds of the sequences' lengths; 0: as many as there are rows. Where an option's shape
  // has max_seqlen_q or max_seqlen_k, that is then total_q or total_k.
  int64_t max_seqlen_q = 0;
  int64_t max_seqlen_k = 0;
  // (batch,) int32: how many of a sequence's keys are used, the first ones. Its queries are aligned
  // (causal, windows, ALiBi) with the last of them.
  const TensorView* seqused_k = nullptr;
  // A call may be a part of a larger attention. Its row i is row query_start + i of the whole, and
  // its key j is key key_start + j. Row r of the whole is on the diagonal with key r + diagonal. If
  // any of the three is given, also by an array, then
  //   shift = query_start + diagonal - key_start
  // and the others are 0. All are at most 2^30, and starts at least 0. A larger shift counts as
  // 2^30. Dropout counts rows and keys from the starts. With dropout, key_start is a multiple of 8.
  std::optional<int64_t> query_start;
  std::optional<int64_t> key_start;
  std::optional<int64_t> diagonal;
  // (batch,) int32: the same for each sequence, in place of the numbers.
  const TensorView* query_starts = nullptr;
  const TensorView* key_starts = nullptr;
  const TensorView* diagonals = nullptr;
  // For dropout, the number of the first sequence in the whole batch and of the first head in the
  // whole's total_heads; 0: as many as q has.
  int64_t batch_start = 0;
  int64_t head_start = 0;
  int64_t total_heads = 0;

  // out (its shape) and lse (its shape) of the same rows over other keys: the results are joined
  // with them as merge_states() does, in one pass. Both or none. float32; on the CPU float64 too:
  // prior_out with float64 tensors, prior_lse with any. They may be `out` and `lse` themselves,
  // which then are a state that call after call continues: with 0 where no key has been seen. Keys
  // that masks hide from all rows then cost no launch, where the host knows the positions. A sink
  // counts in each call that has it. The backward does not read them.
  const TensorView* prior_out = nullptr;
  const TensorView* prior_lse = nullptr;

  // Lengths on a GPU are clamped to what the tensors hold. This checks them, which waits for the
  // device, and is refused while the stream is being captured. On the CPU they are always checked.
  bool validate = false;

  // CPU: largest number of threads; 0 is OpenMP's default (OMP_NUM_THREADS, else all cores). Little
  // work is done by the caller alone. Results do not depend on it.
  int num_threads = 0;
  CpuIsa cpu_isa = CpuIsa::kAuto;
};

// What BackwardPlan needs beside the options that the forward was given.
struct BackwardOptions {
  // Bitwise the same gradients in every run. On a GPU dq is then made by a second pass over blocks
  // of rows (7 products instead of 5) instead of by atomic additions. The CPU's always are.
  bool deterministic = false;
  // Gradient of the LSE, float32, its shape; null: zero. Where the row sees no key it is not read.
  const TensorView* dlse = nullptr;
  // Outputs; null: not wanted. Each has the shape of its tensor among the forward's options, whose
  // type it has too, or float32; axes that are broadcast are summed over in float32.
  const TensorView* dbias = nullptr;  // not of a boolean bias
  const TensorView* dsinks = nullptr;
  const TensorView* dalibi_slopes = nullptr;
  // dq, or dk and dv, are added to what the tensors hold. These are float32, or on the CPU float64
  // with float64 inputs.
  bool accumulate_dq = false;
  bool accumulate_dkv = false;
  // Calls over the same rows, each with other keys, may keep their sums of dq in memory of their
  // own, in the kernel's order, with what they know of the rows. Each call then reads and writes
  // less. The first call has dq_sums_begin, and all rows that others have. The last one has
  // dq_sums_end: it writes (or accumulates) dq of its rows, which no other call touches. Both may
  // be a call without keys. A row has the same q, out, lse, dout and dlse in all calls. Each call
  // writes all of dsinks.
  //
  // The memory is contiguous float32 of BackwardPlan::dq_sums_bytes(), and begins at a multiple of
  // 16 bytes. It has dq_sums_rows rows of each sequence, of which the call's begin at
  // dq_sums_first. On a GPU that is a multiple of 128, and so is seqlen_q, unless the call has the
  // last rows. All calls have one batch, heads, head dims, scale and softcap, and no packed
  // sequences. On a GPU dout and out have q's type, and neither ALiBi, nor dropout, nor
  // `deterministic` is allowed.
  const TensorView* dq_sums = nullptr;
  int64_t dq_sums_first = 0;
  int64_t dq_sums_rows = 0;
  bool dq_sums_begin = false;
  bool dq_sums_end = false;
};

// What KvCachePlan needs beside ForwardOptions. The cache of sequence b is rows
// [0, capacity) of its own: row r of k_cache[cache_batch_idx[b]], or, with a block_table, row
// r % page_size of page block_table[b, r / page_size]. Integers are read on the device, when the
// work runs: a CUDA graph that is replayed sees what they then hold. They are clamped to what the
// tensors hold; on the CPU (and with ForwardOptions::validate) they are checked.
//
// Sequences with different numbers of queries are packed: ForwardOptions::cu_seqlens_q (batch + 1,)
// says where each begins in q and out (total_q, heads, ...) and lse (heads, total_q). max_seqlen_q
// is a bound of their lengths that may spare a launch. Work and workspace follow from shapes and
// this bound alone.
struct KvCacheOptions {
  // (batch,) int32: rows of the cache that are filled, before new keys are appended. Null: all.
  const TensorView* cache_seqlens = nullptr;
  // (batch,) int32: the sequence's place in the cache. Null: b. Not with block_table.
  const TensorView* cache_batch_idx = nullptr;
  // (batch,) int32: how many of the first rows are not used: key 0 is the row after them. Null: 0.
  const TensorView* cache_leftpad = nullptr;
  // (batch, pages of a sequence) int32, any strides. Entries that belong to no row below the
  // sequence's length are not read.
  const TensorView* block_table = nullptr;

  // (batch, seqlen_new, heads_k, head_dim), (batch, seqlen_new, heads_k, head_dim_v), q's dtype:
  // written to the cache's rows from cache_seqlens[b] on, before attention, which sees them. Both
  // or none; they need cache_seqlens. With packed queries: (total_new, heads_k, ...).
  const TensorView* k_new = nullptr;
  const TensorView* v_new = nullptr;
  // (batch + 1,) int32, of packed queries: where the sequences of k_new begin. Null: cu_seqlens_q.
  const TensorView* cu_seqlens_k_new = nullptr;

  // (rows, rotary_dim / 2), float32 or q's dtype: rotary embedding (Su et al., arXiv 2104.09864)
  // of the first rotary_dim columns of k_new, which they need, and of q. New key t is rotated by
  // row n + t, with n = cache_seqlens[b] - cache_leftpad[b]. Query i is rotated by row n + i where
  // there is a causal mask or a window, else by row n. Both or none.
  const TensorView* rotary_cos = nullptr;
  const TensorView* rotary_sin = nullptr;
  // (batch,) int32: the row n of the tables, where it is another than above (cache_seqlens[b], say,
  // for positions that count the pad). Needs the tables.
  const TensorView* rotary_seqlens = nullptr;
  // Columns 2 c and 2 c + 1 are a pair (GPT-J); else c and c + rotary_dim / 2 (GPT-NeoX, Llama).
  bool rotary_interleaved = true;

  // (batch or 1, seqlen_q, seqlen_q) bool: of the last seqlen_q keys, query i sees key j where
  // [b, i, j] holds (tree attention for speculative decoding). Earlier keys are seen as without it.
  // A missing leading axis is broadcast.
  // Packed queries: (total_q, columns), of which column j is the key that the sequence's query j
  // is aligned with; keys behind the last column are seen as without it.
  const TensorView* tree_mask = nullptr;

  // Of a cache of 8 bits, key = scale * element. The scales are float32, by head: (heads_k,); by
  // page (sequence of the cache) and head: (k_cache.shape[0], heads_k); or by row of the cache and
  // head: (k_cache.shape[0], k_cache.shape[1], heads_k). Null: 1. What is appended is divided by
  // the scale of its place and rounded, to the largest number beyond it; NaN becomes 0 in an int8
  // cache.
  const TensorView* k_scale = nullptr;
  const TensorView* v_scale = nullptr;

  // Latent attention (DeepSeek-V2's MLA, arXiv 2405.04434): the values are the first head_dim_v
  // columns of k_cache, 1 to head_dim. v_cache is then empty (TensorView{}), and v_new and v_scale
  // are null: k_new and k_scale serve both. 0: v_cache is given.
  int64_t head_dim_v = 0;

  // Flash-decoding: the number of CTAs (CPU: tasks) over which the keys of a sequence are split.
  // Their partial results are joined in float32. 0: chosen from the sizes, which include the
  // batch's. 1, or a split_size, makes a sequence's result independent of the batch. With packed
  // queries on a GPU they divide the keys of sequences with few queries, whose rows of a K/V head
  // fit the tile of one query. Those of longer ones are only split where the number is chosen.
  int64_t num_splits = 0;
  // Keys of a split, a multiple of 64, in place of num_splits; 0: not used.
  int64_t split_size = 0;
};

struct MergeOptions {
  int num_threads = 0;     // CPU; 0: OpenMP's default
  void* stream = nullptr;  // CUDA: a cudaStream_t; null is the legacy default stream
};

}  // namespace anyflash
