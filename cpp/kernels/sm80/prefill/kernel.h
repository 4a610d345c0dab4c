// Packed queries of sequences that are too long for a decoding tile: the forward kernel, one CTA
// per block of query rows of one head, with keys from a cache.
#pragma once

#include <cstdint>
#include <cute/tensor.hpp>

#include "common/launch.h"
#include "cuda/prefill_block.h"
#include "params.h"
#include "sm80/forward/epilogue.h"
#include "sm80/forward/mainloop.h"
#include "sm80/prefill/cached_keys.h"
#include "variant/cache.h"
#include "variant/work_tile.h"

namespace anyflash::sm80 {

struct PrefillLaunch {
  ForwardParams forward;  // scale_log2 and results; its attention is the cache's
  KvCacheParams cache;
  float q_factor = 1.0f;  // what Q is multiplied by: 1, or the scale's sign or 0
};

template <class Traits>
struct PrefillStorage : Traits::SharedStorage {
  CachedSequence sequence;
  TileRows<typename Traits::Element, Traits::kBlockN> rows;
};

// Grid: x = the blocks' numbers.
template <class Traits, class Variant>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kConfig.min_ctas)
    prefill_kernel(const __grid_constant__ PrefillLaunch params) {
  using namespace cute;
  using Element = typename Traits::Element;
  using Keys = CachedKeys<Element, Traits::kBlockN>;
  auto& smem = *reinterpret_cast<PrefillStorage<Traits>*>(anyflash_smem);
  const Attention& attention = params.forward.attention;
  CachedSequence sequence;
  const PrefillNumber number(params.cache, blockIdx.x);
  ForwardWorkTile work_tile = prefill_work_tile<Traits::kBlockM, Traits::kBlockN>(
      params.cache, number, find_packed_block<Traits::kBlockM>(params.cache, number.row_block),
      sequence);
  // No work tile, or another kernel's.
  if (work_tile.first_row >= work_tile.sequence.seqlen_q) return;
  if (threadIdx.x == 0) {
    smem.work_tile = work_tile;
    smem.sequence = sequence;
    smem.rows.k_head =
        static_cast<const Element*>(attention.k) + work_tile.head_k * attention.k_stride.head;
    smem.rows.v_head =
        static_cast<const Element*>(attention.v) + work_tile.head_k * attention.v_stride.head;
  }
  __syncthreads();  // where the sequence lies is known to all

  const Keys keys{params.cache, smem.sequence, smem.rows};
  typename Traits::AccO acc_o;
  clear(acc_o);
  typename Traits::Softmax softmax(attention.scale_log2, false);
  const bool found_nonfinite = ForwardMainloop<Traits, Variant, Keys>::run(
      attention, work_tile, smem, acc_o, softmax, params.q_factor, keys);
  __syncthreads();             // every warp has done with Q
  work_tile = smem.work_tile;  // from there, because the loop needs the registers
  forward_epilogue<Traits, Variant>(params.forward, work_tile, smem, acc_o, softmax,
                                    found_nonfinite, keys);
}

}  // namespace anyflash::sm80
