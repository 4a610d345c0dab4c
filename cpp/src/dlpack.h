// DLPack tensors as TensorViews.
#pragma once

#include <dlpack/dlpack.h>

#include <cstdint>
#include <string>

#include "anyflash/tensor_view.h"

namespace anyflash {

// False for types that anyflash does not know.
bool dtype_of(const DLDataType& type, DType& result);

// DLPack's name of a type, known or not.
std::string text_of(const DLDataType& type);

// A view of contiguous elements: rank, extents and strides. Throws Error for ranks that anyflash
// does not know. Extents of any size are allowed: they are checked later.
TensorView dense_view(const int64_t* extents, int64_t rank, const char* argument);

// Throws Error for devices, data types and ranks that anyflash does not know. `allowed` is what the
// message says of data types; null: only floating-point types are allowed.
TensorView view_of(const DLTensor* tensor, const char* argument, const char* allowed = nullptr);

}  // namespace anyflash
