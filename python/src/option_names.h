// The names of the options' tensors, in Python and in XLA's calls.
#pragma once

#include <cstddef>
#include <cstring>
#include <string>
#include <string_view>

#include "anyflash/attention.h"

namespace anyflash::python {

template <class Options>
struct TensorOption {
  std::string_view name;
  const TensorView* Options::* field;
  bool writable;
  int rank;  // missing leading axes are added: extent 1, stride 0; 0: as it is
};

inline constexpr TensorOption<ForwardOptions> kForwardTensors[] = {
    {"alibi_slopes", &ForwardOptions::alibi_slopes, false, 0},
    {"bias", &ForwardOptions::bias, false, 4},
    {"block_mask", &ForwardOptions::block_mask, false, 4},
    {"key_ranges", &ForwardOptions::key_ranges, false, 0},
    {"sinks", &ForwardOptions::sinks, false, 0},
    {"rng_state", &ForwardOptions::rng_state, false, 0},
    {"dropout_mask", &ForwardOptions::dropout_mask, true, 0},
    {"max_logits", &ForwardOptions::max_logits, true, 0},
    {"cu_seqlens_q", &ForwardOptions::cu_seqlens_q, false, 0},
    {"cu_seqlens_k", &ForwardOptions::cu_seqlens_k, false, 0},
    {"seqused_k", &ForwardOptions::seqused_k, false, 0},
    {"query_start", &ForwardOptions::query_starts, false, 0},
    {"key_start", &ForwardOptions::key_starts, false, 0},
    {"diagonal", &ForwardOptions::diagonals, false, 0},
    {"prior_out", &ForwardOptions::prior_out, false, 0},
    {"prior_lse", &ForwardOptions::prior_lse, false, 0},
};

inline constexpr TensorOption<BackwardOptions> kBackwardTensors[] = {
    {"dlse", &BackwardOptions::dlse, false, 0},
    {"dbias", &BackwardOptions::dbias, true, 4},
    {"dsinks", &BackwardOptions::dsinks, true, 0},
    {"dalibi_slopes", &BackwardOptions::dalibi_slopes, true, 0},
    {"dq_sums", &BackwardOptions::dq_sums, true, 0},
};

inline constexpr TensorOption<KvCacheOptions> kKvCacheTensors[] = {
    {"cache_seqlens", &KvCacheOptions::cache_seqlens, false, 0},
    {"cache_batch_idx", &KvCacheOptions::cache_batch_idx, false, 0},
    {"cache_leftpad", &KvCacheOptions::cache_leftpad, false, 0},
    {"block_table", &KvCacheOptions::block_table, false, 0},
    {"k_new", &KvCacheOptions::k_new, false, 0},
    {"v_new", &KvCacheOptions::v_new, false, 0},
    {"rotary_cos", &KvCacheOptions::rotary_cos, false, 0},
    {"rotary_sin", &KvCacheOptions::rotary_sin, false, 0},
    {"rotary_seqlens", &KvCacheOptions::rotary_seqlens, false, 0},
    {"cu_seqlens_k_new", &KvCacheOptions::cu_seqlens_k_new, false, 0},
    {"tree_mask", &KvCacheOptions::tree_mask, false, 0},
    {"k_scale", &KvCacheOptions::k_scale, false, 0},
    {"v_scale", &KvCacheOptions::v_scale, false, 0},
};

struct BackwardTensor {
  const char* name;
  TensorView BackwardTensors::* field;
  bool writable;
};

inline constexpr BackwardTensor kBackwardArguments[] = {
    {"dout", &BackwardTensors::dout, false}, {"q", &BackwardTensors::q, false},
    {"k", &BackwardTensors::k, false},       {"v", &BackwardTensors::v, false},
    {"out", &BackwardTensors::out, false},   {"lse", &BackwardTensors::lse, false},
    {"dq", &BackwardTensors::dq, true},      {"dk", &BackwardTensors::dk, true},
    {"dv", &BackwardTensors::dv, true},
};

// A message about k_new and v_new: in Python these have flash-attn's names.
inline std::string with_python_names(std::string message) {
  for (const char* const name : {"k_new", "v_new"}) {
    for (std::size_t at = 0; (at = message.find(name, at)) != std::string::npos; ++at) {
      const bool is_end = at > 0 && message[at - 1] == '_';  // of cu_seqlens_k_new
      if (!is_end) message.erase(at + 1, std::strlen("_new"));
    }
  }
  return message;
}

// function(), its errors with Python's names.
template <class Function>
auto in_python_names(const Function& function) {
  try {
    return function();
  } catch (const Error& error) {
    throw Error(error.code(), with_python_names(error.what()));
  }
}

}  // namespace anyflash::python
