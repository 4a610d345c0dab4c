// A tensor of a call: what the call is told of it, and the memory that this describes.
#pragma once

#include <dlpack/dlpack.h>

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <string>
#include <vector>

#include "bytes.h"

namespace fuzz {

enum class Role { kInput, kOutput, kBoth };

inline constexpr DLDataType kFloat64{kDLFloat, 64, 1};
inline constexpr DLDataType kFloat32{kDLFloat, 32, 1};
inline constexpr DLDataType kFloat16{kDLFloat, 16, 1};
inline constexpr DLDataType kBfloat16{kDLBfloat, 16, 1};
inline constexpr DLDataType kBool{kDLBool, 8, 1};
inline constexpr DLDataType kUInt8{kDLUInt, 8, 1};
inline constexpr DLDataType kInt32{kDLInt, 32, 1};
inline constexpr DLDataType kInt64{kDLInt, 64, 1};
inline constexpr DLDataType kInt8{kDLInt, 8, 1};
inline constexpr DLDataType kE4m3{kDLFloat8_e4m3fn, 8, 1};
inline constexpr DLDataType kE5m2{kDLFloat8_e5m2, 8, 1};

enum class Layout { kNoStrides, kContiguous, kSwapped, kSpread, kReversed, kBroadcast, kOffset };
inline constexpr int kLayouts = 7;

// How many kinds of changes Slot::change() knows.
inline constexpr int kSlotChanges = 16;

class Slot {
 public:
  static constexpr int kMostAxes = 6;

  Slot(const char* name, Role role, DLDataType dtype, std::initializer_list<int64_t> shape,
       bool present);
  Slot(Slot&&) = default;

  // Only of a slot that has not been changed: what is valid stays so.
  void lay_out(Layout layout);
  // Takes one change from the bytes.
  void change(int kind, Bytes& bytes);

  // Memory for all elements, of exactly that size, so that Address Sanitizer sees what is read or
  // written beside them. If that is too much (`false`), the address is one that nobody may touch.
  bool allocate(std::size_t most_bytes);
  // Elements by kind: 0 to 3 for floating-point numbers. Integers that were given stay.
  void fill(uint64_t seed, int kind);

  // The pointer that the call gets.
  const DLTensor* given() const { return present ? &tensor_ : nullptr; }
  // Elements, if they can be counted; else -1.
  int64_t elements() const;
  int64_t extent(int axis) const {
    const bool exists =
        axis >= 0 && axis < std::min<int64_t>(rank(), static_cast<int64_t>(shape_.size()));
    return exists ? shape_[static_cast<std::size_t>(axis)] : 1;
  }
  int rank() const { return tensor_.ndim; }

  void remember() { before_ = memory_copy(); }
  bool unchanged() const { return before_ == memory_copy(); }
  // Whether nothing but elements was written.
  bool gaps_unchanged() const;

  const char* name;
  Role role;
  bool present;
  std::vector<int32_t> integers;  // elements of an int32 tensor

 private:
  struct Pokes {
    int64_t index;
    int64_t value;
  };

  std::vector<unsigned char> memory_copy() const;
  bool countable() const;
  bool span(__int128& lowest, __int128& highest) const;
  int item_bytes() const;
  void fill_item(unsigned char* item, uint64_t random, int kind) const;
  template <class Function>
  void for_each_element(const Function& function) const;

  DLTensor tensor_{};
  std::vector<int64_t> shape_, strides_;
  // What tensor_ points to: exactly as many numbers as it has dimensions.
  std::unique_ptr<int64_t[]> given_shape_, given_strides_;
  bool no_shape_ = false, no_strides_ = true, no_data_ = false;
  int skew_ = 0;  // bytes by which the address misses its alignment
  std::vector<Pokes> pokes_;
  std::unique_ptr<unsigned char[]> memory_;
  std::size_t memory_bytes_ = 0;
  unsigned char* first_ = nullptr;  // element (0, ..., 0)
  std::vector<unsigned char> before_;
};

}  // namespace fuzz
