// The rows of the backward kernels: see cpu/descriptors.h.
#pragma once

#include "cpu/backward/backward.h"
#include "cpu/descriptors.h"
#include "kernel_descriptor.h"

namespace anyflash {
namespace cpu::ANYFLASH_CPU_ISA {

template <typename E>
constexpr KernelDescriptor backward_row(const char* name, DType dtype) {
  const Tile tile{kBlockM, kBlockN, /*warps=*/0};
  return kernel_row(name, Op::kBackward, dtype, tile, {},
                    {&backward_scratch_bytes<E>, &backward<E>});
}

constexpr KernelDescriptor kBackwardRows[] = {
#if !ANYFLASH_CPU_TILES  // what has no tiles runs as for AVX-512
    backward_row<double>(ANYFLASH_CPU_NAME("backward", "f64"), DType::kFloat64),
    backward_row<float>(ANYFLASH_CPU_NAME("backward", "f32"), DType::kFloat32),
    backward_row<Half>(ANYFLASH_CPU_NAME("backward", "f16"), DType::kFloat16),
#endif
    backward_row<BFloat16>(ANYFLASH_CPU_NAME("backward", "bf16"), DType::kBFloat16),
};

}  // namespace cpu::ANYFLASH_CPU_ISA

namespace kernel_units {
extern const KernelUnit ANYFLASH_ROWS;
const KernelUnit ANYFLASH_ROWS = {
    cpu::ANYFLASH_CPU_ISA::kBackwardRows,
    sizeof(cpu::ANYFLASH_CPU_ISA::kBackwardRows) / sizeof(KernelDescriptor)};
}  // namespace kernel_units
}  // namespace anyflash
