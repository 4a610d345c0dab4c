// What a fuzzer's bytes are read as. Behind their end there are zeros.
#pragma once

#include <cfloat>
#include <climits>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>

namespace fuzz {

class Bytes {
 public:
  Bytes(const uint8_t* data, std::size_t size) : at_(data), end_(data + size) {}

  bool empty() const { return at_ == end_; }

  template <class T>
  T take() {
    T value{};
    const auto left = static_cast<std::size_t>(end_ - at_);
    const std::size_t count = left < sizeof(T) ? left : sizeof(T);
    std::memcpy(&value, at_, count);
    at_ += count;
    return value;
  }
  uint8_t byte() { return take<uint8_t>(); }
  // One of [0, count).
  int below(int count) { return byte() % count; }

  template <class T, std::size_t kCount>
  T one_of(const T (&values)[kCount]) {
    return values[byte() % kCount];
  }

 private:
  const uint8_t* at_;
  const uint8_t* end_;
};

// Where sizes overflow, round up, or mean something of their own.
inline constexpr int64_t kIntegers[] = {
    0,
    1,
    -1,
    2,
    3,
    -2,
    5,
    64,
    63,
    65,
    128,
    255,
    256,
    4096,
    65535,
    65536,
    INT_MAX,
    INT_MAX - 4095,
    INT_MAX - 4094,
    int64_t{INT_MAX} + 1,
    INT_MIN,
    int64_t{UINT32_MAX} + 1,
    int64_t{1} << 40,
    int64_t{1} << 55,
    int64_t{1} << 56,
    (int64_t{1} << 56) + 1,
    int64_t{1} << 62,
    INT64_MAX,
    INT64_MAX - 63,
    INT64_MIN,
    INT64_MIN + 1,
};

inline constexpr double kNumbers[] = {
    0.0,
    -0.0,
    1.0,
    -1.0,
    0.5,
    30.0,
    1e-3,
    0.999,
    0.99999999,
    65535.0 / 65536,
    FLT_MIN,
    FLT_MAX / 2,
    FLT_MAX,
    DBL_MIN,
    DBL_MAX / 2,
    DBL_MAX,
    -DBL_MAX,
    4.9e-324,
    1e-45,
    std::numeric_limits<double>::infinity(),
    -std::numeric_limits<double>::infinity(),
    std::numeric_limits<double>::quiet_NaN(),
};

// Another value: of the list, one close by, or any.
inline int64_t changed_integer(Bytes& bytes, int64_t present) {
  const uint8_t how = bytes.byte();
  if (how < 128) return bytes.one_of(kIntegers);
  const int64_t step = bytes.take<int8_t>();
  if (how < 240)
    return static_cast<int64_t>(static_cast<uint64_t>(present) + static_cast<uint64_t>(step));
  return bytes.take<int64_t>();
}

inline double changed_number(Bytes& bytes) {
  const uint8_t how = bytes.byte();
  return how < 200 ? bytes.one_of(kNumbers) : bytes.take<double>();
}

}  // namespace fuzz
