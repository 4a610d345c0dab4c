// The arguments of KvCachePlan.
#include <algorithm>
#include <string>

#include "arguments.h"
#include "describe.h"
#include "kvcache_combinations.h"
#include "validate.h"

namespace anyflash {

namespace {

constexpr char kLayoutQ[] = "(batch, seqlen_q, heads, head_dim)";
constexpr char kLayoutOut[] = "(batch, seqlen_q, heads, head_dim_v)";
constexpr char kLayoutLse[] = "(batch, heads, seqlen_q)";
constexpr int64_t kMaxSplitCount = 65535;

bool is_8bit(DType dtype) { return dtype == DType::kInt8 || dtype == DType::kFloat8E4M3; }

class KvCacheArguments {
 public:
  KvCacheArguments(const KvCacheTensors& tensors, const ForwardOptions& options,
                   const KvCacheOptions& cache_options)
      : t_(with_values(tensors, cache_options)), options_(options), c_(cache_options) {}

  AppendParams validate() {
    refuse_options(options_);
    check_combinations(c_);
    types();
    shapes();
    results();
    check_threads(options_.num_threads);
    validate_features(t_.q, options_, p_.attention.seqlen_q, p_.attention.seqlen_k, p_.attention);
    cache_integers();
    new_keys();
    rotary();
    tree_mask();
    p_.k_scale = scale(c_.k_scale, "k_scale");
    p_.latent = c_.head_dim_v != 0;
    p_.v_scale = p_.latent ? p_.k_scale : scale(c_.v_scale, "v_scale");
    splits();
    return a_;
  }

 private:
  void types() {
    check_float(t_.q, "q");
    cache_type();
    check_dtype_or_float32(t_.out, "out", t_.q, "q");
    check_device(t_.k_cache, "k_cache", t_.q, "q");
    check_device(t_.v_cache, "v_cache", t_.q, "q");
    check_device(t_.out, "out", t_.q, "q");
  }

  void cache_type() {
    const DType dtype = t_.k_cache.dtype;
    if (dtype != t_.q.dtype && !is_8bit(dtype)) {
      invalid_type(std::string("k_cache is ") + name(dtype) + ", but q is " + name(t_.q.dtype) +
                   "; a cache must have q's dtype or be int8 or float8_e4m3fn");
    }
    if (t_.v_cache.dtype != dtype) {
      invalid_type(std::string("v_cache is ") + name(t_.v_cache.dtype) + ", but k_cache is " +
                   name(dtype) + "; both must have one dtype");
    }
    p_.cache_dtype = dtype;
    a_.dtype = t_.q.dtype;
  }

  void shapes() {
    const bool paged = c_.block_table != nullptr;
    check_rank(t_.q, "q", 4, kLayoutQ);
    check_rank(t_.k_cache, "k_cache", 4,
               paged ? "(pages, page_size, heads_k, head_dim) with block_table"
                     : "(cache_batch, capacity, heads_k, head_dim)");
    const auto& n = t_.q.shape;
    const auto& k = t_.k_cache.shape;
    if (n[2] == 0 || n[3] == 0) {
      invalid_value("q has shape " + shape_of(t_.q) + "; heads and head_dim must be at least 1");
    }
    if (k[2] == 0 || n[2] % k[2] != 0) {
      invalid_value("k_cache has " + std::to_string(k[2]) + " heads, which does not divide q's " +
                    std::to_string(n[2]));
    }
    check_shape(t_.k_cache, "k_cache", {{k[0]}, {k[1]}, {k[2]}, {n[3]}}, "", ", with q's head_dim");
    const char* const layout_v = paged ? "(pages, page_size, heads_k, head_dim_v) with block_table"
                                       : "(cache_batch, capacity, heads_k, head_dim_v)";
    check_rank(t_.v_cache, "v_cache", 4, layout_v);
    const int64_t columns_v = t_.v_cache.shape[3];
    check_shape(t_.v_cache, "v_cache", {{k[0]}, {k[1]}, {k[2]}, {columns_v}}, layout_v,
                ": k_cache's, but for head_dim_v");
    if (columns_v == 0) {
      invalid_value("v_cache has shape " + shape_of(t_.v_cache) +
                    "; head_dim_v must be at least 1");
    }
    p_.attention.batch = n[0];
    p_.attention.seqlen_q = checked_extent(n[1], "q", "seqlen_q");
    p_.attention.heads = checked_extent(n[2], "q", "heads");
    p_.attention.heads_k = checked_extent(k[2], "k_cache", "heads");
    p_.attention.head_dim = checked_extent(n[3], "q", "head_dim");
    p_.attention.head_dim_v = checked_extent(columns_v, "v_cache", "head_dim_v");
    p_.slots = k[0];
    paged ? pages(*c_.block_table) : slots();
    p_.attention.q = t_.q.data;
    p_.attention.k = t_.k_cache.data;
    p_.attention.v = t_.v_cache.data;
    p_.attention.q_stride = strides_of(t_.q);
    p_.attention.k_stride = strides_of(t_.k_cache);
    p_.attention.v_stride = strides_of(t_.v_cache);
    check_aligned(t_.q, "q");
    check_aligned(t_.k_cache, "k_cache");
    check_aligned(t_.v_cache, "v_cache");
  }

