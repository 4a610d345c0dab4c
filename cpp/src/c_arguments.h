// The C ABI's arguments as those of the C++ API: options by size, DLPack tensors as views.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <optional>
#include <string>

#include "anyflash/anyflash.h"
#include "anyflash/attention.h"
#include "anyflash/version.h"
#include "describe.h"
#include "dlpack.h"

namespace anyflash {

template <class Options>
bool sets_reserved(const Options& options) {
  return options.reserved != 0;
}
inline bool sets_reserved(const anyflash_forward_options& options) {
  return options.reserved != 0 || options.reserved2 != 0;
}

// Reads the fields that the caller knows into `known`, whose others keep their defaults. A caller
// that is newer than this library may only pass defaults (zeros) in what this library does not
// know.
template <class Options>
void read_options(const Options* given, const char* type, Options& known) {
  if (given == nullptr) return;
  constexpr std::size_t kLargest = 4096;  // more is no size of any version, but no size at all
  // Nor is one that ends within a pointer, of which half would be read.
  if (given->size < sizeof(given->size) || given->size > kLargest ||
      given->size % alignof(Options) != 0) {
    throw Error(ErrorCode::kInvalidValue, "options.size is " + std::to_string(given->size) +
                                              "; it must be sizeof(" + type + ")");
  }
  const auto* const bytes = reinterpret_cast<const unsigned char*>(given);
  bool unknown = false;
  for (std::size_t i = sizeof(known); i < given->size; ++i) unknown |= bytes[i] != 0;
  std::memcpy(&known, given, std::min(sizeof(known), given->size));
  if (unknown || sets_reserved(known)) {
    throw Error(ErrorCode::kUnsupported,
                "options sets a field that this version of anyflash, " ANYFLASH_VERSION_STRING
                ", does not know");
  }
}

inline ForwardOptions options_of(const anyflash_forward_options& c) {
  if (c.cpu_isa < ANYFLASH_CPU_AUTO || c.cpu_isa > ANYFLASH_CPU_AMX) {
    throw Error(ErrorCode::kInvalidValue, "options.cpu_isa is " + std::to_string(c.cpu_isa) +
                                              "; a value of anyflash_cpu_isa is allowed");
  }
  ForwardOptions options;
  if (c.has_softmax_scale != 0) options.softmax_scale = c.softmax_scale;
  options.causal = c.causal != 0;
  options.num_threads = c.num_threads;
  options.cpu_isa = static_cast<CpuIsa>(c.cpu_isa);
  if (c.has_window_left != 0) options.window_left = c.window_left;
  if (c.has_window_right != 0) options.window_right = c.window_right;
  options.softcap = c.softcap;
  for (std::size_t i = 0; i < options.block_size.size(); ++i) {
    if (c.block_size[i] != 0) options.block_size[i] = c.block_size[i];
  }
  options.dropout_p = c.dropout_p;
  options.seed = c.seed;
  options.offset = c.offset;
  options.max_seqlen_q = c.max_seqlen_q;
  options.max_seqlen_k = c.max_seqlen_k;
  options.validate = c.validate != 0;
  if (c.has_query_start != 0) options.query_start = c.query_start;
  if (c.has_key_start != 0) options.key_start = c.key_start;
  if (c.has_diagonal != 0) options.diagonal = c.diagonal;
  options.batch_start = c.batch_start;
  options.head_start = c.head_start;
  options.total_heads = c.total_heads;
  return options;
}

// A tensor that may be absent.
class OptionalView {
 public:
  OptionalView(const DLTensor* tensor, const char* argument, const char* allowed) {
    if (tensor != nullptr) view_ = view_of(tensor, argument, allowed);
  }
  const TensorView* get() const { return view_ ? &*view_ : nullptr; }

