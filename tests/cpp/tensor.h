// Tensors of the tests: own memory, any strides, elements read and written as double.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <random>
#include <vector>

#include "anyflash/attention.h"

namespace test {

using anyflash::DType;
using anyflash::TensorView;
using Index = std::array<int64_t, 4>;

inline constexpr DType kDTypes[] = {DType::kFloat64, DType::kFloat32, DType::kFloat16,
                                    DType::kBFloat16};

inline int bytes_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat64:
    case DType::kInt64:
      return 8;
    case DType::kFloat32:
    case DType::kInt32:
      return 4;
    case DType::kBool:
    case DType::kInt8:
    case DType::kFloat8E4M3:
    case DType::kFloat8E5M2:
      return 1;
    default:
      return 2;
  }
}

// 16-bit formats: bits of the mantissa, and the exponent's bias.
struct Format {
  int mantissa;
  int bias;
};
inline Format format_of(DType dtype) {
  return dtype == DType::kFloat16 ? Format{10, 15} : Format{7, 127};
}

inline double decode16(uint16_t bits, DType dtype) {
  const Format f = format_of(dtype);
  const int mantissa = bits & ((1 << f.mantissa) - 1);
  const int exponent = (bits & 0x7fff) >> f.mantissa;
  const double sign = (bits & 0x8000) != 0 ? -1.0 : 1.0;
  if (exponent == 0x7fff >> f.mantissa) {
    return mantissa != 0 ? std::nan("") : sign * std::numeric_limits<double>::infinity();
  }
  const int implicit = exponent == 0 ? 0 : 1 << f.mantissa;
  return sign * std::ldexp(implicit + mantissa, std::max(exponent, 1) - f.bias - f.mantissa);
}

// For zero, infinity and what the format's normal numbers hold exactly.
inline uint16_t encode16(double x, DType dtype) {
  if (x == 0.0) return 0;
  const Format f = format_of(dtype);
  if (std::isinf(x)) {
    return static_cast<uint16_t>((x < 0.0 ? 0x8000 : 0) | (0x7fff & -(1 << f.mantissa)));
  }
  int exponent = 0;
  const double fraction = std::frexp(std::fabs(x), &exponent);  // [1/2, 1)
  const int mantissa = static_cast<int>(std::ldexp(fraction, f.mantissa + 1)) - (1 << f.mantissa);
  const int bits = ((exponent - 1 + f.bias) << f.mantissa) + mantissa;
  return static_cast<uint16_t>((x < 0.0 ? 0x8000 : 0) | bits);
}

enum class Layout {
  kContiguous,
  kHeadsFirst,  // memory is (batch, heads, rows, columns)
  kSpread,      // gaps between elements, heads and rows
  kReversed,    // rows and columns run backwards
  kLast = kReversed,
};

// All bytes begin as 0xff, which is NaN in every floating-point type. So what is read before it was
// written shows in the results, and what has been written shows in unwritten().
class Tensor {
 public:
  Tensor(DType dtype, Index shape, Layout layout = Layout::kContiguous) {
    view.dtype = dtype;
    view.rank = 4;
    view.shape = shape;
    Index order = {0, 1, 2, 3};  // from the slowest to the fastest axis
    if (layout == Layout::kHeadsFirst) std::swap(order[1], order[2]);
    int64_t step = 1;
    for (int i = 3; i >= 0; --i) {
      if (layout == Layout::kSpread) step = step * 2 + (i == 3 ? 0 : 1);
      view.stride[order[i]] = step;
      step *= std::max<int64_t>(shape[order[i]], 1);
    }
    bytes.assign(static_cast<std::size_t>(step * bytes_of(dtype)), 0xff);
    int64_t first = 0;
    if (layout == Layout::kReversed) {
      for (const int axis : {1, 3}) {
        first += view.stride[axis] * std::max<int64_t>(shape[axis] - 1, 0);
        view.stride[axis] = -view.stride[axis];
      }
    }
    view.data = bytes.data() + first * bytes_of(dtype);
  }

  // `view` points into `bytes`.
  Tensor(const Tensor&) = delete;
  Tensor& operator=(const Tensor&) = delete;

  double get(const Index& i) const {
    const char* const p = address(i);
    if (view.dtype == DType::kFloat64) return read<double>(p);
    if (view.dtype == DType::kFloat32) return read<float>(p);
    if (view.dtype == DType::kBool) return read<unsigned char>(p);
    if (view.dtype == DType::kInt32) return read<int32_t>(p);
    if (view.dtype == DType::kInt8) return read<int8_t>(p);
    return decode16(read<uint16_t>(p), view.dtype);
  }

