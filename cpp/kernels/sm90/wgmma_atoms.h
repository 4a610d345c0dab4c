// wgmma in PTX: the instructions behind wgmma.h. The emulator of the tests has its own.
#pragma once

#include <cutlass/numeric_types.h>

#include <cstdint>

#include "common/macros.h"

namespace anyflash::sm90 {

// Which of an operand's axes is contiguous: that of the sum, or the other one.
enum class Major : int { kK = 0, kMN = 1 };

// wgmma.m64nNk16 with float32 accumulators: `with_smem` takes A from shared memory,
// `with_registers` from four registers a thread. B is in shared memory. Without `accumulate`,
// D = A B^T.
template <class Element, int kN>
struct Wgmma;

// clang-format off
#define ANYFLASH_8P(a, b, c, d, e, f, g, h) \
  "%" #a ",%" #b ",%" #c ",%" #d ",%" #e ",%" #f ",%" #g ",%" #h
#define ANYFLASH_P8 ANYFLASH_8P(0, 1, 2, 3, 4, 5, 6, 7)
#define ANYFLASH_P16 ANYFLASH_P8 "," ANYFLASH_8P(8, 9, 10, 11, 12, 13, 14, 15)
#define ANYFLASH_P24 ANYFLASH_P16 "," ANYFLASH_8P(16, 17, 18, 19, 20, 21, 22, 23)
#define ANYFLASH_P32 ANYFLASH_P24 "," ANYFLASH_8P(24, 25, 26, 27, 28, 29, 30, 31)
#define ANYFLASH_P40 ANYFLASH_P32 "," ANYFLASH_8P(32, 33, 34, 35, 36, 37, 38, 39)
#define ANYFLASH_P48 ANYFLASH_P40 "," ANYFLASH_8P(40, 41, 42, 43, 44, 45, 46, 47)
#define ANYFLASH_P56 ANYFLASH_P48 "," ANYFLASH_8P(48, 49, 50, 51, 52, 53, 54, 55)
#define ANYFLASH_P64 ANYFLASH_P56 "," ANYFLASH_8P(56, 57, 58, 59, 60, 61, 62, 63)
#define ANYFLASH_P96 \
  ANYFLASH_P64 "," \
  ANYFLASH_8P(64, 65, 66, 67, 68, 69, 70, 71) "," ANYFLASH_8P(72, 73, 74, 75, 76, 77, 78, 79) "," \
  ANYFLASH_8P(80, 81, 82, 83, 84, 85, 86, 87) "," ANYFLASH_8P(88, 89, 90, 91, 92, 93, 94, 95)
#define ANYFLASH_P128 \
  ANYFLASH_P96 "," \
  ANYFLASH_8P(96, 97, 98, 99, 100, 101, 102, 103) "," \
  ANYFLASH_8P(104, 105, 106, 107, 108, 109, 110, 111) "," \
  ANYFLASH_8P(112, 113, 114, 115, 116, 117, 118, 119) "," \
  ANYFLASH_8P(120, 121, 122, 123, 124, 125, 126, 127)

#define ANYFLASH_8D(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), \
  "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define ANYFLASH_D8 ANYFLASH_8D(0)
#define ANYFLASH_D16 ANYFLASH_D8, ANYFLASH_8D(8)
#define ANYFLASH_D24 ANYFLASH_D16, ANYFLASH_8D(16)
#define ANYFLASH_D32 ANYFLASH_D24, ANYFLASH_8D(24)
#define ANYFLASH_D40 ANYFLASH_D32, ANYFLASH_8D(32)
#define ANYFLASH_D48 ANYFLASH_D40, ANYFLASH_8D(40)
#define ANYFLASH_D56 ANYFLASH_D48, ANYFLASH_8D(48)
#define ANYFLASH_D64 ANYFLASH_D56, ANYFLASH_8D(56)
#define ANYFLASH_D96 ANYFLASH_D64, \
  ANYFLASH_8D(64), ANYFLASH_8D(72), ANYFLASH_8D(80), ANYFLASH_8D(88)
#define ANYFLASH_D128 ANYFLASH_D96, \
  ANYFLASH_8D(96), ANYFLASH_8D(104), ANYFLASH_8D(112), ANYFLASH_8D(120)
// clang-format on

// I0 to I6: the numbers of the operands that follow the D accumulators.
#define ANYFLASH_WGMMA_OF(ELEMENT, TYPE, N, D, I0, I1, I2, I3, I4, I5, I6)                       \
  template <>                                                                                    \
  struct Wgmma<ELEMENT, N> {                                                                     \
    template <Major kMajorA, Major kMajorB>                                                      \
    ANYFLASH_DEVICE static void with_smem(float* d, uint64_t a, uint64_t b, int accumulate) {    \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #I2                                      \
                   ", 0;\n"                                                                      \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE               \
                   " {" ANYFLASH_P##D "}, %" #I0 ", %" #I1 ", p, 1, 1, %" #I3 ", %" #I4 ";\n}\n" \
                   : ANYFLASH_D##D                                                               \
                   : "l"(a), "l"(b), "r"(accumulate), "n"(static_cast<int>(kMajorA)),            \
                     "n"(static_cast<int>(kMajorB)));                                            \
    }                                                                                            \
    template <Major kMajorB>                                                                     \
    ANYFLASH_DEVICE static void with_registers(float* d, const uint32_t* a, uint64_t b,          \
                                               int accumulate) {                                 \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #I5                                      \
                   ", 0;\n"                                                                      \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE               \
                   " {" ANYFLASH_P##D "}, {%" #I0 ", %" #I1 ", %" #I2 ", %" #I3 "}, %" #I4       \
                                      ", p, 1, 1, %" #I6 ";\n}\n"                                \
                   : ANYFLASH_D##D                                                               \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate),        \
                     "n"(static_cast<int>(kMajorB)));                                            \
    }                                                                                            \
  };
