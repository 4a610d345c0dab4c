// Rounding of fp32 fragments to the kernels' 16-bit types, two values at a time.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cutlass/numeric_types.h>

#include <cstdint>
#include <cute/tensor.hpp>

#include "common/macros.h"

namespace anyflash {

ANYFLASH_DEVICE __half2 round_pair(float2 x, cutlass::half_t) { return __float22half2_rn(x); }
ANYFLASH_DEVICE __nv_bfloat162 round_pair(float2 x, cutlass::bfloat16_t) {
  return __float22bfloat162_rn(x);
}

// The same with 0 for what is negative, in one instruction; NaN stays NaN.
#if defined(ANYFLASH_EMULATED)
template <class Element>
ANYFLASH_DEVICE auto round_positive_pair(float2 x, Element to) {
  return round_pair(float2{x.x < 0.0f ? 0.0f : x.x, x.y < 0.0f ? 0.0f : x.y}, to);
}
#else
ANYFLASH_DEVICE uint32_t round_positive_pair(float2 x, cutlass::half_t) {
  uint32_t pair;
  asm("cvt.rn.relu.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(x.y), "f"(x.x));
  return pair;
}
ANYFLASH_DEVICE uint32_t round_positive_pair(float2 x, cutlass::bfloat16_t) {
  uint32_t pair;
  asm("cvt.rn.relu.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(x.y), "f"(x.x));
  return pair;
}
#endif

template <class Element, class Engine, class Layout, class RoundPair>
ANYFLASH_DEVICE auto round_fragment_by(const cute::Tensor<Engine, Layout>& source,
                                       const RoundPair& round) {
  auto result = cute::make_tensor<Element>(cute::shape(source));
  auto pairs_in = cute::recast<const float2>(source);
  auto pairs_out = cute::recast<decltype(round(float2{}, Element{}))>(result);
  CUTE_UNROLL
  for (int i = 0; i < cute::size(pairs_in); ++i) pairs_out(i) = round(pairs_in(i), Element{});
  return result;
}

// A fragment of Element with the shape and order of `source`, rounded to nearest even. The CUDA
// intrinsics are used because CUTLASS's converter reads past 2-byte objects in its host path.
template <class Element, class Engine, class Layout>
ANYFLASH_DEVICE auto round_fragment(const cute::Tensor<Engine, Layout>& source) {
  return round_fragment_by<Element>(
      source, [](float2 x, Element to) ANYFLASH_INLINE_LAMBDA { return round_pair(x, to); });
}
// The same with 0 for what is negative.
template <class Element, class Engine, class Layout>
ANYFLASH_DEVICE auto round_positive(const cute::Tensor<Engine, Layout>& source) {
  return round_fragment_by<Element>(source, [](float2 x, Element to) ANYFLASH_INLINE_LAMBDA {
    return round_positive_pair(x, to);
  });
}

}  // namespace anyflash
