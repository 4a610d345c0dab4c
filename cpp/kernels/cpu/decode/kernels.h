// The descriptors of the kernels of attention to a cache: see cpu/descriptors.h.
#pragma once

#include <iterator>

#include "cpu/decode/decode.h"
#include "cpu/descriptors.h"
#include "kernel_descriptor.h"

namespace anyflash {
namespace cpu::ANYFLASH_CPU_ISA {

template <typename E>
constexpr KernelDescriptor decode_kernel(const char* name, DType dtype) {
  using T = typename Compute<E>::Type;
  KernelDescriptor d =
      descriptor(name, Op::kDecode, dtype, kTaskPanels<T> * kPanelRows<T>, kBlockN);
  d.features = kSoftcap | kLargeSoftcap | kAlibi | kQuantizedCache;
  d.decode = {&decode_scratch_bytes<E>, &decode<E>};
  return d;
}

constexpr KernelDescriptor kDecodeKernels[] = {
    decode_kernel<double>(ANYFLASH_CPU_NAME("decode", "f64"), DType::kFloat64),
    decode_kernel<float>(ANYFLASH_CPU_NAME("decode", "f32"), DType::kFloat32),
    decode_kernel<Half>(ANYFLASH_CPU_NAME("decode", "f16"), DType::kFloat16),
    decode_kernel<BFloat16>(ANYFLASH_CPU_NAME("decode", "bf16"), DType::kBFloat16),
};

}  // namespace cpu::ANYFLASH_CPU_ISA

namespace kernel_units {
extern const KernelUnit ANYFLASH_UNIT;
const KernelUnit ANYFLASH_UNIT = {std::data(cpu::ANYFLASH_CPU_ISA::kDecodeKernels),
                                  std::size(cpu::ANYFLASH_CPU_ISA::kDecodeKernels)};
}  // namespace kernel_units
}  // namespace anyflash
