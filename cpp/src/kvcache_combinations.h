// What may not be given together, or at all, in a call of KvCachePlan; its splits.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "anyflash/attention.h"
#include "arguments.h"
#include "params.h"

namespace anyflash {

inline void refuse_options(const ForwardOptions& options) {
  const auto refuse = [](bool given, const char* option) {
    if (!given) return;
    invalid_value(std::string(option) +
                  " is given; attention with a KV cache takes no bias, block_mask, key_ranges, "
                  "dropout_p, rng_state, dropout_mask, max_logits, cu_seqlens_k, seqused_k, "
                  "prior_out, prior_lse, and is no part of a larger attention");
  };
  refuse(options.bias != nullptr, "bias");
  refuse(options.block_mask != nullptr, "block_mask");
  refuse(options.key_ranges != nullptr, "key_ranges");
  refuse(options.dropout_p != 0.0, "dropout_p");
  refuse(options.rng_state != nullptr, "rng_state");
  refuse(options.dropout_mask != nullptr, "dropout_mask");
  refuse(options.max_logits != nullptr, "max_logits");
  refuse(options.cu_seqlens_k != nullptr, "cu_seqlens_k");
  refuse(options.seqused_k != nullptr, "seqused_k");
  refuse(options.prior_out != nullptr, "prior_out");
  refuse(options.prior_lse != nullptr, "prior_lse");
  refuse(options.query_start.has_value(), "query_start");
  refuse(options.key_start.has_value(), "key_start");
  refuse(options.diagonal.has_value(), "diagonal");
  refuse(options.query_starts != nullptr, "query_starts");
  refuse(options.key_starts != nullptr, "key_starts");
  refuse(options.diagonals != nullptr, "diagonals");
  refuse(options.batch_start != 0, "batch_start");
  refuse(options.head_start != 0, "head_start");
  refuse(options.total_heads != 0, "total_heads");
}

// Latent attention: what the keys stand for must not be given.
inline void check_latent(const KvCacheTensors& t, const KvCacheOptions& c) {
  const bool given = t.v_cache.rank != 0 || t.v_cache.data != nullptr;
  if (c.head_dim_v == 0) {
    if (given) return;
    invalid_value(
        "v_cache is missing; it, or head_dim_v, so many columns of k_cache that are the values, is "
        "needed");
  }
  const auto refuse = [](bool is_given, const char* argument) {
    if (!is_given) return;
    invalid_value(
        std::string(argument) +
        " is given with head_dim_v, with which the values are k_cache's columns; only one "
        "of both is allowed");
  };
  refuse(given, "v_cache");
  refuse(c.v_new != nullptr, "v_new");
  refuse(c.v_scale != nullptr, "v_scale");
  const int64_t most = t.k_cache.rank == 4 ? t.k_cache.shape[3] : 0;
  if (c.head_dim_v < 1 || (most > 0 && c.head_dim_v > most)) {
    invalid_value("head_dim_v is " + std::to_string(c.head_dim_v) + "; 1 to " +
                  std::to_string(most) + ", the columns of k_cache, is allowed");
  }
}

// With the values that are columns of the keys.
inline KvCacheTensors with_values(KvCacheTensors t, const KvCacheOptions& c) {
  check_latent(t, c);
  if (c.head_dim_v == 0) return t;
  t.v_cache = t.k_cache;
  t.v_cache.shape[3] = c.head_dim_v;
  return t;
}

// The combinations that are not allowed, whatever the tensors are. packed: queries are.
inline void check_combinations(const KvCacheOptions& c, bool packed) {
  if (c.cu_seqlens_k_new != nullptr && (!packed || c.k_new == nullptr)) {
    invalid_value(
        "cu_seqlens_k_new is given without cu_seqlens_q and k_new; it says where the sequences of "
        "k_new begin, where that is elsewhere than in packed queries");
  }
  if (c.head_dim_v == 0) check_both(c.k_new, "k_new", c.v_new, "v_new");
  check_both(c.rotary_cos, "rotary_cos", c.rotary_sin, "rotary_sin");
  if (c.k_new != nullptr && c.cache_seqlens == nullptr) {
    invalid_value("k_new is given without cache_seqlens, which says where it is written");
  }
  if (c.rotary_cos != nullptr && c.k_new == nullptr) {
    invalid_value("rotary_cos is given without k_new; keys are rotated when they are appended");
  }
  if (c.rotary_seqlens != nullptr && c.rotary_cos == nullptr) {
    invalid_value("rotary_seqlens is given without rotary_cos, whose rows it names");
  }
  if (c.block_table != nullptr && c.cache_batch_idx != nullptr) {
    invalid_value("cache_batch_idx is given with block_table; only one of both is allowed");
  }
}

// Leaves num_splits 0 where it is to be chosen.
inline void set_splits(const KvCacheOptions& c, KvCacheParams& p) {
  constexpr int64_t kMaxSplitCount = 65535;
  const int64_t count = c.num_splits;
  const int64_t size = c.split_size;
  if (count < 0 || count > kMaxSplitCount) {
    invalid_value("num_splits is " + std::to_string(count) + "; 0 (chosen) to " +
                  std::to_string(kMaxSplitCount) + " is allowed");
  }
  if (size < 0 || size % 64 != 0) {
    invalid_value("split_size is " + std::to_string(size) +
                  "; 0 (not used) or a positive multiple of 64 is allowed");
  }
  p.num_splits = static_cast<int>(count);
  if (size == 0) return;
  if (count != 0) {
    invalid_value("num_splits is " + std::to_string(count) + " and split_size " +
                  std::to_string(size) + "; only one of both is allowed");
  }
  // A larger one is the same: one split.
  const int64_t whole = std::max<int64_t>((int64_t{p.attention.seqlen_k} + 63) / 64 * 64, 64);
  p.split_size = static_cast<int>(std::min(size, whole));
  const int64_t needed = (int64_t{p.attention.seqlen_k} + p.split_size - 1) / p.split_size;
  if (needed > kMaxSplitCount) {
    invalid_value("split_size is " + std::to_string(size) + ", which makes " +
                  std::to_string(needed) + " splits of a cache with room for " +
                  std::to_string(p.attention.seqlen_k) + " rows; at most " +
                  std::to_string(kMaxSplitCount) + " are allowed");
  }
  p.num_splits = static_cast<int>(std::max<int64_t>(needed, 1));
}

}  // namespace anyflash
