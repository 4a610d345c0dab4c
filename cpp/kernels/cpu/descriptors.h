// Kernels of one instruction set as rows for dispatch. A generated unit defines
//   ANYFLASH_CPU_ISA       avx2              names the inner namespace and the kernels
//   ANYFLASH_CPU_ISA_ENUM  kAvx2             of CpuIsa
//   ANYFLASH_ROWS          cpu_forward_avx2  the object that dispatch lists
//   ANYFLASH_SHARED_NAMESPACE  anyflash::cpu::avx2  of what is shared with other kernels
// and includes cpu/forward/kernels.h or cpu/backward/kernels.h, which define that object.
#pragma once

#include "kernel_descriptor.h"

#define ANYFLASH_CPU_STRING2(x) #x
#define ANYFLASH_CPU_STRING(x) ANYFLASH_CPU_STRING2(x)

// "cpu_avx2_forward_f32"
#define ANYFLASH_CPU_NAME(op, dtype) "cpu_" ANYFLASH_CPU_STRING(ANYFLASH_CPU_ISA) "_" op "_" dtype

namespace anyflash::cpu::ANYFLASH_CPU_ISA {

constexpr KernelDescriptor kernel_row(const char* name, Op op, DType dtype, const Tile& tile,
                                      const KernelEntryPoints<ForwardParams>& forward,
                                      const KernelEntryPoints<BackwardParams>& backward) {
  return {name,
          Arch::kCpu,
          CpuIsa::ANYFLASH_CPU_ISA_ENUM,
          op,
          dtype,
          /*head_dim=*/0,
          /*head_dim_v=*/0,
          kAllFeatures,
          tile,
          /*smem_bytes=*/0,
          forward,
          backward};
}

}  // namespace anyflash::cpu::ANYFLASH_CPU_ISA
