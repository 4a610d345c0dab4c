#pragma once

#include "anyflash/options.h"
#include "anyflash/tensor_view.h"
#include "params.h"

namespace anyflash {

// Checks every argument of forward() and turns them into kernel parameters; throws Error.
ForwardParams validate_forward(const TensorView& q, const TensorView& k, const TensorView& v,
                               const TensorView& out, const TensorView* lse,
                               const ForwardOptions& options);

}  // namespace anyflash