 private:
  std::optional<TensorView> view_;
};

inline constexpr char kMustBeFloat32[] = "it must be float32";
inline constexpr char kMustBeBool[] = "it must be bool";
inline constexpr char kMustBeInt32[] = "it must be int32";

// The options' tensors as views, at addresses that stay.
struct OptionalTensors {
  explicit OptionalTensors(const anyflash_forward_options& c)
      : alibi_slopes(c.alibi_slopes, "alibi_slopes", nullptr),
        bias(c.bias, "bias", "bool, float64, float32, float16 and bfloat16 are allowed"),
        block_mask(c.block_mask, "block_mask", kMustBeBool),
        sinks(c.sinks, "sinks", nullptr),
        rng_state(c.rng_state, "rng_state", "it must be int64"),
        dropout_mask(c.dropout_mask, "dropout_mask", kMustBeBool),
        max_logits(c.max_logits, "max_logits", kMustBeFloat32),
        cu_seqlens_q(c.cu_seqlens_q, "cu_seqlens_q", kMustBeInt32),
        cu_seqlens_k(c.cu_seqlens_k, "cu_seqlens_k", kMustBeInt32),
        seqused_k(c.seqused_k, "seqused_k", kMustBeInt32),
        query_starts(c.query_starts, "query_starts", kMustBeInt32),
        key_starts(c.key_starts, "key_starts", kMustBeInt32),
        diagonals(c.diagonals, "diagonals", kMustBeInt32),
        prior_out(c.prior_out, "prior_out", nullptr),
        prior_lse(c.prior_lse, "prior_lse", kLsesAllowed),
        key_ranges(c.key_ranges, "key_ranges", kMustBeInt32) {}

  void put_into(ForwardOptions& options) const {
    options.alibi_slopes = alibi_slopes.get();
    options.bias = bias.get();
    options.block_mask = block_mask.get();
    options.sinks = sinks.get();
    options.rng_state = rng_state.get();
    options.dropout_mask = dropout_mask.get();
    options.max_logits = max_logits.get();
    options.cu_seqlens_q = cu_seqlens_q.get();
    options.cu_seqlens_k = cu_seqlens_k.get();
    options.seqused_k = seqused_k.get();
    options.query_starts = query_starts.get();
    options.key_starts = key_starts.get();
    options.diagonals = diagonals.get();
    options.prior_out = prior_out.get();
    options.prior_lse = prior_lse.get();
    options.key_ranges = key_ranges.get();
  }

  OptionalView alibi_slopes, bias, block_mask, sinks, rng_state, dropout_mask, max_logits;
  OptionalView cu_seqlens_q, cu_seqlens_k, seqused_k;
  OptionalView query_starts, key_starts, diagonals;
  OptionalView prior_out, prior_lse;
  OptionalView key_ranges;
};

inline anyflash_forward_options known_options(const anyflash_forward_options* given) {
  anyflash_forward_options known = ANYFLASH_FORWARD_OPTIONS_INIT;
  read_options(given, "anyflash_forward_options", known);
  return known;
}

// The options that the forward was given, as the backward wants them: without outputs, and without
// the results of other keys.
inline anyflash_forward_options known_inputs(const anyflash_forward_options* given) {
  anyflash_forward_options known = known_options(given);
  known.dropout_mask = known.max_logits = known.prior_out = known.prior_lse = nullptr;
  return known;
}

// The arguments that all functions share. `options` points into the object.
struct CommonArguments {
  CommonArguments(const DLTensor* q_, const DLTensor* out_, const anyflash_forward_options& known)
      : q(view_of(q_, "q")),
        out(view_of(out_, "out")),
        options(options_of(known)),
        optional_tensors(known),
        stream(known.stream) {
    optional_tensors.put_into(options);
  }
  CommonArguments(const CommonArguments&) = delete;
  CommonArguments& operator=(const CommonArguments&) = delete;

  TensorView q, out;
  ForwardOptions options;
  OptionalTensors optional_tensors;
  void* stream;
};

struct ForwardArguments : CommonArguments {
  ForwardArguments(const DLTensor* q_, const DLTensor* k_, const DLTensor* v_, const DLTensor* out_,
                   const DLTensor* lse_, const anyflash_forward_options* options_)
      : CommonArguments(q_, out_, known_options(options_)),
        k(view_of(k_, "k")),
        v(view_of(v_, "v")),
        lse(lse_, "lse", kLsesAllowed) {}

