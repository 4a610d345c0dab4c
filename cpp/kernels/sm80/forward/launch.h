// Host side of the sm_80 forward kernels: one KernelDescriptor per (dtype, head dims, variant).
#pragma once

#include <cutlass/numeric_types.h>

#include <cmath>
#include <cstdint>

#include "common/launch.h"
#include "common/math.h"
#include "cuda/descriptor.h"
#include "cuda/tile_scheduler.h"
#include "grid_heuristics.h"
#include "kernel_descriptor.h"
#include "sm80/family.h"
#include "sm80/forward/kernel.h"
#include "sm80/forward/traits.h"
#include "variant/forward_variants.h"

namespace anyflash::sm80 {

template <class Traits, class Variant>
void launch_forward(const ForwardParams& params, const LaunchContext& context) {
  const Attention& a = params.attention;
  const int64_t row_blocks = ceil_div(int64_t{a.seqlen_q}, Traits::kBlockM);
  const int blocks = forward_grid_blocks(a, Traits::kBlockM);
  const int64_t bias_stride = a.bias.stride.col;
  if (a.bias.data != nullptr && bias_stride != static_cast<int32_t>(bias_stride)) {
    throw Error(ErrorCode::kUnsupported, "bias has stride " + std::to_string(bias_stride) +
                                             " along the keys; the CUDA kernels take 32 bits");
  }
  ForwardLaunch prepared{params};
  if (std::fabs(a.softmax_scale) < kLeastScale) prepared.attention.softmax_scale = 0.0;
  prepared.attention.scale_log2 =
      static_cast<float>(std::fabs(prepared.attention.softmax_scale)) * kLog2E;
  if (prepared.attention.softmax_scale == 0.0) prepared.attention.scale_log2 = 1.0f;
  prepared.q_factor = static_cast<float>((prepared.attention.softmax_scale > 0.0) -
                                         (prepared.attention.softmax_scale < 0.0));
  prepared.scheduler = LptTileScheduler(a.batch, a.heads, a.heads / a.heads_k, row_blocks,
                                        heads_per_l2_section(a, context.multiprocessors));
  launch<forward_kernel<Traits, Variant>>(
      dim3(static_cast<unsigned>(blocks)), dim3(Traits::kThreads),
      sizeof(typename Traits::SharedStorage), context.stream, prepared);
}

inline std::size_t no_scratch(const ForwardParams&, const LaunchContext&) { return 0; }

template <class Element, int kHeadDim, int kHeadDimV, class Variant,
          TileConfig kTileConfig = TileConfig::kDefault>
constexpr KernelDescriptor forward_descriptor(const char* name) {
  using Traits = ForwardTraits<Element, kHeadDim, kHeadDimV, Variant, kTileConfig>;
  KernelDescriptor d = descriptor<Traits>(kFamily, name, Op::kForward, kTileConfig);
  d.features = Variant::kFeatures;
  d.tile = Traits::kTile;
  d.bits_group = Traits::kConfig.bits_group;
  d.forward = {no_scratch, launch_forward<Traits, Variant>};
  return d;
}

}  // namespace anyflash::sm80
