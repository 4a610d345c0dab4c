// Host side of the sm_80 forward kernels: one KernelDescriptor per (dtype, head dims, variant).
#pragma once

#include <cutlass/numeric_types.h>

#include <cmath>
#include <cstddef>
#include <cstdint>

#include "common/launch.h"
#include "common/math.h"
#include "cuda/column_pass.h"
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
  launch_passes<Traits>(prepared, [&] {
    launch<forward_kernel<Traits, Variant>>(
        dim3(static_cast<unsigned>(blocks)), dim3(Traits::kThreads),
        sizeof(typename Traits::SharedStorage), context.stream, prepared);
  });
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
