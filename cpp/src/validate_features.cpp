// Options of a plan: numbers, and tensors that are optional.
#include <algorithm>
#include <cfloat>
#include <climits>
#include <cmath>
#include <optional>
#include <sstream>
#include <string>

#include "arguments.h"
#include "describe.h"
#include "validate.h"

namespace anyflash {

namespace {

std::string text_of(double x) {
  std::ostringstream text;
  text << x;
  return text.str();
}

double checked_scale(const ForwardOptions& options, int head_dim, bool wide) {
  if (!options.softmax_scale) return 1.0 / std::sqrt(static_cast<double>(head_dim));
  const double scale = *options.softmax_scale;
  // Kernels of the narrower types multiply it by log2(e) in float32.
  if (!std::isfinite(scale) || (!wide && std::abs(scale) > FLT_MAX / 2)) {
    invalid_value("softmax_scale is " + text_of(scale) + "; a finite number" +
                  (wide ? "" : " of at most half of float32's range") + " is allowed");
  }
  return scale;
}

double checked_softcap(double softcap, bool wide) {
  // It is divided by and multiplied by log2(e).
  const double least = wide ? DBL_MIN : FLT_MIN;
  const double most = wide ? DBL_MAX / 2 : FLT_MAX / 2;
  if (softcap == 0.0 || (softcap >= least && softcap <= most)) return softcap;
  invalid_value("softcap is " + text_of(softcap) + "; 0 (none) or a finite positive number" +
                (wide ? "" : " in float32's range") + " is allowed");
}

int64_t checked_window(int64_t width, const char* option) {
  // Sums of it, rows and positions have room then; keys are far fewer.
  constexpr int64_t kMost = int64_t{1} << 40;
  if (width >= -1) return std::min(width, kMost);
  invalid_value(std::string(option) + " is " + std::to_string(width) +
                "; -1 (no bound) or a number of keys is allowed");
}

uint32_t dropout_threshold(double p) {
  if (!(p >= 0.0 && p < 1.0)) {
    invalid_value("dropout_p is " + text_of(p) + "; 0 <= dropout_p < 1 is allowed");
  }
  return static_cast<uint32_t>(std::min(std::round(p * 65536.0), 65535.0));
}

int checked_block(int64_t size, int index) {
  if (size > 0 && size % 64 == 0 && size <= INT_MAX) return static_cast<int>(size);
  invalid_value("block_size[" + std::to_string(index) + "] is " + std::to_string(size) +
                "; a positive multiple of 64 below 2^31 is allowed");
}

class Features {
 public:
  Features(const TensorView& q, const ForwardOptions& options, int64_t seqlen_q, int64_t seqlen_k,
           Attention& attention)
      : q_(q), options_(options), seqlen_q_(seqlen_q), seqlen_k_(seqlen_k), a_(attention) {}

  void numbers() {
    const bool wide = q_.dtype == DType::kFloat64;
    a_.softmax_scale = checked_scale(options_, a_.head_dim, wide);
    a_.softcap = checked_softcap(options_.softcap, wide);
    a_.window.left = checked_window(options_.window_left, "window_left");
    a_.window.right = checked_window(options_.window_right, "window_right");
    if (options_.causal) a_.window.right = 0;
    a_.dropout_threshold = dropout_threshold(options_.dropout_p);
    a_.seed = options_.seed;
    a_.offset = options_.offset;
  }

  void alibi_slopes(const TensorView& t) {
    const char* const layout = "(heads,) or (batch or 1, heads)";
    check_input(t, "alibi_slopes");
    if (t.rank == 1) {
      check_shape(t, "alibi_slopes", {{a_.heads}}, layout, ", one for each head of q");
      a_.alibi_slopes = auxiliary_of(t, {&Strides::head});
    } else {
      check_shape(t, "alibi_slopes", {{a_.batch, true}, {a_.heads}}, layout);
      a_.alibi_slopes = auxiliary_of(t, {&Strides::batch, &Strides::head});
    }
  }

  void bias(const TensorView& t) {
    const char* const layout =
        packed() ? "(batch or 1, heads or 1, max_seqlen_q or 1, max_seqlen_k or 1)"
                 : "(batch or 1, heads or 1, seqlen_q or 1, seqlen_k or 1)";
    if (t.dtype == DType::kBool) {
      check_device(t, "bias", q_, "q");
    } else {
      check_input(t, "bias", "bool, ");
    }
    check_shape(t, "bias",
                {{a_.batch, true}, {a_.heads, true}, {seqlen_q_, true}, {seqlen_k_, true}}, layout);
    a_.bias = auxiliary_of(t, {&Strides::batch, &Strides::head, &Strides::row, &Strides::col});
    const int64_t stride = a_.bias.stride.col;
    if (q_.device.type != DeviceType::kCpu && stride != static_cast<int32_t>(stride)) {
      throw Error(ErrorCode::kUnsupported, "bias has stride " + std::to_string(stride) +
                                               " along the keys; on a GPU it must fit 32 bits");
    }
  }

