// Choices that depend on sizes only: pure functions.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "device.h"
#include "kernel_descriptor.h"
#include "params.h"

namespace anyflash {

// `pairs` in as few sections of about the same size as there can be, of at most `most`: its size.
inline int equal_sections(int64_t pairs, int64_t most) {
  pairs = std::max<int64_t>(pairs, 1);
  const int64_t limit = std::max<int64_t>(most, 1);
  const int64_t sections = (pairs + limit - 1) / limit;
  return static_cast<int>((pairs + sections - 1) / sections);
}

// How many (batch, head) pairs share a section of the forward grid (sm80/forward/kernel.h).
//
// No bound on the right: 1, so that all row blocks of one head, which read the same K and V, run
// side by side. Causal, say: the row blocks of a section start with the heaviest, which evens out
// the end of the grid. Sections are equally large, since a small one at the end would leave
// multiprocessors idle, and of at most a quarter as many pairs as there are multiprocessors: eight
// or more CTAs then read a tile of K and V at about the same time. On an H200, 512 to 8192 keys,
// that is 1.00 to 1.17 times as fast as sections whose K and V fit in half of the L2 cache.
inline int heads_per_l2_section(const ForwardParams& params, int multiprocessors) {
  if (params.window.right < 0) return 1;
  return equal_sections(params.batch * params.heads, multiprocessors / 4);
}

// Into how many parts the backward divides the query heads that share a K/V head: of at most four
// heads each, so that few K/V heads keep a GPU busy, too, but at most 32, because their sums take
// memory. It depends on the group alone, so that a sequence's results do not depend on its batch.
inline int gqa_splits(const ForwardParams& params) {
  constexpr int kHeads = 4;
  constexpr int kMostParts = 32;
  const int group = params.heads / std::max(params.heads_k, 1);
  return std::clamp((group + kHeads - 1) / kHeads, 1, kMostParts);
}

// How many (batch, key head, part) triples share a section of the backward's grid over blocks of
// keys, as heads_per_l2_section(). Each reads the Q and dO of its heads and adds to their dQ; at
// most half as many as in the forward, because all of this passes the L2 cache. On an H200, causal,
// 4096 tokens, that is 1.05 (head dim 256) and 1.09 times (128) as fast as sections whose Q, dO and
// dQ fit in half of the cache.
inline int heads_per_section_backward(const BackwardParams& params, int multiprocessors) {
  const bool bounded = params.window.left >= 0 || params.window.right >= 0;
  if (!bounded) return 1;
  return equal_sections(params.batch * params.heads_k * params.gqa_splits, multiprocessors / 8);
}

// Decoding: the rows of q that share the keys of one head.
inline int64_t query_rows(const ForwardParams& params) {
  return int64_t{params.seqlen_q} * (params.heads / params.heads_k);
}

// A bound of the keys that a sequence's queries see.
inline int64_t visible_keys(const KvCacheParams& params) {
  const int64_t left = params.window.left;
  if (left < 0 || left >= params.seqlen_k) return params.seqlen_k;
  return std::min<int64_t>(params.seqlen_k, left + params.seqlen_q);
}

// How many CTAs of a kernel a multiprocessor holds at once.
inline int64_t resident_ctas(const KernelDescriptor& row, const DeviceProperties& device) {
  constexpr std::size_t kReservedSmem = 1024;  // of each CTA
  const auto by_smem =
      static_cast<int64_t>(device.smem_per_multiprocessor / (row.smem_bytes + kReservedSmem));
  return std::max<int64_t>(std::min<int64_t>(by_smem, row.tile.ctas), 1);
}

inline constexpr int kMaxSplits = 128;

// Into how many splits the keys of a sequence are divided; a CTA takes the rows of one tile and the
// keys of one split, at least two blocks of them. An SM has room for `each` CTAs.
//
// Of 1 to kMaxSplits, the first whose time is within 5 % of the least. Time is counted in quarters
// of what memory takes for a block of keys where every SM reads one. CTAs on one SM share that, and
// a CTA alone does not use all of it, but 2/3; what a CTA does before and after its blocks, others
// fill. Joining the splits costs five blocks, and a twentieth each. Measured on an H200, head_dim
// 128 and 256, 16 to 2048 blocks.
inline int decode_num_splits(const KvCacheParams& params, const Tile& tile, int64_t each,
                             int64_t multiprocessors) {
  const auto divide = [](int64_t a, int64_t b) { return (a + b - 1) / b; };
  const int64_t ctas = params.batch * params.heads_k * divide(query_rows(params), tile.block_m);
  const int64_t blocks = divide(visible_keys(params), tile.block_n);
  const int most = static_cast<int>(std::min<int64_t>(blocks / 2, kMaxSplits));
  if (ctas == 0 || most <= 1) return 1;
  const auto time = [&](int64_t splits) {
    const int64_t resident = each * multiprocessors;
    const int64_t waves = ctas * splits / resident;
    const int64_t rest = divide(ctas * splits % resident, multiprocessors);  // on the busiest SM
    const int64_t shares =
        waves * std::max<int64_t>(4 * each, 6) + (rest == 0 ? 0 : std::max<int64_t>(4 * rest, 6));
    const int64_t joining = splits == 1 ? 0 : 20 + splits / 5;
    return shares * divide(blocks, splits) + joining;
  };
  int64_t least = time(1);
  for (int splits = 2; splits <= most; ++splits) least = std::min(least, time(splits));
  int splits = 1;
  while (time(splits) * 100 > least * 105) ++splits;
  return splits;
}

// The same on a CPU: enough for 4 tasks on each of 64 threads, of at least 1024 keys. It does not
// depend on the number of threads that there are: neither do the results.
inline int decode_num_splits_on_cpu(const KvCacheParams& params) {
  constexpr int64_t kTasks = 256;
  constexpr int64_t kLeastKeys = 1024;
  const int64_t pairs = std::max<int64_t>(params.batch * params.heads_k, 1);
  const int64_t wanted = std::min<int64_t>((kTasks + pairs - 1) / pairs, 64);
  return static_cast<int>(std::clamp<int64_t>(visible_keys(params) / kLeastKeys, 1, wanted));
}

}  // namespace anyflash
