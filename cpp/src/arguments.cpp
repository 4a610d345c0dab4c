#include "arguments.h"

#include <algorithm>

#include "describe.h"

namespace anyflash {

void invalid_value(const std::string& message) { throw Error(ErrorCode::kInvalidValue, message); }
void invalid_type(const std::string& message) { throw Error(ErrorCode::kInvalidType, message); }

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
    if (__builtin_mul_overflow(elements, t.shape[i], &elements) || elements > kMaxElements) {
      invalid_value(std::string(argument) + " has shape " + shape_of(t) +
                    "; at most 2^56 elements are allowed");
    }
  }
  if (elements > 0 && t.data == nullptr) {
    invalid_value(std::string(argument) + " has a NULL data pointer");
  }
}

namespace {

bool may_be_one(const Axis& axis) { return axis.broadcast && axis.extent != 1; }

}  // namespace

bool has_shape(const TensorView& t, std::initializer_list<Axis> axes) {
  auto extent = t.shape.begin();
  for (const Axis& axis : axes) {
    if (*extent != axis.extent && !(may_be_one(axis) && *extent == 1)) return false;
    ++extent;
  }
  return true;
}

void check_shape(const TensorView& t, const char* argument, std::initializer_list<Axis> axes,
                 const char* layout, std::string_view why) {
  check_rank(t, argument, static_cast<int>(axes.size()), layout);
  if (has_shape(t, axes)) return;
  std::string expected;
  for (const Axis& axis : axes) {
    expected += (expected.empty() ? "" : ", ") + std::to_string(axis.extent) +
                (may_be_one(axis) ? " or 1" : "");
  }
  invalid_value(std::string(argument) + " has shape " + shape_of(t) + "; expected (" + expected +
                (t.rank == 1 ? ",)" : ")") +
                (why.empty() ? std::string(": ") + layout : std::string(why)));
}

void check_device(const TensorView& t, const char* argument, const TensorView& other,
                  const char* other_argument) {
  if (t.device == other.device) return;
  invalid_value(std::string(argument) + " is on " + name(t.device) + ", but " + other_argument +
                " is on " + name(other.device) + "; all tensors must be on one device");
}

void check_like(const TensorView& t, const char* argument, const TensorView& other,
                const char* other_argument) {
  check_rank(t, argument, other.rank, (std::string("as ") + other_argument).c_str());
  for (int i = 0; i < t.rank; ++i) {
    if (t.shape[i] == other.shape[i]) continue;
    invalid_value(std::string(argument) + " has shape " + shape_of(t) + "; expected " +
                  shape_of(other) + ", as " + other_argument);
  }
  check_device(t, argument, other, other_argument);
}

void check_float(const TensorView& t, const char* argument, bool allow_double, const char* also) {
  if (is_float(t.dtype) && (allow_double || t.dtype != DType::kFloat64)) return;
  invalid_type(std::string(argument) + " is " + name(t.dtype) + "; " +
               (allow_double ? "" : "on a GPU ") + also +
               (allow_double ? kFloatsAllowed : "float32, float16 and bfloat16 are allowed"));
}

void check_dtype(const TensorView& t, const char* argument, DType dtype) {
  if (t.dtype == dtype) return;
  invalid_type(std::string(argument) + " is " + name(t.dtype) + "; it must be " + name(dtype));
}

void check_lse_dtype(const TensorView& t, const char* argument) {
  const bool may_be_double = t.device.type == DeviceType::kCpu;
  if (t.dtype == DType::kFloat32 || (may_be_double && t.dtype == DType::kFloat64)) return;
  invalid_type(std::string(argument) + " is " + name(t.dtype) + "; " + kLsesAllowed);
}

void check_dtype_or_float32(const TensorView& t, const char* argument, const TensorView& other,
                            const char* other_argument) {
  if (t.dtype == other.dtype || t.dtype == DType::kFloat32) return;
  invalid_type(std::string(argument) + " is " + name(t.dtype) + ", but " + other_argument + " is " +
               name(other.dtype) + "; " + argument + " must have " + other_argument +
               "'s dtype or be float32");
}

void check_heads(const TensorView& q, const TensorView& k, const char* k_argument) {
  const int64_t heads = q.shape[q.rank - 2];
  if (heads == 0 || q.shape[q.rank - 1] == 0) {
    invalid_value("q has shape " + shape_of(q) + "; heads and head_dim must be at least 1");
  }
  const int64_t heads_k = k.shape[k.rank - 2];
  if (heads_k != 0 && heads % heads_k == 0) return;
  invalid_value(std::string(k_argument) + " has " + std::to_string(heads_k) +
                " heads, which does not divide q's " + std::to_string(heads));
}

