// Rounding of fp32 fragments to the kernels' 16-bit types, two values at a time.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cutlass/numeric_types.h>

#include <cute/tensor.hpp>

#include "common/macros.h"

namespace anyflash {

ANYFLASH_DEVICE __half2 round_pair(float2 x, cutlass::half_t) { return __float22half2_rn(x); }
ANYFLASH_DEVICE __nv_bfloat162 round_pair(float2 x, cutlass::bfloat16_t) {
  return __float22bfloat162_rn(x);
}

// A fragment of Element with the shape and order of `source`, rounded to nearest even. The CUDA
// intrinsics are used because CUTLASS's converter reads past 2-byte objects in its host path.
template <class Element, class Engine, class Layout>
ANYFLASH_DEVICE auto round_fragment(const cute::Tensor<Engine, Layout>& source) {
  using Pair = decltype(round_pair(float2{}, Element{}));
  auto result = cute::make_tensor<Element>(cute::shape(source));
  auto pairs_in = cute::recast<const float2>(source);
  auto pairs_out = cute::recast<Pair>(result);
  CUTE_UNROLL
  for (int i = 0; i < cute::size(pairs_in); ++i) {
    pairs_out(i) = round_pair(pairs_in(i), Element{});
  }
  return result;
}

}  // namespace anyflash
