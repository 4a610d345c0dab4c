// The rows of the forward kernels: see cpu/descriptors.h.
#pragma once

#include "cpu/descriptors.h"
#include "cpu/forward/forward.h"
#include "kernel_descriptor.h"

namespace anyflash {
namespace cpu::ANYFLASH_CPU_ISA {

template <typename E>
constexpr KernelDescriptor forward_row(const char* name, DType dtype) {
  using T = typename Compute<E>::Type;
  const Tile tile{kTaskPanels<T> * kPanelRows<T>, kPanelKeys, /*warps=*/0};
  return kernel_row(name, Op::kForward, dtype, tile, {&forward_scratch_bytes<E>, &forward<E>}, {});
}

constexpr KernelDescriptor kForwardRows[] = {
#if !ANYFLASH_CPU_TILES  // what has no tiles runs as for AVX-512
    forward_row<double>(ANYFLASH_CPU_NAME("forward", "f64"), DType::kFloat64),
    forward_row<float>(ANYFLASH_CPU_NAME("forward", "f32"), DType::kFloat32),
    forward_row<Half>(ANYFLASH_CPU_NAME("forward", "f16"), DType::kFloat16),
#endif
    forward_row<BFloat16>(ANYFLASH_CPU_NAME("forward", "bf16"), DType::kBFloat16),
};

}  // namespace cpu::ANYFLASH_CPU_ISA

namespace kernel_units {
extern const KernelUnit ANYFLASH_ROWS;
const KernelUnit ANYFLASH_ROWS = {
    cpu::ANYFLASH_CPU_ISA::kForwardRows,
    sizeof(cpu::ANYFLASH_CPU_ISA::kForwardRows) / sizeof(KernelDescriptor)};
}  // namespace kernel_units
}  // namespace anyflash
