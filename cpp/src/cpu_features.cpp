#include "cpu_features.h"

#if (defined(__x86_64__) || defined(__i386__)) && defined(__GNUC__)
#include <cpuid.h>
#endif
#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace anyflash {

#if (defined(__x86_64__) || defined(__i386__)) && defined(__GNUC__)
namespace {

// Asked by number: clang knows no name for it before version 17.
bool has_f16c() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  constexpr unsigned kF16c = 1u << 29;
  return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & kF16c) != 0;
}

// Whether the processor has AMX with bfloat16 and AVX512_BF16, and Linux lets this process use the
// tiles' registers. Linux has to be asked for them. It refuses where a thread's alternative signal
// stack is too small for them.
bool has_amx() {
#if defined(__x86_64__) && defined(__linux__)
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0) return false;
  constexpr unsigned kAmxBf16 = 1u << 22;
  constexpr unsigned kAmxTile = 1u << 24;
  if ((d & kAmxBf16) == 0 || (d & kAmxTile) == 0) return false;
  if (__get_cpuid_count(7, 1, &a, &b, &c, &d) == 0) return false;
  constexpr unsigned kAvx512Bf16 = 1u << 5;
  if ((a & kAvx512Bf16) == 0) return false;
  constexpr int kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
  constexpr int kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

}  // namespace
#endif

const char* name(CpuIsa isa) {
  switch (isa) {
    case CpuIsa::kAuto:
      return "auto";
    case CpuIsa::kBaseline:
      return "baseline";
    case CpuIsa::kAvx2:
      return "avx2";
    case CpuIsa::kAvx512:
      return "avx512";
    case CpuIsa::kNeon:
      return "neon";
    case CpuIsa::kAmx:
      return "amx";
  }
  return "unknown";
}

// Each call asks. The processor is asked once, since CPUID takes microseconds in a virtual machine.
bool cpu_has(CpuIsa isa) {
  switch (isa) {
    case CpuIsa::kAuto:
    case CpuIsa::kBaseline:
      return true;
    case CpuIsa::kNeon:
#if defined(__aarch64__)
      return true;
#else
      return false;
#endif
#if (defined(__x86_64__) || defined(__i386__)) && defined(__GNUC__)
    case CpuIsa::kAvx2: {
      static const bool has =
          __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
      return has;
    }
    case CpuIsa::kAvx512:
      return cpu_has(CpuIsa::kAvx2) && __builtin_cpu_supports("avx512f") &&
             __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
             __builtin_cpu_supports("avx512dq");
    case CpuIsa::kAmx: {
      static const bool has = cpu_has(CpuIsa::kAvx512) && has_amx();
      return has;
    }
#else
    case CpuIsa::kAvx2:
    case CpuIsa::kAvx512:
    case CpuIsa::kAmx:
      return false;
#endif
  }
  return false;
}

}  // namespace anyflash
