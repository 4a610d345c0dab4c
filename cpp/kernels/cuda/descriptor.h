// What the descriptors of all kernels on tensor cores have in common.
#pragma once

#include <cutlass/numeric_types.h>

#include <type_traits>

#include "kernel_descriptor.h"

namespace anyflash {

template <class Element>
inline constexpr DType kElementType =
    std::is_same_v<Element, cutlass::half_t> ? DType::kFloat16 : DType::kBFloat16;

template <class Traits>
constexpr KernelDescriptor descriptor(const KernelFamily& family, const char* name, Op op,
                                      TileConfig tile_config = TileConfig::kDefault) {
  KernelDescriptor d;
  d.name = name;
  d.family = &family;
  d.op = op;
  d.dtype = kElementType<typename Traits::Element>;
  d.head_dim = Traits::kHeadDim;
  d.head_dim_v = Traits::kHeadDimV;
  d.tile_config = tile_config;
  d.smem_bytes = sizeof(typename Traits::SharedStorage);
  return d;
}

}  // namespace anyflash
