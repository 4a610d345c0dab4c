// DLPack tensors as TensorViews.
#pragma once

#include <dlpack/dlpack.h>

#include "anyflash/tensor_view.h"

namespace anyflash {

// Throws Error for devices, data types and ranks that anyflash does not know. `allowed` is what the
// message says of data types; null: only floating-point types are allowed.
TensorView view_of(const DLTensor* tensor, const char* argument, const char* allowed = nullptr);

}  // namespace anyflash
