// Barriers of some of a CTA's warps.
#pragma once

#include "common/macros.h"

#if defined(ANYFLASH_EMULATED)
#include <cutlass/arch/barrier.h>
#endif

namespace anyflash::sm80 {

// Waits for all of `threads` that come to barrier `id`, 0 to 7. (CUTLASS's has no code for sm_80.)
ANYFLASH_DEVICE void sync_some(int id, int threads) {
#if defined(ANYFLASH_EMULATED)
  cutlass::arch::NamedBarrier::sync(threads, id);
#else
  asm volatile("bar.sync %0, %1;" ::"r"(id + 8), "r"(threads) : "memory");
#endif
}

}  // namespace anyflash::sm80
