// The arguments of each function: those of a call that is allowed.
#include <algorithm>
#include <cstddef>
#include <cstring>

#include "call.h"

namespace fuzz {

void Call::packed_lengths() {
  std::vector<int32_t> q{0}, k{0};
  for (int64_t i = 0; i < batch_; ++i) {
    total_q_ += rows_ - i * rows_ / 4;
    total_k_ += i % 2 == 0 ? keys_ : keys_ / 2;
    q.push_back(static_cast<int32_t>(total_q_));
    k.push_back(static_cast<int32_t>(total_k_));
  }
  add("cu_seqlens_q", Role::kInput, kInt32, {batch_ + 1}, packed_).integers = q;
  add("cu_seqlens_k", Role::kInput, kInt32, {batch_ + 1}, packed_).integers = k;
  if (!packed_) return;
  options_.max_seqlen_q = rows_;
  options_.max_seqlen_k = keys_;
}

// What the forward may have besides q, k, v, out and lse.
void Call::forward_options() {
  const DLDataType of_bias = feature(8) ? kBool : small_dtype_;
  const int64_t one = 1;
  const auto or_one = [&](int bit, int64_t extent) { return feature(bit) ? one : extent; };
  add("bias", Role::kInput, of_bias,
      {or_one(9, batch_), or_one(10, heads_), or_one(11, rows_), or_one(12, keys_)}, feature(13));
  add("block_mask", Role::kInput, feature(14) ? kUInt8 : kBool,
      {or_one(9, batch_), or_one(10, heads_), (rows_ + block_ - 1) / block_,
       (keys_ + block_ - 1) / block_},
      feature(15));
  options_.block_size[0] = options_.block_size[1] = block_;
  std::vector<int32_t> ranges;
  for (int64_t j = 0; j < (packed_ ? total_k_ : keys_); ++j) {
    for (const int64_t x : {j % 5, j % 7, INT32_MAX - j, j - INT32_MAX}) {
      ranges.push_back(static_cast<int32_t>(x));
    }
  }
  const auto numbers = static_cast<int64_t>(ranges.size());
  if (packed_)
    add("key_ranges", Role::kInput, kInt32, {1, numbers / 4, 4}, feature(30)).integers = ranges;
  else
    add("key_ranges", Role::kInput, kInt32, {1, 1, numbers / 4, 4}, feature(30)).integers = ranges;
  add("rng_state", Role::kInput, kInt64, {2}, feature(16));
  if (feature(17)) options_.dropout_p = 0.25;
  const bool outputs = op_ == Op::kForward;
  add("dropout_mask", Role::kOutput, kBool, {batch_, heads_, rows_, keys_}, feature(18) && outputs);
  add("max_logits", Role::kOutput, kFloat32, {batch_, heads_}, feature(19) && outputs);
  std::vector<int32_t> used;
  for (int64_t i = 0; i < batch_; ++i) used.push_back(static_cast<int32_t>(keys_ / 2 - i % 2));
  for (int32_t& n : used) n = std::max(n, 0);
  add("seqused_k", Role::kInput, kInt32, {batch_}, feature(20)).integers = used;
}

void Call::small_tensors() {
  if (feature(21)) {
    add("alibi_slopes", Role::kInput, small_dtype_, {heads_}, feature(22));
  } else {
    add("alibi_slopes", Role::kInput, small_dtype_, {feature(9) ? 1 : batch_, heads_}, feature(22));
  }
  add("sinks", Role::kInput, small_dtype_, {heads_}, feature(23));
}

void Call::forward() {
  packed_lengths();
  const Role out = op_ == Op::kBackward ? Role::kInput : Role::kOutput;
  if (packed_) {
    add("q", Role::kInput, dtype_, {total_q_, heads_, columns_});
    add("k", Role::kInput, dtype_, {total_k_, heads_k_, columns_});
    add("v", Role::kInput, dtype_, {total_k_, heads_k_, columns_v_});
    add("out", out, out_dtype_, {total_q_, heads_, columns_v_});
    add("lse", out, kFloat32, {heads_, total_q_}, feature(24) || op_ == Op::kBackward);
  } else {
    add("q", Role::kInput, dtype_, {batch_, rows_, heads_, columns_});
    add("k", Role::kInput, dtype_, {batch_, keys_, heads_k_, columns_});
    add("v", Role::kInput, dtype_, {batch_, keys_, heads_k_, columns_v_});
    add("out", out, out_dtype_, {batch_, rows_, heads_, columns_v_});
    add("lse", out, kFloat32, {batch_, heads_, rows_}, feature(24) || op_ == Op::kBackward);
  }
  forward_options();
  small_tensors();
}

void Call::backward() {
  forward();
  const DLDataType of_gradients = feature(25) ? kFloat32 : dtype_;
  const bool has_bias = find("bias")->present && !feature(8);
  if (packed_) {
    add("dout", Role::kInput, out_dtype_, {total_q_, heads_, columns_v_});
    add("dq", Role::kOutput, of_gradients, {total_q_, heads_, columns_});
    add("dk", Role::kOutput, of_gradients, {total_k_, heads_k_, columns_});
    add("dv", Role::kOutput, of_gradients, {total_k_, heads_k_, columns_v_});
    add("dlse", Role::kInput, kFloat32, {heads_, total_q_}, feature(26));
  } else {
    add("dout", Role::kInput, out_dtype_, {batch_, rows_, heads_, columns_v_});
    add("dq", Role::kOutput, of_gradients, {batch_, rows_, heads_, columns_});
    add("dk", Role::kOutput, of_gradients, {batch_, keys_, heads_k_, columns_});
    add("dv", Role::kOutput, of_gradients, {batch_, keys_, heads_k_, columns_v_});
    add("dlse", Role::kInput, kFloat32, {batch_, heads_, rows_}, feature(26));
  }
  // Room for float64.
  const int64_t sums = 2 * batch_ * heads_ * rows_ * columns_;
  add("dq_sums", Role::kOutput, kFloat32, {sums}, !packed_ && sums > 0 && feature(31));
  const Slot& bias = *find("bias");
  add("dbias", Role::kOutput, small_dtype_,
      {bias.extent(0), bias.extent(1), bias.extent(2), bias.extent(3)}, has_bias && feature(27));
  add("dsinks", Role::kOutput, small_dtype_, {heads_}, feature(23) && feature(28));
  const bool slopes = feature(22) && feature(29);
  if (feature(21)) {
    add("dalibi_slopes", Role::kOutput, small_dtype_, {heads_}, slopes);
  } else {
    add("dalibi_slopes", Role::kOutput, small_dtype_, {feature(9) ? 1 : batch_, heads_}, slopes);
  }
}

void Call::cache_integers() {
  const int64_t room = keys_ - new_rows_;
  std::vector<int32_t> filled, pads, places, pages, rotations;
  const int64_t table_columns = page_ == 0 ? 0 : keys_ / page_;
  for (int64_t i = 0; i < batch_; ++i) {
    filled.push_back(static_cast<int32_t>(room - i * room / 4));
    pads.push_back(static_cast<int32_t>(filled.back() / 3));
    places.push_back(static_cast<int32_t>(batch_ - 1 - i));
    rotations.push_back(static_cast<int32_t>(i));
    for (int64_t j = 0; j < table_columns; ++j) {
      pages.push_back(static_cast<int32_t>(batch_ * table_columns - 1 - (i * table_columns + j)));
    }
  }
  const bool appends = new_rows_ > 0;
  add("cache_seqlens", Role::kInput, kInt32, {batch_}, feature(9) || appends).integers = filled;
  add("cache_leftpad", Role::kInput, kInt32, {batch_}, feature(10)).integers = pads;
  add("cache_batch_idx", Role::kInput, kInt32, {batch_}, feature(11) && page_ == 0).integers =
      places;
  add("block_table", Role::kInput, kInt32, {batch_, table_columns}, page_ > 0).integers = pages;
  add("rotary_seqlens", Role::kInput, kInt32, {batch_}, appends && feature(12) && feature(13))
      .integers = rotations;
}

// Queries, results and new keys of a call with a cache, packed or not.
void Call::cache_tokens() {
  const bool appends = new_rows_ > 0;
  const bool latent = feature(29);
  std::vector<int32_t> ends, new_ends;
  for (int64_t i = 0; i <= batch_; ++i) {
    ends.push_back(static_cast<int32_t>(i * rows_));
    new_ends.push_back(static_cast<int32_t>(i * new_rows_));
  }
  add("cu_seqlens_q", Role::kInput, kInt32, {batch_ + 1}, packed_).integers = ends;
  const bool own_ends = packed_ && appends && (new_rows_ != rows_ || feature(30));
  add("cu_seqlens_k_new", Role::kInput, kInt32, {batch_ + 1}, own_ends).integers = new_ends;
  if (packed_) {
    const int64_t n = batch_ * rows_;
    add("q", Role::kInput, dtype_, {n, heads_, columns_});
    add("out", Role::kOutput, out_dtype_, {n, heads_, columns_v_});
    add("lse", Role::kOutput, kFloat32, {heads_, n}, feature(24));
    add("k_new", Role::kInput, dtype_, {batch_ * new_rows_, heads_k_, columns_}, appends);
    add("v_new", Role::kInput, dtype_, {batch_ * new_rows_, heads_k_, columns_v_},
        appends && !latent);
    add("tree_mask", Role::kInput, kBool, {n, rows_}, feature(20));
    return;
  }
  add("q", Role::kInput, dtype_, {batch_, rows_, heads_, columns_});
  add("out", Role::kOutput, out_dtype_, {batch_, rows_, heads_, columns_v_});
  add("lse", Role::kOutput, kFloat32, {batch_, heads_, rows_}, feature(24));
  add("k_new", Role::kInput, dtype_, {batch_, new_rows_, heads_k_, columns_}, appends);
  add("v_new", Role::kInput, dtype_, {batch_, new_rows_, heads_k_, columns_v_}, appends && !latent);
  add("tree_mask", Role::kInput, kBool, {feature(19) ? 1 : batch_, rows_, rows_}, feature(20));
}

void Call::kvcache() {
  if (page_ > 0) keys_ = (keys_ + page_ - 1) / page_ * page_;
  new_rows_ = std::min(new_rows_, keys_);
  const bool appends = new_rows_ > 0;
  const DLDataType eight = feature(15) ? kInt8 : kE4m3;
  cache_dtype_ = feature(14) ? eight : dtype_;
  const int64_t slots = page_ > 0 ? batch_ * (keys_ / page_) : batch_;
  const int64_t rows = page_ > 0 ? page_ : keys_;
  add("k_cache", appends ? Role::kBoth : Role::kInput, cache_dtype_,
      {slots, rows, heads_k_, columns_});
  const bool latent = feature(29);
  if (latent) cache_options_.head_dim_v = columns_v_ = std::min(columns_v_, columns_);
  add("v_cache", appends ? Role::kBoth : Role::kInput, cache_dtype_,
      {slots, rows, heads_k_, columns_v_}, !latent);
  cache_tokens();
  cache_integers();
  const bool rotates = appends && feature(12) && columns_ >= 2;
  slot("rotary_seqlens").present &= rotates;
  const int64_t positions = keys_ + rows_ + new_rows_ + batch_;
  const DLDataType of_table = feature(16) ? kFloat32 : dtype_;
  const int64_t pairs = std::max<int64_t>(feature(17) ? columns_ / 2 : columns_ / 4, 1);
  add("rotary_cos", Role::kInput, of_table, {positions, pairs}, rotates);
  add("rotary_sin", Role::kInput, of_table, {positions, pairs}, rotates);
  cache_options_.rotary_neox = feature(18);
  for (const char* const name : {"k_scale", "v_scale"}) {
    if (feature(25)) {
      add(name, Role::kInput, kFloat32, {heads_k_}, feature(14) && feature(26));
    } else {
      add(name, Role::kInput, kFloat32, {slots, heads_k_}, feature(14) && feature(26));
    }
  }
  if (latent) slot("v_scale").present = false;
  if (feature(27)) cache_options_.num_splits = 3;
  if (feature(28) && !feature(27)) cache_options_.split_size = 64;
  small_tensors();
  for (const char* const refused : {"bias", "block_mask", "key_ranges", "rng_state", "dropout_mask",
                                    "max_logits", "cu_seqlens_k", "seqused_k"}) {
    add(refused, Role::kInput, kFloat32, {2}, false);
  }
}

void Call::merge() {
  if (packed_) {
    const int64_t n = batch_ * rows_;
    for (const char* const name : {"out_a", "out_b", "out"}) {
      const bool is_out = std::strcmp(name, "out") == 0;
      add(name, is_out ? Role::kOutput : Role::kInput, is_out ? out_dtype_ : dtype_,
          {n, heads_, columns_v_});
    }
    for (const char* const name : {"lse_a", "lse_b"})
      add(name, Role::kInput, kFloat32, {heads_, n});
    add("lse", Role::kOutput, kFloat32, {heads_, n}, feature(24));
    return;
  }
  for (const char* const name : {"out_a", "out_b", "out"}) {
    const bool is_out = std::strcmp(name, "out") == 0;
    add(name, is_out ? Role::kOutput : Role::kInput, is_out ? out_dtype_ : dtype_,
        {batch_, rows_, heads_, columns_v_});
  }
  for (const char* const name : {"lse_a", "lse_b"}) {
    add(name, Role::kInput, kFloat32, {batch_, heads_, rows_});
  }
  add("lse", Role::kOutput, kFloat32, {batch_, heads_, rows_}, feature(24));
}

void Call::numbers() {
  using Type = Number::Type;
  if (op_ == Op::kMerge) {
    numbers_ = {{"num_threads", Type::kInt32, &merge_options_.num_threads},
                {"options", Type::kInt32, &merge_options_.reserved},
                {"options", Type::kSize, &merge_options_.size}};
    return;
  }
  anyflash_forward_options& o = options_;
  o.num_threads = 1;
  numbers_ = {{"options", Type::kSize, &o.size},
              {"softmax_scale", Type::kDouble, &o.softmax_scale},
              {"softmax_scale", Type::kInt32, &o.has_softmax_scale},
              {"causal", Type::kInt32, &o.causal},
              {"num_threads", Type::kInt32, &o.num_threads},
              {"cpu_isa", Type::kInt32, &o.cpu_isa},
              {"window_left", Type::kInt32, &o.has_window_left},
              {"window_right", Type::kInt32, &o.has_window_right},
              {"window_left", Type::kInt64, &o.window_left},
              {"window_right", Type::kInt64, &o.window_right},
              {"softcap", Type::kDouble, &o.softcap},
              {"block_size", Type::kInt64, &o.block_size[0]},
              {"block_size", Type::kInt64, &o.block_size[1]},
              {"dropout_p", Type::kDouble, &o.dropout_p},
              {"seed", Type::kUInt64, &o.seed},
              {"offset", Type::kUInt64, &o.offset},
              {"max_seqlen_q", Type::kInt64, &o.max_seqlen_q},
              {"max_seqlen_k", Type::kInt64, &o.max_seqlen_k},
              {"validate", Type::kInt32, &o.validate},
              {"options", Type::kInt32, &o.reserved}};
  if (op_ == Op::kBackward) {
    anyflash_backward_options& b = backward_options_;
    numbers_.push_back({"options", Type::kSize, &b.size});
    numbers_.push_back({"deterministic", Type::kInt32, &b.deterministic});
    numbers_.push_back({"options", Type::kInt32, &b.reserved});
    b.dq_sums_rows = rows_;
    b.dq_sums_begin = b.dq_sums_end = 1;
    numbers_.push_back({"dq_sums", Type::kInt64, &b.dq_sums_first});
    numbers_.push_back({"dq_sums", Type::kInt64, &b.dq_sums_rows});
  }
  if (op_ == Op::kKvCache) {
    anyflash_kvcache_options& c = cache_options_;
    numbers_.push_back({"options", Type::kSize, &c.size});
    numbers_.push_back({"rotary_neox", Type::kInt32, &c.rotary_neox});
    numbers_.push_back({"options", Type::kInt32, &c.reserved});
    numbers_.push_back({"num_splits", Type::kInt64, &c.num_splits});
    numbers_.push_back({"split_size", Type::kInt64, &c.split_size});
    numbers_.push_back({"head_dim_v", Type::kInt64, &c.head_dim_v});
  }
}

}  // namespace fuzz
