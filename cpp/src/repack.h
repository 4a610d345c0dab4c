// Tensors that the CUDA kernels read or write in the workspace, because they cannot where the
// caller has them.
#pragma once

#include <cstddef>

#include "anyflash/tensor_view.h"
#include "kernel_descriptor.h"
#include "params.h"

namespace anyflash {

// A contiguous copy whose rows are whole pieces of InputRules::alignment bytes.
struct Repacked {
  bool needed = false;
  TensorView tensor;       // the caller's, with a batch axis
  Strides stride;          // of the copy
  int columns = 0;         // of the copy, which has zeros where the tensor has none
  std::size_t offset = 0;  // in the workspace
};

// Whether kernels with these rules can read or write the tensor where it lies.
bool fits_kernel(const TensorView& t, const InputRules& rules);

// Whether TMA's boxes can begin in every slot of a cache. The first axis is asked however long it
// is: bits must not depend on that.
bool has_box_slots(const TensorView& cache);

// Plans a copy of a tensor with_batch() at the end of a workspace of `total` bytes, if the kernel's
// rules ask for one.
Repacked plan_repack(const TensorView& tensor, const InputRules& rules, std::size_t& total);

// Where it is needed: copies an input to its place in the workspace and points the kernel there.
void repack_input(const Repacked& repacked, char* workspace, void* stream, const void*& data,
                  Strides& stride);

// Where it is needed: points the kernel to an output's place in the workspace; once the kernel has
// run, copies it to the tensor. Of packed tensors, some rows may belong to no sequence: they keep
// what they hold.
void redirect_output(const Repacked& repacked, bool packed, char* workspace, void* stream,
                     void*& data, Strides& stride);
void write_back(const Repacked& repacked, const char* workspace, void* stream);

}  // namespace anyflash
