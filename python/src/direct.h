// Attention of PyTorch's tensors where only the kernel has a part in it, in one step from Python.
// A small attention takes a GPU less time than many steps take the host.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>

#include "anyflash/attention.h"
#include "convert.h"
#include "dlpack.h"

namespace anyflash::python {

namespace nb = nanobind;

// What is called in PyTorch. Nothing here synchronizes: kernels run on its current stream.
struct PyTorchFunctions {
  nb::object export_tensor;   // (tensor) -> a capsule of DLPack
  nb::object current_stream;  // (device index) -> cudaStream_t
  nb::object empty_like;      // (q), with the same strides if q has no gaps and no overlaps
  nb::object new_out;         // (q, batch, rows, heads, columns, heads_first)
  nb::object new_lse;         // (q, batch, heads, rows)
  nb::object workspace;       // (bytes, q) -> (owner, address)
};

// anyflash._core.PyTorch, which anyflash.torch._fast_path makes once.
class PyTorch {
 public:
  // exchange_api: the capsule of DLPack's exchange API, or anything else where there is none.
  PyTorch(nb::handle exchange_api, PyTorchFunctions given);

  // Throws Error, or what PyTorch raises. The tensor must outlive the array.
  Array read(nb::handle tensor, const char* argument) const;

  std::uintptr_t current_stream(const Device& device) const;

  int visit(visitproc visit, void* arg) const;  // as Py_tp_traverse

  PyTorchFunctions functions;

 private:
  const DLPackExchangeAPI* exchange_ = nullptr;
};

void bind_pytorch(nb::module_& m);

// Returns out, or (out, lse) if return_lse. None for tensors that the kernels do not take, and for
// other types than None or a finite float, and bool. The kernels take tensors on the CPU or on a
// GPU, of four axes and of a float type that is known there.
// heads_first: the tensors are (batch, heads, seqlen, columns); in memory, out's heads lie side by
// side either way. options: what options.h reads, or None.
nb::object forward_direct(const char* operation, nb::handle q, nb::handle k, nb::handle v,
                          nb::handle softmax_scale, nb::handle causal, nb::handle options,
                          nb::handle return_lse, bool heads_first, const PyTorch& pytorch);

// Returns (dq, dk, dv), or None as forward_direct() does. dlse: a tensor or None.
nb::object backward_direct(const char* operation, nb::handle dout, nb::handle q, nb::handle k,
                           nb::handle v, nb::handle out, nb::handle lse, nb::handle dlse,
                           nb::handle softmax_scale, nb::handle causal, bool deterministic,
                           const PyTorch& pytorch);

}  // namespace anyflash::python