  void slots() {
    p_.attention.seqlen_k = checked_extent(t_.k_cache.shape[1], "k_cache", "capacity");
    if (c_.cache_batch_idx == nullptr && p_.slots < p_.attention.batch) {
      invalid_value("k_cache has shape " + shape_of(t_.k_cache) + ", room for " +
                    std::to_string(p_.slots) + " sequences, but q has batch " +
                    std::to_string(p_.attention.batch) +
                    "; at least as many, or cache_batch_idx, are needed");
    }
  }

  void pages(const TensorView& table) {
    const int64_t page_size = t_.k_cache.shape[1];
    if (page_size < 1 || (page_size & (page_size - 1)) != 0) {
      invalid_value("k_cache has page_size " + std::to_string(page_size) +
                    "; with block_table a power of two is allowed");
    }
    checked_extent(page_size, "k_cache", "page_size");
    const char* const layout = "(batch, pages of a sequence)";
    check_rank(table, "block_table", 2, layout);
    check_dtype(table, "block_table", DType::kInt32);
    check_device(table, "block_table", t_.q, "q");
    check_shape(table, "block_table", {{p_.attention.batch}, {table.shape[1]}}, layout,
                ", with q's batch");
    check_aligned(table, "block_table");
    if (table.shape[1] > kMaxExtent / page_size) {
      invalid_value("block_table has " + std::to_string(table.shape[1]) + " pages of " +
                    std::to_string(page_size) + " rows for a sequence; at most " +
                    std::to_string(kMaxExtent) + " rows are allowed");
    }
    p_.attention.seqlen_k = static_cast<int>(table.shape[1] * page_size);
    while (int64_t{1} << p_.page_shift < page_size) ++p_.page_shift;
    p_.block_table = static_cast<const int32_t*>(table.data);
    p_.block_table_stride = {table.stride[0], 0, 0, table.stride[1]};
  }

  void results() {
    const auto& n = t_.q.shape;
    check_shape(t_.out, "out", {{n[0]}, {n[1]}, {n[2]}, {p_.attention.head_dim_v}}, kLayoutOut,
                c_.head_dim_v == 0 ? ": q's batch, seqlen_q and heads, and v_cache's head_dim"
                                   : ": q's batch, seqlen_q and heads, and head_dim_v");
    check_writable(t_.out, "out");
    check_aligned(t_.out, "out");
    p_.out = t_.out.data;
    p_.out_dtype = t_.out.dtype;
    p_.out_stride = strides_of(t_.out);
    if (t_.lse == nullptr) return;
    const TensorView& lse = *t_.lse;
    check_dtype(lse, "lse", DType::kFloat32);
    check_device(lse, "lse", t_.q, "q");
    check_shape(lse, "lse", {{n[0]}, {n[2]}, {n[1]}}, kLayoutLse);
    check_writable(lse, "lse");
    check_aligned(lse, "lse");
    p_.lse = static_cast<float*>(lse.data);
    p_.lse_stride = lse_strides_of(lse, false);
  }