  void block_mask(const TensorView& t) {
    const char* const layout = "(batch or 1, heads or 1, query blocks, key blocks)";
    a_.block_size_q = checked_block(options_.block_size[0], 0);
    a_.block_size_k = checked_block(options_.block_size[1], 1);
    check_dtype(t, "block_mask", DType::kBool);
    check_device(t, "block_mask", q_, "q");
    const int64_t blocks_q = (seqlen_q_ + a_.block_size_q - 1) / a_.block_size_q;
    const int64_t blocks_k = (seqlen_k_ + a_.block_size_k - 1) / a_.block_size_k;
    const std::initializer_list<Axis> axes = {
        {a_.batch, true}, {a_.heads, true}, {blocks_q}, {blocks_k}};
    check_rank(t, "block_mask", 4, layout);
    if (!has_shape(t, axes)) {
      check_shape(t, "block_mask", axes, layout,
                  ": blocks of " + std::to_string(a_.block_size_q) + " x " +
                      std::to_string(a_.block_size_k) + " of " + std::to_string(seqlen_q_) +
                      " queries and " + std::to_string(seqlen_k_) + " keys" +
                      (packed() ? ", max_seqlen_q and max_seqlen_k" : ""));
    }
    a_.block_mask =
        auxiliary_of(t, {&Strides::batch, &Strides::head, &Strides::row, &Strides::col});
  }

  void key_ranges(const TensorView& t) {
    const char* const layout = packed() ? "(heads_k or 1, total_k, 2 or 4)"
                                        : "(batch or 1, heads_k or 1, seqlen_k, 2 or 4)";
    check_dtype(t, "key_ranges", DType::kInt32);
    check_device(t, "key_ranges", q_, "q");
    check_aligned(t, "key_ranges");
    check_rank(t, "key_ranges", packed() ? 3 : 4, layout);
    const int64_t numbers = t.shape[t.rank - 1] == 4 ? 4 : 2;
    if (packed()) {
      check_shape(t, "key_ranges", {{a_.heads_k, true}, {a_.total_k}, {numbers}}, layout);
      a_.key_ranges = auxiliary_of(t, {&Strides::head, &Strides::row, &Strides::col});
    } else {
      check_shape(t, "key_ranges", {{a_.batch, true}, {a_.heads_k, true}, {seqlen_k_}, {numbers}},
                  layout);
      a_.key_ranges =
          auxiliary_of(t, {&Strides::batch, &Strides::head, &Strides::row, &Strides::col});
    }
    a_.key_intervals = static_cast<int>(numbers / 2);
  }

  void sinks(const TensorView& t) {
    check_input(t, "sinks");
    check_shape(t, "sinks", {{a_.heads}}, "(heads,)", ", one for each head of q");
    a_.sinks = auxiliary_of(t, {&Strides::head});
  }

  void rng_state(const TensorView& t) {
    check_integers(t, "rng_state", DType::kInt64, q_, 2, "(2,)", ": seed and offset");
    a_.rng_state = static_cast<const uint64_t*>(t.data);
  }

  void dropout_mask(const TensorView& t) {
    const char* const layout = packed() ? "(batch, heads, max_seqlen_q, max_seqlen_k)"
                                        : "(batch, heads, seqlen_q, seqlen_k)";
    check_dtype(t, "dropout_mask", DType::kBool);
    check_device(t, "dropout_mask", q_, "q");
    check_shape(t, "dropout_mask", {{a_.batch}, {a_.heads}, {seqlen_q_}, {seqlen_k_}}, layout);
    check_writable(t, "dropout_mask");
  }

  void max_logits(const TensorView& t) {
    check_dtype(t, "max_logits", DType::kFloat32);
    check_device(t, "max_logits", q_, "q");
    check_shape(t, "max_logits", {{a_.batch}, {a_.heads}}, "(batch, heads)", ": (batch, heads)");
    check_writable(t, "max_logits");
    check_aligned(t, "max_logits");
  }

  void lengths(const TensorView& t, const char* argument, int64_t count, const char* layout,
               const char* why) {
    check_integers(t, argument, DType::kInt32, q_, count, layout, why);
  }

