// Packed queries of sequences that are too long for a decoding tile: the forward kernel, one CTA per
// block of query rows of one head, with keys from a cache.
#pragma once

#include <cstdint>
#include <cute/tensor.hpp>

#include "common/launch.h"
#include "params.h"
#include "sm80/decode/packed_tiles.h"
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

// The rows of a sequence's last blocks, which see the most keys, come first; heads are fastest.
template <int kBlockM>
ANYFLASH_DEVICE ForwardWorkTile prefill_block(const PrefillLaunch& params, unsigned index,
                                              CachedSequence& sequence) {
  const Attention& a = params.cache.attention;
  const int64_t tiles = packed_tiles(a, 1, kBlockM);
  const int64_t number = tiles - 1 - index / a.heads;
  ForwardWorkTile block;
  block.batch = sequence_of_tile<kBlockM>(a, 1, number);
  block.head = static_cast<int>(index % a.heads);
  block.head_k = block.head / (a.heads / a.heads_k);
  sequence = cached_sequence(params.cache, block.batch);
  const int64_t row = (number - first_tile<kBlockM>(a, 1, block.batch)) * kBlockM;
  const bool takes = sequence.seqlen_q >= params.cache.least_queries && row >= 0;
  block.first_row = takes && row < sequence.seqlen_q ? static_cast<int>(row) : sequence.seqlen_q;
  block.sequence = {0,
                    sequence.first_q,
                    0,
                    sequence.seqlen_q,
                    sequence.seqlen_k,
                    sequence.seqlen_k,
                    sequence.seqlen_k - sequence.seqlen_q};
  return block;
}

template <class Traits>
struct PrefillStorage : Traits::SharedStorage {
  CachedSequence sequence;
};

// Grid: x = heads of blocks of query rows of all sequences, heads fastest.
template <class Traits, class Variant>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kConfig.min_ctas)
    prefill_kernel(const __grid_constant__ PrefillLaunch params) {
  using namespace cute;
  auto& smem = *reinterpret_cast<PrefillStorage<Traits>*>(anyflash_smem);
  CachedSequence sequence;
  ForwardWorkTile block = prefill_block<Traits::kBlockM>(params, blockIdx.x, sequence);
  if (block.first_row >= block.sequence.seqlen_q) return;  // not a block, or another kernel's
  if (threadIdx.x == 0) {
    smem.block = block;
    smem.sequence = sequence;
  }
  __syncthreads();  // the sequence is known to all

  const Attention& attention = params.forward.attention;
  const CachedKeys keys{params.cache, smem.sequence};
  typename Traits::AccO acc_o;
  clear(acc_o);
  typename Traits::Softmax softmax(attention.scale_log2, false);
  const bool found_nonfinite = ForwardMainloop<Traits, Variant, CachedKeys>::run(
      attention, block, smem, acc_o, softmax, params.q_factor, keys);
  __syncthreads();     // the block is in shared memory, and every warp has done with Q
  block = smem.block;  // from there, because the loop needs the registers
  forward_epilogue<Traits, Variant>(params.forward, block, smem, acc_o, softmax, found_nonfinite,
                                    keys);
}

}  // namespace anyflash::sm80
