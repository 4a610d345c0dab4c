// The options of a call, which follow its tensors by name.
#pragma once

#include <cstddef>
#include <cstdint>

#include "anyflash/anyflash.h"

namespace anyflash_tvm_ffi {

enum Function : unsigned { kForward = 1, kBackward = 2, kKvCache = 4, kMerge = 8 };

// The structs of the C ABI, all of them: a function reads its own.
struct Options {
  anyflash_forward_options forward = ANYFLASH_FORWARD_OPTIONS_INIT;
  anyflash_backward_options backward = ANYFLASH_BACKWARD_OPTIONS_INIT;
  anyflash_kvcache_options cache = ANYFLASH_KVCACHE_OPTIONS_INIT;
  anyflash_merge_options merge = ANYFLASH_MERGE_OPTIONS_INIT;
  const DLTensor* workspace = nullptr;
};

enum class Kind { kNumber, kInteger, kBits, kFlag, kInt32, kTensor };

inline constexpr std::size_t kNone = ~std::size_t{0};

// Offsets in Options.
struct Place {
  std::size_t value;
  std::size_t given = kNone;  // of the flag that says so
};

struct Option {
  const char* name;
  Kind kind;
  Place place;
  unsigned functions;  // that have it
};

// Of a field of Options.
#define ANYFLASH_AT(field) \
  Place { offsetof(Options, field) }
// Of a field of one of its structs that says by has_... whether the field is given.
#define ANYFLASH_WITH_FLAG(options, field) \
  Place { offsetof(Options, options.field), offsetof(Options, options.has_##field) }

inline constexpr unsigned kDense = kForward | kBackward;
inline constexpr unsigned kAttention = kDense | kKvCache;

inline constexpr Option kOptions[] = {
    {"softmax_scale", Kind::kNumber, ANYFLASH_WITH_FLAG(forward, softmax_scale), kAttention},
    {"causal", Kind::kFlag, ANYFLASH_AT(forward.causal), kAttention},
    {"num_threads", Kind::kInt32, ANYFLASH_AT(forward.num_threads), kAttention},
    {"cpu_isa", Kind::kInt32, ANYFLASH_AT(forward.cpu_isa), kAttention},
    {"num_threads", Kind::kInt32, ANYFLASH_AT(merge.num_threads), kMerge},
    {"window_left", Kind::kInteger, ANYFLASH_WITH_FLAG(forward, window_left), kAttention},
    {"window_right", Kind::kInteger, ANYFLASH_WITH_FLAG(forward, window_right), kAttention},
    {"softcap", Kind::kNumber, ANYFLASH_AT(forward.softcap), kAttention},
    {"alibi_slopes", Kind::kTensor, ANYFLASH_AT(forward.alibi_slopes), kAttention},
    {"bias", Kind::kTensor, ANYFLASH_AT(forward.bias), kDense},
    {"block_mask", Kind::kTensor, ANYFLASH_AT(forward.block_mask), kDense},
    {"block_size_q", Kind::kInteger, ANYFLASH_AT(forward.block_size[0]), kDense},
    {"block_size_k", Kind::kInteger, ANYFLASH_AT(forward.block_size[1]), kDense},
    {"key_ranges", Kind::kTensor, ANYFLASH_AT(forward.key_ranges), kDense},
    {"sinks", Kind::kTensor, ANYFLASH_AT(forward.sinks), kAttention},
    {"dropout_p", Kind::kNumber, ANYFLASH_AT(forward.dropout_p), kDense},
    {"seed", Kind::kBits, ANYFLASH_AT(forward.seed), kDense},
    {"offset", Kind::kBits, ANYFLASH_AT(forward.offset), kDense},
    {"rng_state", Kind::kTensor, ANYFLASH_AT(forward.rng_state), kDense},
    {"dropout_mask", Kind::kTensor, ANYFLASH_AT(forward.dropout_mask), kForward},
    {"max_logits", Kind::kTensor, ANYFLASH_AT(forward.max_logits), kForward},
    {"cu_seqlens_q", Kind::kTensor, ANYFLASH_AT(forward.cu_seqlens_q), kAttention},
    {"cu_seqlens_k", Kind::kTensor, ANYFLASH_AT(forward.cu_seqlens_k), kDense},
    {"max_seqlen_q", Kind::kInteger, ANYFLASH_AT(forward.max_seqlen_q), kAttention},
    {"max_seqlen_k", Kind::kInteger, ANYFLASH_AT(forward.max_seqlen_k), kDense},
    {"seqused_k", Kind::kTensor, ANYFLASH_AT(forward.seqused_k), kDense},
    {"validate", Kind::kFlag, ANYFLASH_AT(forward.validate), kAttention},
    {"query_start", Kind::kInteger, ANYFLASH_WITH_FLAG(forward, query_start), kDense},
    {"key_start", Kind::kInteger, ANYFLASH_WITH_FLAG(forward, key_start), kDense},
    {"diagonal", Kind::kInteger, ANYFLASH_WITH_FLAG(forward, diagonal), kDense},
    {"query_starts", Kind::kTensor, ANYFLASH_AT(forward.query_starts), kDense},
    {"key_starts", Kind::kTensor, ANYFLASH_AT(forward.key_starts), kDense},
    {"diagonals", Kind::kTensor, ANYFLASH_AT(forward.diagonals), kDense},
    {"batch_start", Kind::kInteger, ANYFLASH_AT(forward.batch_start), kDense},
    {"head_start", Kind::kInteger, ANYFLASH_AT(forward.head_start), kDense},
    {"total_heads", Kind::kInteger, ANYFLASH_AT(forward.total_heads), kDense},
    {"prior_out", Kind::kTensor, ANYFLASH_AT(forward.prior_out), kForward},
    {"prior_lse", Kind::kTensor, ANYFLASH_AT(forward.prior_lse), kForward},
    {"deterministic", Kind::kFlag, ANYFLASH_AT(backward.deterministic), kBackward},
    {"dlse", Kind::kTensor, ANYFLASH_AT(backward.dlse), kBackward},
    {"dbias", Kind::kTensor, ANYFLASH_AT(backward.dbias), kBackward},
    {"dsinks", Kind::kTensor, ANYFLASH_AT(backward.dsinks), kBackward},
    {"dalibi_slopes", Kind::kTensor, ANYFLASH_AT(backward.dalibi_slopes), kBackward},
    {"accumulate_dq", Kind::kFlag, ANYFLASH_AT(backward.accumulate_dq), kBackward},
    {"accumulate_dkv", Kind::kFlag, ANYFLASH_AT(backward.accumulate_dkv), kBackward},
    {"dq_sums", Kind::kTensor, ANYFLASH_AT(backward.dq_sums), kBackward},
    {"dq_sums_first", Kind::kInteger, ANYFLASH_AT(backward.dq_sums_first), kBackward},
    {"dq_sums_rows", Kind::kInteger, ANYFLASH_AT(backward.dq_sums_rows), kBackward},
    {"dq_sums_begin", Kind::kFlag, ANYFLASH_AT(backward.dq_sums_begin), kBackward},
    {"dq_sums_end", Kind::kFlag, ANYFLASH_AT(backward.dq_sums_end), kBackward},
    {"cache_seqlens", Kind::kTensor, ANYFLASH_AT(cache.cache_seqlens), kKvCache},
    {"cache_batch_idx", Kind::kTensor, ANYFLASH_AT(cache.cache_batch_idx), kKvCache},
    {"cache_leftpad", Kind::kTensor, ANYFLASH_AT(cache.cache_leftpad), kKvCache},
    {"block_table", Kind::kTensor, ANYFLASH_AT(cache.block_table), kKvCache},
    {"k_new", Kind::kTensor, ANYFLASH_AT(cache.k_new), kKvCache},
    {"v_new", Kind::kTensor, ANYFLASH_AT(cache.v_new), kKvCache},
    {"cu_seqlens_k_new", Kind::kTensor, ANYFLASH_AT(cache.cu_seqlens_k_new), kKvCache},
    {"rotary_cos", Kind::kTensor, ANYFLASH_AT(cache.rotary_cos), kKvCache},
    {"rotary_sin", Kind::kTensor, ANYFLASH_AT(cache.rotary_sin), kKvCache},
    {"rotary_neox", Kind::kFlag, ANYFLASH_AT(cache.rotary_neox), kKvCache},
    {"rotary_seqlens", Kind::kTensor, ANYFLASH_AT(cache.rotary_seqlens), kKvCache},
    {"tree_mask", Kind::kTensor, ANYFLASH_AT(cache.tree_mask), kKvCache},
    {"k_scale", Kind::kTensor, ANYFLASH_AT(cache.k_scale), kKvCache},
    {"v_scale", Kind::kTensor, ANYFLASH_AT(cache.v_scale), kKvCache},
    {"num_splits", Kind::kInteger, ANYFLASH_AT(cache.num_splits), kKvCache},
    {"split_size", Kind::kInteger, ANYFLASH_AT(cache.split_size), kKvCache},
    {"head_dim_v", Kind::kInteger, ANYFLASH_AT(cache.head_dim_v), kKvCache},
    {"workspace", Kind::kTensor, ANYFLASH_AT(workspace), kAttention},
};

#undef ANYFLASH_AT
#undef ANYFLASH_WITH_FLAG

}  // namespace anyflash_tvm_ffi
