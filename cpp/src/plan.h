// What the plans of forward() and backward() have in common: which kernel runs, and with what.
#pragma once

#include <cstddef>

#include "anyflash/options.h"
#include "kernel_table.h"
#include "threads.h"
#include "workspace.h"

namespace anyflash {

struct KernelPlan {
  const KernelDescriptor* kernel = nullptr;
  const DeviceProperties* gpu = nullptr;  // null: the CPU
  int num_threads = 1;                    // CPU: at most
  bool empty = false;                     // nothing to launch
  std::size_t scratch_offset = 0;
  std::size_t scratch_bytes = 0;
  std::size_t bytes = 0;  // of all pieces of the workspace

  LaunchContext context(const ForwardOptions& options, char* workspace) const {
    LaunchContext context;
    context.num_threads = num_threads;
    if (gpu != nullptr) {
      context.multiprocessors = gpu->multiprocessors;
      context.compute_capability = gpu->compute_capability;
    }
    context.stream = options.stream;
    context.scratch = workspace + scratch_offset;
    context.scratch_bytes = scratch_bytes;
    return context;
  }

 protected:
  void select(const Problem& problem, const ForwardOptions& options) {
    kernel = &select_kernel(problem);
    if (kernel->family->is_gpu()) {
      gpu = &device_properties(problem.device.index);
    } else {
      num_threads = options.num_threads > 0 ? options.num_threads : default_threads();
    }
  }

  // `empty`, and params as the kernel reads them, must be known.
  template <class Params>
  void reserve_scratch(const KernelEntryPoints<Params>& entry, const Params& params) {
    scratch_bytes = empty ? 0 : entry.scratch_bytes(params, num_threads);
    scratch_offset = reserve(bytes, scratch_bytes);
  }
};

}  // namespace anyflash
