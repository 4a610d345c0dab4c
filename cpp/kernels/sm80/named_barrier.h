// Barriers of some of a CTA's warps.
#pragma once

#include <cstdint>

#include "common/macros.h"

#if defined(ANYFLASH_EMULATED)
#include <cutlass/arch/barrier.h>
#endif

namespace anyflash {

// Waits for all of `threads` that come to barrier `id`, 0 to 7. (CUTLASS's has no code for sm_80.)
ANYFLASH_DEVICE void named_barrier_sync(int id, int threads) {
#if defined(ANYFLASH_EMULATED)
  cutlass::arch::NamedBarrier::sync(threads, id);
#else
  asm volatile("bar.sync %0, %1;" ::"r"(id + 8), "r"(threads) : "memory");
#endif
}

// An mbarrier in shared memory: who has come goes on, and waits later, or not at all. Its phases
// count from 0; each ends when as many threads have come as init() was told.
class Mbarrier {
 public:
  // By one thread; then __syncthreads().
  ANYFLASH_DEVICE void init(int threads) {
#if defined(ANYFLASH_EMULATED)
    barrier_.init(threads);
#else
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(address()), "r"(threads) : "memory");
#endif
  }

  ANYFLASH_DEVICE void arrive() {
#if defined(ANYFLASH_EMULATED)
    barrier_.arrive();
#else
    uint64_t state;
    asm volatile("mbarrier.arrive.shared.b64 %0, [%1];" : "=l"(state) : "r"(address()) : "memory");
#endif
  }

  // Waits for the end of a phase, the current or the one before, by its parity. There was one
  // before the first.
  ANYFLASH_DEVICE void wait(int parity) {
#if defined(ANYFLASH_EMULATED)
    barrier_.wait(parity);
#else
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again%=:\n"
        "mbarrier.test_wait.parity.shared.b64 done, [%0], %1;\n"
        "@!done bra again%=;\n"
        "}" ::"r"(address()),
        "r"(parity)
        : "memory");
#endif
  }

 private:
#if defined(ANYFLASH_EMULATED)
  cutlass::arch::ClusterBarrier barrier_;
#else
  ANYFLASH_DEVICE uint32_t address() const {
    return static_cast<uint32_t>(__cvta_generic_to_shared(&state_));
  }
  uint64_t state_;
#endif
};

}  // namespace anyflash
