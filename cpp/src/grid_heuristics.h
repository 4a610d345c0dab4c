// How GPU kernels cut and order their grids: pure functions of sizes, which their launches call.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "anyflash/error.h"
#include "params.h"

namespace anyflash {

// The forward's grid: blocks of `block_m` query rows of all heads and sequences. Throws
// Error(kUnsupported) if there are more than a CUDA grid holds.
inline int forward_grid_blocks(const Attention& attention, int block_m) {
  const int64_t row_blocks = (int64_t{attention.seqlen_q} + block_m - 1) / block_m;
  const int64_t blocks = row_blocks * attention.batch * attention.heads;
  if (blocks > INT32_MAX) {
    throw Error(ErrorCode::kUnsupported,
                "batch * heads * ceil(seqlen_q / " + std::to_string(block_m) + ") is " +
                    std::to_string(blocks) + "; a CUDA grid holds at most 2147483647 blocks");
  }
  return static_cast<int>(blocks);
}

// `pairs` in as few sections of about the same size as there can be, of at most `most`: its size.
inline int equal_sections(int64_t pairs, int64_t most) {
  pairs = std::max<int64_t>(pairs, 1);
  const int64_t limit = std::max<int64_t>(most, 1);
  const int64_t sections = (pairs + limit - 1) / limit;
  return static_cast<int>((pairs + sections - 1) / sections);
}

// How many (batch, head) pairs share an L2 section of the forward's grid (cuda/tile_scheduler.h).
//
// Without a bound on the right: 1. All row blocks of one head, which read the same K and V, then
// run side by side. With one (causal, say) the row blocks of a section start with the heaviest,
// which evens out the end of the grid. Sections are equally large, since a small one at the end
// would leave multiprocessors idle. They hold at most a quarter as many pairs as there are
// multiprocessors: eight or more CTAs then read a tile of K and V at about the same time. On an
// H200, 512 to 8192 keys, that is 1.00 to 1.17 times as fast as sections whose K and V fit in half
// of the L2 cache.
//
// `most_keys`: a section has so many keys over all its heads at most, but always two heads or more.
inline int heads_per_l2_section(const Attention& attention, int multiprocessors,
                                int64_t most_keys = INT64_MAX) {
  if (attention.window.right < 0) return 1;
  const int64_t by_keys = most_keys / std::max<int64_t>(attention.seqlen_k, 1);
  return equal_sections(attention.batch * attention.heads,
                        std::min<int64_t>(multiprocessors / 4, std::max<int64_t>(by_keys, 2)));
}

// Decoding: whether the CTAs of a tile's splits, of `ctas` in all, should be one cluster, which
// joins them: that saves a kernel. But a GPU that clusters fill has its work shared out less
// evenly, unless they are small. Where a CTA has an SM for itself, clusters of up to six fill three
// quarters of an H200 as well as CTAs do; clusters of seven do not find places for as many.
inline bool suits_cluster(int64_t ctas, int64_t splits, int64_t multiprocessors, bool owns_sm) {
  constexpr int64_t kLargestOfMany = 6;
  const bool fits = 1 < splits && splits <= kLargestCluster;
  const bool fills_more = owns_sm && splits <= kLargestOfMany;
  const int64_t most = fills_more ? multiprocessors * 3 / 4 : multiprocessors / 2;
  return fits && (splits == 2 || ctas <= most);
}

// Number of CTAs that split the query heads of one K/V head in the backward. Each takes at most
// four heads, so that few K/V heads keep a GPU busy, too. There are at most 32, because their sums
// take memory. It depends on the group alone, so that a sequence's results do not depend on its
// batch.
inline int gqa_splits(int heads, int heads_k) {
  constexpr int kHeads = 4;
  constexpr int kMostSplits = 32;
  const int group = heads / std::max(heads_k, 1);
  return std::clamp((group + kHeads - 1) / kHeads, 1, kMostSplits);
}

// How many (batch, key head, GQA split) triples share an L2 section of the backward's grid over
// blocks of keys. Each reads the Q and dO of its heads and adds to their dQ. All of this passes the
// L2 cache, so a section holds at most half as many as in the forward. On an H200, causal, 4096
// tokens, that is 1.05 (head dim 256) and 1.09 times (128) as fast as other sections. The others
// are those whose Q, dO and dQ fit in half of the cache.
inline int backward_heads_per_l2_section(const Attention& attention, int multiprocessors) {
  if (!attention.window.is_bounded()) return 1;
  const int64_t splits = gqa_splits(attention.heads, attention.heads_k);
  return equal_sections(attention.batch * attention.heads_k * splits, multiprocessors / 8);
}

// The same for kernels of one CTA a multiprocessor, with blocks of `block_n` keys: as many triples
// as one wave of CTAs has. CTAs drift apart over a long sequence. The fewer heads are at work, the
// less has to lie in the L2 cache between the first CTA that needs it and the last. A section's
// last blocks are short under a causal mask, so that small sections leave nothing idle. On an H100,
// head dim 128, causal, 32 heads on 8, this is 1.4 times as fast as above with 65536 keys, and 1.7
// times with 131072. Up to 16384 keys it is as fast as above.
inline int backward_heads_per_wave(const Attention& attention, int block_n, int multiprocessors) {
  const int64_t blocks =
      std::max((int64_t{attention.seqlen_k} + block_n - 1) / block_n, int64_t{1});
  const int64_t wave = std::max<int64_t>(multiprocessors / blocks, 1);
  return static_cast<int>(
      std::min<int64_t>(wave, backward_heads_per_l2_section(attention, multiprocessors)));
}

}  // namespace anyflash