  ForwardPlan plan() const {
    ForwardTensors tensors;
    tensors.q = q;
    tensors.k = k;
    tensors.v = v;
    tensors.out = out;
    tensors.lse = lse.get();
    return ForwardPlan(tensors, options);
  }

  TensorView k, v;
  OptionalView lse;
};

inline anyflash_backward_options known_options(const anyflash_backward_options* given) {
  anyflash_backward_options known = ANYFLASH_BACKWARD_OPTIONS_INIT;
  read_options(given, "anyflash_backward_options", known);
  return known;
}

struct BackwardArguments : CommonArguments {
  BackwardArguments(const DLTensor* dout_, const DLTensor* q_, const DLTensor* k_,
                    const DLTensor* v_, const DLTensor* out_, const DLTensor* lse_,
                    const DLTensor* dq_, const DLTensor* dk_, const DLTensor* dv_,
                    const anyflash_forward_options* options_,
                    const anyflash_backward_options& known)
      : CommonArguments(q_, out_, known_inputs(options_)),
        dout(view_of(dout_, "dout")),
        k(view_of(k_, "k")),
        v(view_of(v_, "v")),
        lse(view_of(lse_, "lse", kMustBeFloat32)),
        dq(view_of(dq_, "dq")),
        dk(view_of(dk_, "dk")),
        dv(view_of(dv_, "dv")),
        dlse(known.dlse, "dlse", kMustBeFloat32),
        dbias(known.dbias, "dbias", nullptr),
        dsinks(known.dsinks, "dsinks", nullptr),
        dalibi_slopes(known.dalibi_slopes, "dalibi_slopes", nullptr),
        dq_sums(known.dq_sums, "dq_sums", kMustBeFloat32) {
    backward_options.deterministic = known.deterministic != 0;
    backward_options.dlse = dlse.get();
    backward_options.dbias = dbias.get();
    backward_options.dsinks = dsinks.get();
    backward_options.dalibi_slopes = dalibi_slopes.get();
    backward_options.accumulate_dq = known.accumulate_dq != 0;
    backward_options.accumulate_dkv = known.accumulate_dkv != 0;
    backward_options.dq_sums = dq_sums.get();
    backward_options.dq_sums_first = known.dq_sums_first;
    backward_options.dq_sums_rows = known.dq_sums_rows;
    backward_options.dq_sums_begin = known.dq_sums_begin != 0;
    backward_options.dq_sums_end = known.dq_sums_end != 0;
  }

  BackwardPlan plan() const {
    BackwardTensors tensors;
    tensors.dout = dout;
    tensors.q = q;
    tensors.k = k;
    tensors.v = v;
    tensors.out = out;
    tensors.lse = lse;
    tensors.dq = dq;
    tensors.dk = dk;
    tensors.dv = dv;
    return BackwardPlan(tensors, options, backward_options);
  }

  TensorView dout, k, v, lse, dq, dk, dv;
  OptionalView dlse, dbias, dsinks, dalibi_slopes, dq_sums;
  BackwardOptions backward_options;
};

inline anyflash_kvcache_options known_options(const anyflash_kvcache_options* given) {
  anyflash_kvcache_options known = ANYFLASH_KVCACHE_OPTIONS_INIT;
  read_options(given, "anyflash_kvcache_options", known);
  return known;
}

// The cache's tensors among the options, at addresses that stay.
struct CacheTensors {
  explicit CacheTensors(const anyflash_kvcache_options& c)
      : cache_seqlens(c.cache_seqlens, "cache_seqlens", kMustBeInt32),
        cache_batch_idx(c.cache_batch_idx, "cache_batch_idx", kMustBeInt32),
        cache_leftpad(c.cache_leftpad, "cache_leftpad", kMustBeInt32),
        block_table(c.block_table, "block_table", kMustBeInt32),
        k_new(c.k_new, "k_new", nullptr),
        v_new(c.v_new, "v_new", nullptr),
        rotary_cos(c.rotary_cos, "rotary_cos", nullptr),
        rotary_sin(c.rotary_sin, "rotary_sin", nullptr),
        rotary_seqlens(c.rotary_seqlens, "rotary_seqlens", kMustBeInt32),
        tree_mask(c.tree_mask, "tree_mask", kMustBeBool),
        k_scale(c.k_scale, "k_scale", kMustBeFloat32),
        v_scale(c.v_scale, "v_scale", kMustBeFloat32),
        cu_seqlens_k_new(c.cu_seqlens_k_new, "cu_seqlens_k_new", kMustBeInt32) {}

