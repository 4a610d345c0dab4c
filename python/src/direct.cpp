#include "direct.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>

#include "anyflash/attention.h"
#include "call.h"
#include "convert.h"
#include "describe.h"
#include "dlpack.h"

namespace anyflash::python {

using namespace nb::literals;

namespace {

// For Python's collector of cycles: the functions' module holds the object.
int traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  if (!nb::inst_ready(self)) return 0;
  return nb::inst_ptr<PyTorch>(self)->visit(visit, arg);
}

int clear(PyObject* self) {
  nb::inst_ptr<PyTorch>(self)->functions = {};
  return 0;
}

bool is_bool(nb::handle flag) { return flag.ptr() == Py_True || flag.ptr() == Py_False; }

bool is_scale(nb::handle scale) {
  return scale.is_none() ||
         (PyFloat_CheckExact(scale.ptr()) && std::isfinite(PyFloat_AsDouble(scale.ptr())));
}

std::optional<double> scale_of(nb::handle scale) {
  if (scale.is_none()) return std::nullopt;
  return PyFloat_AsDouble(scale.ptr());
}

struct Input {
  nb::handle tensor;
  const char* name;
};

// Reads tensors, q, k and v first; false where these are not what the kernels take, or one cannot
// be read.
template <std::size_t kCount>
bool read_inputs(const PyTorch& pytorch, const Input (&inputs)[kCount], Array (&arrays)[kCount]) {
  try {
    for (std::size_t i = 0; i < kCount; ++i) {
      arrays[i] = pytorch.read(inputs[i].tensor, inputs[i].name);
    }
  } catch (const Error&) {
    return false;
  } catch (nb::python_error& error) {
    if (!error.matches(PyExc_Exception)) throw;
    return false;
  }
  const TensorView& q = arrays[0].view;
  const bool on_cpu = q.device.type == DeviceType::kCpu;
  const bool half = q.dtype == DType::kFloat16 || q.dtype == DType::kBFloat16;
  return (half || (on_cpu && is_float(q.dtype))) &&
         std::all_of(arrays, arrays + 3, [&](const Array& array) {
           return array.view.rank == 4 && array.view.device.type == q.device.type;
         });
}

// (batch, heads, seqlen, columns) as (batch, seqlen, heads, columns).
void swap_heads_and_rows(TensorView& view) {
  std::swap(view.shape[1], view.shape[2]);
  std::swap(view.stride[1], view.stride[2]);
}

bool is_contiguous(const TensorView& view) {
  std::int64_t elements = 1;
  for (int i = view.rank - 1; i >= 0; --i) {
    if (view.stride[i] != elements) return false;
    elements *= std::max<std::int64_t>(view.shape[i], 1);
  }
  return true;
}

// A new tensor of this one's shape, without gaps.
nb::object new_gradient(const PyTorchFunctions& functions, nb::handle tensor,
                        const TensorView& view) {
  if (is_contiguous(view)) return functions.empty_like(tensor);
  const auto& n = view.shape;
  return functions.new_out(tensor, n[0], n[1], n[2], n[3], false);
}

}  // namespace

PyTorch::PyTorch(nb::handle exchange_api, PyTorchFunctions given) : functions(std::move(given)) {
  static constexpr char kName[] = "dlpack_exchange_api";
  if (!PyCapsule_IsValid(exchange_api.ptr(), kName)) return;
  const auto* const api =
      static_cast<const DLPackExchangeAPI*>(PyCapsule_GetPointer(exchange_api.ptr(), kName));
  if (api->header.version.major == DLPACK_MAJOR_VERSION &&
      api->dltensor_from_py_object_no_sync != nullptr) {
    exchange_ = api;
  }
}

Array PyTorch::read(nb::handle tensor, const char* argument) const {
  if (exchange_ == nullptr) {
    return import_array(functions.export_tensor(tensor), argument, 0, false);
  }
  DLTensor shown;
  if (exchange_->dltensor_from_py_object_no_sync(tensor.ptr(), &shown) != 0) {
    nb::raise_python_error();
  }
  Array array;
  array.view = view_of(&shown, argument, "anyflash knows no such dtype");
  return array;
}

std::uintptr_t PyTorch::current_stream(const Device& device) const {
  if (device.type == DeviceType::kCpu) return 0;
  if (exchange_ == nullptr) return nb::cast<std::uintptr_t>(functions.current_stream(device.index));
  void* stream = nullptr;
  if (exchange_->current_work_stream(kDLCUDA, device.index, &stream) != 0) {
    nb::raise_python_error();
  }
  return reinterpret_cast<std::uintptr_t>(stream);
}

int PyTorch::visit(visitproc visit, void* arg) const {
  Py_VISIT(functions.export_tensor.ptr());
  Py_VISIT(functions.current_stream.ptr());
  Py_VISIT(functions.empty_like.ptr());
  Py_VISIT(functions.new_out.ptr());
  Py_VISIT(functions.new_lse.ptr());
  Py_VISIT(functions.workspace.ptr());
  return 0;
}