#define ANYFLASH_WGMMA(N, D, I0, I1, I2, I3, I4, I5, I6)                           \
  ANYFLASH_WGMMA_OF(cutlass::bfloat16_t, "bf16", N, D, I0, I1, I2, I3, I4, I5, I6) \
  ANYFLASH_WGMMA_OF(cutlass::half_t, "f16", N, D, I0, I1, I2, I3, I4, I5, I6)

ANYFLASH_WGMMA(16, 8, 8, 9, 10, 11, 12, 13, 14)
ANYFLASH_WGMMA(32, 16, 16, 17, 18, 19, 20, 21, 22)
ANYFLASH_WGMMA(48, 24, 24, 25, 26, 27, 28, 29, 30)
ANYFLASH_WGMMA(64, 32, 32, 33, 34, 35, 36, 37, 38)
ANYFLASH_WGMMA(80, 40, 40, 41, 42, 43, 44, 45, 46)
ANYFLASH_WGMMA(96, 48, 48, 49, 50, 51, 52, 53, 54)
ANYFLASH_WGMMA(112, 56, 56, 57, 58, 59, 60, 61, 62)
ANYFLASH_WGMMA(128, 64, 64, 65, 66, 67, 68, 69, 70)
ANYFLASH_WGMMA(192, 96, 96, 97, 98, 99, 100, 101, 102)
ANYFLASH_WGMMA(256, 128, 128, 129, 130, 131, 132, 133, 134)

#undef ANYFLASH_WGMMA
#undef ANYFLASH_WGMMA_OF
#undef ANYFLASH_D128
#undef ANYFLASH_D96
#undef ANYFLASH_D64
#undef ANYFLASH_D56
#undef ANYFLASH_D48
#undef ANYFLASH_D40
#undef ANYFLASH_D32
#undef ANYFLASH_D24
#undef ANYFLASH_D16
#undef ANYFLASH_D8
#undef ANYFLASH_8D
#undef ANYFLASH_P128
#undef ANYFLASH_P96
#undef ANYFLASH_P64
#undef ANYFLASH_P56
#undef ANYFLASH_P48
#undef ANYFLASH_P40
#undef ANYFLASH_P32
#undef ANYFLASH_P24
#undef ANYFLASH_P16
#undef ANYFLASH_P8
#undef ANYFLASH_8P

// Before a group: what this thread wrote to registers is there for it.
ANYFLASH_DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
ANYFLASH_DEVICE void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// The compiler may not move reads or writes of these registers past this place.
template <int kSize>
ANYFLASH_DEVICE void pin_registers(float* registers) {
#pragma unroll
  for (int i = 0; i < kSize; ++i) asm volatile("" : "+f"(registers[i])::"memory");
}
template <int kSize>
ANYFLASH_DEVICE void pin_registers(uint32_t* registers) {
#pragma unroll
  for (int i = 0; i < kSize; ++i) asm volatile("" : "+r"(registers[i])::"memory");
}

// Waits until at most `kGroups` of the latest groups are still running.
template <int kGroups>
ANYFLASH_DEVICE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kGroups) : "memory");
}

}  // namespace anyflash::sm90