  // Where the call lies in the attention that it is a part of.
  void part() {
    Part& p = a_.part;
    p.query_start =
        position(options_.query_start, "query_start", options_.query_starts, "query_starts", 0);
    p.key_start = position(options_.key_start, "key_start", options_.key_starts, "key_starts", 0);
    p.diagonal =
        position(options_.diagonal, "diagonal", options_.diagonals, "diagonals", -kMaxPosition);
    if (a_.dropout_threshold != 0 && p.key_start.value % 8 != 0) {
      invalid_value("key_start is " + std::to_string(p.key_start.value) +
                    "; with dropout a multiple of 8 is allowed");
    }
    p.batch_start = checked_start(options_.batch_start, "batch_start");
    p.head_start = checked_start(options_.head_start, "head_start");
    const int64_t end = p.head_start + a_.heads;
    p.total_heads = options_.total_heads == 0 ? a_.heads : options_.total_heads;
    if (p.total_heads < end || p.total_heads > kMaxExtent) {
      invalid_value("total_heads is " + std::to_string(options_.total_heads) + "; at least " +
                    std::to_string(end) + ", head_start and q's heads, is expected, and at most " +
                    std::to_string(kMaxExtent));
    }
  }

 private:
  static int64_t checked_start(int64_t start, const char* option) {
    if (start >= 0 && start <= kMaxPosition) return start;
    invalid_value(std::string(option) + " is " + std::to_string(start) + "; 0 to " +
                  std::to_string(kMaxPosition) + " is allowed");
  }

  OfEachSequence position(const std::optional<int64_t>& number, const char* option,
                          const TensorView* array, const char* array_option, int64_t least) {
    if (number && array != nullptr) {
      invalid_value(std::string(option) + " is given with " + array_option +
                    "; only one of both is allowed");
    }
    if (!number && array == nullptr) return {};
    a_.part.is_given = true;
    if (array != nullptr) {
      lengths(*array, array_option, a_.batch, "(batch,)", ", one for each sequence");
      return {0, static_cast<const int32_t*>(array->data)};
    }
    if (*number < least || *number > kMaxPosition) {
      invalid_value(std::string(option) + " is " + std::to_string(*number) + "; " +
                    std::to_string(least) + " to " + std::to_string(kMaxPosition) + " is allowed");
    }
    return {*number, nullptr};
  }

  bool packed() const { return options_.cu_seqlens_q != nullptr; }

  void check_input(const TensorView& t, const char* argument, const char* also = "") {
    check_float(t, argument, q_.device.type == DeviceType::kCpu, also);
    check_device(t, argument, q_, "q");
    check_aligned(t, argument);
  }

  const TensorView& q_;
  const ForwardOptions& options_;
  int64_t seqlen_q_;
  int64_t seqlen_k_;
  Attention& a_;
};

}  // namespace

void validate_packed(const TensorView& q, const ForwardOptions& options, Attention& attention) {
  const TensorView* const cu_q = options.cu_seqlens_q;
  const TensorView* const cu_k = options.cu_seqlens_k;
  check_cu_seqlens(*cu_q, "cu_seqlens_q", q);
  check_cu_seqlens(*cu_k, "cu_seqlens_k", q);
  if (cu_k->shape[0] != cu_q->shape[0]) {
    invalid_value("cu_seqlens_k has shape " + shape_of(*cu_k) + "; expected " + shape_of(*cu_q) +
                  ", as cu_seqlens_q");
  }
  attention.batch = cu_q->shape[0] - 1;
  attention.cu_seqlens_q = static_cast<const int32_t*>(cu_q->data);
  attention.cu_seqlens_k = static_cast<const int32_t*>(cu_k->data);
}

void validate_features(const TensorView& q, const ForwardOptions& options, int64_t seqlen_q,
                       int64_t seqlen_k, Attention& attention) {
  Features features(q, options, seqlen_q, seqlen_k, attention);
  features.numbers();
  features.part();
  if (options.alibi_slopes != nullptr) features.alibi_slopes(*options.alibi_slopes);
  if (options.bias != nullptr) features.bias(*options.bias);
  if (options.block_mask != nullptr) features.block_mask(*options.block_mask);
  if (options.key_ranges != nullptr) features.key_ranges(*options.key_ranges);
  if (options.sinks != nullptr) features.sinks(*options.sinks);
  if (options.rng_state != nullptr) features.rng_state(*options.rng_state);
  if (options.dropout_mask != nullptr) features.dropout_mask(*options.dropout_mask);
  if (options.max_logits != nullptr) features.max_logits(*options.max_logits);
  if (options.seqused_k != nullptr) {
    features.lengths(*options.seqused_k, "seqused_k", attention.batch, "(batch,)",
                     ", one for each sequence");
    attention.seqused_k = static_cast<const int32_t*>(options.seqused_k->data);
  }
}

}  // namespace anyflash
