// The main loop of a decoding warpgroup: some rows, the tiles of keys of one split.
//
// Scores are transposed: each row's keys lie in all warps. Its maximum goes through shared memory,
// as P does, which wgmma reads there.
#pragma once

#include <cmath>
#include <cstdint>
#include <cute/tensor.hpp>
#include <type_traits>

#include "common/convert.h"
#include "common/element.h"
#include "common/macros.h"
#include "cuda/decode_epilogue.h"
#include "cuda/decode_work_tile.h"
#include "params.h"
#include "sm90/accumulator.h"
#include "sm90/decode/loader.h"
#include "sm90/decode/products.h"
#include "sm90/decode/queries.h"
#include "sm90/decode/scales.h"
#include "sm90/decode/transposed.h"
#include "sm90/panel_tile.h"
#include "sm90/pipeline.h"
#include "sm90/ptx.h"
#include "sm90/wgmma.h"
#include "variant/mask.h"
#include "variant/tree_mask.h"

namespace anyflash::sm90 {

template <class Traits>
class DecodeWarpgroup {
  using Stored = typename Traits::Stored;
  using Smem = typename Traits::SharedStorage;
  static constexpr int kRows = Traits::kRows;
  static constexpr int kColumns = Traits::kThreadColumns;
  static constexpr int kWarps = 4;

 public:
  ANYFLASH_DEVICE DecodeWarpgroup(const DecodeLaunch& params, Smem& smem)
      : params_(params),
        block_(smem.block),
        smem_(smem),
        warpgroup_(uniform(static_cast<int>(threadIdx.x) / kWarpgroupThreads)),
        warp_(uniform(static_cast<int>(threadIdx.x) / 32 % kWarps)),
        scale_log2_(static_cast<float>(params.attention.softmax_scale) * kLog2E),
        scales_(params, smem.block.head_k, smem.scales, warpgroup_ * kRows) {
    ANYFLASH_UNROLL
    for (int c = 0; c < kColumns; ++c) {
      maximum_[c] = -INFINITY;
      sum_[c] = 0.0f;
    }
    ANYFLASH_UNROLL
    for (auto& out : out_) cute::clear(out);
  }

  // This warpgroup's rows of Q, and what they see.
  ANYFLASH_DEVICE void load_queries() {
    load_rows();
    const Mask mask = block_.mask(params_);
    for (int row = thread(); row < kRows; row += kWarpgroupThreads) {
      const int in_tile = warpgroup_ * kRows + row;
      smem_.seen[in_tile] = block_.seen(mask, in_tile);
    }
    cute::cp_async_wait<0>();
    fence_smem_writes();
    sync();  // Q and what rows see are there
  }

  // All tiles. Leaves this warpgroup's rows of the result in shared memory.
  ANYFLASH_DEVICE void run() {
    bool found_nonfinite = false;
    for (int key = block_.keys.begin; key < block_.keys.end; key += Traits::kBlockN) {
      const bool partial = block_.hides(key, key + Traits::kBlockN);
      const int k_stage = wait_tile();
      typename Traits::Scores scores;
      make_scores(scores, k_stage);
      if (!Traits::kLatent) release_tile(k_stage);
      if (partial) hide_keys(scores, key);
      softmax(scores);
      if constexpr (Traits::k8Bit) {
        scales_.scale_probabilities(scores, out_, [&] { sync(); });
      }
      store_probabilities(scores);
      const int v_stage = Traits::kLatent ? k_stage : wait_tile();
      Stored* const values = smem_.tiles[v_stage];
      if (partial) found_nonfinite |= clear_values(values, key);
      fence_smem_writes();
      sync_for_values(partial);  // P is there
      add_values(values);
      release_tile(v_stage);
    }
    if (block_.hides(block_.keys.begin, block_.keys.end) && any_warp(found_nonfinite)) {
      restore_values();
    }
    stage_result();
  }

 private:
  ANYFLASH_DEVICE static int thread() { return static_cast<int>(threadIdx.x) % kWarpgroupThreads; }
  // The row of the tile that this thread's c-th column of accumulators is.
  ANYFLASH_DEVICE int row(int c) const { return warpgroup_ * kRows + query_of_column(c); }
  // Of V, in block `block` of the output.
  ANYFLASH_DEVICE int out_column(int block, int half) const {
    return block * 64 + warp_ * kWarpRows + value_column<Traits>(half);
  }
  ANYFLASH_DEVICE void sync() {
    sync_named(static_cast<int>(NamedBarrier::kRows) + warpgroup_, kWarpgroupThreads);
  }

  ANYFLASH_DEVICE void load_rows() {
    auto* const q = smem_.q[warpgroup_];
    const int first = warpgroup_ * kRows;
    if constexpr (Traits::k8Bit) {
      HalfQueries<Traits, kWarpgroupThreads>(params_, block_, smem_, q, first).load();
    } else {
      sm90::load_queries<typename Traits::TileQ, kWarpgroupThreads>(params_, block_, q, first);
    }
  }

