// For benchmarks and tests: which kernel runs.
#pragma once

#include "anyflash/export.h"

namespace anyflash {

// From now on, in all threads, the CUDA kernel of this name runs what it can run; for the rest one
// is chosen as ever. "": the rules alone choose, without tuned_tiles.cpp. Null: as ever. Throws
// Error(kInvalidValue), which lists the kernels, if none has this name.
ANYFLASH_API void prefer_kernel(const char* name);

}  // namespace anyflash
