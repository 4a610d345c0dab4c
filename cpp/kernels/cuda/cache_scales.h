// Scales of keys and values in a cache of 8 bits.
#pragma once

#include <cmath>
#include <cstdint>
#include <cute/tensor.hpp>

#include "common/macros.h"
#include "params.h"
#include "variant/broadcast_tensor.h"

namespace anyflash {

// Those of a head.
template <class Traits>
struct CacheScales {
  bool k_by_key = false;
  bool v_by_key = false;
  float k = 1.0f;  // of all keys; 1 where each has its own
  float v = 1.0f;  // of all values
  // It is not finite: then it is for P, since rows that see no key are 0 whatever it is.
  bool v_is_late = false;

  ANYFLASH_DEVICE CacheScales(const KvCacheParams& params, int head_k) {
    if constexpr (Traits::k8Bit) {
      k_by_key = is_per_key(params.k_scale);
      v_by_key = is_per_key(params.v_scale);
      if (!k_by_key) k = of_head(params.k_scale, head_k);
      if (!v_by_key) v = of_head(params.v_scale, head_k);
      v_is_late = !std::isfinite(v);
    }
  }

  // What O counts in before the first tile.
  ANYFLASH_DEVICE float unit() const { return v_by_key ? 0.0f : v_is_late ? 1.0f : v; }

  template <class Scores>
  ANYFLASH_DEVICE void scale_visible(Scores& probabilities) const {
    CUTE_UNROLL
    for (int i = 0; i < cute::size(probabilities); ++i) {
      float& p = probabilities(i);
      p = p == 0.0f ? 0.0f : p * v;
    }
  }

  static ANYFLASH_DEVICE bool is_per_key(const BroadcastTensor& scale) {
    return scale.data != nullptr && (scale.stride.batch != 0 || scale.stride.row != 0);
  }
  static ANYFLASH_DEVICE float of_head(const BroadcastTensor& scale, int head_k) {
    return scale.data == nullptr
               ? 1.0f
               : static_cast<const float*>(scale.data)[head_k * scale.stride.head];
  }
};

// The largest power of two that is no larger than x; infinity if x is, 0 if x is 0 or subnormal.
ANYFLASH_DEVICE float power_of_two(float x) {
  return __uint_as_float(__float_as_uint(x) & 0x7f800000u);
}

}  // namespace anyflash
