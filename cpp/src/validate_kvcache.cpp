// The arguments of KvCachePlan.
#include <algorithm>
#include <string>

#include "arguments.h"
#include "describe.h"
#include "kvcache_combinations.h"
#include "validate.h"

namespace anyflash {

namespace {

struct CacheLayouts {
  const char* q;
  const char* out;
  const char* k_new;
  const char* v_new;
  const char* tree_mask;
};
constexpr CacheLayouts kBatchedCall = {
    "(batch, seqlen_q, heads, head_dim)", "(batch, seqlen_q, heads, head_dim_v)",
    "(batch, seqlen_new, heads_k, head_dim)", "(batch, seqlen_new, heads_k, head_dim_v)",
    "(batch or 1, seqlen_q, seqlen_q)"};
constexpr CacheLayouts kPackedCall = {"(total_q, heads, head_dim) with cu_seqlens_q",
                                      "(total_q, heads, head_dim_v) with cu_seqlens_q",
                                      "(total_new, heads_k, head_dim) with cu_seqlens_q",
                                      "(total_new, heads_k, head_dim_v) with cu_seqlens_q",
                                      "(total_q, columns) with cu_seqlens_q"};

class KvCacheArguments {
 public:
  KvCacheArguments(const KvCacheTensors& tensors, const ForwardOptions& options,
                   const KvCacheOptions& cache_options)
      : t_(with_values(tensors, cache_options)),
        options_(options),
        c_(cache_options),
        packed_(options.cu_seqlens_q != nullptr),
        layouts_(packed_ ? kPackedCall : kBatchedCall) {}

  AppendParams validate() {
    refuse_options(options_);
    check_combinations(c_, packed_);
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
    set_splits(c_, p_);
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
    if (dtype != t_.q.dtype && !is_quantized(dtype)) {
      invalid_type(std::string("k_cache is ") + name(dtype) + ", but q is " + name(t_.q.dtype) +
                   "; a cache must have q's dtype or be int8, float8_e4m3fn or float8_e5m2");
    }
    if (t_.v_cache.dtype != dtype) {
      invalid_type(std::string("v_cache is ") + name(t_.v_cache.dtype) + ", but k_cache is " +
                   name(dtype) + "; both must have one dtype");
    }
    p_.cache_dtype = dtype;
    p_.cache_is_e5m2 = dtype == DType::kFloat8E5M2;
    a_.dtype = t_.q.dtype;
  }

  void shapes() {
    const bool paged = c_.block_table != nullptr;
    check_rank(t_.q, "q", packed_ ? 3 : 4, layouts_.q);
    check_rank(t_.k_cache, "k_cache", 4,
               paged ? "(pages, page_size, heads_k, head_dim) with block_table"
                     : "(cache_batch, capacity, heads_k, head_dim)");
    const TensorView q = with_batch(t_.q, packed_);
    const auto& n = q.shape;
    const auto& k = t_.k_cache.shape;
    check_heads(t_.q, t_.k_cache, "k_cache");
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
    p_.attention.seqlen_q = checked_extent(n[1], "q", packed_ ? "total_q" : "seqlen_q");
    if (packed_) packed_queries(*options_.cu_seqlens_q);
    p_.attention.heads = checked_extent(n[2], "q", "heads");
    p_.attention.heads_k = checked_extent(k[2], "k_cache", "heads");
    p_.attention.head_dim = checked_extent(n[3], "q", "head_dim");
    p_.attention.head_dim_v = checked_extent(columns_v, "v_cache", "head_dim_v");
    p_.slots = k[0];
    paged ? pages(*c_.block_table) : slots();
    p_.attention.q = t_.q.data;
    p_.attention.k = t_.k_cache.data;
    p_.attention.v = t_.v_cache.data;
    p_.attention.q_stride = strides_of(q);
    p_.attention.k_stride = strides_of(t_.k_cache);
    p_.attention.v_stride = strides_of(t_.v_cache);
    check_aligned(t_.q, "q");
    check_aligned(t_.k_cache, "k_cache");
    check_aligned(t_.v_cache, "v_cache");
  }

  void packed_queries(const TensorView& cu_seqlens_q) {
    Attention& a = p_.attention;
    check_cu_seqlens(cu_seqlens_q, "cu_seqlens_q", t_.q);
    a.batch = cu_seqlens_q.shape[0] - 1;
    a.cu_seqlens_q = static_cast<const int32_t*>(cu_seqlens_q.data);
    a.total_q = a.seqlen_q;
    a.seqlen_q = packed_bound(options_.max_seqlen_q, "max_seqlen_q", a.total_q);
  }

