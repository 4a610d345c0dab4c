// The descriptors of the backward kernels: see cpu/descriptors.h.
#pragma once

#include <iterator>

#include "cpu/backward/backward.h"
#include "cpu/descriptors.h"
#include "kernel_descriptor.h"

namespace anyflash {
namespace cpu::ANYFLASH_CPU_ISA {

template <typename E>
constexpr KernelDescriptor backward_kernel(const char* name, DType dtype) {
  KernelDescriptor d = descriptor(name, Op::kBackward, dtype, kBlockM, kBlockN);
  d.backward = {&backward_scratch_bytes<E>, &backward<E>};
  d.dq_sums_bytes = &dq_sums_bytes<E>;
  return d;
}

constexpr KernelDescriptor kBackwardKernels[] = {
#if !ANYFLASH_CPU_TILES  // what has no tiles runs as for AVX-512
    backward_kernel<double>(ANYFLASH_CPU_NAME("backward", "f64"), DType::kFloat64),
    backward_kernel<float>(ANYFLASH_CPU_NAME("backward", "f32"), DType::kFloat32),
    backward_kernel<Half>(ANYFLASH_CPU_NAME("backward", "f16"), DType::kFloat16),
#endif
    backward_kernel<BFloat16>(ANYFLASH_CPU_NAME("backward", "bf16"), DType::kBFloat16),
};

}  // namespace cpu::ANYFLASH_CPU_ISA

namespace kernel_units {
extern const KernelUnit ANYFLASH_UNIT;
const KernelUnit ANYFLASH_UNIT = {std::data(cpu::ANYFLASH_CPU_ISA::kBackwardKernels),
                                  std::size(cpu::ANYFLASH_CPU_ISA::kBackwardKernels)};
}  // namespace kernel_units
}  // namespace anyflash
