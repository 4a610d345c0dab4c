// heuristics.h: what its comments promise, over a table of sizes.
#include "heuristics.h"

#include <algorithm>
#include <climits>
#include <cstdint>
#include <utility>

#include "check.h"

using anyflash::Attention;
using anyflash::backward_heads_per_l2_section;
using anyflash::backward_heads_per_wave;
using anyflash::decode_num_splits_on_cpu;
using anyflash::DeviceProperties;
using anyflash::gqa_splits;
using anyflash::heads_per_l2_section;
using anyflash::KernelDescriptor;
using anyflash::query_rows;
using anyflash::resident_ctas;
using anyflash::suits_cluster;
using anyflash::Tile;
using anyflash::visible_keys;

namespace {

Attention causal_params(int64_t batch, int heads, int heads_k, int seqlen_k, int head_dim) {
  Attention p;
  p.batch = batch;
  p.heads = heads;
  p.heads_k = heads_k;
  p.seqlen_q = seqlen_k;
  p.seqlen_k = seqlen_k;
  p.head_dim = head_dim;
  p.head_dim_v = head_dim;
  p.window.right = 0;
  return p;
}

// Of `pairs`, in sections of at most `most`.
void check_section(int64_t section, int64_t pairs, int64_t most) {
  CHECK(section >= 1);
  CHECK(section <= std::max<int64_t>(pairs, 1));
  CHECK(section <= std::max<int64_t>(most, 1));
  // The last section lacks fewer pairs than there are sections, and one section fewer is too few.
  const int64_t sections = (pairs + section - 1) / section;
  CHECK(sections * section - pairs < std::max<int64_t>(sections, 1));
  if (sections > 1) CHECK((sections - 1) * std::max<int64_t>(most, 1) < pairs);
}

void check_bounds(const Attention& p, int multiprocessors) {
  const int section = heads_per_l2_section(p, multiprocessors);
  check_section(section, p.batch * p.heads, multiprocessors / 4);

  Attention all = p;
  all.window = {5, -1};
  CHECK_EQ(heads_per_l2_section(all, multiprocessors), 1);
  Attention window = p;
  window.window.right = 1000;
  CHECK_EQ(heads_per_l2_section(window, multiprocessors), section);
}

void check_backward_bounds(const Attention& p, int multiprocessors) {
  const int section = backward_heads_per_l2_section(p, multiprocessors);
  check_section(section, p.batch * p.heads_k * gqa_splits(p.heads, p.heads_k), multiprocessors / 8);

  Attention window = p;
  window.window = {7, -1};
  CHECK_EQ(backward_heads_per_l2_section(window, multiprocessors), section);
  window.window = {-1, -1};
  CHECK_EQ(backward_heads_per_l2_section(window, multiprocessors), 1);
}

Attention decode_params(int64_t batch, int heads_k, int group, int seqlen_q, int capacity) {
  Attention p;
  p.batch = batch;
  p.heads = heads_k * group;
  p.heads_k = heads_k;
  p.seqlen_q = seqlen_q;
  p.seqlen_k = capacity;
  return p;
}

int64_t divide(int64_t a, int64_t b) { return (a + b - 1) / b; }

// In quarters of a block of keys, wave by wave: CTAs on the busiest SM share memory, and joining
// the splits costs as well.
int64_t decode_time(int64_t ctas, int64_t blocks, int64_t splits, int64_t each, int64_t sms) {
  int64_t time = splits > 1 ? 20 + splits / 5 : 0;
  for (int64_t left = ctas * splits; left > 0; left -= each * sms) {
    const int64_t busiest = std::min(each, divide(left, sms));
    time += std::max<int64_t>(4 * busiest, 6) * divide(blocks, splits);
  }
  return time;
}

// Of a kernel that decodes, of which an SM holds `each` CTAs.
int splits_of(const Attention& p, const Tile& tile, int64_t each, int64_t sms) {
  KernelDescriptor kernel{};
  kernel.tile = tile;
  kernel.tile.ctas = static_cast<int>(each);
  DeviceProperties device;
  device.multiprocessors = static_cast<int>(sms);
  device.smem_per_multiprocessor = 167936;
  return anyflash::splits_on_gpu(kernel, device, p, anyflash::row_tiles_of(p, tile) * p.heads_k);
}

void check_splits(const Attention& p, const Tile& tile, int64_t each, int64_t sms) {
  const int splits = splits_of(p, tile, each, sms);
  const int64_t ctas = p.batch * p.heads_k * divide(query_rows(p), tile.block_m);
  const int64_t blocks = divide(visible_keys(p), tile.block_n);
  const int64_t most = std::min<int64_t>(blocks / 2, 128);
  CHECK(splits >= 1 && splits <= std::max<int64_t>(most, 1));
  // A window counts as if its keys were all there are.
  Attention seen = p;
  seen.seqlen_k = static_cast<int>(visible_keys(p));
  seen.window = {-1, -1};
  CHECK_EQ(splits_of(seen, tile, each, sms), splits);
  // Nothing to gain: no rows, or every SM is full, in all waves or in most of them.
  if (ctas % (each * sms) == 0 || ctas > 16 * each * sms) {
    CHECK_EQ(splits, 1);
    return;
  }
  // The first that is hardly slower than any other.
  const int64_t time = decode_time(ctas, blocks, splits, each, sms);
  for (int64_t other = 1; other <= most; ++other) {
    const int64_t other_time = decode_time(ctas, blocks, other, each, sms);
    CHECK(time * 100 <= other_time * 105);
    if (other < splits) CHECK(other_time > time);
  }
}

void check_cpu_splits(const Attention& p) {
  const int splits = decode_num_splits_on_cpu(p);
  CHECK(splits >= 1 && splits <= 64);
  if (splits == 1) return;
  CHECK(int64_t{splits} * 1024 <= visible_keys(p));
  CHECK((splits - 1) * p.batch * p.heads_k < 256);
}

void check_windows() {
  Attention p = decode_params(1, 1, 1, 3, 10000);
  p.window = {-1, 0};
  CHECK_EQ(visible_keys(p), 10000);
  p.window = {500, 0};
  CHECK_EQ(visible_keys(p), 503);
  p.window = {9999, -1};
  CHECK_EQ(visible_keys(p), 10000);
  p.window = {INT64_MAX, -1};
  CHECK_EQ(visible_keys(p), 10000);
}

void check_resident_ctas() {
  KernelDescriptor kernel{};
  kernel.tile = {16, 64, 4, 3};
  DeviceProperties device;
  device.smem_per_multiprocessor = 167936;  // A100
  kernel.smem_bytes = 20000;                // room for seven, registers for three
  CHECK_EQ(resident_ctas(kernel, device), 3);
  kernel.smem_bytes = 82944;  // with what the driver takes, just two
  CHECK_EQ(resident_ctas(kernel, device), 2);
  kernel.smem_bytes = 82945;
  CHECK_EQ(resident_ctas(kernel, device), 1);
  kernel.smem_bytes = 200000;  // at least one, whatever the numbers say
  CHECK_EQ(resident_ctas(kernel, device), 1);
}

// An H200 (132 SMs), head_dim 128: sequences of `blocks` blocks for `ctas` CTAs, three an SM.
int measured_splits(int64_t ctas, int blocks) {
  return splits_of(decode_params(ctas, 1, 4, 1, 64 * blocks), {16, 64, 4, 3}, 3, 132);
}

// What was, or was close to, the fastest there.
void check_measured() {
  CHECK_EQ(measured_splits(8, 16), 8);     // one sequence of 1024 keys and 8 heads
  CHECK_EQ(measured_splits(512, 256), 2);  // 64 of 16384: the second wave is not full
  CHECK_EQ(measured_splits(1024, 16), 1);  // 128 of 1024
  CHECK_EQ(measured_splits(1, 256), 64);   // one of 16384 and a single head
  CHECK_EQ(measured_splits(256, 512), 1);  // 32 of 32768: two on nearly every SM
}

// A kernel of Hopper's own, of tiles with 64 keys.
KernelDescriptor box_kernel(int head_dim, int rows, int ctas_per_sm) {
  KernelDescriptor kernel{};
  kernel.loads_boxes = true;
  kernel.head_dim = kernel.head_dim_v = head_dim;
  kernel.latent = head_dim > 256;
  kernel.tile = {rows, 64, 4, ctas_per_sm};
  kernel.joins_in_cluster = rows == 16;
  return kernel;
}

constexpr double kH100 = 3352.0;  // GB/s
constexpr double kH200 = 4917.0;

int box_splits(const KernelDescriptor& kernel, int64_t ctas, int blocks, double bandwidth = kH200) {
  DeviceProperties hopper;
  hopper.multiprocessors = 132;
  hopper.smem_per_multiprocessor = 228 * 1024;
  hopper.memory_gigabytes_per_second = bandwidth;
  return anyflash::splits_on_gpu(kernel, hopper, decode_params(1, 1, 1, 1, 64 * blocks), ctas);
}

// An H100: the same, head dim 128.
int measured_box_splits(int64_t ctas, int blocks) {
  return box_splits(box_kernel(128, 16, 2), ctas, blocks, kH100);
}

void check_measured_boxes() {
  CHECK_EQ(measured_box_splits(8, 16), 8);     // one sequence of 1024 keys and 8 heads: a cluster
  CHECK_EQ(measured_box_splits(8, 256), 8);    // of 16384
  CHECK_EQ(measured_box_splits(32, 16), 2);    // four of 1024
  CHECK_EQ(measured_box_splits(128, 64), 1);   // 16 of 4096: a CTA on nearly every SM
  CHECK_EQ(measured_box_splits(1024, 16), 1);  // 128 of 1024
  CHECK(measured_box_splits(1, 256) > 32);     // one of 16384 and a single head
  CHECK_EQ(measured_box_splits(1, 3), 1);      // fewer than four blocks are never split
  CHECK_EQ(measured_box_splits(0, 100), 1);
  // Nobody knows the bandwidth.
  CHECK_EQ(box_splits(box_kernel(128, 16, 2), 8, 256, 0.0), 8);
  // An H200: a CTA without neighbours does not read much more than its share.
  CHECK_EQ(box_splits(box_kernel(128, 16, 2), 8, 16), 8);
  CHECK(box_splits(box_kernel(128, 16, 2), 8, 256) > 8);
  CHECK_EQ(box_splits(box_kernel(128, 16, 2), 32, 16), 2);
  CHECK_EQ(box_splits(box_kernel(128, 16, 2), 32, 64), 3);  // one sequence of 4096, 32 heads
  CHECK_EQ(box_splits(box_kernel(128, 16, 2), 128, 64), 1);
  CHECK_EQ(box_splits(box_kernel(256, 16, 1), 16, 64), 4);  // one of 4096, 16 heads
  // Latent attention of 16 sequences of 4096 keys: with 16 heads in clusters, with 128 without.
  CHECK_EQ(box_splits(box_kernel(576, 16, 1), 16, 64), 6);
  CHECK_EQ(box_splits(box_kernel(576, 64, 1), 32, 64), 4);
}

// An H200, caches of 8 bits: what was, or was close to, the fastest there.
void check_8bit_boxes() {
  const auto kernel = [](int head_dim, int rows, int ctas_per_sm) {
    KernelDescriptor one = box_kernel(head_dim, rows, ctas_per_sm);
    one.features = anyflash::kQuantizedCache;
    return one;
  };
  CHECK_EQ(box_splits(kernel(128, 16, 3), 128, 256), 3);  // 16 sequences of 16384, 8 heads
  CHECK_EQ(box_splits(kernel(128, 16, 3), 256, 64), 1);   // 32 of 4096
  CHECK_EQ(box_splits(kernel(128, 16, 3), 512, 64), 2);   // 64
  CHECK_EQ(box_splits(kernel(128, 16, 3), 1024, 64), 1);  // 128
  CHECK_EQ(box_splits(kernel(128, 32, 2), 128, 256), 2);
  CHECK_EQ(box_splits(kernel(128, 64, 1), 128, 256), 1);  // a CTA on nearly every SM
  CHECK_EQ(box_splits(kernel(256, 16, 2), 64, 128), 4);   // 16 of 8192, 4 heads
  CHECK_EQ(box_splits(kernel(576, 16, 1), 16, 64), 8);    // latent: 16 of 4096
  CHECK_EQ(box_splits(kernel(576, 64, 1), 32, 256), 4);   // 16 of 16384, 128 heads
}

void check_clusters() {
  constexpr int kSms = 132;
  CHECK(suits_cluster(8, 8, kSms, false));
  CHECK(suits_cluster(66, 6, kSms, false));
  CHECK(!suits_cluster(72, 6, kSms, false));
  CHECK(suits_cluster(1024, 2, kSms, false));  // pairs always find places
  CHECK(!suits_cluster(1, 1, kSms, false));
  CHECK(!suits_cluster(9, 9, kSms, true));  // more than a cluster may have
  // A CTA has an SM for itself.
  CHECK(suits_cluster(96, 6, kSms, true));
  CHECK(!suits_cluster(102, 6, kSms, true));
  CHECK(!suits_cluster(70, 7, kSms, true));
  CHECK(suits_cluster(64, 8, kSms, true));
}

void check_decode_examples() {
  const Tile tile{16, 64, 4};
  // CTAs count, not where they come from: sequences, heads, or rows of a group.
  const int splits = splits_of(decode_params(24, 1, 1, 1, 8192), tile, 2, 132);
  CHECK(splits > 1);
  CHECK_EQ(splits_of(decode_params(3, 8, 16, 1, 8192), tile, 2, 132), splits);
  CHECK_EQ(splits_of(decode_params(1, 8, 3, 16, 8192), tile, 2, 132), splits);
  // Fewer than four blocks are never split.
  CHECK_EQ(splits_of(decode_params(1, 8, 4, 1, 192), tile, 2, 132), 1);
  CHECK_EQ(splits_of(decode_params(1, 1, 1, 1, 0), tile, 2, 132), 1);

  CHECK_EQ(decode_num_splits_on_cpu(decode_params(1, 8, 4, 1, 131072)), 32);
  CHECK_EQ(decode_num_splits_on_cpu(decode_params(1, 1, 4, 1, 131072)), 64);
  CHECK_EQ(decode_num_splits_on_cpu(decode_params(1, 8, 4, 1, 2047)), 1);
  CHECK_EQ(decode_num_splits_on_cpu(decode_params(1, 8, 4, 1, 2048)), 2);
  CHECK_EQ(decode_num_splits_on_cpu(decode_params(256, 1, 4, 1, 1 << 20)), 1);
  CHECK_EQ(decode_num_splits_on_cpu(decode_params(0, 1, 4, 1, 0)), 1);
  Attention packed = decode_params(1, 8, 4, 8192, 131072);
  packed.total_q = 8192;
  CHECK_EQ(decode_num_splits_on_cpu(packed), 1);
}

void check_decode() {
  for (const int64_t batch : {0, 1, 3, 32, 1000}) {
    for (const int heads_k : {1, 8}) {
      for (const int seqlen_q : {0, 1, 9, 100}) {
        for (const int capacity : {0, 1, 64, 257, 1000, 8192, 131072, INT_MAX - 4095}) {
          Attention p = decode_params(batch, heads_k, 4, seqlen_q, capacity);
          for (const int64_t left : {-1, 300}) {
            p.window = {left, 0};
            for (const Tile& tile : {Tile{16, 64, 4}, Tile{64, 128, 4}}) {
              for (const int64_t each : {1, 2, 3, 4}) {
                for (const int64_t sms : {1, 46, 108, 132}) check_splits(p, tile, each, sms);
              }
            }
            check_cpu_splits(p);
          }
        }
      }
    }
  }
}

}  // namespace