  const int32_t* integers(const TensorView* t, const char* argument) {
    if (t == nullptr) return nullptr;
    check_integers(*t, argument, DType::kInt32, t_.q, p_.attention.batch, "(batch,)",
                   ", one for each sequence of q");
    return static_cast<const int32_t*>(t->data);
  }

  void cache_integers() {
    p_.cache_seqlens = integers(c_.cache_seqlens, "cache_seqlens");
    p_.cache_batch_idx = integers(c_.cache_batch_idx, "cache_batch_idx");
    p_.cache_leftpad = integers(c_.cache_leftpad, "cache_leftpad");
  }

  void new_rows(const TensorView& t, const char* argument, int64_t rows, int64_t columns,
                const char* layout, const char* why) {
    if (t.dtype != t_.q.dtype) {
      invalid_type(std::string(argument) + " is " + name(t.dtype) + ", but q is " +
                   name(t_.q.dtype) + "; new keys and values must have q's dtype");
    }
    check_device(t, argument, t_.q, "q");
    check_shape(t, argument, {{p_.attention.batch}, {rows}, {p_.attention.heads_k}, {columns}},
                layout, why);
    check_aligned(t, argument);
  }

  void new_keys() {
    if (c_.k_new == nullptr) return;
    const TensorView& k = *c_.k_new;
    const char* const layout = "(batch, seqlen_new, heads_k, head_dim)";
    check_rank(k, "k_new", 4, layout);
    new_rows(k, "k_new", k.shape[1], p_.attention.head_dim, layout,
             ": q's batch and head_dim, and k_cache's heads");
    if (c_.v_new != nullptr) {
      new_rows(*c_.v_new, "v_new", k.shape[1], p_.attention.head_dim_v,
               "(batch, seqlen_new, heads_k, head_dim_v)", ": k_new's, but for v_cache's head_dim");
    }
    if (k.shape[1] > p_.attention.seqlen_k) {
      invalid_value("k_new has seqlen_new " + std::to_string(k.shape[1]) + ", but " +
                    room_of(c_.block_table != nullptr, p_.attention.seqlen_k));
    }
    check_writable(t_.k_cache, "k_cache");
    check_writable(t_.v_cache, "v_cache");
    p_.seqlen_new = static_cast<int>(k.shape[1]);
    p_.k_new = k.data;
    p_.k_new_stride = strides_of(k);
    if (c_.v_new == nullptr) return;
    p_.v_new = c_.v_new->data;
    p_.v_new_stride = strides_of(*c_.v_new);
  }

  void rotary() {
    if (c_.rotary_cos == nullptr) return;
    const TensorView& cos = *c_.rotary_cos;
    const TensorView& sin = *c_.rotary_sin;
    check_rank(cos, "rotary_cos", 2, "(rows, rotary_dim / 2)");
    check_dtype_or_float32(cos, "rotary_cos", t_.q, "q");
    check_device(cos, "rotary_cos", t_.q, "q");
    const int64_t most = p_.attention.head_dim / 2;
    if (cos.shape[0] < 1 || cos.shape[1] < 1 || cos.shape[1] > most) {
      invalid_value("rotary_cos has shape " + shape_of(cos) +
                    "; expected (rows, rotary_dim / 2) with at least one row and rotary_dim / 2 "
                    "from 1 to " +
                    std::to_string(most) + ", half of head_dim");
    }
    if (sin.dtype != cos.dtype) {
      invalid_type(std::string("rotary_sin is ") + name(sin.dtype) + ", but rotary_cos is " +
                   name(cos.dtype) + "; both must have one dtype");
    }
    check_like(sin, "rotary_sin", cos, "rotary_cos");
    check_aligned(cos, "rotary_cos");
    check_aligned(sin, "rotary_sin");
    a_.rotary_cos = auxiliary_of(cos, {&Strides::row, &Strides::col});
    a_.rotary_sin = auxiliary_of(sin, {&Strides::row, &Strides::col});
    a_.rotary_rows = cos.shape[0];
    a_.rotary_seqlens = integers(c_.rotary_seqlens, "rotary_seqlens");
    a_.rotary_dim = static_cast<int>(2 * cos.shape[1]);
    a_.rotary_interleaved = c_.rotary_interleaved;
    a_.rotary_steps = p_.attention.window.is_bounded();
  }

