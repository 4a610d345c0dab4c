// Programmatic dependent launch, as kernels see it (LaunchOrder). Kernels follow one another before
// Hopper, and on the emulator.
#pragma once

#include "common/macros.h"

namespace anyflash {

// The next kernel of the stream may begin, if it was launched kWhenAllowed.
ANYFLASH_DEVICE void allow_next_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// In a kernel launched kWhenAllowed: the one before it has ended, and its writes are seen.
ANYFLASH_DEVICE void wait_previous_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace anyflash
