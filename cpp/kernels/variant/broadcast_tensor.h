// Single elements of small tensors of any float type.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "common/macros.h"
#include "params.h"

namespace anyflash {

ANYFLASH_DEVICE float load_float(const BroadcastTensor& tensor, int64_t index) {
  switch (tensor.dtype) {
    case DType::kFloat16:
      return __half2float(static_cast<const __half*>(tensor.data)[index]);
    case DType::kBFloat16:
      return __bfloat162float(static_cast<const __nv_bfloat16*>(tensor.data)[index]);
    default:
      return static_cast<const float*>(tensor.data)[index];
  }
}

ANYFLASH_DEVICE void store_float(const GradientOutput& tensor, int64_t index, float x) {
  switch (tensor.dtype) {
    case DType::kFloat16:
      static_cast<__half*>(tensor.data)[index] = __float2half_rn(x);
      break;
    case DType::kBFloat16:
      static_cast<__nv_bfloat16*>(tensor.data)[index] = __float2bfloat16_rn(x);
      break;
    default:
      static_cast<float*>(tensor.data)[index] = x;
  }
}

}  // namespace anyflash
