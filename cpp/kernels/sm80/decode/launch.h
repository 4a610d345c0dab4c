// Host side of the sm_80 decoding kernels: one KernelDescriptor per dtype, head dim, row tile and
// kind of cache.
#pragma once

#include <cstdint>
#include <string>

#include "common/cluster.h"
#include "common/launch.h"
#include "common/math.h"
#include "cuda/descriptor.h"
#include "cuda/partial_results.h"
#include "kernel_descriptor.h"
#include "sm80/decode/kernel.h"
#include "sm80/decode/traits.h"
#include "sm80/family.h"

namespace anyflash::sm80 {

// Tiles of rows of one head of K.
template <int kBlockM>
int64_t row_tiles(const KvCacheParams& params) {
  const Attention& a = params.attention;
  if (a.cu_seqlens_q == nullptr) {
    return a.batch * ceil_div(int64_t{a.seqlen_q} * (a.heads / a.heads_k), kBlockM);
  }
  if (has_tile_per_sequence<kBlockM>(params)) return a.batch;
  return PackedTiles<kBlockM>(a, a.heads / a.heads_k, params.least_queries).count();
}

template <class Traits>
int64_t number_of_ctas(const KvCacheParams& params) {
  return row_tiles<Traits::kBlockM>(params) * params.attention.heads_k * params.num_splits;
}

// Whether the CTAs of a tile's splits are one cluster, which joins them: that saves a kernel. But a
// GPU that clusters fill has its work shared out less evenly, unless they are small.
template <class Traits>
bool splits_in_cluster(const KvCacheParams& params, const LaunchContext& context) {
  const bool fits = 1 < params.num_splits && params.num_splits <= kLargestCluster;
  const bool spares =
      params.num_splits == 2 || number_of_ctas<Traits>(params) <= context.multiprocessors / 2;
  return fits && spares && has_clusters<decode_kernel<Traits>>(context.device);
}

template <class Traits>
std::size_t decode_scratch_bytes(const KvCacheParams& params, const LaunchContext& context) {
  return splits_in_cluster<Traits>(params, context) ? 0 : parts_bytes(params);
}

// Whether rows of a tensor, columns of `bytes` each, can be copied in pieces of 16 bytes.
inline bool has_vectors(const void* data, const Strides& stride, int columns, int bytes) {
  const int64_t places = reinterpret_cast<int64_t>(data) | stride.batch * bytes |
                         stride.row * bytes | stride.head * bytes | columns * bytes;
  return places % 16 == 0 && stride.col == 1;
}

template <class Traits>
void launch_decode(const KvCacheParams& params, const LaunchContext& context) {
  const Attention& a = params.attention;
  const int64_t rows = int64_t{a.seqlen_q} * (a.heads / a.heads_k);  // of a sequence at most
  const int64_t blocks = number_of_ctas<Traits>(params);
  if (blocks > INT32_MAX || rows > INT32_MAX - Traits::kBlockM) {
    throw Error(ErrorCode::kUnsupported,
                "batch * heads_k * num_splits * ceil(seqlen_q * heads / heads_k / " +
                    std::to_string(Traits::kBlockM) + ") is " + std::to_string(blocks) +
                    "; a CUDA grid holds at most 2147483647 blocks");
  }
  const bool in_cluster = splits_in_cluster<Traits>(params, context);
  const bool in_parts = params.num_splits > 1 && !in_cluster;
  const int group = a.heads / a.heads_k;
  DecodeLaunch prepared{};
  static_cast<KvCacheParams&>(prepared) = in_parts ? partial_params(params, context) : params;
  prepared.splits_in_cluster = in_cluster;
  prepared.q_has_vectors = has_vectors(a.q, a.q_stride, a.head_dim, 2);
  prepared.cache_has_vectors =
      has_vectors(a.k, a.k_stride, a.head_dim, Traits::k8Bit ? 1 : 2) &&
      (Traits::kLatent || has_vectors(a.v, a.v_stride, a.head_dim_v, Traits::k8Bit ? 1 : 2));
  prepared.page_count = static_cast<unsigned>(params.slots < INT32_MAX ? params.slots : INT32_MAX);
  prepared.page_mask = (1u << params.page_shift) - 1;
  prepared.by_splits = cutlass::FastDivmod(params.num_splits);
  const int64_t tiles = ceil_div(rows, Traits::kBlockM);
  prepared.by_row_tiles = cutlass::FastDivmod(tiles > 0 ? static_cast<int>(tiles) : 1);
  prepared.by_heads_k = cutlass::FastDivmod(a.heads_k);
  prepared.by_group = cutlass::FastDivmod(group);
  const LaunchMode mode(LaunchOrder::kAfterPrevious, in_cluster ? params.num_splits : 1);
  launch<decode_kernel<Traits>>(dim3(static_cast<unsigned>(blocks)), dim3(Traits::kThreads),
                                sizeof(typename Traits::SharedStorage), context.stream, prepared,
                                mode);
  if (in_parts) combine_parts<typename Traits::Element>(params, prepared, context.stream);
}

template <class Element, int kHeadDim, int kHeadDimV, int kBlockM, bool k8Bit>
constexpr KernelDescriptor decode_descriptor(const char* name) {
  using Traits = DecodeTraits<Element, kHeadDim, kHeadDimV, kBlockM, k8Bit>;
  KernelDescriptor d = descriptor<Traits>(kFamily, name, Op::kDecode);
  d.features = kSoftcap | kLargeSoftcap | kAlibi | (k8Bit ? kQuantizedCache : kNoFeatures);
  d.tile = Traits::kTile;
  d.latent = Traits::kLatent;
  d.decode = {decode_scratch_bytes<Traits>, launch_decode<Traits>};
  return d;
}

}  // namespace anyflash::sm80
