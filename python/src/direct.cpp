#include "direct.h"

#include <nanobind/stl/optional.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "anyflash/attention.h"
#include "call.h"
#include "convert.h"
#include "describe.h"
#include "dlpack.h"

namespace anyflash::python {

namespace {

// What is asked of PyTorch. Nothing here synchronizes: kernels run on its current stream.
class PyTorch {
 public:
  // The tuple of anyflash.torch._direct: the capsule of DLPack's exchange API, or something else
  // where there is none, and the functions below.
  explicit PyTorch(nb::handle functions) : functions_(functions) {
    static constexpr char kName[] = "dlpack_exchange_api";
    PyObject* const capsule = item(0).ptr();
    if (!PyCapsule_IsValid(capsule, kName)) return;
    const auto* const api =
        static_cast<const DLPackExchangeAPI*>(PyCapsule_GetPointer(capsule, kName));
    if (api->header.version.major == DLPACK_MAJOR_VERSION &&
        api->dltensor_from_py_object_no_sync != nullptr) {
      exchange_ = api;
    }
  }

  // Throws Error, or what PyTorch raises. The tensor must outlive the array.
  Array read(nb::handle tensor, const char* argument) const {
    if (exchange_ == nullptr) return import_array(item(1)(tensor), argument, false, false);
    DLTensor shown;
    if (exchange_->dltensor_from_py_object_no_sync(tensor.ptr(), &shown) != 0) {
      nb::raise_python_error();
    }
    Array array;
    array.view = view_of(&shown, argument, "anyflash knows no such dtype");
    return array;
  }

  std::uintptr_t current_stream(const Device& device) const {
    if (device.type == DeviceType::kCpu) return 0;
    if (exchange_ == nullptr) return nb::cast<std::uintptr_t>(item(2)(device.index));
    void* stream = nullptr;
    if (exchange_->current_work_stream(kDLCUDA, device.index, &stream) != 0) {
      nb::raise_python_error();
    }
    return reinterpret_cast<std::uintptr_t>(stream);
  }

  // With the same strides, where q has no gaps and no overlaps.
  nb::object empty_like(nb::handle q) const { return item(3)(q); }
  nb::object new_out(nb::handle q, const TensorView& q_view, std::int64_t columns,
                     bool heads_first) const {
    const auto& n = q_view.shape;
    return item(4)(q, n[0], n[1], n[2], columns, heads_first);
  }
  nb::object new_lse(nb::handle q, const TensorView& q_view) const {
    const auto& n = q_view.shape;
    return item(5)(q, n[0], n[2], n[1]);
  }
  nb::object workspace(std::size_t bytes, nb::handle q) const { return item(6)(bytes, q); }

 private:
  nb::handle item(Py_ssize_t i) const { return PyTuple_GetItem(functions_.ptr(), i); }

  nb::handle functions_;
  const DLPackExchangeAPI* exchange_ = nullptr;
};

// Reads q, k and v; false where they are not what the kernels take.
bool read_inputs(const PyTorch& pytorch, const nb::handle (&tensors)[3], Array (&arrays)[3]) {
  static constexpr const char* kNames[] = {"q", "k", "v"};
  try {
    for (std::size_t i = 0; i < 3; ++i) arrays[i] = pytorch.read(tensors[i], kNames[i]);
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
         std::all_of(std::begin(arrays), std::end(arrays), [&](const Array& array) {
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

}  // namespace

nb::object forward_direct(const char* operation, nb::handle q, nb::handle k, nb::handle v,
                          std::optional<double> softmax_scale, bool causal, nb::handle given,
                          bool return_lse, bool heads_first, nb::handle functions) {
  return named(operation, [&]() -> nb::object {
    const PyTorch pytorch(functions);
    Array arrays[3];
    if (!read_inputs(pytorch, {q, k, v}, arrays)) return nb::none();
    if (heads_first) {
      for (Array& array : arrays) swap_heads_and_rows(array.view);
    }
    const auto& [q_array, k_array, v_array] = arrays;
    const TensorView& q_view = q_array.view;

    const std::int64_t columns = v_array.view.shape[3];
    const bool alike = columns == q_view.shape[3] && is_contiguous(q_view);
    nb::object out =
        alike ? pytorch.empty_like(q) : pytorch.new_out(q, q_view, columns, heads_first);
    Array out_array = pytorch.read(out, "out");
    if (heads_first) swap_heads_and_rows(out_array.view);
    nb::object lse;
    Array lse_array;
    if (return_lse) {
      lse = pytorch.new_lse(q, q_view);
      lse_array = pytorch.read(lse, "lse");
    }

    const Options options(softmax_scale, causal, pytorch.current_stream(q_view.device), given);
    ForwardTensors tensors;
    tensors.q = q_view;
    tensors.k = k_array.view;
    tensors.v = v_array.view;
    tensors.out = out_array.view;
    if (return_lse) tensors.lse = &lse_array.view;
    attend(tensors, options, [&](std::size_t bytes) { return pytorch.workspace(bytes, q); });
    if (return_lse) return nb::make_tuple(out, lse);
    return out;
  });
}

}  // namespace anyflash::python
