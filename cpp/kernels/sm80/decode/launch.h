// Host side of the sm_80 decoding kernels: one KernelDescriptor per dtype, head dim, row tile and
// kind of cache.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda/decode_launch.h"
#include "cuda/descriptor.h"
#include "kernel_descriptor.h"
#include "sm80/decode/kernel.h"
#include "sm80/decode/traits.h"
#include "sm80/family.h"

namespace anyflash::sm80 {

template <class Traits>
void launch_decode(const KvCacheParams& params, const LaunchContext& context) {
  launch_splits<Traits, decode_kernel<Traits>, DecodeLaunch>(
      params, context, [&params](DecodeLaunch& prepared) {
        const Attention& a = params.attention;
        constexpr int kBytes = Traits::k8Bit ? 1 : 2;
        prepared.cache_has_vectors =
            has_vectors(a.k, a.k_stride, a.head_dim, kBytes) &&
            (Traits::kLatent || has_vectors(a.v, a.v_stride, a.head_dim_v, kBytes));
        prepared.page_count = static_cast<unsigned>(std::min<int64_t>(params.slots, INT32_MAX));
        prepared.page_mask = (1u << params.page_shift) - 1;
      });
}

template <class Element, int kHeadDim, int kHeadDimV, int kBlockM, bool k8Bit>
constexpr KernelDescriptor decode_descriptor(const char* name) {
  using Traits = DecodeTraits<Element, kHeadDim, kHeadDimV, kBlockM, k8Bit>;
  KernelDescriptor d = descriptor<Traits>(kFamily, name, Op::kDecode);
  d.features = kSoftcap | kLargeSoftcap | kAlibi | (k8Bit ? kQuantizedCache : kNoFeatures);
  d.tile = Traits::kTile;
  d.latent = Traits::kLatent;
  d.joins_in_cluster = Traits::kJoinsInCluster;
  d.decode = {decode_scratch_bytes<Traits, decode_kernel<Traits>>, launch_decode<Traits>};
  return d;
}

}  // namespace anyflash::sm80
