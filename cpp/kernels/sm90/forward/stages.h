// What a consumer warpgroup does with a tile of keys, stage by stage; mainloop.h puts these in
// order.
#pragma once

#include <cstdint>
#include <cute/tensor.hpp>

#include "common/convert.h"
#include "common/layout.h"
#include "common/macros.h"
#include "sm90/forward/blocks.h"
#include "sm90/forward/key_tiles.h"
#include "sm90/forward/softmax.h"
#include "sm90/forward/traits.h"
#include "sm90/kept_elements.h"
#include "sm90/pipeline.h"
#include "sm90/products.h"
#include "sm90/seen_elements.h"
#include "sm90/wgmma.h"
#include "variant/forward_variants.h"
#include "variant/mask.h"

namespace anyflash::sm90 {

// `bound` is that of row 0, as BlockWork has it. Row i's is i larger, but within [0, keys].
ANYFLASH_DEVICE int key_of(int bound, int i, int keys) { return max(min(bound, keys - i) + i, 0); }

// The keys that this thread's rows see, and those that all rows of its warp see.
struct RowBounds {
  int first[kThreadRows];
  int end[kThreadRows];
  int first_of_all;
  int end_of_all;

  ANYFLASH_DEVICE explicit RowBounds(const BlockWork& block) {
    const int keys = block.tile.sequence.seqlen_k;
    CUTE_UNROLL
    for (int row = 0; row < kThreadRows; ++row) {
      const int i = thread_row() + 8 * row;
      first[row] = key_of(block.first_key, i, keys);
      end[row] = key_of(block.end_key, i, keys);
    }
    // Bounds do not decrease from row to row.
    first_of_all = uniform(key_of(block.first_key, warp_row() + kWarpRows - 1, keys));
    end_of_all = uniform(key_of(block.end_key, warp_row(), keys));
  }
};

template <class Traits>
class ForwardStages {
  using Element = typename Traits::Element;
  using AccS = typename Traits::AccS;
  using AccO = typename Traits::AccO;
  static constexpr bool kPingPong = Traits::kConfig.ping_pong;

 public:
  using Probabilities = RoundedAccumulator<Element, Traits::kBlockN>;

  ANYFLASH_DEVICE ForwardStages(typename Traits::SharedStorage& smem, int warpgroup)
      : smem_(smem), warpgroup_(warpgroup) {
    // The first turn.
    if (kPingPong && warpgroup == 0) arrive_named(ping_pong_barrier(0), kPingPongThreads);
  }

  // The next block, with its Q. It stays readable until Q of the block after it is released.
  ANYFLASH_DEVICE const typename Traits::Block& wait_block() {
    smem_.q_ring[warpgroup_].full[q_place_.stage()].wait(q_place_.parity());
    if (!Traits::kConfig.late_release) release_last_block();
    return smem_.blocks[block_place<Traits>(q_place_)];
  }
  // The block's Q, or what takes its place.
  ANYFLASH_DEVICE Element* queries() { return smem_.queries(q_place_.stage(), warpgroup_); }

  // After the block's last scores. Where results take Q's place, it is released later.
  ANYFLASH_DEVICE void release_queries() {
    if (!Traits::kOutputInQ) release_block(q_place_.stage());
  }
  ANYFLASH_DEVICE void end_block() { q_place_.advance(); }

  // Behind the block's first products.
  ANYFLASH_DEVICE void release_last_block_late() {
    if (Traits::kConfig.late_release) release_last_block();
  }
  ANYFLASH_DEVICE void wait_keys(int part = 0) {
    smem_.k_ring[part].full[k_place_.stage()].wait(k_place_.parity());
  }
  // What the loader says of these keys: KeyTile's word.
  ANYFLASH_DEVICE int wait_key_tile() {
    wait_keys();
    const int word = uniform(smem_.key_tiles[k_place_.stage()]);
    __syncwarp();  // all lanes have read it, before one of them releases the keys
    return word;
  }

  // S = Q K^T of the tile's first kKeys keys is on its way, after wait_keys(): a group of products
  // for each part of K.
  template <int kKeys = Traits::kBlockN>
  ANYFLASH_DEVICE void issue_scores(AccS& acc_s) {
    using TileQ = typename Traits::TileQ;
    using TileK = typename Traits::TileK;
    constexpr int kSteps = Traits::kHeadDim / 16 / Traits::kKeyParts;  // of a part
    constexpr int kPanelQ = TileQ::kPanelElements * sizeof(Element);
    constexpr int kPanelK = TileK::kPanelElements * sizeof(Element);
    OperandDescriptor q(queries(), kPanelQ);
    if (Traits::kKeyParts > 1) q.pin();
    pin_registers<size(AccS{})>(acc_s.data());
    CUTE_UNROLL
    for (int part = 0; part < Traits::kKeyParts; ++part) {
      if (part > 0) wait_keys(part);
      wgmma_fence();
      OperandDescriptor k(smem_.keys(k_place_.stage(), part), kPanelK);
      if (Traits::kKeyParts > 1) k.pin();
      CUTE_UNROLL
      for (int i = 0; i < kSteps; ++i) {
        const int step = part * kSteps + i;
        Wgmma<Element, kKeys>::template with_smem<Major::kK, Major::kK>(
            acc_s.data(), q + step_bytes(step, kPanelQ), k + step_bytes(i, kPanelK), step > 0);
      }
      wgmma_commit();
      if (part > 0) {
        wgmma_wait<1>();  // the part before
        release_keys(part - 1);
      }
    }
  }

