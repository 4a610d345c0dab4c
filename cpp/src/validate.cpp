// The tensors that every call has: q, k, v, out and lse.
#include "validate.h"

#include <string>
#include <string_view>

#include "arguments.h"
#include "describe.h"

namespace anyflash {

namespace {

// Where the axes of q, k, v and out are: batched (batch, rows, heads, columns), packed without
// batch.
struct Axes {
  explicit Axes(bool packed) : rows(packed ? 0 : 1), heads(rows + 1), columns(rows + 2) {}
  int rows, heads, columns;
};

struct Layouts {
  const char *q, *k, *v, *out;
};
constexpr Layouts kBatched = {
    "(batch, seqlen_q, heads, head_dim)", "(batch, seqlen_k, heads_k, head_dim)",
    "(batch, seqlen_k, heads_k, head_dim_v)", "(batch, seqlen_q, heads, head_dim_v)"};
constexpr Layouts kPacked = {"(total_q, heads, head_dim) with cu_seqlens_q",
                             "(total_k, heads_k, head_dim) with cu_seqlens_k",
                             "(total_k, heads_k, head_dim_v) with cu_seqlens_k",
                             "(total_q, heads, head_dim_v) with cu_seqlens_q"};

void check_types(const TensorView& q, const TensorView& k, const TensorView& v,
                 const TensorView& out) {
  check_float(q, "q");
  const auto differs = [&](const TensorView& t, const char* argument, const char* rule) {
    invalid_type(std::string(argument) + " is " + name(t.dtype) + ", but q is " + name(q.dtype) +
                 rule);
  };
  if (k.dtype != q.dtype) differs(k, "k", "; q, k and v must have one dtype");
  if (v.dtype != q.dtype) differs(v, "v", "; q, k and v must have one dtype");
  check_dtype_or_float32(out, "out", q, "q");
  check_device(k, "k", q, "q");
  check_device(v, "v", q, "q");
  check_device(out, "out", q, "q");
  check_aligned(q, "q");
  check_aligned(k, "k");
  check_aligned(v, "v");
  check_aligned(out, "out");
}

void check_shapes(const TensorView& q, const TensorView& k, const TensorView& v,
                  const TensorView& out, const Layouts& layouts, bool packed) {
  const Axes at(packed);
  check_heads(q, k, "k");
  const int64_t heads_k = k.shape[at.heads];
  const int64_t batch = q.shape[0];
  const int64_t rows = q.shape[at.rows];
  const int64_t keys = k.shape[at.rows];
  const int64_t columns = q.shape[at.columns];
  const int64_t columns_v = v.shape[at.columns];
  const auto check = [&](const TensorView& t, const char* argument, int64_t n, int64_t heads,
                         int64_t width, const char* layout, std::string_view why) {
    if (packed) {
      check_shape(t, argument, {{n}, {heads}, {width}}, layout, why);
    } else {
      check_shape(t, argument, {{batch}, {n}, {heads}, {width}}, layout, why);
    }
  };
  check(k, "k", keys, heads_k, columns, layouts.k,
        packed ? ", with q's head_dim" : ", with q's batch and head_dim");
  check(v, "v", keys, heads_k, columns_v, layouts.v,
        packed ? ", with k's total_k and heads" : ", with k's batch, seqlen_k and heads");
  if (columns_v == 0) {
    invalid_value("v has shape " + shape_of(v) + "; head_dim_v must be at least 1");
  }
  check(out, "out", rows, q.shape[at.heads], columns_v, layouts.out,
        packed ? ": q's total_q and heads, and v's head_dim"
               : ": q's batch, seqlen_q and heads, and v's head_dim");
}

Prior prior_of(const ForwardTensors& tensors, const ForwardOptions& options, bool packed) {
  check_both(options.prior_out, "prior_out", options.prior_lse, "prior_lse");
  if (options.prior_out == nullptr) return {};
  const TensorView& out = *options.prior_out;
  const TensorView& lse = *options.prior_lse;
  const TensorView& q = tensors.q;
  check_like(out, "prior_out", tensors.out, "out");
  check_dtype(out, "prior_out", q.dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32);
  check_aligned(out, "prior_out");
  check_lse(lse, "prior_lse", q, "q");
  check_lse_dtype(lse, "prior_lse");
  Prior prior;
  prior.out = out.data;
  prior.lse = lse.data;
  prior.out_dtype = out.dtype;
  prior.lse_dtype = lse.dtype;
  prior.out_stride = strides_of(with_batch(out, packed));
  prior.lse_stride = lse_strides_of(lse, packed);
  prior.columns = static_cast<int>(out.shape[out.rank - 1]);
  return prior;
}

}  // namespace

Attention validate_inputs(const ForwardTensors& tensors, const ForwardOptions& options) {
  const auto& [q, k, v, out, lse] = tensors;
  Attention a;
  check_both(options.cu_seqlens_q, "cu_seqlens_q", options.cu_seqlens_k, "cu_seqlens_k");
  const bool packed = options.cu_seqlens_q != nullptr;
  const Layouts& layouts = packed ? kPacked : kBatched;
  const Axes at(packed);
  check_rank(q, "q", packed ? 3 : 4, layouts.q);
  check_rank(k, "k", q.rank, layouts.k);
  check_rank(v, "v", q.rank, layouts.v);
  check_rank(out, "out", q.rank, layouts.out);
  check_types(q, k, v, out);
  check_shapes(q, k, v, out, layouts, packed);
  if (lse != nullptr) check_lse(*lse, "lse", q, "q");
  check_threads(options.num_threads);

  a.q = q.data;
  a.k = k.data;
  a.v = v.data;
  a.q_stride = strides_of(with_batch(q, packed));
  a.k_stride = strides_of(with_batch(k, packed));
  a.v_stride = strides_of(with_batch(v, packed));
  a.seqlen_q = checked_extent(q.shape[at.rows], "q", packed ? "total_q" : "seqlen_q");
  a.seqlen_k = checked_extent(k.shape[at.rows], "k", packed ? "total_k" : "seqlen_k");
  a.heads = checked_extent(q.shape[at.heads], "q", "heads");
  a.heads_k = checked_extent(k.shape[at.heads], "k", "heads");
  a.head_dim = checked_extent(q.shape[at.columns], "q", "head_dim");
  a.head_dim_v = checked_extent(v.shape[at.columns], "v", "head_dim_v");
  if (packed) {
    a.total_q = a.seqlen_q;
    a.total_k = a.seqlen_k;
    a.seqlen_q = packed_bound(options.max_seqlen_q, "max_seqlen_q", a.total_q);
    a.seqlen_k = packed_bound(options.max_seqlen_k, "max_seqlen_k", a.total_k);
    validate_packed(q, options, a);
    validate_features(q, options, longest_of(options.max_seqlen_q, a.total_q),
                      longest_of(options.max_seqlen_k, a.total_k), a);
  } else {
    a.batch = q.shape[0];
    validate_features(q, options, a.seqlen_q, a.seqlen_k, a);
  }
  return a;
}

ForwardParams validate_forward(const ForwardTensors& tensors, const ForwardOptions& options) {
  ForwardParams params;
  params.attention = validate_inputs(tensors, options);
  const auto& [q, k, v, out, lse] = tensors;
  const bool packed = params.attention.cu_seqlens_q != nullptr;
  check_writable(out, "out");
  params.out = out.data;
  params.out_dtype = out.dtype;
  params.out_stride = strides_of(with_batch(out, packed));
  if (lse != nullptr) {
    check_lse_dtype(*lse, "lse");
    check_writable(*lse, "lse");
    params.lse = lse->data;
    params.lse_dtype = lse->dtype;
    params.lse_stride = lse_strides_of(*lse, packed);
  }
  if (options.max_logits != nullptr) {
    const TensorView& t = *options.max_logits;
    params.max_logits = static_cast<float*>(t.data);
    params.max_logits_stride = {t.stride[0], 0, t.stride[1], 0};
  }
  params.prior = prior_of(tensors, options, packed);
  return params;
}

}  // namespace anyflash