  void set(const Index& i, double x) {
    char* const p = address(i);
    if (view.dtype == DType::kFloat64) return write(p, x);
    if (view.dtype == DType::kFloat32) return write(p, static_cast<float>(x));
    if (view.dtype == DType::kBool) return write(p, static_cast<unsigned char>(x));
    if (view.dtype == DType::kInt32) return write(p, static_cast<int32_t>(x));
    if (view.dtype == DType::kInt64) return write(p, static_cast<int64_t>(x));
    if (view.dtype == DType::kInt8) return write(p, static_cast<int8_t>(x));
    write(p, encode16(x, view.dtype));
  }

  // Multiples of 1/32 in [-2, 2]: exact in every type.
  void fill(unsigned seed) {
    std::mt19937 random(seed);
    for_each([&](const Index& i) { set(i, (static_cast<int>(random() % 129) - 64) / 32.0); });
  }

  template <class Function>
  void for_each(const Function& function) const {
    const Index& n = view.shape;
    for (int64_t a = 0; a < n[0]; ++a) {
      for (int64_t b = 0; b < n[1]; ++b) {
        for (int64_t c = 0; c < n[2]; ++c) {
          for (int64_t d = 0; d < n[3]; ++d) function(Index{a, b, c, d});
        }
      }
    }
  }

  std::size_t unwritten() const {
    return static_cast<std::size_t>(std::count(bytes.begin(), bytes.end(), 0xff));
  }
  bool untouched() const { return unwritten() == bytes.size(); }

  TensorView view;
  std::vector<unsigned char> bytes;

 private:
  char* address(const Index& i) const {
    int64_t offset = 0;
    for (int axis = 0; axis < 4; ++axis) offset += i[axis] * view.stride[axis];
    return static_cast<char*>(view.data) + offset * bytes_of(view.dtype);
  }
  template <class T>
  static T read(const char* p) {
    T x;
    std::memcpy(&x, p, sizeof x);
    return x;
  }
  template <class T>
  static void write(char* p, T x) {
    std::memcpy(p, &x, sizeof x);
  }
};

// A view of the axes [first, 4) of a tensor.
inline TensorView without(const Tensor& t, int first) {
  TensorView view = t.view;
  view.rank = 4 - first;
  for (int i = 0; i < view.rank; ++i) {
    view.shape[i] = t.view.shape[i + first];
    view.stride[i] = t.view.stride[i + first];
  }
  return view;
}

// Memory of exactly the size asked for, whose end address sanitizer guards; without that sanitizer,
// bytes behind it do. It begins one byte behind a multiple of 256, where a workspace has most to
// skip.
class ExactBytes {
 public:
  explicit ExactBytes(std::size_t bytes)
      : bytes_(bytes),
        data_(static_cast<unsigned char*>(::operator new(1 + bytes + kGuard, kAlign)) + 1) {
    std::memset(data_ - 1, 0xff, 1 + bytes + kGuard);
  }
  ~ExactBytes() { ::operator delete(data_ - 1, kAlign); }
  ExactBytes(const ExactBytes&) = delete;
  ExactBytes& operator=(const ExactBytes&) = delete;

  anyflash::Workspace workspace() const { return {data_, bytes_}; }
  bool guard_untouched() const {
    return data_[-1] == 0xff && std::count(data_ + bytes_, data_ + bytes_ + kGuard, 0xff) == kGuard;
  }

 private:
#if defined(__SANITIZE_ADDRESS__)
  static constexpr int kGuard = 0;
#else
  static constexpr int kGuard = 256;
#endif
  static constexpr std::align_val_t kAlign{256};
  std::size_t bytes_;
  unsigned char* data_;
};

inline anyflash::ForwardTensors forward_tensors(const TensorView& q, const TensorView& k,
                                                const TensorView& v, const TensorView& out,
                                                const TensorView* lse = nullptr) {
  anyflash::ForwardTensors tensors;
  tensors.q = q;
  tensors.k = k;
  tensors.v = v;
  tensors.out = out;
  tensors.lse = lse;
  return tensors;
}

inline anyflash::KvCacheTensors kvcache_tensors(const TensorView& q, const TensorView& k_cache,
                                                const TensorView& v_cache, const TensorView& out,
                                                const TensorView* lse = nullptr) {
  anyflash::KvCacheTensors tensors;
  tensors.q = q;
  tensors.k_cache = k_cache;
  tensors.v_cache = v_cache;
  tensors.out = out;
  tensors.lse = lse;
  return tensors;
}

// With exactly the workspace that the plan asks for; whether nothing was written behind it.
template <class Plan>
bool run_exactly(const Plan& plan, void* stream = nullptr) {
  const ExactBytes memory(plan.workspace_bytes());
  plan.run(memory.workspace(), stream);
  return memory.guard_untouched();
}

}  // namespace test
