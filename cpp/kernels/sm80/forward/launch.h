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
  const int64_t row_blocks = ceil_div(int64_t{params.seqlen_q}, Traits::kBlockM);
  const int64_t blocks = row_blocks * params.batch * params.heads;
  if (blocks > INT32_MAX) {
    throw Error(ErrorCode::kUnsupported,
                "batch * heads * ceil(seqlen_q / " + std::to_string(Traits::kBlockM) + ") is " +
                    std::to_string(blocks) + "; a CUDA grid holds at most 2147483647 blocks");
  }
  const int64_t bias_stride = params.bias.stride.col;
  if (params.bias.data != nullptr && bias_stride != static_cast<int32_t>(bias_stride)) {
    throw Error(ErrorCode::kUnsupported, "bias has stride " + std::to_string(bias_stride) +
                                             " along the keys; the CUDA kernels take 32 bits");
  }
  ForwardLaunch prepared{params};
  if (std::fabs(params.softmax_scale) < kLeastScale) prepared.softmax_scale = 0.0;
  prepared.scale_log2 = static_cast<float>(std::fabs(prepared.softmax_scale)) * kLog2E;
  if (prepared.softmax_scale == 0.0) prepared.scale_log2 = 1.0f;
  prepared.q_factor =
      static_cast<float>((prepared.softmax_scale > 0.0) - (prepared.softmax_scale < 0.0));
  prepared.scheduler =
      LptTileScheduler(params.batch, params.heads, params.heads / params.heads_k, row_blocks,
                       heads_per_l2_section(params, context.multiprocessors));
  launch<forward_kernel<Traits, Variant>>(
      dim3(static_cast<unsigned>(blocks)), dim3(Traits::kThreads),
      sizeof(typename Traits::SharedStorage), context.stream, prepared);
}

inline std::size_t no_scratch(const ForwardParams&, int) { return 0; }

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
