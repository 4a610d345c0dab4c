// Rows of results to global memory, four numbers at a time.
#pragma once

#include <cstdint>

#include "common/macros.h"

namespace anyflash {

// Those of four neighbouring numbers that exist, rounded: at once where they may be.
template <class Out>
ANYFLASH_DEVICE void store_four(const float (&x)[4], Out* target, int64_t stride, int columns) {
  struct alignas(4 * sizeof(Out)) Four {
    Out values[4];
  };
  if (stride == 1 && columns >= 4 && reinterpret_cast<int64_t>(target) % alignof(Four) == 0) {
    *reinterpret_cast<Four*>(target) = {Out(x[0]), Out(x[1]), Out(x[2]), Out(x[3])};
    return;
  }
#if defined(__CUDACC__)
#pragma unroll
#endif
  for (int i = 0; i < 4; ++i) {
    if (i < columns) target[i * stride] = Out(x[i]);
  }
}

}  // namespace anyflash