// Packed queries: there are at least as many tiles as a batch of such sequences can have.
void check_packed() {
  for (const int64_t least : {1, 5, 64}) {
    for (const int64_t group : {1, 4, 70}) {
      for (const int tile : {64, 128}) {
        Attention p = decode_params(7, 1, 1, 1, 1000);
        p.total_q = 7 * least;  // each as short as may be
        const int64_t of_each = divide(least * group, tile);
        CHECK(anyflash::packed_row_tiles(p, group, tile, least) >= 7 * of_each);
        p.total_q = 6 * least + 1000;  // one is long
        const int64_t of_long = divide(1000 * group, tile);
        CHECK(anyflash::packed_row_tiles(p, group, tile, least) >= 6 * of_each + of_long);
        p.batch = 0;
        p.total_q = 0;
        CHECK_EQ(anyflash::packed_row_tiles(p, group, tile, least), 0);
      }
    }
  }
  // As many splits as fill the GPU, none of fewer than 16 blocks.
  CHECK_EQ(anyflash::prefill_num_splits(0, 128, 2, 132), 1);
  CHECK_EQ(anyflash::prefill_num_splits(64, 128, 2, 132), 5);
  CHECK_EQ(anyflash::prefill_num_splits(160, 128, 2, 132), 2);
  CHECK_EQ(anyflash::prefill_num_splits(264, 128, 2, 132), 1);
  CHECK_EQ(anyflash::prefill_num_splits(64, 31, 2, 132), 1);
  CHECK_EQ(anyflash::prefill_num_splits(64, 32, 2, 132), 2);
  CHECK_EQ(anyflash::prefill_num_splits(96, 128, 1, 132), 1);  // two turns of halves
  CHECK_EQ(anyflash::prefill_num_splits(32, 128, 1, 132), 4);  // not two turns of fifths
  CHECK_EQ(anyflash::prefill_num_splits(32, 47, 1, 132), 2);
}