  // Where all have to have cleared a tile of V, all wait.
  ANYFLASH_DEVICE void sync_for_values(bool cleared) {
    if (cleared) sync_consumers<Traits::kConsumerThreads>();
    else sync();
  }

  // This warp's values of each row, for the others.
  ANYFLASH_DEVICE void tell_others(const float (&values)[kColumns]) {
    if (lane_row() != 0) return;
    ANYFLASH_UNROLL
    for (int c = 0; c < kColumns; ++c) smem_.of_warps[warp_][row(c)] = values[c];
  }

  // Whether it is so for any thread of all warpgroups.
  ANYFLASH_DEVICE bool any_warp(bool found) {
    found = __any_sync(0xffffffffu, found);
    if (threadIdx.x % 32 == 0) smem_.found_by_warps[threadIdx.x / 32] = found;
    sync_consumers<Traits::kConsumerThreads>();  // every warp's word is there
    ANYFLASH_UNROLL
    for (const bool other : smem_.found_by_warps) found |= other;
    return found;
  }

  ANYFLASH_DEVICE int wait_tile() {
    const int stage = place_.stage();
    smem_.ring.full[stage].wait(place_.parity());
    place_.advance();
    return stage;
  }
  ANYFLASH_DEVICE void release_tile(int stage) { release(smem_.ring.empty[stage]); }

  // S^T = K Q^T
  ANYFLASH_DEVICE void make_scores(typename Traits::Scores& scores, int stage) {
    Stored* const keys = smem_.tiles[stage];
    if constexpr (Traits::k8Bit) {
      sm90::make_scores<Traits>(scores, keys, smem_.q[warpgroup_], warp_, params_.cache_dtype);
      scales_.scale_scores(scores, stage);
    } else {
      sm90::make_scores<Traits>(scores, keys, smem_.q[warpgroup_]);
    }
  }

  // O^T += V^T P^T
  ANYFLASH_DEVICE void add_values(Stored* values) {
    if constexpr (Traits::k8Bit) {
      sm90::add_values<Traits>(out_, values, smem_.p[warpgroup_], warp_, params_.cache_dtype);
    } else {
      sm90::add_values<Traits>(out_, values, smem_.p[warpgroup_]);
    }
  }

  // Of the keys from `first` on.
  ANYFLASH_DEVICE void hide_keys(typename Traits::Scores& scores, int first) const {
    const TreeMask tree(params_, block_.batch, block_.sequence);
    ANYFLASH_UNROLL
    for (int c = 0; c < kColumns; ++c) {
      const SplitKeys seen = smem_.seen[row(c)];
      ANYFLASH_UNROLL
      for (int half = 0; half < 2; ++half) {
        const int key = first + warp_ * kWarpRows + lane_row() + 8 * half;
        bool keeps = seen.begin <= key && key < seen.end;
        if (tree.active() && keeps) keeps = tree.keep(block_.query(row(c)), key);
        if (!keeps) element(scores, c, half) = -INFINITY;
      }
    }
  }

  // Turns scores into probabilities, and rescales sums and output to the new maxima.
  ANYFLASH_DEVICE void softmax(typename Traits::Scores& scores) {
    float maxima[kColumns];
    ANYFLASH_UNROLL
    for (int c = 0; c < kColumns; ++c) {
      maxima[c] = over_lanes(fmaxf(element(scores, c, 0), element(scores, c, 1)), larger);
    }
    tell_others(maxima);
    sync();  // every warp's are there
    float rescale[kColumns];
    bool moves = false;
    ANYFLASH_UNROLL
    for (int c = 0; c < kColumns; ++c) {
      const float previous = maximum_[c];
      ANYFLASH_UNROLL
      for (int warp = 0; warp < kWarps; ++warp) {
        maximum_[c] = fmaxf(maximum_[c], smem_.of_warps[warp][row(c)]);
      }
      // -inf means that nothing was visible yet: P must be 0, not NaN.
      const float reference = maximum_[c] == -INFINITY ? 0.0f : maximum_[c];
      const float shift = reference * scale_log2_;
      rescale[c] = exp2f(previous * scale_log2_ - shift);
      moves |= previous != maximum_[c];
      sum_[c] *= rescale[c];
      ANYFLASH_UNROLL
      for (int half = 0; half < 2; ++half) {
        float& score = element(scores, c, half);
        score = exp2f(score * scale_log2_ - shift);
        sum_[c] += score;
      }
    }
    if (!__any_sync(0xffffffffu, moves)) return;
    ANYFLASH_UNROLL
    for (auto& out : out_) {
      ANYFLASH_UNROLL
      for (int c = 0; c < kColumns; ++c) {
        element(out, c, 0) *= rescale[c];
        element(out, c, 1) *= rescale[c];
      }
    }
  }

