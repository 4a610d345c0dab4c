// Packed queries of sequences that are too long for a decoding tile: the forward kernel, one CTA
// per block of query rows of one head, with keys from a cache.
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
#include "variant/mask.h"
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

// Of a sequence, the keys of a split are a sequence, too: its keys begin later, and the diagonal
// with them.
template <int kBlockN>
ANYFLASH_DEVICE void take_split(const KvCacheParams& p, int split, int rows,
                                ForwardWorkTile& work_tile, CachedSequence& sequence) {
  const Mask mask(work_tile.sequence, p.attention.window);
  const int last_row = min(work_tile.first_row + rows, work_tile.sequence.seqlen_q) - 1;
  const SplitKeys keys =
      split_keys(p, split, mask.first_key(work_tile.first_row), mask.end_key(last_row), kBlockN);
  sequence.first_row += keys.begin;
  work_tile.sequence.seqlen_k = work_tile.sequence.all_keys = keys.end - keys.begin;
  work_tile.sequence.shift -= keys.begin;
  // Along the splits parts are apart; packed queries have no stride of batches.
  work_tile.sequence.batch = split;
}

// Grid: x = splits of heads of blocks of query rows of all sequences, splits fastest. The rows of a
// sequence's last blocks, which see the most keys, come first.
template <int kBlockM, int kBlockN>
ANYFLASH_DEVICE ForwardWorkTile prefill_block(const KvCacheParams& p, unsigned index,
                                              CachedSequence& sequence) {
  const Attention& a = p.attention;
  const int split = index % p.num_splits;
  index /= p.num_splits;
  const PackedTiles<kBlockM> tiles(a, 1, p.least_queries);
  const int64_t tile = tiles.count() - 1 - index / a.heads;
  ForwardWorkTile work_tile;
  work_tile.batch = tiles.sequence_of(tile);
  const int64_t row = (tile - tiles.first(work_tile.batch)) * kBlockM;
  const int queries = queries_of(p, work_tile.batch);
  work_tile.first_row = work_tile.sequence.seqlen_q = queries;
  if (queries < p.least_queries || row < 0 || row >= queries) return work_tile;  // there is none
  work_tile.first_row = static_cast<int>(row);
  work_tile.head = static_cast<int>(index % a.heads);
  work_tile.head_k = work_tile.head / (a.heads / a.heads_k);
  sequence = cached_sequence(p, work_tile.batch);
  work_tile.sequence.batch = 0;
  work_tile.sequence.first_q = sequence.first_q;
  work_tile.sequence.first_k = 0;
  work_tile.sequence.seqlen_q = sequence.seqlen_q;
  work_tile.sequence.seqlen_k = work_tile.sequence.all_keys = sequence.seqlen_k;
  work_tile.sequence.shift = sequence.seqlen_k - sequence.seqlen_q;
  if (p.num_splits > 1) take_split<kBlockN>(p, split, kBlockM, work_tile, sequence);
  return work_tile;
}

template <class Traits, class Variant>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kConfig.min_ctas)
    prefill_kernel(const __grid_constant__ PrefillLaunch params) {
  using namespace cute;
  using Element = typename Traits::Element;
  using Keys = CachedKeys<Element, Traits::kBlockN>;
  auto& smem = *reinterpret_cast<PrefillStorage<Traits>*>(anyflash_smem);
  const Attention& attention = params.forward.attention;
  CachedSequence sequence;
  ForwardWorkTile work_tile =
      prefill_block<Traits::kBlockM, Traits::kBlockN>(params.cache, blockIdx.x, sequence);
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
