// The only place where kernels are launched: on a GPU, or on the emulated one of the tests.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>

#include "anyflash/error.h"
#include "common/math.h"

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

#if !defined(ANYFLASH_EMULATED)
// Shared memory beyond what every kernel may have is asked for once for each device: that takes the
// host as long as a part of a launch.
template <auto kKernel>
class LargeSmem {
 public:
  // Before a launch on the current device.
  explicit LargeSmem(std::size_t bytes) : bytes_(bytes) {
    constexpr std::size_t kDefaultLimit = 48 * 1024;
    if (bytes <= kDefaultLimit) return;
    int device = 0;
    check_cuda(cudaGetDevice(&device), "cudaGetDevice");
    const std::uint64_t bit = device < 64 ? std::uint64_t{1} << device : 0;
    if ((allowed_.load(std::memory_order_relaxed) & bit) != 0) {
      is_old_ = true;
      return;
    }
    allow();
    allowed_.fetch_or(bit, std::memory_order_relaxed);
  }

  // Whether to launch again: what was asked for belongs to a context, and the device may have got
  // another one.
  bool is_outdated(cudaError_t status) const {
    if (status != cudaErrorInvalidValue || !is_old_) return false;
    cudaGetLastError();
    allow();
    return true;
  }

 private:
  void allow() const {
    check_cuda(cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    static_cast<int>(bytes_)),
               "cudaFuncSetAttribute");
  }

  static inline std::atomic<std::uint64_t> allowed_{0};  // bits: devices
  std::size_t bytes_;
  bool is_old_ = false;
};
#endif

// Whether a kernel's code for a device knows clusters: that of older GPUs may run on newer ones.
template <auto kKernel>
bool has_clusters(int device) {
#if defined(ANYFLASH_EMULATED)
  (void)device;
  return emu::options().compute_capability >= 90;
#else
  constexpr int kDevices = 64;
  static std::atomic<int> versions[kDevices];  // of the front end, 90 for 9.0; 0: not asked yet
  std::atomic<int>& known = versions[device % kDevices];
  int version = known.load(std::memory_order_relaxed);
  if (version == 0 || device >= kDevices) {
    int previous = 0;
    cudaFuncAttributes attributes{};
    check_cuda(cudaGetDevice(&previous), "cudaGetDevice");
    check_cuda(cudaSetDevice(device), "cudaSetDevice");
    const cudaError_t status = cudaFuncGetAttributes(&attributes, kKernel);
    check_cuda(cudaSetDevice(previous), "cudaSetDevice");
    check_cuda(status, "cudaFuncGetAttributes");
    version = attributes.ptxVersion;
    known.store(version, std::memory_order_relaxed);
  }
  return version >= 90;
#endif
}

#if !defined(ANYFLASH_EMULATED)
// Graphs know programmatic dependent launch since CUDA 12.3. With an older driver, kernels follow
// one another: nothing else changes.
inline bool driver_overlaps_kernels() {
  static const bool overlaps = [] {
    int version = 0;
    return cudaDriverGetVersion(&version) == cudaSuccess && version >= 12030;
  }();
  return overlaps;
}
#endif

// When a kernel may begin: after those before it in the stream, or already when the last of them
// allows it (programmatic dependent launch). Such a kernel waits itself for what that one writes
// (dependent_launch.h).
enum class LaunchOrder { kAfterPrevious, kWhenAllowed };

struct LaunchMode {
  LaunchOrder order;
  int cluster;  // so many neighbouring CTAs of the grid (common/cluster.h)

  LaunchMode(LaunchOrder order_ = LaunchOrder::kAfterPrevious, int cluster_ = 1)
      : order(order_), cluster(cluster_) {}
};

// Runs kKernel(params) on grid x block threads, always with as much shared memory. Asynchronous on
// a GPU.
template <auto kKernel, class Params>
void launch(dim3 grid, dim3 block, std::size_t smem_bytes, void* stream, const Params& params,
            const LaunchMode& mode = {}) {
#if defined(ANYFLASH_EMULATED)
  (void)stream;
  emu::launch(
      emu::Dim3{grid.x, grid.y, grid.z}, emu::Dim3{block.x, block.y, block.z}, smem_bytes,
      [&params] { kKernel(params); }, mode.cluster);
#else
  const LargeSmem<kKernel> large(smem_bytes);
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = smem_bytes;
  config.stream = static_cast<cudaStream_t>(stream);
  cudaLaunchAttribute attributes[2]{};
  config.attrs = attributes;
  if (mode.order == LaunchOrder::kWhenAllowed && driver_overlaps_kernels()) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
  }
  if (mode.cluster > 1) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = static_cast<unsigned>(mode.cluster);
    attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  }
  cudaError_t status = cudaLaunchKernelEx(&config, kKernel, params);
  if (large.is_outdated(status)) status = cudaLaunchKernelEx(&config, kKernel, params);
  check_cuda(status, "cudaLaunchKernelEx");
#endif
}

// Runs kKernel(params) on CTAs of `threads`. Each takes `per_cta` of `count` units of work, then
// those a grid further on, while there are any. Without work, nothing is launched.
template <auto kKernel, class Params>
void launch_grid_stride(int64_t count, int per_cta, int threads, std::size_t smem_bytes,
                        void* stream, const Params& params,
                        LaunchOrder order = LaunchOrder::kAfterPrevious) {
  constexpr int64_t kMaxBlocks = 1 << 16;
  if (count == 0) return;
  const int64_t blocks = std::min(ceil_div(count, per_cta), kMaxBlocks);
  launch<kKernel>(dim3(static_cast<unsigned>(blocks)), dim3(static_cast<unsigned>(threads)),
                  smem_bytes, stream, params, order);
}

}  // namespace anyflash
