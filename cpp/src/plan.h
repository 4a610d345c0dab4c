// What the plans of all operations have in common: which kernel runs, where, and with what.
#pragma once

#include <cstddef>
#include <new>
#include <type_traits>

#include "anyflash/options.h"
#include "kernel_table.h"
#include "threads.h"
#include "workspace.h"

namespace anyflash {

struct KernelPlan {
  const KernelDescriptor* kernel = nullptr;
  Device device;
  bool on_gpu = false;
  int multiprocessors = 0;
  int compute_capability = 0;
  int num_threads = 1;          // CPU: at most
  bool checks_lengths = false;  // before each run
  bool empty = false;           // nothing to launch
  std::size_t scratch_offset = 0;
  std::size_t scratch_bytes = 0;
  std::size_t bytes = 0;  // of all pieces of the workspace

  LaunchContext context(char* workspace, void* stream) const {
    LaunchContext context;
    context.num_threads = num_threads;
    if (on_gpu) {
      context.multiprocessors = multiprocessors;
      context.compute_capability = compute_capability;
      context.device = device.index;
    }
    context.stream = stream;
    context.scratch = workspace + scratch_offset;
    context.scratch_bytes = scratch_bytes;
    return context;
  }

 protected:
  void select(const Problem& problem, const ForwardOptions& options) {
    kernel = &select_kernel(problem);
    device = problem.device;
    on_gpu = kernel->family->is_gpu();
    if (on_gpu) {
      const DeviceProperties& gpu = device_properties(device.index);
      multiprocessors = gpu.multiprocessors;
      compute_capability = gpu.compute_capability;
    } else {
      num_threads = options.num_threads > 0 ? options.num_threads : default_threads();
    }
    checks_lengths = !on_gpu || options.validate;
  }

  // `empty`, and params as the kernel reads them, must be known.
  template <class Params>
  void reserve_scratch(const KernelEntryPoints<Params>& entry, const Params& params) {
    scratch_bytes = empty ? 0 : entry.scratch_bytes(params, context(nullptr, nullptr));
    scratch_offset = reserve(bytes, scratch_bytes);
  }
};

// A public plan has its state in itself, so that none is allocated.
template <class State, std::size_t kBytes, class... Arguments>
void emplace_state(std::byte (&memory)[kBytes], const Arguments&... arguments) {
  static_assert(sizeof(State) <= kBytes, "the plan's header has too few bytes");
  static_assert(alignof(State) <= 8 && std::is_trivially_copyable_v<State>);
  ::new (static_cast<void*>(memory)) State(arguments...);
}

template <class State, std::size_t kBytes>
const State& state_in(const std::byte (&memory)[kBytes]) {
  return *std::launder(reinterpret_cast<const State*>(memory));
}

}  // namespace anyflash
