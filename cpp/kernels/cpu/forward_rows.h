// The forward kernels of one instruction set as rows for dispatch. A generated unit defines
//   ANYFLASH_CPU_ISA       avx2              names the inner namespace and the kernels
//   ANYFLASH_CPU_ISA_ENUM  kAvx2             of CpuIsa
//   ANYFLASH_ROWS          cpu_forward_avx2  the object that dispatch lists
//   ANYFLASH_SHARED_NAMESPACE  anyflash::cpu::avx2  of what is shared with other kernels
// and includes this file.
#pragma once

#include "cpu/forward.h"
#include "kernel.h"

#define ANYFLASH_CPU_STRING2(x) #x
#define ANYFLASH_CPU_STRING(x) ANYFLASH_CPU_STRING2(x)

namespace anyflash {
namespace cpu::ANYFLASH_CPU_ISA {

template <typename E>
constexpr KernelRow forward_row(const char* name, DType dtype) {
  using T = typename Compute<E>::Type;
  return {name,
          Arch::kCpu,
          CpuIsa::ANYFLASH_CPU_ISA_ENUM,
          Op::kForward,
          dtype,
          /*head_dim=*/0,
          /*head_dim_v=*/0,
          kAllFeatures,
          Tile{kTaskPanels<T> * kPanelRows<T>, kBlockN, /*warps=*/0},
          /*smem_bytes=*/0,
          &forward_scratch_bytes<E>,
          &forward<E>};
}

#define ANYFLASH_CPU_NAME(dtype) "cpu_" ANYFLASH_CPU_STRING(ANYFLASH_CPU_ISA) "_forward_" dtype

constexpr KernelRow kForwardRows[] = {
    forward_row<double>(ANYFLASH_CPU_NAME("f64"), DType::kFloat64),
    forward_row<float>(ANYFLASH_CPU_NAME("f32"), DType::kFloat32),
    forward_row<Half>(ANYFLASH_CPU_NAME("f16"), DType::kFloat16),
    forward_row<BFloat16>(ANYFLASH_CPU_NAME("bf16"), DType::kBFloat16),
};

}  // namespace cpu::ANYFLASH_CPU_ISA

namespace rows {
extern const KernelRows ANYFLASH_ROWS;
const KernelRows ANYFLASH_ROWS = {cpu::ANYFLASH_CPU_ISA::kForwardRows,
                                  sizeof(cpu::ANYFLASH_CPU_ISA::kForwardRows) / sizeof(KernelRow)};
}  // namespace rows
}  // namespace anyflash
