// For benchmarks and tests: which kernel runs, and on how many threads.
#pragma once

#include "anyflash/export.h"

namespace anyflash {

// From now on, in all threads, the CUDA kernel of this name runs what it can run; for the rest one
// is chosen as ever. "": the rules alone choose, without tuned_tiles.cpp. Null: as ever. Throws
// Error(kInvalidValue), which lists the kernels, if none has this name.
ANYFLASH_API void prefer_kernel(const char* name);

// Sets how much work (threads.h) a thread must have before another one is used: on the CPU, from
// now on, in all threads. 0: the default. A plan's workspace is for the number of threads that this
// gives: it must not change before the plan has run.
ANYFLASH_API void set_work_per_thread(double work);

}  // namespace anyflash
