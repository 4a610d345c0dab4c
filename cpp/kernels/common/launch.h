// The only place where kernels are launched: on a GPU, or on the emulated one of the tests.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <string>

#include "anyflash/error.h"

#if defined(ANYFLASH_EMULATED)
#include "emu.hpp"
#endif

// Dynamic shared memory of every kernel: one symbol at global scope, so that the emulator can
// define it.
extern __shared__ __align__(1024) unsigned char anyflash_smem[];

namespace anyflash {

inline void check_cuda(cudaError_t status, const char* what) {
  if (status != cudaSuccess) {
    throw Error(ErrorCode::kDevice, std::string(what) + ": " + cudaGetErrorString(status));
  }
}

// Runs kKernel(params) on grid x block threads. Asynchronous on a GPU.
template <auto kKernel, class Params>
void launch(dim3 grid, dim3 block, std::size_t smem_bytes, void* stream, const Params& params) {
#if defined(ANYFLASH_EMULATED)
  (void)stream;
  emu::launch(emu::Dim3{grid.x, grid.y, grid.z}, emu::Dim3{block.x, block.y, block.z}, smem_bytes,
              [&params] { kKernel(params); });
#else
  constexpr std::size_t kDefaultLimit = 48 * 1024;
  if (smem_bytes > kDefaultLimit) {
    check_cuda(cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    static_cast<int>(smem_bytes)),
               "cudaFuncSetAttribute");
  }
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = smem_bytes;
  config.stream = static_cast<cudaStream_t>(stream);
  check_cuda(cudaLaunchKernelEx(&config, kKernel, params), "cudaLaunchKernelEx");
#endif
}

}  // namespace anyflash