  // For errors: where the batch's size is from.
  const char* batch_of() const { return packed_ ? "cu_seqlens_q" : "q"; }

  void slots() {
    p_.attention.seqlen_k = checked_extent(t_.k_cache.shape[1], "k_cache", "capacity");
    if (c_.cache_batch_idx == nullptr && p_.slots < p_.attention.batch) {
      invalid_value("k_cache has shape " + shape_of(t_.k_cache) + ", room for " +
                    std::to_string(p_.slots) + " sequences, but " + batch_of() + " has batch " +
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
                packed_ ? ", with the batch of cu_seqlens_q" : ", with q's batch");
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
    const int64_t columns = p_.attention.head_dim_v;
    const bool latent = c_.head_dim_v != 0;
    const char* const why =
        packed_ ? (latent ? ": q's total_q and heads, and head_dim_v"
                          : ": q's total_q and heads, and v_cache's head_dim")
                : (latent ? ": q's batch, seqlen_q and heads, and head_dim_v"
                          : ": q's batch, seqlen_q and heads, and v_cache's head_dim");
    check_rank(t_.out, "out", t_.q.rank, layouts_.out);
    if (packed_) check_shape(t_.out, "out", {{n[0]}, {n[1]}, {columns}}, layouts_.out, why);
    else check_shape(t_.out, "out", {{n[0]}, {n[1]}, {n[2]}, {columns}}, layouts_.out, why);
    check_writable(t_.out, "out");
    check_aligned(t_.out, "out");
    p_.out = t_.out.data;
    p_.out_dtype = t_.out.dtype;
    p_.out_stride = strides_of(with_batch(t_.out, packed_));
    if (t_.lse == nullptr) return;
    const TensorView& lse = *t_.lse;
    check_dtype(lse, "lse", DType::kFloat32);
    check_lse(lse, "lse", t_.q, "q");
    check_writable(lse, "lse");
    p_.lse = static_cast<float*>(lse.data);
    p_.lse_stride = lse_strides_of(lse, packed_);
  }

  const int32_t* integers(const TensorView* t, const char* argument) {
    if (t == nullptr) return nullptr;
    check_integers(
        *t, argument, DType::kInt32, t_.q, p_.attention.batch, "(batch,)",
        packed_ ? ", one for each sequence of cu_seqlens_q" : ", one for each sequence of q");
    return static_cast<const int32_t*>(t->data);
  }

  void cache_integers() {
    p_.cache_seqlens = integers(c_.cache_seqlens, "cache_seqlens");
    p_.cache_batch_idx = integers(c_.cache_batch_idx, "cache_batch_idx");
    p_.cache_leftpad = integers(c_.cache_leftpad, "cache_leftpad");
  }

  // With `rows` of each sequence, or packed of all.
  void new_rows(const TensorView& t, const char* argument, int64_t rows, int64_t columns,
                const char* layout, const char* why) {
    if (t.dtype != t_.q.dtype) {
      invalid_type(std::string(argument) + " is " + name(t.dtype) + ", but q is " +
                   name(t_.q.dtype) + "; new keys and values must have q's dtype");
    }
    check_device(t, argument, t_.q, "q");
    const int64_t heads = p_.attention.heads_k;
    check_rank(t, argument, packed_ ? 3 : 4, layout);
    if (packed_) check_shape(t, argument, {{rows}, {heads}, {columns}}, layout, why);
    else check_shape(t, argument, {{p_.attention.batch}, {rows}, {heads}, {columns}}, layout, why);
    check_aligned(t, argument);
  }

  void new_keys() {
    if (c_.k_new == nullptr) return;
    const TensorView& k = *c_.k_new;
    check_rank(k, "k_new", packed_ ? 3 : 4, layouts_.k_new);
    const int64_t rows = k.shape[packed_ ? 0 : 1];
    new_rows(k, "k_new", rows, p_.attention.head_dim, layouts_.k_new,
             packed_ ? ": q's head_dim, and k_cache's heads"
                     : ": q's batch and head_dim, and k_cache's heads");
    if (c_.v_new != nullptr) {
      new_rows(*c_.v_new, "v_new", rows, p_.attention.head_dim_v, layouts_.v_new,
               ": k_new's, but for v_cache's head_dim");
    }
    packed_ ? packed_new_keys(rows) : batched_new_keys(rows);
    check_writable(t_.k_cache, "k_cache");
    check_writable(t_.v_cache, "v_cache");
    a_.k_cache = t_.k_cache.data;
    a_.v_cache = t_.v_cache.data;
    p_.k_new = k.data;
    p_.k_new_stride = strides_of(with_batch(k, packed_));
    if (c_.v_new == nullptr) return;
    p_.v_new = c_.v_new->data;
    p_.v_new_stride = strides_of(with_batch(*c_.v_new, packed_));
  }

  void batched_new_keys(int64_t rows) {
    if (rows > p_.attention.seqlen_k) {
      invalid_value("k_new has seqlen_new " + std::to_string(rows) + ", but " +
                    room_of(c_.block_table != nullptr, p_.attention.seqlen_k));
    }
    p_.seqlen_new = static_cast<int>(rows);
  }

  // They begin where the queries of their sequences do, unless cu_seqlens_k_new says otherwise.
  void packed_new_keys(int64_t rows) {
    const TensorView& cu =
        c_.cu_seqlens_k_new == nullptr ? *options_.cu_seqlens_q : *c_.cu_seqlens_k_new;
    if (c_.cu_seqlens_k_new != nullptr) {
      check_cu_seqlens(cu, "cu_seqlens_k_new", t_.q);
      check_shape(cu, "cu_seqlens_k_new", {{p_.attention.batch + 1}}, "(batch + 1,)",
                  ", as cu_seqlens_q");
    } else if (rows != p_.attention.total_q) {
      invalid_value("k_new has " + std::to_string(rows) + " rows, but q " +
                    std::to_string(p_.attention.total_q) +
                    "; cu_seqlens_k_new is needed where new keys are not as many as queries");
    }
    p_.cu_seqlens_k_new = static_cast<const int32_t*>(cu.data);
    p_.total_new = checked_extent(rows, "k_new", "total_new");
    p_.seqlen_new = static_cast<int>(std::min<int64_t>(rows, p_.attention.seqlen_k));
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
    const Attention& a = p_.attention;
    TensorView t = *c_.tree_mask;
    if (!packed_ && t.rank == 2) t = with_leading_axis(t);
    check_dtype(t, "tree_mask", DType::kBool);
    check_device(t, "tree_mask", t_.q, "q");
    check_rank(t, "tree_mask", packed_ ? 2 : 3, layouts_.tree_mask);
    if (packed_) {
      check_shape(t, "tree_mask", {{a.total_q}, {t.shape[1]}}, layouts_.tree_mask);
      p_.tree_mask = {t.data, t.dtype, {0, t.stride[0], 0, t.stride[1]}};
      p_.tree_columns = checked_extent(t.shape[1], "tree_mask", "columns");
    } else {
      check_shape(t, "tree_mask", {{a.batch, true}, {a.seqlen_q}, {a.seqlen_q}},
                  layouts_.tree_mask);
      p_.tree_mask = auxiliary_of(t, {&Strides::batch, &Strides::row, &Strides::col});
      p_.tree_columns = a.seqlen_q;
    }
    if (p_.tree_columns == 0) p_.tree_mask = {};
  }

  BroadcastTensor scale(const TensorView* t, const char* argument) {
    if (t == nullptr) return {};
    if (!is_quantized(p_.cache_dtype)) {
      invalid_value(std::string(argument) + " is given, but k_cache is " + name(p_.cache_dtype) +
                    "; int8, float8_e4m3fn and float8_e5m2 caches have scales");
    }
    const bool paged = c_.block_table != nullptr;
    const char* const layout =
        paged ? "(heads_k,), (pages, heads_k) or (pages, page_size, heads_k) of k_cache"
              : "(heads_k,), (cache_batch, heads_k) or (cache_batch, capacity, heads_k) of k_cache";
    check_dtype(*t, argument, DType::kFloat32);
    check_device(*t, argument, t_.q, "q");
    check_aligned(*t, argument);
    if (t->rank == 1) {
      check_shape(*t, argument, {{p_.attention.heads_k}}, layout, ", one for each head of k_cache");
      return auxiliary_of(*t, {&Strides::head});
    }
    if (t->rank == 2) {
      check_shape(*t, argument, {{p_.slots}, {p_.attention.heads_k}}, layout);
      return auxiliary_of(*t, {&Strides::batch, &Strides::head});
    }
    check_shape(*t, argument, {{p_.slots}, {t_.k_cache.shape[1]}, {p_.attention.heads_k}}, layout);
    return auxiliary_of(*t, {&Strides::batch, &Strides::row, &Strides::head});
  }

  const KvCacheTensors t_;
  const ForwardOptions& options_;
  const KvCacheOptions& c_;
  const bool packed_;
  const CacheLayouts& layouts_;
  AppendParams a_;
  KvCacheParams& p_ = a_.cache;
};

}  // namespace

AppendParams validate_kvcache(const KvCacheTensors& tensors, const ForwardOptions& options,
                              const KvCacheOptions& cache_options) {
  return KvCacheArguments(tensors, options, cache_options).validate();
}

}  // namespace anyflash
