// Host side of the sm_80 prefill kernels: one KernelDescriptor per (dtype, head dim, variant).
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/descriptor.h"
#include "kernel_descriptor.h"
#include "sm80/family.h"
#include "sm80/forward/launch.h"
#include "sm80/forward/traits.h"
#include "sm80/prefill/kernel.h"

namespace anyflash::sm80 {

inline std::size_t no_prefill_scratch(const KvCacheParams&, const LaunchContext&) { return 0; }

template <class Traits, class Variant>
void launch_prefill(const KvCacheParams& params, const LaunchContext& context) {
  const Attention& a = params.attention;
  const int64_t blocks = packed_tiles(a, 1, Traits::kBlockM) * a.heads;
  if (blocks > INT32_MAX) {
    throw Error(ErrorCode::kUnsupported, "heads * (total_q / " + std::to_string(Traits::kBlockM) +
                                             " + batch) is " + std::to_string(blocks) +
                                             "; a CUDA grid holds at most 2147483647 blocks");
  }
  PrefillLaunch prepared;
  prepared.cache = params;
  prepared.forward.attention = a;
  prepared.forward.out = params.out;
  prepared.forward.out_dtype = params.out_dtype;
  prepared.forward.out_stride = params.out_stride;
  prepared.forward.lse = params.lse;
  prepared.forward.lse_stride = params.lse_stride;
  prepared.q_factor = prepare_scale(prepared.forward.attention);
  launch<prefill_kernel<Traits, Variant>>(dim3(static_cast<unsigned>(blocks)),
                                          dim3(Traits::kThreads), sizeof(PrefillStorage<Traits>),
                                          context.stream, prepared);
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
  d.decode = {no_prefill_scratch, launch_prefill<Traits, Variant>};
  return d;
}

}  // namespace anyflash::sm80