  void tree_mask() {
    if (c_.tree_mask == nullptr) return;
    const TensorView& t = *c_.tree_mask;
    const char* const layout = "(batch or 1, seqlen_q, seqlen_q)";
    check_dtype(t, "tree_mask", DType::kBool);
    check_device(t, "tree_mask", t_.q, "q");
    check_shape(t, "tree_mask",
                {{p_.attention.batch, true}, {p_.attention.seqlen_q}, {p_.attention.seqlen_q}},
                layout);
    p_.tree_mask = auxiliary_of(t, {&Strides::batch, &Strides::row, &Strides::col});
  }

  BroadcastTensor scale(const TensorView* t, const char* argument) {
    if (t == nullptr) return {};
    if (!is_8bit(p_.cache_dtype)) {
      invalid_value(std::string(argument) + " is given, but k_cache is " + name(p_.cache_dtype) +
                    "; int8 and float8_e4m3fn caches have scales");
    }
    const bool paged = c_.block_table != nullptr;
    const char* const layout = paged ? "(heads_k,) or (pages, heads_k) of k_cache"
                                     : "(heads_k,) or (cache_batch, heads_k) of k_cache";
    check_dtype(*t, argument, DType::kFloat32);
    check_device(*t, argument, t_.q, "q");
    check_aligned(*t, argument);
    if (t->rank == 1) {
      check_shape(*t, argument, {{p_.attention.heads_k}}, layout, ", one for each head of k_cache");
      return auxiliary_of(*t, {&Strides::head});
    }
    check_shape(*t, argument, {{p_.slots}, {p_.attention.heads_k}}, layout);
    return auxiliary_of(*t, {&Strides::batch, &Strides::head});
  }

  // Leaves num_splits 0 where it is to be chosen.
  void splits() {
    const int64_t count = c_.num_splits;
    const int64_t size = c_.split_size;
    if (count < 0 || count > kMaxSplitCount) {
      invalid_value("num_splits is " + std::to_string(count) + "; 0 (chosen) to " +
                    std::to_string(kMaxSplitCount) + " is allowed");
    }
    if (size < 0 || size % 64 != 0) {
      invalid_value("split_size is " + std::to_string(size) +
                    "; 0 (not used) or a positive multiple of 64 is allowed");
    }
    p_.num_splits = static_cast<int>(count);
    if (size == 0) return;
    if (count != 0) {
      invalid_value("num_splits is " + std::to_string(count) + " and split_size " +
                    std::to_string(size) + "; only one of both is allowed");
    }
    // A larger one is the same: one split.
    const int64_t whole = std::max<int64_t>((int64_t{p_.attention.seqlen_k} + 63) / 64 * 64, 64);
    p_.split_size = static_cast<int>(std::min(size, whole));
    const int64_t needed = (int64_t{p_.attention.seqlen_k} + p_.split_size - 1) / p_.split_size;
    if (needed > kMaxSplitCount) {
      invalid_value("split_size is " + std::to_string(size) + ", which makes " +
                    std::to_string(needed) + " splits of a cache with room for " +
                    std::to_string(p_.attention.seqlen_k) + " rows; at most " +
                    std::to_string(kMaxSplitCount) + " are allowed");
    }
    p_.num_splits = static_cast<int>(std::max<int64_t>(needed, 1));
  }

  const KvCacheTensors t_;
  const ForwardOptions& options_;
  const KvCacheOptions& c_;
  AppendParams a_;
  KvCacheParams& p_ = a_.cache;
};

}  // namespace

AppendParams validate_kvcache(const KvCacheTensors& tensors, const ForwardOptions& options,
                              const KvCacheOptions& cache_options) {
  return KvCacheArguments(tensors, options, cache_options).validate();
}

}  // namespace anyflash