  // P, rounded, a row for each of Q's: this warp's sixteen keys.
  ANYFLASH_DEVICE void store_probabilities(const typename Traits::Scores& scores) {
    RoundedAccumulator<typename Traits::Operand, kRows> rounded;
    rounded.round(scores);
    const int lane = static_cast<int>(threadIdx.x) % 32;
    ANYFLASH_UNROLL
    for (int j = 0; j < kRows / 8; ++j) {
      const int vector = warp_ * 2 + lane / 8 % 2;
      store_transposed(
          piece_of<typename Traits::TileP>(smem_.p[warpgroup_], 8 * j + lane % 8, vector),
          rounded.words[2 * j], rounded.words[2 * j + 1]);
    }
  }

  // A masked probability is 0, but 0 * NaN is NaN (common/finite.h): such values of keys that not
  // all rows see become 0.
  ANYFLASH_DEVICE bool clear_values(Stored* tile, int first_key) {
    constexpr int kVectors = Traits::TileV::kPanels * kPanelBytes / 16;
    bool found = false;
    for (int i = static_cast<int>(threadIdx.x); i < Traits::kBlockN * kVectors;
         i += Traits::kConsumerThreads) {
      const int row = i / kVectors;
      if (!block_.hides(first_key + row, first_key + row + 1)) continue;
      Stored* const piece = piece_of<typename Traits::TileV>(tile, row, i % kVectors);
      found |= clear_piece<Traits>(piece, params_.cache_dtype);
    }
    return found;
  }

  // Gives what clear_values() took out of V to the rows that see it. Rare: plain loops.
  ANYFLASH_DEVICE void restore_values() {
    const TreeMask tree(params_, block_.batch, block_.sequence);
    const int columns = params_.attention.head_dim_v;
    for (int key = block_.keys.begin; key < block_.keys.end; ++key) {
      if (!block_.hides(key, key + 1)) continue;
      ANYFLASH_UNROLL
      for (int block = 0; block < Traits::kOutBlocks; ++block) {
        ANYFLASH_UNROLL
        for (int half = 0; half < 2; ++half) {
          const int x = out_column(block, half);
          const float lost = x < columns ? cached_value<Traits>(params_, block_, key, x) : 0.0f;
          if (std::isfinite(lost)) continue;
          ANYFLASH_UNROLL
          for (int c = 0; c < kColumns; ++c) {
            const SplitKeys seen = smem_.seen[row(c)];
            const bool sees = seen.begin <= key && key < seen.end;
            if (sees && tree.keep(block_.query(row(c)), key)) {
              element(out_[block], c, half) += in_units(lost, c);
            }
          }
        }
      }
    }
  }

  // An infinity or NaN, as O counts it.
  ANYFLASH_DEVICE float in_units(float lost, int c) const {
    if constexpr (kLostWeight<Traits> == TermWeight::kDropped) return NAN;
    else if constexpr (Traits::k8Bit) return copysignf(1.0f, scales_.unit(c)) * lost;
    else return lost;
  }

  // In the place of the tiles: code that stores rows of it, by a loop, is shorter than what would
  // store each of a thread's accumulators. A CTA runs it once, so that its length counts.
  ANYFLASH_DEVICE void stage_result() {
    ANYFLASH_UNROLL
    for (int c = 0; c < kColumns; ++c) {
      sum_[c] = over_lanes(sum_[c], [](float a, float b) { return a + b; });
    }
    tell_others(sum_);
    if (thread() < 4) {
      ANYFLASH_UNROLL
      for (int c = 0; c < kColumns; ++c) {
        smem_.maximum[row(c)] = maximum_[c];
        if constexpr (Traits::k8Bit) smem_.scales.unit[row(c)] = scales_.unit(c);
      }
    }
    sync_consumers<Traits::kConsumerThreads>();  // all have done with the tiles
    ANYFLASH_UNROLL
    for (int block = 0; block < Traits::kOutBlocks; ++block) {
      ANYFLASH_UNROLL
      for (int half = 0; half < 2; ++half) {
        ANYFLASH_UNROLL
        for (int c = 0; c < kColumns; ++c) {
          smem_.result[row(c)][out_column(block, half)] = element(out_[block], c, half);
        }
      }
    }
    sync_consumers<Traits::kConsumerThreads>();  // every warp's part is there
  }

  const DecodeLaunch& params_;
  const DecodeWorkTile& block_;
  Smem& smem_;
  const int warpgroup_;
  const int warp_;
  const float scale_log2_;
  std::conditional_t<Traits::k8Bit, RowScales<Traits>, NoRowScales> scales_;
  RingPlace<Traits::kBuffers> place_;
  float maximum_[kColumns];  // of scores so far
  float sum_[kColumns];      // of this thread's probabilities
  typename Traits::Scores out_[Traits::kOutBlocks];
};

}  // namespace anyflash::sm90
