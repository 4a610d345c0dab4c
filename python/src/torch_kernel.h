// PyTorch's operator aten::_scaled_dot_product_flash_attention without a step in Python: dispatch
// to a Python function takes the host longer than a small attention takes a GPU.
#pragma once

#include <nanobind/nanobind.h>

namespace anyflash::python {

namespace nb = nanobind;

// PyTorch calls the kernel until what this returns is gone. path: of torch._C. key: of PyTorch's
// dispatcher, "CPU" or "CUDA". fallback: called for what the kernel does not take, and to raise its
// errors, with the operator's arguments in order. It returns the nine results. Tensors are capsules
// with an AtenTensorHandle, which whoever gets them owns. Throws Error where PyTorch has no such
// interface.
nb::object register_torch_kernel(const char* path, const char* key, nb::object fallback);

}  // namespace anyflash::python
