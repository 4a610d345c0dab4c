#pragma once

#define SM80_CP_ASYNC_CACHEALWAYS SM80_CP_ASYNC_CACHEALWAYS_device
#define SM80_CP_ASYNC_CACHEGLOBAL SM80_CP_ASYNC_CACHEGLOBAL_device
#define SM80_CP_ASYNC_CACHEALWAYS_ZFILL SM80_CP_ASYNC_CACHEALWAYS_ZFILL_device
#define SM80_CP_ASYNC_CACHEGLOBAL_ZFILL SM80_CP_ASYNC_CACHEGLOBAL_ZFILL_device
#define cp_async_fence cp_async_fence_device
#define cp_async_wait cp_async_wait_device
#include_next <cute/arch/copy_sm80.hpp>
#undef SM80_CP_ASYNC_CACHEALWAYS
#undef SM80_CP_ASYNC_CACHEGLOBAL
#undef SM80_CP_ASYNC_CACHEALWAYS_ZFILL
#undef SM80_CP_ASYNC_CACHEGLOBAL_ZFILL
#undef cp_async_fence
#undef cp_async_wait

namespace cute {

// The base is CuTe's own atom, for its register types and its checks of the sizes.
#define ANYFLASH_EMULATED_CP_ASYNC(NAME)                      \
  template <class TS, class TD = TS>                          \
  struct NAME : NAME##_device<TS, TD> {                       \
    static void copy(const TS& source, TD& destination) {     \
      emu::cp_async(&destination, &source, sizeof(TS), true); \
    }                                                         \
  }
#define ANYFLASH_EMULATED_CP_ASYNC_ZFILL(NAME)                    \
  template <class TS, class TD = TS>                              \
  struct NAME : NAME##_device<TS, TD> {                           \
    static void copy(const TS& source, TD& destination, bool p) { \
      emu::cp_async(&destination, &source, sizeof(TS), p);        \
    }                                                             \
  }

ANYFLASH_EMULATED_CP_ASYNC(SM80_CP_ASYNC_CACHEALWAYS);
ANYFLASH_EMULATED_CP_ASYNC(SM80_CP_ASYNC_CACHEGLOBAL);
ANYFLASH_EMULATED_CP_ASYNC_ZFILL(SM80_CP_ASYNC_CACHEALWAYS_ZFILL);
ANYFLASH_EMULATED_CP_ASYNC_ZFILL(SM80_CP_ASYNC_CACHEGLOBAL_ZFILL);

#undef ANYFLASH_EMULATED_CP_ASYNC
#undef ANYFLASH_EMULATED_CP_ASYNC_ZFILL

inline void cp_async_fence() { emu::cp_async_commit_group(); }

// For zero CuTe emits cp.async.wait_all, which also waits for what was not committed.
template <int N>
void cp_async_wait() {
  if constexpr (N == 0) {
    emu::cp_async_wait_all();
  } else {
    emu::cp_async_wait_group(N);
  }
}

template <int N>
void cp_async_wait(Int<N>) {
  cp_async_wait<N>();
}

}  // namespace cute
