// Kernels of one instruction set as descriptors. A generated unit defines
//   ANYFLASH_CPU_ISA       avx2              names the inner namespace and the kernels
//   ANYFLASH_CPU_ISA_ENUM  kAvx2             of CpuIsa
//   ANYFLASH_UNIT          cpu_forward_avx2  the object that dispatch lists
//   ANYFLASH_SHARED_NAMESPACE  anyflash::cpu::avx2  of what is shared with other kernels
// and includes kernels.h of cpu/forward, cpu/backward or cpu/decode, which defines that object.
#pragma once

#include "kernel_descriptor.h"

#define ANYFLASH_CPU_STRING2(x) #x
#define ANYFLASH_CPU_STRING(x) ANYFLASH_CPU_STRING2(x)

// "cpu_avx2_forward_f32"
#define ANYFLASH_CPU_NAME(op, dtype) "cpu_" ANYFLASH_CPU_STRING(ANYFLASH_CPU_ISA) "_" op "_" dtype

namespace anyflash::cpu {

inline constexpr KernelFamily kFamily = [] {
  KernelFamily family;
  family.name = "cpu";
  return family;
}();

namespace ANYFLASH_CPU_ISA {

// Has every feature, and any head dim.
constexpr KernelDescriptor descriptor(const char* name, Op op, DType dtype, int block_m,
                                      int block_n) {
  KernelDescriptor d;
  d.name = name;
  d.family = &kFamily;
  d.isa = CpuIsa::ANYFLASH_CPU_ISA_ENUM;
  d.op = op;
  d.dtype = dtype;
  d.features = kAllFeatures;
  d.tile.block_m = block_m;
  d.tile.block_n = block_n;
  return d;
}

}  // namespace ANYFLASH_CPU_ISA
}  // namespace anyflash::cpu
