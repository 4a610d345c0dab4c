// What the host code needs of a GPU. device_cuda.cu implements it with the CUDA runtime,
// device_none.cpp for builds without CUDA, and the tests' emulator for its own device.
#pragma once

#include <cstddef>
#include <string>

namespace anyflash {

struct DeviceProperties {
  std::string name;
  int compute_capability = 0;  // 80 for 8.0
  int multiprocessors = 0;
  std::size_t smem_per_block = 0;  // with opt-in
  std::size_t smem_per_multiprocessor = 0;
  int full_grid = 0;  // a grid of this number of CTAs leaves no multiprocessor idle
  double memory_gigabytes_per_second = 0.0;  // by its clock and width; 0: unknown
};

// CUDA devices that can be used, and, if there are none, why in one sentence.
struct DeviceList {
  int count = 0;
  std::string error;
};

DeviceList list_devices();

// Properties of device `index`; throws Error(kDevice) if it cannot be used.
const DeviceProperties& device_properties(int index);

// Toolkit version of this build ("13.0"), empty without CUDA.
std::string cuda_version();

// Plain device memory; the first throws Error(kDevice).
void* device_allocate(int index, std::size_t bytes);
void device_free(int index, void* data) noexcept;

// Whether work on the stream is recorded into a CUDA graph instead of being run; throws
// Error(kDevice).
bool is_capturing(int index, void* stream);

// Copies from the device once the work enqueued on the stream is done, and waits for that; throws
// Error(kDevice).
void copy_to_host(int index, void* target, const void* source, std::size_t bytes, void* stream);

// Makes device `index` current for the lifetime of the object.
class DeviceGuard {
 public:
  explicit DeviceGuard(int index);
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int previous_ = -1;
};

}  // namespace anyflash
