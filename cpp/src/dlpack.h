// DLPack tensors as TensorViews.
#pragma once

#include <dlpack/dlpack.h>

#include "anyflash/tensor_view.h"

namespace anyflash {

// Throws Error for devices, data types and ranks that anyflash does not know.
TensorView view_of(const DLTensor* tensor, const char* argument);

}  // namespace anyflash