  // S is there, while `kYounger` groups of products may go on.
  template <int kYounger>
  ANYFLASH_DEVICE void land_scores(AccS& acc_s) {
    wgmma_wait<kYounger>();
    pin_registers<size(AccS{})>(acc_s.data());
    release_keys(Traits::kKeyParts - 1);
    k_place_.advance();
  }

  // `masked`: the tile has hidden keys.
  ANYFLASH_DEVICE void wait_values(bool masked) {
    const int stage = v_place_.stage();
    smem_.v_ring.full[stage].wait(v_place_.parity());
    if (masked) see_guard(stage);
  }

  // O += P V is on its way, after wait_values().
  ANYFLASH_DEVICE void issue_values(AccO& acc_o, const Probabilities& p) {
    using TileV = typename Traits::TileV;
    constexpr int kPanelV = TileV::kPanelElements * sizeof(Element);
    const OperandDescriptor v(smem_.v.data() + v_place_.stage() * TileV::kSize, kPanelV);
    pin_registers<size(AccO{})>(acc_o.data());
    wgmma_fence();
    CUTE_UNROLL
    for (int step = 0; step < Traits::kBlockN / 16; ++step) {
      Wgmma<Element, Traits::kHeadDimV>::template with_registers<Major::kMN>(
          acc_o.data(), p.words + 4 * step, v + step * 16 * kPanelBytes, 1);
    }
    wgmma_commit();
  }

  ANYFLASH_DEVICE void land_values(AccO& acc_o) {
    wgmma_wait<0>();
    pin_registers<size(AccO{})>(acc_o.data());
    release(smem_.v_ring.empty[v_place_.stage()]);
    v_place_.advance();
  }

  // This warpgroup's rows see no keys from here on; 0 if there are no such rows.
  ANYFLASH_DEVICE int end_key(const BlockWork& block) const {
    const Sequence& sequence = block.tile.sequence;
    const int first = warpgroup_ * Traits::kWarpgroupRows;
    const int rows = min(sequence.seqlen_q - block.tile.first_row, first + Traits::kWarpgroupRows);
    return uniform(rows <= first ? 0 : key_of(block.end_key, rows - 1, sequence.seqlen_k));
  }

  // K of a tile of which this warpgroup sees nothing. Its turn to issue products passes, if it has
  // one.
  ANYFLASH_DEVICE void skip_keys(bool has_turn) {
    if (has_turn) {
      wait_ping_pong();
      pass_ping_pong();
    }
    for (int part = 0; part < Traits::kKeyParts; ++part) {
      wait_keys(part);
      __syncwarp();  // no lane still waits for a phase that lane 0 lets pass
      release_keys(part);
    }
    k_place_.advance();
  }
  ANYFLASH_DEVICE void skip_values(bool masked) {
    wait_values(masked);
    __syncwarp();
    release(smem_.v_ring.empty[v_place_.stage()]);
    v_place_.advance();
  }

  // -inf over the scores (row, key) that the mask removes.
  template <class Scores>
  ANYFLASH_DEVICE void mask_scores(Scores& scores, const RowBounds& visible, int tile) {
    constexpr int kKeys = 4 * decltype(cute::size<1>(scores))::value;
    const int first_col = tile * Traits::kBlockN;
    const int lane_col = first_col + thread_column();
    if (first_col + kKeys > visible.end_of_all) {
      CUTE_UNROLL
      for (int row = 0; row < kThreadRows; ++row) {
        hide<false>(scores, row, elements_below(max(visible.end[row] - lane_col, 0)));
      }
    }
    if (first_col < visible.first_of_all) {
      CUTE_UNROLL
      for (int row = 0; row < kThreadRows; ++row) {
        hide<true>(scores, row, elements_below(max(visible.first[row] - lane_col, 0)));
      }
    }
  }

  // -inf over the scores that the variant hides. `first_row` is the block's.
  template <class Scores>
  ANYFLASH_DEVICE void hide_unseen(Scores& scores, const BlocksForward& variant, int first_row,
                                   int tile) {
    constexpr int kElements = decltype(cute::size<1>(scores))::value;
    const Sequence& sequence = variant.sequence;
    const int first_key = tile * Traits::kBlockN;
    const uint32_t kept =
        find_kept_keys(variant.blocks, min(first_row + warp_row(), sequence.seqlen_q - 1),
                       first_key, min(first_key + 4 * kElements, sequence.seqlen_k));
    fill_others(scores, {kept, kept}, -INFINITY);
  }
  // Most warps see all of a tile or nothing: its bounds tell.
  template <class Scores>
  ANYFLASH_DEVICE void hide_unseen(Scores& scores, const RangesForward& variant, int first_row,
                                   int tile) {
    constexpr int kElements = decltype(cute::size<1>(scores))::value;
    const int first_key = tile * Traits::kBlockN;
    const Visibility of_warp =
        variant.see(first_row + warp_row(), kWarpRows, first_key, 4 * kElements);
    if (of_warp.all) return;
    uint32_t seen[kThreadRows] = {0, 0};
    if (of_warp.any) {
      const KeyRanges ranges = variant.ranges();
      const int row = first_row + thread_row();
      const int places[kThreadRows] = {ranges.place_of(row), ranges.place_of(row + 8)};
      find_seen_elements<kElements>(ranges, places, first_key + thread_column(), seen);
    }
    fill_others(scores, seen, -INFINITY);
  }

