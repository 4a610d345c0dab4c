// The rows of the kernels of attention to a cache: see cpu/descriptors.h.
#pragma once

#include "cpu/decode/decode.h"
#include "cpu/descriptors.h"
#include "kernel_descriptor.h"

namespace anyflash {
namespace cpu::ANYFLASH_CPU_ISA {

template <typename E>
constexpr KernelDescriptor decode_row(const char* name, DType dtype) {
  using T = typename Compute<E>::Type;
  const Tile tile{kTaskPanels<T> * kPanelRows<T>, kBlockN, /*warps=*/0};
  KernelDescriptor row = kernel_row(name, Op::kDecode, dtype, tile, {}, {});
  row.features = kSoftcap | kLargeSoftcap | kAlibi | kQuantizedCache;
  row.decode = {&decode_scratch_bytes<E>, &decode<E>};
  return row;
}

constexpr KernelDescriptor kDecodeRows[] = {
    decode_row<double>(ANYFLASH_CPU_NAME("decode", "f64"), DType::kFloat64),
    decode_row<float>(ANYFLASH_CPU_NAME("decode", "f32"), DType::kFloat32),
    decode_row<Half>(ANYFLASH_CPU_NAME("decode", "f16"), DType::kFloat16),
    decode_row<BFloat16>(ANYFLASH_CPU_NAME("decode", "bf16"), DType::kBFloat16),
};

}  // namespace cpu::ANYFLASH_CPU_ISA

namespace kernel_units {
extern const KernelUnit ANYFLASH_ROWS;
const KernelUnit ANYFLASH_ROWS = {
    cpu::ANYFLASH_CPU_ISA::kDecodeRows,
    sizeof(cpu::ANYFLASH_CPU_ISA::kDecodeRows) / sizeof(KernelDescriptor)};
}  // namespace kernel_units
}  // namespace anyflash
