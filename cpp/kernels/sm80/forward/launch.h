// Host side of the sm_80 forward kernels: one KernelDescriptor per (dtype, head dims, variant).
#pragma once

#include <cutlass/numeric_types.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "common/launch.h"
#include "common/math.h"
#include "cuda/descriptor.h"
#include "cuda/key_range_bounds.h"
#include "cuda/tile_scheduler.h"
#include "grid_heuristics.h"
#include "kernel_descriptor.h"
#include "sm80/family.h"
#include "sm80/forward/kernel.h"
#include "sm80/forward/traits.h"
#include "variant/forward_variants.h"

namespace anyflash::sm80 {

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

// The softmax wants a positive scale: returns its sign, or 0, which goes into Q.
inline float prepare_scale(Attention& a) {
  a.softmax_scale = softmax_scale_on_gpu(a.softmax_scale);
  a.scale_log2 = static_cast<float>(std::fabs(a.softmax_scale)) * kLog2E;
  if (a.softmax_scale == 0.0) a.scale_log2 = 1.0f;
  return static_cast<float>((a.softmax_scale > 0.0) - (a.softmax_scale < 0.0));
}

template <class Traits, class Variant>
void launch_forward(const ForwardParams& params, const LaunchContext& context) {
  const Attention& a = params.attention;
  const int64_t row_blocks = ceil_div(int64_t{a.seqlen_q}, Traits::kBlockM);
  const int blocks = forward_grid_blocks(a, Traits::kBlockM);
  ForwardLaunch prepared{params};
  prepared.q_factor = prepare_scale(prepared.attention);
  prepared.attention.key_range_bounds = static_cast<IntervalBounds*>(context.scratch);
  make_key_range_bounds(prepared.attention, context.stream);
  prepared.scheduler = LptTileScheduler(a.batch, a.heads, a.heads / a.heads_k, row_blocks,
                                        heads_per_l2_section(a, context.multiprocessors));
  const auto launch_pass = [&] {
    launch<forward_kernel<Traits, Variant>>(
        dim3(static_cast<unsigned>(blocks)), dim3(Traits::kThreads),
        sizeof(typename Traits::SharedStorage), context.stream, prepared);
  };
  if constexpr (Traits::kConfig.passes == 1) {
    launch_pass();
  } else {
    const ForwardParams whole = prepared;
    for (int first = 0; first < a.head_dim_v; first += Traits::kHeadDimV) {
      const int rest = a.head_dim_v - first;
      static_cast<ForwardParams&>(prepared) = with_columns<typename Traits::Element>(
          whole, first, std::min(rest, Traits::kHeadDimV), rest <= Traits::kHeadDimV);
      launch_pass();
    }
  }
}

// A grid that is too large is refused here, before the call has written anything.
template <class Traits>
std::size_t forward_scratch_bytes(const ForwardParams& params, const LaunchContext&) {
  forward_grid_blocks(params.attention, Traits::kBlockM);
  return key_range_bounds_bytes(params.attention);
}

template <class Element, int kHeadDim, int kHeadDimV, class Variant,
          TileConfig kTileConfig = TileConfig::kDefault>
constexpr KernelDescriptor forward_descriptor(const char* name) {
  using Traits = ForwardTraits<Element, kHeadDim, kHeadDimV, Variant, kTileConfig>;
  KernelDescriptor d = descriptor<Traits>(kFamily, name, Op::kForward, kTileConfig);
  d.head_dim_v = kHeadDimV;
  d.features = Variant::kFeatures;
  d.tile = Traits::kTile;
  d.bits_group = Traits::kConfig.bits_group;
  d.forward = {forward_scratch_bytes<Traits>, launch_forward<Traits, Variant>};
  return d;
}

}  // namespace anyflash::sm80
