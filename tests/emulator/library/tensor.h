// Tensors of the emulated driver. Each is a heap block of its exact size, so that Address Sanitizer
// sees every access beyond it.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "anyflash/tensor_view.h"

namespace driver {

using anyflash::DType;
using anyflash::TensorView;

inline DType dtype_of(const std::string& name) {
  if (name == "fp16") return DType::kFloat16;
  if (name == "bf16") return DType::kBFloat16;
  if (name == "fp32") return DType::kFloat32;
  if (name == "bool") return DType::kBool;
  if (name == "int8") return DType::kInt8;
  if (name == "e4m3") return DType::kFloat8E4M3;
  if (name == "e5m2") return DType::kFloat8E5M2;
  throw std::invalid_argument("no data type: " + name);
}

inline int64_t bytes_of(DType dtype) {
  switch (dtype) {
    case DType::kBool:
    case DType::kInt8:
    case DType::kFloat8E4M3:
    case DType::kFloat8E5M2:
      return 1;
    case DType::kFloat16:
    case DType::kBFloat16:
      return 2;
    default:
      return 4;
  }
}

// A sign, bits of exponent, bits of mantissa; the codes of each sign from `infinite` on are not
// finite.
struct Float8 {
  int mantissa;
  int bias;
  unsigned infinite;

  double decode(unsigned code) const {
    const unsigned size = code & 127;
    const int exponent = static_cast<int>(size >> mantissa);
    const int fraction = static_cast<int>(size) - (exponent << mantissa);
    const int one = exponent == 0 ? 0 : 1 << mantissa;
    double x = std::ldexp(one + fraction, std::max(exponent, 1) - bias - mantissa);
    if (size >= infinite) x = fraction == 0 ? INFINITY : NAN;
    return (code & 128) != 0 ? -x : x;
  }

  // The nearest number, of two such ones that whose code is even; an infinity as it is.
  unsigned char encode(double x) const {
    if (std::isnan(x)) return 127;
    const auto error = [&](unsigned code) { return std::abs(decode(code) - std::abs(x)); };
    unsigned best = 0;
    for (unsigned code = 1; code < infinite; ++code) {
      if (error(code) < error(best) || (error(code) == error(best) && code % 2 == 0)) best = code;
    }
    if (std::isinf(x) && std::isinf(decode(infinite))) best = infinite;
    return static_cast<unsigned char>(best | (std::signbit(x) ? 128u : 0u));
  }
};
inline constexpr Float8 kE4m3{3, 7, 127};
inline constexpr Float8 kE5m2{2, 15, 124};

// A tensor of up to four axes; it is always addressed by four indices, of which the first axes are
// 0 where it has fewer. Axes of extent 1 take any index.
class Tensor {
 public:
  Tensor(DType dtype, const std::array<int64_t, 4>& extent)
      : dtype_(dtype), extent_(extent), bytes_(static_cast<std::size_t>(size() * bytes_of(dtype))) {
    data_.reset(new unsigned char[bytes_]);
    // NaN, or the largest number where there is no NaN.
    std::memset(data_.get(), dtype == DType::kInt8 ? 0x7f : 0xff, bytes_);
  }

  DType dtype() const { return dtype_; }
  const std::array<int64_t, 4>& extent() const { return extent_; }
  int64_t size() const { return extent_[0] * extent_[1] * extent_[2] * extent_[3]; }

  int64_t bytes() const { return static_cast<int64_t>(bytes_); }
  void* bytes_at(int64_t offset) const { return data_.get() + offset; }

  // Rows of the first two axes as those of one.
  TensorView packed_view(int rank) const {
    TensorView packed = view(rank + 1);
    for (int axis = 0; axis < rank; ++axis) {
      const auto to = static_cast<std::size_t>(axis);
      packed.shape[to] = packed.shape[to + 1] * (axis == 0 ? packed.shape[0] : 1);
      packed.stride[to] = packed.stride[to + 1];
    }
    packed.rank = rank;
    return packed;
  }

  // The last `rank` axes.
  TensorView view(int rank) const {
    TensorView view;
    view.data = data_.get();
    view.dtype = dtype_;
    view.device = {anyflash::DeviceType::kCuda, 0};
    view.rank = rank;
    int64_t stride = 1;
    for (int axis = 3; axis >= 4 - rank; --axis) {
      const auto from = static_cast<std::size_t>(axis);
      const auto to = static_cast<std::size_t>(axis - (4 - rank));
      view.shape[to] = extent_[from];
      view.stride[to] = stride;
      stride *= extent_[from];
    }
    return view;
  }

  double at(int64_t a, int64_t b, int64_t c, int64_t d) const { return get(index(a, b, c, d)); }

  double get(int64_t i) const {
    switch (dtype_) {
      case DType::kFloat16:
        return __half2float(__ushort_as_half(element<uint16_t>(i)));
      case DType::kBFloat16:
        return __bfloat162float(__ushort_as_bfloat16(element<uint16_t>(i)));
      case DType::kFloat32:
        return element<float>(i);
      case DType::kInt32:
        return element<int32_t>(i);
      case DType::kInt8:
        return element<signed char>(i);
      case DType::kFloat8E4M3:
        return kE4m3.decode(element<unsigned char>(i));
      case DType::kFloat8E5M2:
        return kE5m2.decode(element<unsigned char>(i));
      default:
        return data_[static_cast<std::size_t>(i)];
    }
  }

  std::vector<double> values() const {
    std::vector<double> values(static_cast<std::size_t>(size()));
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = get(static_cast<int64_t>(i));
    return values;
  }

  // Of all bits (FNV-1a).
  uint64_t digest() const {
    uint64_t hash = 0xcbf29ce484222325;
    for (std::size_t i = 0; i < bytes_; ++i) hash = (hash ^ data_[i]) * 0x100000001b3;
    return hash;
  }

  void set(int64_t i, double x) {
    const auto value = static_cast<float>(x);
    switch (dtype_) {
      case DType::kFloat16:
        return put(i, __half_as_ushort(__float2half_rn(value)));
      case DType::kBFloat16:
        return put(i, __bfloat16_as_ushort(__float2bfloat16_rn(value)));
      case DType::kFloat32:
        return put(i, value);
      case DType::kInt32:
        return put(i, static_cast<int32_t>(x));
      case DType::kInt8:
        return put(i, static_cast<signed char>(std::nearbyint(std::min(std::max(x, -128.), 127.))));
      case DType::kFloat8E4M3:
        return put(i, kE4m3.encode(x));
      case DType::kFloat8E5M2:
        return put(i, kE5m2.encode(x));
      default:
        data_[static_cast<std::size_t>(i)] = x != 0;
    }
  }

  int64_t index(int64_t a, int64_t b, int64_t c, int64_t d) const {
    const std::array<int64_t, 4> at{a, b, c, d};
    int64_t result = 0;
    for (std::size_t axis = 0; axis < 4; ++axis) {
      result = result * extent_[axis] + (extent_[axis] == 1 ? 0 : at[axis]);
    }
    return result;
  }

 private:
  template <class T>
  T element(int64_t i) const {
    T value;
    std::memcpy(&value, data_.get() + i * static_cast<int64_t>(sizeof(T)), sizeof(T));
    return value;
  }
  template <class T>
  void put(int64_t i, T value) {
    std::memcpy(data_.get() + i * static_cast<int64_t>(sizeof(T)), &value, sizeof(T));
  }

  DType dtype_;
  std::array<int64_t, 4> extent_;
  std::size_t bytes_;
  std::unique_ptr<unsigned char[]> data_;
};

}  // namespace driver
