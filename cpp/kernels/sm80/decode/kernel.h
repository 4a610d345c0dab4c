// Decoding: attention of a few queries to a cache of keys and values (Flash-Decoding,
// https://crfm.stanford.edu/2023/10/12/flashdecoding.html). Rows are the queries and heads that
// share a head of K and V. A CTA takes a tile of rows and one split of their keys.
#pragma once

#include <cute/tensor.hpp>

#include "common/cluster.h"
#include "common/dependent_launch.h"
#include "common/launch.h"
#include "common/softmax.h"
#include "sm80/decode/epilogue.h"
#include "sm80/decode/mainloop.h"
#include "sm80/decode/scores.h"
#include "sm80/decode/traits.h"
#include "sm80/decode/work_tile.h"

namespace anyflash::sm80 {

// One split's part of the result.
template <class Traits>
ANYFLASH_DEVICE void decode_split(const DecodeLaunch& params, const DecodeWorkTile& block,
                                  typename Traits::SharedStorage& smem) {
  using namespace cute;
  auto acc_o = partition_fragment_C(typename Traits::TiledMma{},
                                    Shape<Int<Traits::kBlockM>, Int<Traits::kWarpColumns>>{});
  clear(acc_o);  // (MMA, MMA_M, MMA_N)
  OnlineSoftmax<2> softmax(kLog2E);
  float factors[DecodeRows::kRows];
  const bool found_nonfinite =
      decode_mainloop<Traits>(params, block, smem, acc_o, softmax, factors);
  decode_epilogue<Traits>(params, block, smem, acc_o, softmax, factors, found_nonfinite);
}

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kTile.ctas)
    decode_kernel(const __grid_constant__ DecodeLaunch params) {
  auto& smem = *reinterpret_cast<typename Traits::SharedStorage*>(anyflash_smem);
  if (threadIdx.x < 32) {
    const CachedWorkTile here =
        cached_block<Traits::kBlockM, Traits::kBlockN>(params, static_cast<int>(blockIdx.x));
    if (threadIdx.x == 0) smem.block = here;
  }
  __syncthreads();  // the block is known to all
  const DecodeWorkTile& block = smem.block;
  if (block.rows <= 0) return;
  if (params.num_splits > 1 && block.keys.begin >= block.keys.end) {
    decode_nothing<Traits>(params, block, smem.result);
  } else {
    decode_split<Traits>(params, block, smem);
  }
  allow_next_kernel();  // not earlier: CTAs that wait for this kernel take places on SMs
#if ANYFLASH_HAS_CLUSTERS
  if (params.splits_in_cluster) {
    cluster_sync();  // all splits are in shared memory
    const bool float_out = params.out_dtype == DType::kFloat32;
    if (float_out) join_splits<Traits, float>(params, block, smem.result);
    else join_splits<Traits, typename Traits::Element>(params, block, smem.result);
    cluster_sync();  // no CTA reads this one's any more
  }
#endif
}

}  // namespace anyflash::sm80
