// Host side of what the decoding kernels of all families have in common.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>

#include "common/launch.h"
#include "common/math.h"
#include "cuda/decode_work_tile.h"
#include "cuda/packed_tiles.h"
#include "cuda/partial_results.h"
#include "grid_heuristics.h"
#include "kernel_descriptor.h"
#include "params.h"

namespace anyflash {

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

template <int kBlockM>
int64_t number_of_ctas(const KvCacheParams& params) {
  return row_tiles<kBlockM>(params) * params.attention.heads_k * params.num_splits;
}

template <class Traits, auto kKernel>
bool splits_in_cluster(const KvCacheParams& params, const LaunchContext& context) {
  return Traits::kJoinsInCluster &&
         suits_cluster(number_of_ctas<Traits::kBlockM>(params), params.num_splits,
                       context.multiprocessors, Traits::kOwnsSm) &&
         is_hopper_code<kKernel>(context.device);
}

// Most rows of a sequence.
inline int64_t rows_of_sequence(const Attention& a) {
  return int64_t{a.seqlen_q} * (a.heads / a.heads_k);
}

template <int kBlockM>
void check_decode_grid(const KvCacheParams& params) {
  const int64_t ctas = number_of_ctas<kBlockM>(params);
  const int64_t rows = rows_of_sequence(params.attention);
  if (ctas <= INT32_MAX && rows <= INT32_MAX - kBlockM) return;
  throw Error(ErrorCode::kUnsupported,
              "batch * heads_k * num_splits * ceil(seqlen_q * heads / heads_k / " +
                  std::to_string(kBlockM) + ") is " + std::to_string(ctas) +
                  "; a CUDA grid holds at most 2147483647 blocks");
}

// Refuses a grid that is too large, too: a plan asks this before a call appends to the cache.
template <class Traits, auto kKernel>
std::size_t decode_scratch_bytes(const KvCacheParams& params, const LaunchContext& context) {
  check_decode_grid<Traits::kBlockM>(params);
  return splits_in_cluster<Traits, kKernel>(params, context) ? 0 : parts_bytes(params);
}

// Whether rows of a tensor, columns of `bytes` each, can be copied in pieces of 16 bytes.
inline bool has_vectors(const void* data, const Strides& stride, int columns, int bytes) {
  const int64_t places = reinterpret_cast<int64_t>(data) | stride.batch * bytes |
                         stride.row * bytes | stride.head * bytes | columns * bytes;
  return places % 16 == 0 && stride.col == 1;
}

// Whether a CTA has few tiles of keys. Then a kernel gains by beginning before the one before it
// has ended. In a longer step it loses: its CTAs get places where others have just ended, two of
// them on one SM beside an SM without any.
template <class Traits>
bool is_short_step(const KvCacheParams& params) {
  constexpr int64_t kFewTiles = 8;
  return params.attention.seqlen_k <= kFewTiles * Traits::kBlockN * params.num_splits;
}

// Launches kKernel, whose parameters are a Launch: DecodeParams, and what complete(launch) adds.
// Then it joins the splits, where these are not a cluster.
template <class Traits, auto kKernel, class Launch, class Complete>
void launch_splits(const KvCacheParams& params, const LaunchContext& context,
                   const Complete& complete) {
  const Attention& a = params.attention;
  const int group = a.heads / a.heads_k;
  const int64_t ctas = number_of_ctas<Traits::kBlockM>(params);
  const bool in_cluster = splits_in_cluster<Traits, kKernel>(params, context);
  const bool in_parts = params.num_splits > 1 && !in_cluster;
  Launch prepared{};
  static_cast<KvCacheParams&>(prepared) = in_parts ? partial_params(params, context) : params;
  prepared.splits_in_cluster = in_cluster;
  prepared.q_has_vectors = has_vectors(a.q, a.q_stride, a.head_dim, 2);
  prepared.by_splits = cutlass::FastDivmod(params.num_splits);
  const int64_t tiles = std::max<int64_t>(ceil_div(rows_of_sequence(a), Traits::kBlockM), 1);
  prepared.by_row_tiles = cutlass::FastDivmod(static_cast<int>(tiles));
  prepared.by_heads_k = cutlass::FastDivmod(a.heads_k);
  prepared.by_group = cutlass::FastDivmod(group);
  complete(prepared);
  const LaunchMode mode(
      is_short_step<Traits>(params) ? LaunchOrder::kWhenAllowed : LaunchOrder::kAfterPrevious,
      in_cluster ? params.num_splits : 1);
  launch<kKernel>(dim3(static_cast<unsigned>(ctas)), dim3(Traits::kThreads),
                  sizeof(typename Traits::SharedStorage), context.stream, prepared, mode);
  if (in_parts) combine_parts<typename Traits::Element>(params, prepared, context.stream);
}

}  // namespace anyflash
