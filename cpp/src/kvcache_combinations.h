// What may not be given together, or at all, in a call of KvCachePlan.
#pragma once

#include <cstdint>
#include <string>

#include "anyflash/attention.h"
#include "arguments.h"

namespace anyflash {

inline void refuse_options(const ForwardOptions& options) {
  const auto refuse = [](bool given, const char* option) {
    if (!given) return;
    invalid_value(
        std::string(option) +
        " is given; attention with a KV cache takes no bias, block_mask, key_ranges, "
        "dropout_p, rng_state, dropout_mask, max_logits, cu_seqlens_q, cu_seqlens_k, seqused_k, "
        "prior_out, prior_lse, and is no part of a larger attention");
  };
  refuse(options.bias != nullptr, "bias");
  refuse(options.block_mask != nullptr, "block_mask");
  refuse(options.key_ranges != nullptr, "key_ranges");
  refuse(options.dropout_p != 0.0, "dropout_p");
  refuse(options.rng_state != nullptr, "rng_state");
  refuse(options.dropout_mask != nullptr, "dropout_mask");
  refuse(options.max_logits != nullptr, "max_logits");
  refuse(options.cu_seqlens_q != nullptr, "cu_seqlens_q");
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

// The combinations that are not allowed, whatever the tensors are.
inline void check_combinations(const KvCacheOptions& c) {
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

}  // namespace anyflash
