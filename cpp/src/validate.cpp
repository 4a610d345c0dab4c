#include "validate.h"

#include <cfloat>
#include <climits>
#include <cmath>
#include <sstream>
#include <string>

#include "anyflash/error.h"
#include "describe.h"

namespace anyflash {

namespace {

[[noreturn]] void invalid_value(const std::string& message) {
  throw Error(ErrorCode::kInvalidValue, message);
}
[[noreturn]] void invalid_type(const std::string& message) {
  throw Error(ErrorCode::kInvalidType, message);
}

void check_rank(const TensorView& t, const char* argument, int rank, const char* layout) {
  if (t.rank != rank) {
    const std::string shape = t.rank >= 0 && t.rank <= kMaxRank ? ", shape " + shape_of(t) : "";
    invalid_value(std::string(argument) + " has " + std::to_string(t.rank) + " dimensions" + shape +
                  "; expected " + std::to_string(rank) + ": " + layout);
  }
  // Counted in elements, with room for sizes in bytes and for rounding up.
  constexpr int64_t kMaxElements = int64_t{1} << 56;
  int64_t elements = 1;
  for (int i = 0; i < t.rank; ++i) {
    if (t.shape[i] < 0) {
      invalid_value(std::string(argument) + " has shape " + shape_of(t) +
                    "; an extent must not be negative");
    }
    if (t.shape[i] > 0 && elements > kMaxElements / t.shape[i]) {
      invalid_value(std::string(argument) + " has shape " + shape_of(t) +
                    "; at most 2^56 elements are allowed");
    }
    elements *= t.shape[i];
  }
  if (elements > 0 && t.data == nullptr) {
    invalid_value(std::string(argument) + " has a NULL data pointer");
  }
}

void check_same(const TensorView& t, const char* argument, const TensorView& q) {
  if (t.dtype != q.dtype) {
    invalid_type(std::string(argument) + " is " + name(t.dtype) + ", but q is " + name(q.dtype) +
                 "; q, k, v and out must have one dtype");
  }
  if (t.device != q.device) {
    invalid_value(std::string(argument) + " is on " + name(t.device) + ", but q is on " +
                  name(q.device) + "; all tensors must be on one device");
  }
}

void check_shape(const TensorView& t, const char* argument,
                 const std::array<int64_t, kMaxRank>& expected, const char* why) {
  for (int i = 0; i < t.rank; ++i) {
    if (t.shape[i] == expected[i]) continue;
    TensorView wanted = t;
    wanted.shape = expected;
    invalid_value(std::string(argument) + " has shape " + shape_of(t) + "; expected " +
                  shape_of(wanted) + why);
  }
}

// A tensor that is written must not hold one address twice.
void check_writable(const TensorView& t, const char* argument) {
  for (int i = 0; i < t.rank; ++i) {
    if (t.shape[i] == 0) return;  // strides of an empty tensor mean nothing
  }
  for (int i = 0; i < t.rank; ++i) {
    if (t.shape[i] > 1 && t.stride[i] == 0) {
      invalid_value(std::string(argument) + " has stride 0 in dimension " + std::to_string(i) +
                    " of shape " + shape_of(t) + "; an output must not repeat elements");
    }
  }
}

// Kernels count rows in 32 bits and round up to whole tiles, which must not overflow.
constexpr int64_t kMaxExtent = INT_MAX - 4095;

int int_extent(const TensorView& t, const char* argument, int dimension, const char* what) {
  const int64_t extent = t.shape[dimension];
  if (extent > kMaxExtent) {
    invalid_value(std::string(argument) + " has " + what + " " + std::to_string(extent) +
                  "; at most " + std::to_string(kMaxExtent) + " is allowed");
  }
  return static_cast<int>(extent);
}

Strides strides(const TensorView& t) {
  return {t.stride[0], t.stride[1], t.stride[2], t.stride[3]};
}

double checked_scale(const ForwardOptions& options, const TensorView& q) {
  if (!options.softmax_scale) return 1.0 / std::sqrt(static_cast<double>(q.shape[3]));
  const double scale = *options.softmax_scale;
  // Kernels of the narrower types multiply it by log2(e) in float32.
  const bool wide = q.dtype == DType::kFloat64;
  if (!std::isfinite(scale) || (!wide && std::abs(scale) > FLT_MAX / 2)) {
    std::ostringstream message;
    message << "softmax_scale is " << scale << "; a finite number"
            << (wide ? "" : " of at most half of float32's range") << " is allowed";
    invalid_value(message.str());
  }
  return scale;
}

}  // namespace

ForwardParams validate_forward(const TensorView& q, const TensorView& k, const TensorView& v,
                               const TensorView& out, const TensorView* lse,
                               const ForwardOptions& options) {
  check_rank(q, "q", 4, "(batch, seqlen_q, heads, head_dim)");
  check_rank(k, "k", 4, "(batch, seqlen_k, heads_k, head_dim)");
  check_rank(v, "v", 4, "(batch, seqlen_k, heads_k, head_dim_v)");
  check_rank(out, "out", 4, "(batch, seqlen_q, heads, head_dim_v)");
  check_same(k, "k", q);
  check_same(v, "v", q);
  check_same(out, "out", q);

  for (const int dimension : {2, 3}) {
    if (q.shape[dimension] == 0) {
      invalid_value("q has shape " + shape_of(q) + "; heads and head_dim must be at least 1");
    }
  }
  if (k.shape[2] == 0 || q.shape[2] % k.shape[2] != 0) {
    invalid_value("k has " + std::to_string(k.shape[2]) + " heads, which does not divide q's " +
                  std::to_string(q.shape[2]));
  }
  check_shape(k, "k", {q.shape[0], k.shape[1], k.shape[2], q.shape[3]},
              ", with q's batch and head_dim");
  check_shape(v, "v", {q.shape[0], k.shape[1], k.shape[2], v.shape[3]},
              ", with k's batch, seqlen_k and heads");
  if (v.shape[3] == 0) {
    invalid_value("v has shape " + shape_of(v) + "; head_dim_v must be at least 1");
  }
  check_shape(out, "out", {q.shape[0], q.shape[1], q.shape[2], v.shape[3]},
              ": q's batch, seqlen_q and heads, and v's head_dim");
  check_writable(out, "out");

  ForwardParams params;
  if (lse != nullptr) {
    check_rank(*lse, "lse", 3, "(batch, heads, seqlen_q)");
    if (lse->dtype != DType::kFloat32) {
      invalid_type(std::string("lse is ") + name(lse->dtype) + "; it must be float32");
    }
    if (lse->device != q.device) {
      invalid_value("lse is on " + name(lse->device) + ", but q is on " + name(q.device));
    }
    check_shape(*lse, "lse", {q.shape[0], q.shape[2], q.shape[1]}, ": (batch, heads, seqlen_q)");
    check_writable(*lse, "lse");
    params.lse = static_cast<float*>(lse->data);
    params.lse_stride = {lse->stride[0], lse->stride[2], lse->stride[1], 0};
  }
  if (options.num_threads < 0) {
    invalid_value("num_threads is " + std::to_string(options.num_threads) +
                  "; 0 (the default) or a positive number is allowed");
  }

  params.q = q.data;
  params.k = k.data;
  params.v = v.data;
  params.out = out.data;
  params.q_stride = strides(q);
  params.k_stride = strides(k);
  params.v_stride = strides(v);
  params.out_stride = strides(out);
  params.batch = q.shape[0];
  params.seqlen_q = int_extent(q, "q", 1, "seqlen_q");
  params.seqlen_k = int_extent(k, "k", 1, "seqlen_k");
  params.heads = int_extent(q, "q", 2, "heads");
  params.heads_k = int_extent(k, "k", 2, "heads");
  params.head_dim = int_extent(q, "q", 3, "head_dim");
  params.head_dim_v = int_extent(v, "v", 3, "head_dim_v");
  params.softmax_scale = checked_scale(options, q);
  params.causal = options.causal;
  return params;
}

}  // namespace anyflash
