// A build without CUDA.
#include "anyflash/error.h"
#include "append.h"
#include "copy_rows.h"
#include "device.h"
#include "merge_states.h"
#include "side_outputs.h"

namespace anyflash {

namespace {

const char* const kMessage =
    "this build of anyflash has no CUDA kernels; build it where nvcc or an NVIDIA driver is found, "
    "or with --config-settings=cmake.define.ANYFLASH_CUDA=ON";

}  // namespace

DeviceList list_devices() { return {0, kMessage}; }

const DeviceProperties& device_properties(int) { throw Error(ErrorCode::kUnsupported, kMessage); }

std::string cuda_version() { return ""; }

void* device_allocate(int, std::size_t) { throw Error(ErrorCode::kUnsupported, kMessage); }
void device_free(int, void*) noexcept {}

bool is_capturing(int, void*) { throw Error(ErrorCode::kUnsupported, kMessage); }

void copy_to_host(int, void*, const void*, std::size_t, void*) {
  throw Error(ErrorCode::kUnsupported, kMessage);
}

DeviceGuard::DeviceGuard(int) { throw Error(ErrorCode::kUnsupported, kMessage); }
DeviceGuard::~DeviceGuard() = default;

void copy_rows(const CopyRowsParams&, void*) { throw Error(ErrorCode::kUnsupported, kMessage); }
void fill_side_outputs(const SideOutputs&, void*) {
  throw Error(ErrorCode::kUnsupported, kMessage);
}
void append_to_cache(const AppendParams&, void*) { throw Error(ErrorCode::kUnsupported, kMessage); }
void merge_states_on_cuda(const MergeParams&, void*) {
  throw Error(ErrorCode::kUnsupported, kMessage);
}

}  // namespace anyflash
