// Host side of the sm_80 prefill kernels: one KernelDescriptor per (dtype, head dim, variant).
#pragma once

#include <cstddef>

#include "cuda/descriptor.h"
#include "cuda/partial_results.h"
#include "cuda/prefill_launch.h"
#include "kernel_descriptor.h"
#include "sm80/family.h"
#include "sm80/forward/launch.h"
#include "sm80/forward/traits.h"
#include "sm80/prefill/kernel.h"

namespace anyflash::sm80 {

template <class Traits, class Variant>
void launch_prefill(const KvCacheParams& params, const LaunchContext& context) {
  const int blocks = prefill_blocks<Traits::kBlockM>(params);
  PrefillLaunch prepared;
  prepared.cache = params.num_splits > 1 ? partial_params(params, context) : params;
  ForwardParams& forward = prepared.forward;
  set_forward(forward, params, prepared.cache);
  prepared.q_factor = prepare_scale(forward.attention);
  launch<prefill_kernel<Traits, Variant>>(dim3(static_cast<unsigned>(blocks)),
                                          dim3(Traits::kThreads), sizeof(PrefillStorage<Traits>),
                                          context.stream, prepared);
  if (params.num_splits > 1) {
    combine_parts<typename Traits::Element>(params, prepared.cache, context.stream);
  }
}

template <class Traits>
std::size_t prefill_scratch_bytes(const KvCacheParams& params, const LaunchContext&) {
  packed_blocks<Traits::kBlockM>(params);
  return parts_bytes(params);
}

// kTileConfig: whose tiles of the forward it has; there is one for a variant.
template <class Element, int kHeadDim, int kHeadDimV, class Variant,
          TileConfig kTileConfig = TileConfig::kDefault>
constexpr KernelDescriptor prefill_descriptor(const char* name) {
  using Traits = ForwardTraits<Element, kHeadDim, kHeadDimV, Variant, kTileConfig>;
  KernelDescriptor d = descriptor<Traits>(kFamily, name, Op::kDecode);
  d.features = Variant::kFeatures;
  d.tile = Traits::kTile;
  d.prefill = true;
  d.smem_bytes = sizeof(PrefillStorage<Traits>);
  d.decode = {prefill_scratch_bytes<Traits>, launch_prefill<Traits, Variant>};
  return d;
}

}  // namespace anyflash::sm80
