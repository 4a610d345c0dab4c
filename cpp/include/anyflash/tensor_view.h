// A tensor that somebody else owns: address, type, device, shape and strides.
#pragma once

#include <array>
#include <cstdint>

namespace anyflash {

// Q, K, V and what comes of them have the first four. kBool is any byte that is 0 or not (bool,
// uint8), kInt64 stands for uint64 too. kInt8, kFloat8E4M3 (float8_e4m3fn: no infinity, largest
// number 448) and kFloat8E5M2 (float8_e5m2: largest 57344) are for caches of keys and values.
enum class DType : int {
  kFloat64,
  kFloat32,
  kFloat16,
  kBFloat16,
  kBool,
  kInt32,
  kInt64,
  kInt8,
  kFloat8E4M3,
  kFloat8E5M2
};

enum class DeviceType : int { kCpu, kCuda };

struct Device {
  DeviceType type = DeviceType::kCpu;
  int index = 0;

  friend bool operator==(const Device& a, const Device& b) {
    return a.type == b.type && a.index == b.index;
  }
  friend bool operator!=(const Device& a, const Device& b) { return !(a == b); }
};

inline constexpr int kMaxRank = 4;

// `data` is the address of element (0, ..., 0). Strides count elements and may be zero or negative.
struct TensorView {
  void* data = nullptr;
  DType dtype = DType::kFloat32;
  Device device;
  int rank = 0;
  std::array<int64_t, kMaxRank> shape{};
  std::array<int64_t, kMaxRank> stride{};
};

}  // namespace anyflash
