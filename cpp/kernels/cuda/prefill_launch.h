// Host side of what the prefill kernels of all families have in common.
#pragma once

#include <cstdint>
#include <string>

#include "common/launch.h"
#include "cuda/packed_tiles.h"
#include "cuda/partial_results.h"
#include "kernel_descriptor.h"
#include "params.h"

namespace anyflash {

// Numbers of blocks of query rows, and of these for all heads and splits (cuda/prefill_block.h).
// Refuses a grid that is too large. All kernels' scratch_bytes ask this, so that a plan refuses it,
// before a call appends to the cache.
template <int kBlockM>
int64_t packed_blocks(const KvCacheParams& params) {
  const int64_t row_blocks =
      PackedTiles<kBlockM>(params.attention, 1, params.least_queries).count();
  const int64_t blocks = row_blocks * params.attention.heads * params.num_splits;
  if (blocks > INT32_MAX) {
    throw Error(ErrorCode::kUnsupported,
                "heads * num_splits * blocks of " + std::to_string(kBlockM) + " queries is " +
                    std::to_string(blocks) + "; a CUDA grid holds at most 2147483647 blocks");
  }
  return row_blocks;
}
template <int kBlockM>
int prefill_blocks(const KvCacheParams& params) {
  return static_cast<int>(packed_blocks<kBlockM>(params) * params.attention.heads *
                          params.num_splits);
}

// The forward of `cache`, which is `params` or partial_params() of it.
inline void set_forward(ForwardParams& forward, const KvCacheParams& params,
                        const KvCacheParams& cache) {
  forward.attention = cache.attention;
  forward.out = cache.out;
  forward.out_dtype = cache.out_dtype;
  forward.out_stride = cache.out_stride;
  forward.out_stride.batch = stride_of_split(params);
  forward.lse = cache.lse;
  forward.lse_stride = cache.lse_stride;
  forward.lse_stride.batch = lse_stride_of_split(params);
}

}  // namespace anyflash
