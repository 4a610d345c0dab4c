// Host side of the sm_80 decoding kernels: one KernelDescriptor per dtype, head dim, row tile and
// kind of cache.
#pragma once

#include <cstdint>
#include <string>

#include "common/launch.h"
#include "common/math.h"
#include "cuda/combine.h"
#include "cuda/descriptor.h"
#include "kernel_descriptor.h"
#include "sm80/decode/kernel.h"
#include "sm80/decode/traits.h"
#include "sm80/family.h"

namespace anyflash::sm80 {

inline std::size_t partial_out_bytes(const KvCacheParams& params) {
  const auto bytes = static_cast<std::size_t>(params.num_splits * stride_of_split(params)) * 4;
  return ceil_div(bytes, std::size_t{256}) * 256;
}

inline std::size_t decode_scratch_bytes(const KvCacheParams& params, const LaunchContext&) {
  if (params.num_splits == 1) return 0;
  const int64_t lses = params.num_splits * lse_stride_of_split(params);
  return partial_out_bytes(params) + static_cast<std::size_t>(lses) * sizeof(float);
}

// The same problem with partial results for results.
inline KvCacheParams partial_params(const KvCacheParams& params, const LaunchContext& context) {
  KvCacheParams parts = params;
  char* const scratch = static_cast<char*>(context.scratch);
  const int64_t rows = part_rows(params);
  const int64_t columns = part_columns(params);
  const int64_t of_batch = params.packed_parts ? 0 : params.attention.heads * rows;
  parts.out = scratch;
  parts.out_dtype = DType::kFloat32;
  parts.out_stride = {of_batch * columns, columns, rows * columns, 1};
  parts.lse = reinterpret_cast<float*>(scratch + partial_out_bytes(params));
  parts.lse_stride = {of_batch, 1, rows, 0};
  parts.attention.sinks = {};
  return parts;
}

// parts: partial_params(params)
template <class Element>
void combine_parts(const KvCacheParams& params, const KvCacheParams& parts, void* stream) {
  CombineParams combine;
  combine.result = params;
  combine.out = static_cast<const float*>(parts.out);
  combine.lse = parts.lse;
  combine.q_dtype = kElementType<Element>;
  combine_splits(combine, stream);
}

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
void launch_decode(const KvCacheParams& params, const LaunchContext& context) {
  const Attention& a = params.attention;
  const int64_t rows = int64_t{a.seqlen_q} * (a.heads / a.heads_k);  // of a sequence at most
  const int64_t blocks = row_tiles<Traits::kBlockM>(params) * a.heads_k * params.num_splits;
  if (blocks > INT32_MAX || rows > INT32_MAX - Traits::kBlockM) {
    throw Error(ErrorCode::kUnsupported,
                "batch * heads_k * num_splits * ceil(seqlen_q * heads / heads_k / " +
                    std::to_string(Traits::kBlockM) + ") is " + std::to_string(blocks) +
                    "; a CUDA grid holds at most 2147483647 blocks");
  }
  const bool split = params.num_splits > 1;
  const KvCacheParams target = split ? partial_params(params, context) : params;
  launch<decode_kernel<Traits>>(dim3(static_cast<unsigned>(blocks)), dim3(Traits::kThreads),
                                sizeof(typename Traits::SharedStorage), context.stream, target);
  if (split) combine_parts<typename Traits::Element>(params, target, context.stream);
}

template <class Element, int kHeadDim, int kHeadDimV, int kBlockM, bool k8Bit>
constexpr KernelDescriptor decode_descriptor(const char* name) {
  using Traits = DecodeTraits<Element, kHeadDim, kHeadDimV, kBlockM, k8Bit>;
  KernelDescriptor d = descriptor<Traits>(kFamily, name, Op::kDecode);
  d.features = kSoftcap | kLargeSoftcap | kAlibi | (k8Bit ? kQuantizedCache : kNoFeatures);
  d.tile = Traits::kTile;
  d.latent = Traits::kLatent;
  d.decode = {decode_scratch_bytes, launch_decode<Traits>};
  return d;
}

}  // namespace anyflash::sm80
