// Sums over a CTA.
#pragma once

#include "common/macros.h"

namespace anyflash {

// The sum of every thread's x, in the same order whenever it runs. `warps`: shared memory for one
// number a warp, which may have held something else.
template <int kThreads>
ANYFLASH_DEVICE float block_sum(float x, float* warps) {
#if defined(__CUDACC__)
#pragma unroll
#endif
  for (int distance = 16; distance > 0; distance /= 2) {
    x += __shfl_xor_sync(0xffffffffu, x, distance);
  }
  __syncthreads();  // every warp has done with what lay there
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = x;
  __syncthreads();  // all sums are there
  float sum = 0.0f;
#if defined(__CUDACC__)
#pragma unroll
#endif
  for (int warp = 0; warp < kThreads / 32; ++warp) sum += warps[warp];
  return sum;
}

}  // namespace anyflash
