// The module anyflash._core: signatures, error mapping, the GIL. Everything else is C++ or Python.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <optional>
#include <string>

#include "anyflash/attention.h"
#include "anyflash/version.h"
#include "convert.h"
#include "describe.h"
#include "memory.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace anyflash::python {

namespace {

PyObject* exception_type(ErrorCode code) {
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

// Runs an operation; its errors become Python's, with the operation's name in front.
template <class Function>
auto named(const char* operation, const Function& function) {
  try {
    return function();
  } catch (const Error& error) {
    const std::string message = std::string(operation) + ": " + error.what();
    PyErr_SetString(exception_type(error.code()), message.c_str());
    throw nb::python_error();
  }
}

// Memory for one call on the CPU.
class CpuMemory {
 public:
  explicit CpuMemory(std::size_t bytes) : data_(allocate(Device{}, bytes)) {}
  ~CpuMemory() { deallocate(Device{}, data_); }
  CpuMemory(const CpuMemory&) = delete;
  CpuMemory& operator=(const CpuMemory&) = delete;
  void* data() const { return data_; }

 private:
  void* data_;
};

// allocate_gpu(bytes) -> (owner, address) is called where a GPU needs workspace: it comes from the
// array's framework, whose allocator reuses it in the order of its stream.
void run_forward(nb::handle q, nb::handle k, nb::handle v, nb::handle out, nb::handle lse,
                 std::optional<double> softmax_scale, bool causal, std::uintptr_t stream,
                 bool bf16_bits, const nb::callable& allocate_gpu) {
  named("anyflash.attention", [&] {
    const Array q_array = import_array(q, "q", bf16_bits, false);
    const Array k_array = import_array(k, "k", bf16_bits, false);
    const Array v_array = import_array(v, "v", bf16_bits, false);
    const Array out_array = import_array(out, "out", bf16_bits, true);
    Array lse_array;
    if (!lse.is_none()) lse_array = import_array(lse, "lse", false, true);
    const TensorView* const lse_view = lse.is_none() ? nullptr : &lse_array.view;
    ForwardOptions options;
    options.softmax_scale = softmax_scale;
    options.causal = causal;
    options.stream = reinterpret_cast<void*>(stream);

    const auto run = [&](Workspace workspace) {
      const nb::gil_scoped_release release;
      forward(q_array.view, k_array.view, v_array.view, out_array.view, lse_view, options,
              workspace);
    };
    const std::size_t bytes = forward_workspace_size(q_array.view, k_array.view, v_array.view,
                                                     out_array.view, lse_view, options);
    if (q_array.view.device.type == DeviceType::kCpu) {
      const CpuMemory memory(bytes);
      run({memory.data(), bytes});
    } else if (bytes == 0) {
      run({});
    } else {
      const nb::tuple memory = nb::cast<nb::tuple>(allocate_gpu(bytes));
      run({reinterpret_cast<void*>(nb::cast<std::uintptr_t>(memory[1])), bytes});
    }
  });
}

nb::tuple describe(nb::handle object) {
  return named("anyflash", [&] {
    const Array array = import_array(object, "array", false, false);
    nb::list shape;
    for (int i = 0; i < array.view.rank; ++i) shape.append(array.view.shape[i]);
    return nb::make_tuple(nb::tuple(shape), name(array.view.dtype));
  });
}

nb::object named_new_array(const nb::tuple& shape, int dtype, int device_type, int device_index) {
  return named("anyflash.attention",
               [&] { return new_array(shape, dtype, device_type, device_index); });
}

nb::list kernel_dicts() {
  nb::list result;
  for (const KernelInfo& kernel : kernels()) {
    nb::dict d;
    d["name"] = kernel.name;
    d["arch"] = kernel.arch;
    d["op"] = kernel.op;
    d["dtype"] = name(kernel.dtype);
    d["head_dim"] = kernel.head_dim;
    d["block_m"] = kernel.block_m;
    d["block_n"] = kernel.block_n;
    d["warps"] = kernel.warps;
    d["smem_bytes"] = kernel.smem_bytes;
    d["launches"] = kernel.launches;
    result.append(d);
  }
  return result;
}

nb::dict build_info_dict() {
  const BuildInfo info = build_info();
  nb::dict result;
  result["version"] = info.version;
  result["cuda"] = nb::none();
  if (info.cuda) {
    nb::dict cuda;
    cuda["runtime_version"] = info.cuda_version;
    cuda["archs"] = info.cuda_archs;
    result["cuda"] = cuda;
  }
  nb::dict cpu;
  cpu["isa"] = info.cpu_isa;
  cpu["compiled"] = info.cpu_isas;
  cpu["threads"] = info.cpu_threads;
  result["cpu"] = cpu;
  result["kernels"] = kernel_dicts();
  nb::list devices;
  for (const DeviceInfo& device : info.devices) {
    nb::dict d;
    d["index"] = device.index;
    d["name"] = device.name;
    d["compute_capability"] = std::to_string(device.compute_capability / 10) + "." +
                              std::to_string(device.compute_capability % 10);
    d["supported"] = device.supported;
    devices.append(d);
  }
  result["devices"] = devices;
  result["device_error"] = nb::none();
  if (!info.device_error.empty()) result["device_error"] = info.device_error;
  return result;
}

}  // namespace

}  // namespace anyflash::python

NB_MODULE(_core, m) {
  using namespace anyflash::python;
  m.def("forward", &run_forward, "q"_a, "k"_a, "v"_a, "out"_a, "lse"_a.none(),
        "softmax_scale"_a.none(), "causal"_a, "stream"_a, "bf16_bits"_a, "allocate"_a);
  m.def("describe", &describe, "array"_a);
  m.def("new_array", &named_new_array, "shape"_a, "dtype"_a, "device_type"_a, "device_index"_a);
  m.def("build_info", &build_info_dict);
  m.attr("version") = ANYFLASH_VERSION_STRING;
}
