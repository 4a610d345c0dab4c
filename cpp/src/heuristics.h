// Choices of dispatch and of plans that depend on sizes only: pure functions.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "device.h"
#include "grid_heuristics.h"
#include "kernel_descriptor.h"
#include "params.h"

namespace anyflash {

// Decoding: the rows of q that share the keys of one head.
inline int64_t query_rows(const Attention& attention) {
  return int64_t{attention.seqlen_q} * (attention.heads / attention.heads_k);
}

// A bound of the keys that a sequence's queries see.
inline int64_t visible_keys(const Attention& attention) {
  const int64_t left = attention.window.left;
  if (left < 0 || left >= attention.seqlen_k) return attention.seqlen_k;
  return std::min<int64_t>(attention.seqlen_k, left + attention.seqlen_q);
}

// Of a key and its value, in the kernel's tiles.
inline int tile_columns(const KernelDescriptor& kernel) {
  return kernel.head_dim + (kernel.latent ? 0 : kernel.head_dim_v);
}

// How many CTAs of a kernel a multiprocessor holds at once.
inline int64_t resident_ctas(const KernelDescriptor& kernel, const DeviceProperties& device) {
  constexpr std::size_t kReservedSmem = 1024;  // of each CTA
  const auto by_smem =
      static_cast<int64_t>(device.smem_per_multiprocessor / (kernel.smem_bytes + kReservedSmem));
  return std::max<int64_t>(std::min<int64_t>(by_smem, kernel.tile.ctas), 1);
}

inline constexpr int kMaxSplits = 128;

// Into how many splits the keys of a sequence are divided: `blocks` blocks, for `ctas` tiles of
// rows. A CTA takes the rows of one tile and the keys of one split, at least two blocks of them. An
// SM has room for `ctas_per_sm` CTAs.
//
// Of 1 to kMaxSplits, the first whose time is within 5 % of the least. Time is counted in quarters
// of what memory takes for a block of keys where every SM reads one. CTAs on one SM share that.
// A CTA alone uses 2/3 of it. The time before and after a CTA's blocks is filled by other CTAs.
// Joining the splits costs five blocks, and a twentieth each. Measured on an H200, head_dim 128 and
// 256, 16 to 2048 blocks.
inline int decode_num_splits(int64_t ctas, int64_t blocks, int64_t ctas_per_sm,
                             int64_t multiprocessors) {
  const auto divide = [](int64_t a, int64_t b) { return (a + b - 1) / b; };
  const int most = static_cast<int>(std::min<int64_t>(blocks / 2, kMaxSplits));
  if (ctas == 0 || most <= 1) return 1;
  const auto time = [&](int64_t splits) {
    const int64_t resident = ctas_per_sm * multiprocessors;
    const int64_t waves = ctas * splits / resident;
    const int64_t rest = divide(ctas * splits % resident, multiprocessors);  // on the busiest SM
    const int64_t shares = waves * std::max<int64_t>(4 * ctas_per_sm, 6) +
                           (rest == 0 ? 0 : std::max<int64_t>(4 * rest, 6));
    const int64_t joining = splits == 1 ? 0 : 20 + splits / 5;
    return shares * divide(blocks, splits) + joining;
  };
  int64_t least = time(1);
  for (int splits = 2; splits <= most; ++splits) least = std::min(least, time(splits));
  int splits = 1;
  while (time(splits) * 100 > least * 105) ++splits;
  return splits;
}

// Few rows wait for memory alone, of which a CTA without neighbours gets more than its share. It
// takes 0.66 us for 32 KB on an H200, where memory has 0.95 for 132 of them. An H100 measured 58 %.
inline int64_t alone_by_memory(const DeviceProperties& gpu) {
  constexpr double kLeast = 58.0;
  constexpr double kMost = 100.0;
  constexpr double kAloneGigabytesPerSecond = 49.6;
  constexpr double kReached = 0.92;  // of the bandwidth by clock and width
  const double share =
      kReached * gpu.memory_gigabytes_per_second / std::max(gpu.multiprocessors, 1);
  return static_cast<int64_t>(std::clamp(100.0 * share / kAloneGigabytesPerSecond, kLeast, kMost));
}

// What box_num_splits() is told of a kernel.
struct BoxKernel {
  int64_t ctas_per_sm;
  int64_t block_bytes;  // of K and V
  int64_t alone;        // what a block takes a CTA at least, in percent as below
  int64_t beginning;    // of a turn of CTAs, and its end: in percent of 32 KB
  bool owns_sm;         // an SM has one CTA
  bool joins_in_cluster;
};
inline BoxKernel box_kernel_of(const KernelDescriptor& kernel, int64_t ctas_per_sm,
                               const DeviceProperties& gpu) {
  // With 64 rows the tensor cores take as long for a block as memory does.
  constexpr int64_t kAloneByProducts = 100;
  // Kernels above head dim 256 have two buffers, and compute in one of them.
  constexpr int64_t kAloneByBuffers = 67;
  // Above 128 a CTA has twice as many bytes on their way.
  constexpr int64_t kAloneOfWideHeads = 50;
  // Of 8-bit elements memory takes half the time of a block, and a CTA longer than of 16 bits. So
  // other CTAs do not fill the time in which one begins.
  constexpr int64_t kAloneByConversions = 230;
  constexpr int64_t kBeginningOf8Bits = 650;
  const bool is_8bit = (kernel.features & kQuantizedCache) != 0;
  const int columns = tile_columns(kernel);
  BoxKernel box{};
  box.ctas_per_sm = ctas_per_sm;
  box.block_bytes = (is_8bit ? 1 : 2) * kernel.tile.block_n * columns;
  box.alone = is_8bit                     ? kAloneByConversions
              : kernel.tile.block_m >= 64 ? kAloneByProducts
              : kernel.head_dim > 256     ? kAloneByBuffers
              : kernel.head_dim > 128     ? kAloneOfWideHeads
                                          : alone_by_memory(gpu);
  box.beginning = is_8bit ? kBeginningOf8Bits : 0;
  box.owns_sm = kernel.tile.ctas == 1;
  box.joins_in_cluster = kernel.joins_in_cluster;
  return box;
}

// The same for the kernels that load boxes, whose CTA alone uses more of the memory. Time is
// counted in percent of what memory takes for a block where every SM reads one. An SM's CTAs take
// 50 each. Joining costs 3 to 4 blocks of 32 KB, or less than one in a cluster. Measured on an
// H100 and an H200, head dims 64 to 256 and latent attention, one to 16 sequences of 512 to 131072
// keys. (Not of head dim 512, which has latent attention's constant.)
inline int box_num_splits(int64_t ctas, int64_t blocks, int64_t multiprocessors,
                          const BoxKernel& kernel) {
  constexpr int64_t kBytes = 32 * 1024;
  const auto divide = [](int64_t a, int64_t b) { return (a + b - 1) / b; };
  const int most = static_cast<int>(std::min<int64_t>(blocks / 2, kMaxSplits));
  if (ctas == 0 || most <= 1) return 1;
  const auto time = [&](int64_t splits) {
    const int64_t all = ctas * splits;
    const int64_t resident = kernel.ctas_per_sm * multiprocessors;
    const int64_t rest = all % resident;
    const int64_t of_rest =
        std::max({kernel.alone, 100 * rest / multiprocessors, 50 * divide(rest, multiprocessors)});
    const int64_t of_all = std::max(kernel.alone, 100 * kernel.ctas_per_sm);
    const int64_t block = all / resident * of_all + (rest == 0 ? 0 : of_rest);
    const bool in_cluster =
        kernel.joins_in_cluster && suits_cluster(all, splits, multiprocessors, kernel.owns_sm);
    const int64_t joining = splits == 1 ? 0 : in_cluster ? 40 : 300 + 5 * splits;
    const int64_t once = joining + divide(all, resident) * kernel.beginning;
    return block * divide(blocks, splits) + once * kBytes / kernel.block_bytes;
  };
  int best = 1;
  for (int splits = 2; splits <= most; ++splits) {
    if (time(splits) * 100 < time(best) * 97) best = splits;
  }
  return best;
}

inline int64_t row_tiles_of(const Attention& attention, const Tile& tile) {
  return attention.batch * ((query_rows(attention) + tile.block_m - 1) / tile.block_m);
}

inline int64_t decode_blocks(const Attention& attention, const Tile& tile) {
  return (visible_keys(attention) + tile.block_n - 1) / tile.block_n;
}

// Packed queries: a bound of the tiles of rows, `group` a query, of sequences with at least `least`
// queries.
inline int64_t packed_row_tiles(const Attention& attention, int64_t group, int tile_rows,
                                int64_t least) {
  const int64_t sequences =
      std::min(attention.batch, attention.total_q / std::max<int64_t>(least, 1));
  return attention.total_q * group / tile_rows + sequences;
}

// Prefill, which is bound by arithmetic: as many as fill the GPU, of at least 16 blocks each. Where
// an SM has one CTA, an SM with one more than others makes all wait: fewer splits may end sooner.
inline int prefill_num_splits(int64_t ctas, int64_t blocks, int64_t ctas_per_sm,
                              int64_t multiprocessors) {
  constexpr int64_t kLeastBlocks = 16;
  if (ctas == 0) return 1;
  const int64_t places = std::max<int64_t>(ctas_per_sm * multiprocessors, 1);
  const int64_t most = std::clamp<int64_t>(blocks / kLeastBlocks, 1, (places + ctas - 1) / ctas);
  if (ctas_per_sm > 1) return static_cast<int>(most);
  const auto turns = [&](int64_t splits) { return (ctas * splits + places - 1) / places; };
  int64_t best = 1;
  for (int64_t splits = 2; splits <= most; ++splits) {
    if (turns(splits) * best < turns(best) * splits) best = splits;
  }
  return static_cast<int>(best);
}

// Into how many splits a GPU's kernel divides the keys, where a launch without splits has `ctas`
// CTAs.
inline int splits_on_gpu(const KernelDescriptor& kernel, const DeviceProperties& gpu,
                         const Attention& attention, int64_t ctas) {
  const int64_t blocks = decode_blocks(attention, kernel.tile);
  const int64_t resident = resident_ctas(kernel, gpu);
  const int64_t multiprocessors = std::max(gpu.multiprocessors, 1);
  if (kernel.prefill) return prefill_num_splits(ctas, blocks, resident, multiprocessors);
  if (!kernel.loads_boxes) return decode_num_splits(ctas, blocks, resident, multiprocessors);
  return box_num_splits(ctas, blocks, multiprocessors, box_kernel_of(kernel, resident, gpu));
}

// Decoding on a CPU: enough for 4 tasks on each of 64 threads, of at least 1024 keys. It does not
// depend on the number of threads that there are: neither do the results.
inline int decode_num_splits_on_cpu(const Attention& attention) {
  constexpr int64_t kTasks = 256;
  constexpr int64_t kLeastKeys = 1024;
  // A long packed sequence makes tasks of its own, and its parts would be many.
  constexpr int64_t kRows = 64;
  const int64_t sequences = std::max<int64_t>(attention.batch, attention.total_q / kRows);
  const int64_t pairs = std::max<int64_t>(sequences * attention.heads_k, 1);
  const int64_t wanted = std::min<int64_t>((kTasks + pairs - 1) / pairs, 64);
  return static_cast<int>(std::clamp<int64_t>(visible_keys(attention) / kLeastKeys, 1, wanted));
}

}  // namespace anyflash
