// The forward of PyTorch's tensors where only the kernel has a part in it, in one step from Python:
// a small attention takes a GPU less time than many steps the host.
#pragma once

#include <nanobind/nanobind.h>

#include <optional>

namespace anyflash::python {

namespace nb = nanobind;

// out, or (out, lse) if return_lse; None for tensors that are not what the kernels take: on the CPU
// or on a GPU, of four axes and of a float type that is known there. heads_first: the tensors are
// (batch, heads, seqlen, columns); in memory, out's heads lie side by side either way. options:
// what options.h reads, or None. pytorch: what is asked of PyTorch, a tuple that direct.cpp
// describes.
nb::object forward_direct(const char* operation, nb::handle q, nb::handle k, nb::handle v,
                          std::optional<double> softmax_scale, bool causal, nb::handle options,
                          bool return_lse, bool heads_first, nb::handle pytorch);

}  // namespace anyflash::python
