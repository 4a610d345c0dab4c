// What the binding's calls have in common: errors, options, workspace, the GIL.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "anyflash/attention.h"
#include "convert.h"
#include "memory.h"
#include "options.h"
#include "released_gil.h"

namespace anyflash::python {

inline PyObject* exception_type(ErrorCode code) {
  switch (code) {
    case ErrorCode::kInvalidValue:
      return PyExc_ValueError;
    case ErrorCode::kInvalidType:
      return PyExc_TypeError;
    case ErrorCode::kUnsupported:
      return PyExc_NotImplementedError;
    case ErrorCode::kDevice:
      return PyExc_RuntimeError;
  }
  return PyExc_RuntimeError;
}

// Runs an operation; its errors become Python's, with its name, if it has one, in front.
template <class Function>
auto named(const char* operation, const Function& function) {
  try {
    return function();
  } catch (const Error& error) {
    const std::string prefix = operation == nullptr ? "" : std::string(operation) + ": ";
    PyErr_SetString(exception_type(error.code()), (prefix + error.what()).c_str());
    throw nb::python_error();
  }
}

// The options of a call, and the arrays that they point into.
struct Options {
  // given: what options.h reads, or None.
  Options(std::optional<double> softmax_scale, bool causal, std::uintptr_t stream_,
          nb::handle given)
      : stream(reinterpret_cast<void*>(stream_)) {
    forward.softmax_scale = softmax_scale;
    forward.causal = causal;
    if (!given.is_none()) read_options(nb::cast<nb::dict>(given), forward, arrays);
  }

  ForwardOptions forward;
  void* stream;
  std::vector<Array> arrays;
};

// Workspace of one call: the CPU's memory, or a GPU's from the array's framework, whose allocator
// reuses it in the order of its stream. Destroyed with the GIL held.
class CallMemory {
 public:
  explicit CallMemory(const Device& device) : on_cpu_(device.type == DeviceType::kCpu) {}
  ~CallMemory() { deallocate(Device{}, data_); }
  CallMemory(const CallMemory&) = delete;
  CallMemory& operator=(const CallMemory&) = delete;

  // To be called once, with or without the GIL. allocate_gpu(bytes): a tuple (owner, address).
  template <class AllocateGpu>
  Workspace get(std::size_t bytes, const AllocateGpu& allocate_gpu) {
    if (bytes == 0) return {};
    if (on_cpu_) {
      data_ = allocate(Device{}, bytes);
      return {data_, bytes};
    }
    const nb::gil_scoped_acquire acquire;
    owner_ = allocate_gpu(bytes);
    const auto pair = nb::cast<nb::tuple>(owner_);
    return {reinterpret_cast<void*>(nb::cast<std::uintptr_t>(pair[1])), bytes};
  }

 private:
  bool on_cpu_;
  void* data_ = nullptr;
  nb::object owner_;
};

// Makes a plan and runs it, without the GIL. allocate_gpu: as CallMemory::get().
template <class MakePlan, class AllocateGpu>
void run_plan(const Device& device, void* stream, const MakePlan& make_plan,
              const AllocateGpu& allocate_gpu) {
  CallMemory memory(device);
  const ReleasedGil release;
  const auto plan = make_plan();
  plan.run(memory.get(plan.workspace_bytes(), allocate_gpu), stream);
}

template <class AllocateGpu>
void attend(const ForwardTensors& tensors, const Options& options,
            const AllocateGpu& allocate_gpu) {
  run_plan(
      tensors.q.device, options.stream, [&] { return ForwardPlan(tensors, options.forward); },
      allocate_gpu);
}

}  // namespace anyflash::python
