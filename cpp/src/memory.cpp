#include "memory.h"

#include <algorithm>
#include <new>

#include "anyflash/error.h"
#include "device.h"

namespace anyflash {

namespace {

constexpr std::align_val_t kAlignment{256};

}  // namespace

void* allocate(const Device& device, std::size_t bytes) {
  bytes = std::max<std::size_t>(bytes, 1);
  if (device.type == DeviceType::kCuda) return device_allocate(device.index, bytes);
  return ::operator new(bytes, kAlignment);
}

void deallocate(const Device& device, void* data) noexcept {
  if (device.type == DeviceType::kCuda) {
    device_free(device.index, data);
  } else {
    ::operator delete(data, kAlignment);
  }
}

}  // namespace anyflash
