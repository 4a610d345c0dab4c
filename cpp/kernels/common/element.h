// Numbers on a GPU: its float types, and constants of the one that it computes in.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "common/macros.h"
#include "common/math.h"

namespace anyflash {

inline constexpr float kLog2E = kLog2EOf<float>;
inline constexpr float kLn2 = kLn2Of<float>;

ANYFLASH_DEVICE float to_float(float x) { return x; }
ANYFLASH_DEVICE float to_float(__half x) { return __half2float(x); }
ANYFLASH_DEVICE float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
ANYFLASH_DEVICE void round_to(float x, float& to) { to = x; }
ANYFLASH_DEVICE void round_to(float x, __half& to) { to = __float2half_rn(x); }
ANYFLASH_DEVICE void round_to(float x, __nv_bfloat16& to) { to = __float2bfloat16_rn(x); }

}  // namespace anyflash