  // Which probabilities of the tile's first kKeys keys dropout keeps. `first_row` is the block's.
  template <int kKeys>
  ANYFLASH_DEVICE void draw(const Dropout& dropout, int first_row, int tile,
                            KeptElements& kept) const {
    const int row = first_row + thread_row();
    const int rows[kThreadRows] = {row, row + 8};
    find_kept_elements<kKeys / 4>(dropout, rows, tile * Traits::kBlockN, kept);
  }
  // What has been computed from S stays before the next wait (mainloop.h).
  ANYFLASH_DEVICE void keep_before_wait(AccS& acc_s) { pin_registers<size(AccS{})>(acc_s.data()); }

  // Where the schedule is ping-pong, warpgroups issue their products one after the other.
  ANYFLASH_DEVICE void wait_ping_pong() {
    if (kPingPong) sync_named(ping_pong_barrier(warpgroup_), kPingPongThreads);
  }
  ANYFLASH_DEVICE void pass_ping_pong() {
    const int next = warpgroup_ + 1 < Traits::kConsumers ? warpgroup_ + 1 : 0;
    if (kPingPong) arrive_named(ping_pong_barrier(next), kPingPongThreads);
  }

  // After the last block: its results leave before the CTA's shared memory goes to another one, and
  // the first warpgroup takes the turn that the last one passed. No barrier is left in the middle
  // of a phase.
  ANYFLASH_DEVICE void end() {
    release_last_block_late();
    if (warpgroup_ == 0) wait_ping_pong();
  }

  // Whether the guard took NaN or infinity out of a tile of V since the last call.
  ANYFLASH_DEVICE bool take_found_nonfinite() {
    const bool found = found_nonfinite_;
    found_nonfinite_ = false;
    return found;
  }

 private:
  ANYFLASH_DEVICE void release_keys(int part) {
    release(smem_.k_ring[part].empty[k_place_.stage()]);
  }
  ANYFLASH_DEVICE void release_block(int q_stage) {
    __syncwarp();  // every lane has done with it, and with what it knows of the block before
    release(smem_.q_ring[warpgroup_].empty[q_stage]);
  }

  // When its results have left shared memory. Before the first block, nothing is there to release.
  ANYFLASH_DEVICE void release_last_block() {
    if (!Traits::kOutputInQ) return;
    if (threadIdx.x % 32 == 0) wait_stores_read();
    if (q_place_.count() > 0) {
      release_block((q_place_.stage() + Traits::kQStages - 1) % Traits::kQStages);
    }
  }

  static constexpr int kPingPongThreads = 2 * kWarpgroupThreads;  // who passes and who takes it
  ANYFLASH_DEVICE static int ping_pong_barrier(int warpgroup) {
    return static_cast<int>(NamedBarrier::kPingPong) + warpgroup;
  }

  // A row's first `elements`, or the others. By bits, which become predicates seven at a time
  // (R2P): a comparison for each costs twice as much.
  template <bool kFirst, class Scores>
  ANYFLASH_DEVICE static void hide(Scores& scores, int row, int elements) {
    constexpr int kChunk = 16;
    constexpr int kElements = decltype(cute::size<1>(scores))::value;
    CUTE_UNROLL
    for (int begin = 0; begin < kElements; begin += kChunk) {
      const uint32_t below = (1u << min(max(elements - begin, 0), kChunk)) - 1;
      CUTE_UNROLL
      for (int i = begin; i < min(begin + kChunk, kElements); ++i) {
        if (((below >> (i - begin) & 1) != 0) == kFirst) scores(row, i) = -INFINITY;
      }
    }
  }

  ANYFLASH_DEVICE void see_guard(int stage) {
    CUTE_UNROLL
    for (int warp = 0; warp < Traits::kGuardWarps; ++warp) {
      found_nonfinite_ |= smem_.v_cleared[stage][warp] != 0;
    }
    __syncwarp();  // all lanes have read what lane 0 will release
  }

  typename Traits::SharedStorage& smem_;
  int warpgroup_;
  RingPlace<Traits::kStages> k_place_;
  RingPlace<Traits::kStages> v_place_;
  RingPlace<Traits::kQStages> q_place_;  // counts the blocks
  bool found_nonfinite_ = false;
};

}  // namespace anyflash::sm90