void check_lse(const TensorView& t, const char* argument, const TensorView& other,
               const char* other_argument) {
  const auto& n = other.shape;
  if (other.rank == 3) {
    check_shape(t, argument, {{n[1]}, {n[0]}}, "(heads, total_q), of packed sequences");
  } else {
    check_shape(t, argument, {{n[0]}, {n[2]}, {n[1]}}, "(batch, heads, seqlen_q)");
  }
  check_device(t, argument, other, other_argument);
  check_aligned(t, argument);
}

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

void check_aligned(const TensorView& t, const char* argument) {
  const int bytes = bytes_of(t.dtype);
  if (reinterpret_cast<std::uintptr_t>(t.data) % static_cast<std::uintptr_t>(bytes) == 0) return;
  invalid_value(std::string(argument) + " is " + name(t.dtype) + ", but its address is not a " +
                "multiple of " + std::to_string(bytes) + " bytes");
}

void check_both(const TensorView* a, const char* name_a, const TensorView* b, const char* name_b) {
  if ((a == nullptr) == (b == nullptr)) return;
  invalid_value(std::string(a == nullptr ? name_b : name_a) + " is given without " +
                (a == nullptr ? name_a : name_b) + "; both or none are allowed");
}

void check_integers(const TensorView& t, const char* argument, DType dtype, const TensorView& q,
                    int64_t count, const char* layout, const char* why) {
  check_dtype(t, argument, dtype);
  check_device(t, argument, q, "q");
  check_shape(t, argument, {{count}}, layout, why);
  if (count > 1 && t.stride[0] != 1) {
    invalid_value(std::string(argument) + " has stride " + std::to_string(t.stride[0]) +
                  "; it must be contiguous");
  }
  check_aligned(t, argument);
}

void check_cu_seqlens(const TensorView& t, const char* argument, const TensorView& q) {
  check_rank(t, argument, 1, "(batch + 1,)");
  if (t.shape[0] == 0) {
    invalid_value(std::string(argument) + " has shape (0,); expected batch + 1 elements");
  }
  check_integers(t, argument, DType::kInt32, q, t.shape[0], "(batch + 1,)", "");
}

int packed_bound(int64_t given, const char* option, int64_t total) {
  if (given < 0 || given > kMaxExtent) {
    invalid_value(std::string(option) + " is " + std::to_string(given) +
                  "; the length of the longest sequence is expected, 0 to " +
                  std::to_string(kMaxExtent) + "; 0 stands for the number of rows");
  }
  return static_cast<int>(std::min(longest_of(given, total), total));
}

void check_threads(int num_threads) {
  if (num_threads >= 0) return;
  invalid_value("num_threads is " + std::to_string(num_threads) +
                "; 0 (the default) or a positive number is allowed");
}

int checked_extent(int64_t extent, const char* argument, const char* what) {
  if (extent > kMaxExtent) {
    invalid_value(std::string(argument) + " has " + what + " " + std::to_string(extent) +
                  "; at most " + std::to_string(kMaxExtent) + " is allowed");
  }
  return static_cast<int>(extent);
}

TensorView with_batch(const TensorView& t, bool packed) {
  if (!packed) return t;
  TensorView result = t;
  result.rank = 4;
  result.shape = {1, t.shape[0], t.shape[1], t.shape[2]};
  result.stride = {0, t.stride[0], t.stride[1], t.stride[2]};
  return result;
}

TensorView with_leading_axis(const TensorView& t) {
  TensorView result = t;
  result.rank = 3;
  result.shape = {1, t.shape[0], t.shape[1]};
  result.stride = {0, t.stride[0], t.stride[1]};
  return result;
}

Strides broadcast_strides_of(const TensorView& t, std::initializer_list<int64_t Strides::*> axes) {
  Strides stride{0, 0, 0, 0};
  int i = 0;
  for (int64_t Strides::* const axis : axes) {
    stride.*axis = t.shape[i] == 1 ? 0 : t.stride[i];
    ++i;
  }
  return stride;
}

bool hides_all_keys(const Attention& a) {
  const Part& p = a.part;
  const bool read_on_device =
      p.query_start.array != nullptr || p.key_start.array != nullptr || p.diagonal.array != nullptr;
  if (!p.is_given || read_on_device) return false;
  const int64_t shift = p.query_start.value + p.diagonal.value - p.key_start.value;
  const int64_t last_row = a.seqlen_q - 1;  // packed: of the longest sequence
  const bool all_later = a.window.right >= 0 && last_row + shift + a.window.right < 0;
  const bool all_earlier = a.window.left >= 0 && shift - a.window.left >= a.seqlen_k;
  return all_later || all_earlier;
}

}  // namespace anyflash