  void put_into(KvCacheOptions& options) const {
    options.cache_seqlens = cache_seqlens.get();
    options.cache_batch_idx = cache_batch_idx.get();
    options.cache_leftpad = cache_leftpad.get();
    options.block_table = block_table.get();
    options.k_new = k_new.get();
    options.v_new = v_new.get();
    options.rotary_cos = rotary_cos.get();
    options.rotary_sin = rotary_sin.get();
    options.rotary_seqlens = rotary_seqlens.get();
    options.tree_mask = tree_mask.get();
    options.k_scale = k_scale.get();
    options.v_scale = v_scale.get();
    options.cu_seqlens_k_new = cu_seqlens_k_new.get();
  }

  OptionalView cache_seqlens, cache_batch_idx, cache_leftpad, block_table;
  OptionalView k_new, v_new, rotary_cos, rotary_sin, rotary_seqlens;
  OptionalView tree_mask, k_scale, v_scale, cu_seqlens_k_new;
};

inline constexpr char kCacheTypes[] =
    "float64, float32, float16, bfloat16, int8, float8_e4m3fn and float8_e5m2 are allowed";

struct CKvCacheArguments : CommonArguments {
  CKvCacheArguments(const DLTensor* q_, const DLTensor* k_cache_, const DLTensor* v_cache_,
                    const DLTensor* out_, const DLTensor* lse_,
                    const anyflash_forward_options* options_,
                    const anyflash_kvcache_options* cache_options_)
      : CKvCacheArguments(q_, k_cache_, v_cache_, out_, lse_, known_options(options_),
                          known_options(cache_options_)) {}

  KvCachePlan plan() const {
    KvCacheTensors tensors;
    tensors.q = q;
    tensors.k_cache = k_cache;
    tensors.v_cache = v_cache;
    tensors.out = out;
    tensors.lse = lse.get();
    return KvCachePlan(tensors, options, cache_options);
  }

  TensorView k_cache, v_cache;
  OptionalView lse;
  CacheTensors cache_tensors;
  KvCacheOptions cache_options;

 private:
  CKvCacheArguments(const DLTensor* q_, const DLTensor* k_cache_, const DLTensor* v_cache_,
                    const DLTensor* out_, const DLTensor* lse_,
                    const anyflash_forward_options& options_, const anyflash_kvcache_options& known)
      : CommonArguments(q_, out_, options_),
        k_cache(view_of(k_cache_, "k_cache", kCacheTypes)),
        v_cache(v_cache_ == nullptr ? TensorView{} : view_of(v_cache_, "v_cache", kCacheTypes)),
        lse(lse_, "lse", kMustBeFloat32),
        cache_tensors(known) {
    cache_tensors.put_into(cache_options);
    cache_options.rotary_interleaved = known.rotary_neox == 0;
    cache_options.num_splits = known.num_splits;
    cache_options.split_size = known.split_size;
    cache_options.head_dim_v = known.head_dim_v;
  }
};

inline MergeOptions options_of(const anyflash_merge_options* given) {
  anyflash_merge_options known = ANYFLASH_MERGE_OPTIONS_INIT;
  read_options(given, "anyflash_merge_options", known);
  MergeOptions options;
  options.num_threads = known.num_threads;
  options.stream = known.stream;
  return options;
}

}  // namespace anyflash
