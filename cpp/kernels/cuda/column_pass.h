// A forward by passes: launches that each make some columns of the results, where registers do not
// hold all (head dim 512). Each computes the scores anew.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "params.h"

namespace anyflash {

// The same problem with the columns [first, first + count) of V and of the output. Only the last
// pass writes what belongs to rows: a prior result, which that may overwrite, is read by all.
template <class Element>
ForwardParams with_columns(ForwardParams params, int first, int count, bool last) {
  Attention& a = params.attention;
  const auto bytes_before = [first](const Strides& stride, std::size_t element) {
    return first * stride.col * static_cast<int64_t>(element);
  };
  const bool float_out = params.out_dtype == DType::kFloat32;
  a.v = static_cast<const char*>(a.v) + bytes_before(a.v_stride, sizeof(Element));
  params.out = static_cast<char*>(params.out) +
               bytes_before(params.out_stride, float_out ? sizeof(float) : sizeof(Element));
  if (params.prior.out != nullptr) {
    params.prior.out = static_cast<const char*>(params.prior.out) +
                       bytes_before(params.prior.out_stride, sizeof(float));
  }
  params.prior.columns -= first;
  a.head_dim_v = count;
  if (!last) {
    params.lse = nullptr;
    params.max_logits = nullptr;
  }
  return params;
}

// Calls launch_pass() for each pass, of at most Traits::kHeadDimV columns, when `prepared` has its
// parameters.
template <class Traits, class Prepared, class LaunchPass>
void launch_passes(Prepared& prepared, const LaunchPass& launch_pass) {
  if constexpr (Traits::kConfig.passes == 1) {
    launch_pass();
  } else {
    const ForwardParams whole = prepared;
    for (int first = 0; first < whole.attention.head_dim_v; first += Traits::kHeadDimV) {
      const int rest = whole.attention.head_dim_v - first;
      static_cast<ForwardParams&>(prepared) = with_columns<typename Traits::Element>(
          whole, first, std::min(rest, Traits::kHeadDimV), rest <= Traits::kHeadDimV);
      launch_pass();
    }
  }
}

}  // namespace anyflash
