// Loads of tensors whose rows cannot be copied by vectors.
#pragma once

#include <cstdint>

#include "common/macros.h"

namespace anyflash {

// One row's 16 bytes element by element; columns that do not exist become 0.
template <class Unit>
ANYFLASH_DEVICE void load_elements(const void* row, int64_t stride, int first, int columns,
                                   void* piece) {
  const auto* const source = static_cast<const Unit*>(row);
  auto* const target = static_cast<Unit*>(piece);
#if defined(__CUDACC__)
#pragma unroll 1  // rare: not worth the code
#endif
  for (int i = 0; i < 16 / static_cast<int>(sizeof(Unit)); ++i) {
    target[i] = first + i < columns ? source[(first + i) * stride] : Unit{0};
  }
}

}  // namespace anyflash
