// The descriptors of the forward kernels: see cpu/descriptors.h.
#pragma once

#include <iterator>

#include "cpu/descriptors.h"
#include "cpu/forward/forward.h"
#include "kernel_descriptor.h"

namespace anyflash {
namespace cpu::ANYFLASH_CPU_ISA {

template <typename E>
constexpr KernelDescriptor forward_kernel(const char* name, DType dtype) {
  using T = typename Compute<E>::Type;
  KernelDescriptor d =
      descriptor(name, Op::kForward, dtype, kTaskPanels<T> * kPanelRows<T>, kPanelKeys);
  d.forward = {&forward_scratch_bytes<E>, &forward<E>};
  return d;
}

constexpr KernelDescriptor kForwardKernels[] = {
#if !ANYFLASH_CPU_TILES  // what has no tiles runs as for AVX-512
    forward_kernel<double>(ANYFLASH_CPU_NAME("forward", "f64"), DType::kFloat64),
    forward_kernel<float>(ANYFLASH_CPU_NAME("forward", "f32"), DType::kFloat32),
    forward_kernel<Half>(ANYFLASH_CPU_NAME("forward", "f16"), DType::kFloat16),
#endif
    forward_kernel<BFloat16>(ANYFLASH_CPU_NAME("forward", "bf16"), DType::kBFloat16),
};

}  // namespace cpu::ANYFLASH_CPU_ISA

namespace kernel_units {
extern const KernelUnit ANYFLASH_UNIT;
const KernelUnit ANYFLASH_UNIT = {std::data(cpu::ANYFLASH_CPU_ISA::kForwardKernels),
                                  std::size(cpu::ANYFLASH_CPU_ISA::kForwardKernels)};
}  // namespace kernel_units
}  // namespace anyflash
