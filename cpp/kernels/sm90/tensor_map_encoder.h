// The driver's encoder of tensor maps, and where a thread keeps them.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include "common/launch.h"

namespace anyflash::sm90 {

using TensorMapEncoder = decltype(&cuTensorMapEncodeTiled);

// The driver's function, found once: the library is not linked with the driver.
inline TensorMapEncoder tensor_map_encoder() {
  static const auto encoder = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result{};
#if CUDART_VERSION >= 12050
    check_cuda(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                                cudaEnableDefault, &result),
               "cudaGetDriverEntryPointByVersion");
#else  // deprecated since
    check_cuda(
        cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &function, cudaEnableDefault, &result),
        "cudaGetDriverEntryPoint");
#endif
    if (result != cudaDriverEntryPointSuccess || function == nullptr) {
      throw Error(ErrorCode::kDevice, "the driver has no cuTensorMapEncodeTiled");
    }
    return reinterpret_cast<TensorMapEncoder>(function);
  }();
  return encoder;
}

// Zeros at first.
template <class Memory>
Memory& of_this_thread() {
  thread_local Memory memory{};
  return memory;
}

}  // namespace anyflash::sm90
