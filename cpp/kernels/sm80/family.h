// The family of kernels for every GPU from the A100 on: mma.sync and cp.async.
#pragma once

#include <cutlass/numeric_types.h>

#include <cstdint>
#include <type_traits>

#include "kernel_descriptor.h"

namespace anyflash::sm80 {

inline constexpr KernelFamily kFamily = [] {
  KernelFamily family;
  family.name = "sm80";
  family.gpus.first = 80;
  // cp.async and the epilogue move 16 bytes. Offsets within a tile, which has at most 256 rows, are
  // 32-bit numbers of elements.
  family.input_rules.alignment = 16;
  family.input_rules.max_row_stride = INT32_MAX / 256;
  return family;
}();

template <class Element>
inline constexpr DType kElementType =
    std::is_same_v<Element, cutlass::half_t> ? DType::kFloat16 : DType::kBFloat16;

// What the descriptors of all operations have in common.
template <class Traits>
constexpr KernelDescriptor descriptor(const char* name, Op op, TileConfig tile_config) {
  KernelDescriptor d;
  d.name = name;
  d.family = &kFamily;
  d.op = op;
  d.dtype = kElementType<typename Traits::Element>;
  d.head_dim = Traits::kHeadDim;
  d.head_dim_v = Traits::kHeadDimV;
  d.tile_config = tile_config;
  return d;
}

}  // namespace anyflash::sm80
