// Host side of the Hopper decoding kernels: one KernelDescriptor per dtype, head dim and row tile.
#pragma once

#include <type_traits>

#include "cuda/decode_launch.h"
#include "cuda/descriptor.h"
#include "kernel_descriptor.h"
#include "sm90/cache_boxes.h"
#include "sm90/decode/kernel.h"
#include "sm90/decode/shared_rows_traits.h"
#include "sm90/decode/traits.h"
#include "sm90/family.h"

namespace anyflash::sm90 {

template <class Traits>
void launch_decode(const KvCacheParams& params, const LaunchContext& context) {
  launch_splits<Traits, decode_kernel<Traits>, DecodeLaunch>(
      params, context, [](DecodeLaunch& prepared) {
        make_cache_maps(prepared, prepared, prepared.cache_dtype, Traits::kBlockN);
      });
}

template <class Element, int kHeadDim, int kHeadDimV, int kBlockM, bool k8Bit>
constexpr KernelDescriptor decode_descriptor(const char* name) {
  constexpr bool kIsLatent = kHeadDim != kHeadDimV;
  using Traits = std::conditional_t<kIsLatent && kBlockM == 64,
                                    SharedRowsTraits<Element, kHeadDim, kHeadDimV, k8Bit>,
                                    DecodeTraits<Element, kHeadDim, kHeadDimV, kBlockM, k8Bit>>;
  KernelDescriptor d = descriptor<Traits>(kFamily, name, Op::kDecode);
  d.features = k8Bit ? kQuantizedCache : kNoFeatures;
  d.tile = Traits::kTile;
  d.latent = Traits::kLatent;
  d.loads_boxes = true;
  d.joins_in_cluster = Traits::kJoinsInCluster;
  d.decode = {decode_scratch_bytes<Traits, decode_kernel<Traits>>, launch_decode<Traits>};
  return d;
}

}  // namespace anyflash::sm90