int main() {
  check_packed();
  check_decode();
  check_decode_examples();
  check_measured();
  check_measured_boxes();
  check_8bit_boxes();
  check_clusters();
  check_resident_ctas();
  check_windows();
  constexpr int kMax = INT_MAX - 4095;
  for (const int multiprocessors : {1, 20, 132}) {
    for (const int64_t batch : {0, 1, 3, 512}) {
      for (const int heads_k : {1, 2, 8}) {
        for (const int group : {1, 4, 16}) {
          for (const int seqlen_k : {0, 511, kMax}) {
            const Attention p = causal_params(batch, heads_k * group, heads_k, seqlen_k, 64);
            check_bounds(p, multiprocessors);
            check_backward_bounds(p, multiprocessors);
          }
        }
      }
    }
  }
  // A100: at most 27 of 256 pairs, in 10 sections. H200: 33 of 128, in 4; and all of 16.
  CHECK_EQ(heads_per_l2_section(causal_params(8, 32, 8, 2048, 128), 108), 26);
  CHECK_EQ(heads_per_l2_section(causal_params(8, 16, 16, 2048, 128), 132), 32);
  CHECK_EQ(heads_per_l2_section(causal_params(1, 16, 16, 16384, 128), 132), 16);
  CHECK_EQ(heads_per_l2_section(causal_params(1, 16, 16, 16384, 128), 132, 1 << 17), 8);
  CHECK_EQ(heads_per_l2_section(causal_params(1, 16, 16, 1 << 20, 128), 132, 1 << 17), 2);
  CHECK_EQ(heads_per_l2_section(causal_params(1, 3, 3, 1, 64), 132, 3), 3);  // of one key each
  // Backward, H200: 16 of 64 key heads, and all of 8.
  const Attention backward = causal_params(8, 32, 8, 1024, 128);
  CHECK_EQ(backward_heads_per_l2_section(backward, 132), 16);
  CHECK_EQ(backward_heads_per_l2_section(causal_params(1, 8, 8, 16384, 256), 132), 8);
  // Hopper: a wave of 132 CTAs has blocks of 128 keys of so many heads.
  for (const auto& [seqlen, heads] :
       {std::pair{512, 16}, {2048, 8}, {4096, 4}, {8192, 2}, {16384, 1}, {131072, 1}}) {
    const Attention p = causal_params(4, 16, 16, seqlen, 128);
    CHECK_EQ(backward_heads_per_wave(p, 128, 132), heads);
  }
  CHECK_EQ(backward_heads_per_wave(causal_params(4, 16, 16, 0, 128), 128, 132), 16);
  // 16 query heads on one key head: four parts of each of four sequences.
  const Attention one_head_k = causal_params(4, 16, 1, 4096, 128);
  CHECK_EQ(backward_heads_per_l2_section(one_head_k, 132), 16);
  // A part has at most four heads, but there are at most 32 parts.
  for (const auto& [group, parts] :
       {std::pair{1, 1}, {4, 1}, {5, 2}, {8, 2}, {9, 3}, {128, 32}, {1000, 32}}) {
    CHECK_EQ(gqa_splits(2 * group, 2), parts);
  }
  CHECK_EQ(gqa_splits(0, 0), 1);
  Attention grid = causal_params(2, 3, 3, 129, 64);
  CHECK_EQ(anyflash::forward_grid_blocks(grid, 128), 12);
  grid.seqlen_q = 128;
  CHECK_EQ(anyflash::forward_grid_blocks(grid, 128), 6);
  grid.batch = INT32_MAX;
  grid.heads = grid.seqlen_q = 1;
  CHECK_EQ(anyflash::forward_grid_blocks(grid, 128), INT32_MAX);
  return check::report();
}
