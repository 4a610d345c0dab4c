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
#else
// Dynamic shared memory of every kernel: one name, which the emulator has, too.
extern __shared__ __align__(1024) unsigned char anyflash_smem[];
#endif

namespace anyflash {

inline void check_cuda(cudaError_t status, const char* what) {
  if (status != cudaSuccess) {
    throw Error(ErrorCode::kDevice, std::string(what) + ": " + cudaGetErrorString(status));
  }
}

#if !defined(ANYFLASH_EMULATED)
inline int current_device() {
  int device = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  return device;
}

// Shared memory beyond what every kernel may have is asked for once for each device: that takes the
// host as long as a part of a launch.
template <auto kKernel>
class LargeSmem {
 public:
  // Before a launch on the current device.
  LargeSmem(std::size_t bytes, int device) : bytes_(bytes) {
    constexpr std::size_t kDefaultLimit = 48 * 1024;
    if (bytes <= kDefaultLimit) return;
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

// Whether a kernel's code for a device is made for Hopper or later: it knows clusters, and waits
// for the kernel before it. Code of older GPUs may run on newer ones, and does neither.
template <auto kKernel>
bool is_hopper_code(int device) {
#if defined(ANYFLASH_EMULATED)
  (void)device;
  return emu::options().compute_capability >= 90;
#else
  constexpr int kDevices = 64;
  static std::atomic<int> versions[kDevices];  // of the front end, 90 for 9.0; 0: not asked yet
  std::atomic<int>& known = versions[device % kDevices];
  int version = known.load(std::memory_order_relaxed);
  if (version == 0 || device >= kDevices) {
    const int previous = current_device();
    cudaFuncAttributes attributes{};
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
// Whether a kernel may be launched to begin before the one before it has ended. Graphs know
// programmatic dependent launch since CUDA 12.3. Otherwise kernels follow one another: nothing else
// changes.
template <auto kKernel>
bool overlaps_previous(int device) {
  static const bool driver_knows = [] {
    int version = 0;
    return cudaDriverGetVersion(&version) == cudaSuccess && version >= 12030;
  }();
  return driver_knows && is_hopper_code<kKernel>(device);
}
#endif

// When a kernel may begin: after those before it in the stream, or already when each CTA of the
// last one has allowed it or has ended (programmatic dependent launch). That one may be the user's.
// So every CTA of a kernel launched kWhenAllowed waits before it touches memory
// (dependent_launch.h), even one that has nothing else to do: a kernel that has ended proves that
// all before it have. Behind a kernel of the same call that has waited before it allows the next,
// it may read before that what the call only reads.
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
  const int device = current_device();
  const LargeSmem<kKernel> large(smem_bytes, device);
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = smem_bytes;
  config.stream = static_cast<cudaStream_t>(stream);
  cudaLaunchAttribute attributes[2]{};
  config.attrs = attributes;
  if (mode.order == LaunchOrder::kWhenAllowed && overlaps_previous<kKernel>(device)) {
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
