// device.h for the emulated GPU: one device, of compute capability 8.0 unless told otherwise, whose
// memory is the host's.
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>

#include "anyflash/error.h"
#include "device.h"
#include "emu.hpp"
#include "kernel_table.h"
#include "prefer_kernel.h"

namespace {

int multiprocessors = 108;
int full_grid = 1;             // nothing is too small for the kernels of large problems
std::uintptr_t capturing = 0;  // the stream that is being captured; 0: none

}  // namespace

// Let a test ask what another GPU would be told, or run.
extern "C" __attribute__((visibility("default"))) void emulated_set_full_grid(int value) {
  full_grid = value;
}
extern "C" __attribute__((visibility("default"))) void emulated_set_compute_capability(int value) {
  emu::options().compute_capability = value;
}
extern "C" __attribute__((visibility("default"))) void emulated_set_multiprocessors(int value) {
  multiprocessors = value;
}
extern "C" __attribute__((visibility("default"))) void emulated_capture(std::uintptr_t stream) {
  capturing = stream;
}
extern "C" __attribute__((visibility("default"))) void emulated_prefer_kernel(const char* name) {
  anyflash::prefer_kernel(name);
}
// KernelDescriptor::bits_group of a kernel; -1: there is none of this name.
extern "C" __attribute__((visibility("default"))) int emulated_bits_group(const char* name) {
  for (const anyflash::KernelDescriptor* kernel : anyflash::all_kernels()) {
    if (std::strcmp(kernel->name, name) == 0) return kernel->bits_group;
  }
  return -1;
}

namespace anyflash {

DeviceList list_devices() { return {1, ""}; }

const DeviceProperties& device_properties(int index) {
  if (index != 0) {
    throw Error(ErrorCode::kDevice,
                "CUDA device " + std::to_string(index) + " does not exist; there are 1");
  }
  // Tests may change the shared memory between calls. A multiprocessor has 1 KB more, which is
  // reserved.
  thread_local DeviceProperties properties;
  const std::size_t smem = emu::options().shared_memory_limit;
  properties.name = "emulated GPU";
  properties.compute_capability = emu::options().compute_capability;
  properties.multiprocessors = multiprocessors;
  properties.smem_per_block = smem;
  properties.smem_per_multiprocessor = smem + 1024;
  properties.full_grid = full_grid;
  return properties;
}

std::string cuda_version() { return "emulated"; }

void* device_allocate(int, std::size_t bytes) {
  void* data = std::malloc(bytes);
  if (data == nullptr) throw std::bad_alloc();
  return data;
}
void device_free(int, void* data) noexcept { std::free(data); }

bool is_capturing(int, void* stream) {
  return capturing != 0 && reinterpret_cast<std::uintptr_t>(stream) == capturing;
}

void copy_to_host(int, void* target, const void* source, std::size_t bytes, void* stream) {
  if (is_capturing(0, stream)) throw Error(ErrorCode::kDevice, "the capture is invalidated");
  std::memcpy(target, source, bytes);
}

DeviceGuard::DeviceGuard(int) {}
DeviceGuard::~DeviceGuard() = default;

}  // namespace anyflash