void bind_pytorch(nb::module_& m) {
  static PyType_Slot slots[] = {{Py_tp_traverse, reinterpret_cast<void*>(traverse)},
                                {Py_tp_clear, reinterpret_cast<void*>(clear)},
                                {0, nullptr}};
  nb::class_<PyTorch>(m, "PyTorch", nb::type_slots(slots))
      .def(
          "__init__",
          [](PyTorch* self, nb::handle exchange_api, nb::object export_tensor,
             nb::object current_stream, nb::object empty_like, nb::object new_out,
             nb::object new_lse, nb::object workspace) {
            PyTorchFunctions functions;
            functions.export_tensor = std::move(export_tensor);
            functions.current_stream = std::move(current_stream);
            functions.empty_like = std::move(empty_like);
            functions.new_out = std::move(new_out);
            functions.new_lse = std::move(new_lse);
            functions.workspace = std::move(workspace);
            new (self) PyTorch(exchange_api, std::move(functions));
          },
          nb::kw_only(), "exchange_api"_a.none(), "export_tensor"_a, "current_stream"_a.none(),
          "empty_like"_a, "new_out"_a, "new_lse"_a, "workspace"_a);
}

nb::object forward_direct(const char* operation, nb::handle q, nb::handle k, nb::handle v,
                          nb::handle scale, nb::handle causal, nb::handle given,
                          nb::handle return_lse, bool heads_first, const PyTorch& pytorch) {
  return named(operation, [&]() -> nb::object {
    if (!is_scale(scale) || !is_bool(causal) || !is_bool(return_lse)) return nb::none();
    const bool with_lse = return_lse.ptr() == Py_True;
    const PyTorchFunctions& functions = pytorch.functions;
    Array arrays[3];
    if (!read_inputs(pytorch, {{q, "q"}, {k, "k"}, {v, "v"}}, arrays)) return nb::none();
    if (heads_first) {
      for (Array& array : arrays) swap_heads_and_rows(array.view);
    }
    const auto& [q_array, k_array, v_array] = arrays;
    const TensorView& q_view = q_array.view;

    const std::int64_t columns = v_array.view.shape[3];
    const bool alike = columns == q_view.shape[3] && is_contiguous(q_view);
    const auto& n = q_view.shape;  // batch, rows, heads
    nb::object out = alike ? functions.empty_like(q)
                           : functions.new_out(q, n[0], n[1], n[2], columns, heads_first);
    Array out_array = pytorch.read(out, "out");
    if (heads_first) swap_heads_and_rows(out_array.view);
    nb::object lse;
    Array lse_array;
    if (with_lse) {
      lse = functions.new_lse(q, n[0], n[2], n[1]);
      lse_array = pytorch.read(lse, "lse");
    }

    const Options options(scale_of(scale), causal.ptr() == Py_True,
                          pytorch.current_stream(q_view.device), given);
    ForwardTensors tensors;
    tensors.q = q_view;
    tensors.k = k_array.view;
    tensors.v = v_array.view;
    tensors.out = out_array.view;
    if (with_lse) tensors.lse = &lse_array.view;
    attend(tensors, options, [&](std::size_t bytes) { return functions.workspace(bytes, q); });
    if (with_lse) return nb::make_tuple(out, lse);
    return out;
  });
}

nb::object backward_direct(const char* operation, nb::handle dout, nb::handle q, nb::handle k,
                           nb::handle v, nb::handle out, nb::handle lse, nb::handle dlse,
                           nb::handle scale, nb::handle causal, bool deterministic,
                           const PyTorch& pytorch) {
  return named(operation, [&]() -> nb::object {
    if (!is_scale(scale) || !is_bool(causal)) return nb::none();
    const PyTorchFunctions& functions = pytorch.functions;
    Array arrays[6];
    if (!read_inputs(pytorch,
                     {{q, "q"}, {k, "k"}, {v, "v"}, {dout, "dout"}, {out, "out"}, {lse, "lse"}},
                     arrays)) {
      return nb::none();
    }
    BackwardTensors tensors;
    tensors.q = arrays[0].view;
    tensors.k = arrays[1].view;
    tensors.v = arrays[2].view;
    tensors.dout = arrays[3].view;
    tensors.out = arrays[4].view;
    tensors.lse = arrays[5].view;
    BackwardOptions backward_options;
    backward_options.deterministic = deterministic;
    Array dlse_array;
    if (!dlse.is_none()) {
      dlse_array = pytorch.read(dlse, "dlse");
      backward_options.dlse = &dlse_array.view;
    }

    nb::object gradients[] = {new_gradient(functions, q, tensors.q),
                              new_gradient(functions, k, tensors.k),
                              new_gradient(functions, v, tensors.v)};
    const Array dq = pytorch.read(gradients[0], "dq");
    const Array dk = pytorch.read(gradients[1], "dk");
    const Array dv = pytorch.read(gradients[2], "dv");
    tensors.dq = dq.view;
    tensors.dk = dk.view;
    tensors.dv = dv.view;

    const Device device = tensors.q.device;
    const Options options(scale_of(scale), causal.ptr() == Py_True, pytorch.current_stream(device),
                          nb::none());
    run_plan(
        device, options.stream,
        [&] { return BackwardPlan(tensors, options.forward, backward_options); },
        [&](std::size_t bytes) { return functions.workspace(bytes, q); });
    return nb::make_tuple(gradients[0], gradients[1], gradients[2]);
  });
}

}  // namespace anyflash::python
