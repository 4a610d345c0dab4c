// What the warpgroups of latent attention with many rows do, whatever the cache's type.
//
// Each makes the scores and P of half of the keys, for all rows, and adds P V of all keys to its
// half of the columns, as FlashMLA does ("seesaw", https://github.com/deepseek-ai/FlashMLA).
// Products of 64 rows and 256 columns read little shared memory, which limits decoding.
#pragma once

#include <cmath>
#include <cstdint>
#include <cute/tensor.hpp>

#include "common/finite.h"
#include "common/macros.h"
#include "common/softmax.h"
#include "cuda/decode_epilogue.h"
#include "cuda/decode_work_tile.h"
#include "cuda/restore_nonfinite.h"
#include "params.h"
#include "sm90/accumulator.h"
#include "sm90/decode/loader.h"
#include "sm90/decode/shared_rows_traits.h"
#include "sm90/panel_tile.h"
#include "sm90/pipeline.h"
#include "sm90/products.h"
#include "sm90/ptx.h"
#include "sm90/wgmma.h"
#include "variant/mask.h"
#include "variant/tree_mask.h"

namespace anyflash::sm90 {

template <class Traits>
class SharedRows {
 protected:
  using Operand = typename Traits::Operand;
  using Keys = typename Traits::Keys;
  using TileQ = typename Traits::TileQ;
  using TileP = typename Traits::TileP;
  using Scores = typename Traits::Scores;
  using Rounded = RoundedAccumulator<Operand, Traits::kKeys>;
  using Smem = typename Traits::SharedStorage;

  ANYFLASH_DEVICE SharedRows(const DecodeLaunch& params, Smem& smem)
      : params_(params),
        block_(smem.block),
        smem_(smem),
        warpgroup_(uniform(static_cast<int>(threadIdx.x) / kWarpgroupThreads)),
        scale_log2_(static_cast<float>(params.attention.softmax_scale) * kLog2E) {
    ANYFLASH_UNROLL
    for (int i = 0; i < kThreadRows; ++i) {
      maximum_[i] = -INFINITY;
      sum_[i] = 0.0f;
    }
    cute::clear(out_);
  }

  // This thread's i-th row.
  ANYFLASH_DEVICE static int row(int i) { return thread_row() % Traits::kBlockM + 8 * i; }
  ANYFLASH_DEVICE void sync() const {
    sync_named(static_cast<int>(NamedBarrier::kRows) + warpgroup_, kWarpgroupThreads);
  }
  ANYFLASH_DEVICE static void sync_all() { sync_consumers<Traits::kConsumerThreads>(); }

  // After Q is on its way to shared memory, or there.
  ANYFLASH_DEVICE void wait_queries() {
    const Mask mask = block_.mask(params_);
    const int thread = static_cast<int>(threadIdx.x);
    if (thread < Traits::kBlockM) smem_.seen[thread] = block_.seen(mask, thread);
    cute::cp_async_wait<0>();
    fence_smem_writes();
    sync_all();  // Q and what rows see are there
  }

  // What columns from a panel on give to S = Q K^T is on its way, for the keys from `keys` on.
  template <int kColumns>
  ANYFLASH_DEVICE void issue_scores(Scores& scores, const Operand* keys, int first_panel,
                                    bool is_first) {
    constexpr int kPanelQ = TileQ::kPanelElements * static_cast<int>(sizeof(Operand));
    constexpr int kPanelK = Keys::kPanelElements * static_cast<int>(sizeof(Operand));
    const OperandDescriptor q(smem_.q + first_panel * TileQ::kPanelElements, kPanelQ);
    const OperandDescriptor k(keys + first_panel * Keys::kPanelElements, kPanelK);
    wgmma_fence();
    ANYFLASH_UNROLL
    for (int step = 0; step < kColumns / 16; ++step) {
      Wgmma<Operand, Traits::kKeys>::template with_smem<Major::kK, Major::kK>(
          scores.data(), q + step_bytes(step, kPanelQ), k + step_bytes(step, kPanelK),
          !is_first || step > 0);
    }
    wgmma_commit();
  }

  // Of this warpgroup's keys, from `first` on.
  ANYFLASH_DEVICE void hide_keys(Scores& scores, int first) const {
    constexpr int kElements = Traits::kKeys / 4;  // of a row
    const TreeMask tree(params_, block_.batch, block_.sequence);
    const int first_key = first + thread_column();
    uint32_t bits[kThreadRows];
    ANYFLASH_UNROLL
    for (int i = 0; i < kThreadRows; ++i) {
      const SplitKeys seen = smem_.seen[row(i)];
      bits[i] = element_bits(seen.begin - first_key, seen.end - first_key);
      if (!tree.active()) continue;
      for (int element = 0; element < kElements; ++element) {
        const int key = first_key + element / 2 * 8 + element % 2;
        const bool asks = (bits[i] >> element & 1) != 0;
        if (asks && !tree.keep(block_.query(row(i)), key)) bits[i] &= ~(1u << element);
      }
    }
    auto matrix = as_matrix(scores);
    fill_others(matrix, bits, -INFINITY);
  }

  // A masked probability is 0, but 0 * NaN is NaN (common/finite.h): values of this warpgroup's
  // keys that not all rows see become 0 if they are not finite. These lie from row `first_row` of
  // the tile on.
  ANYFLASH_DEVICE bool clear_values(Operand* keys, int first_row, int first_key) {
    constexpr int kVectors = Traits::Values::kPanels * kPanelBytes / 16;
    sync();  // all warps have done with the tile as keys
    bool found = false;
    for (int i = static_cast<int>(threadIdx.x) % kWarpgroupThreads; i < Traits::kKeys * kVectors;
         i += kWarpgroupThreads) {
      const int key = i / kVectors;
      if (!block_.hides(first_key + key, first_key + key + 1)) continue;
      auto* const piece = piece_of<Keys>(keys, first_row + key, i % kVectors);
      auto vector = cute::make_tensor(cute::make_smem_ptr(piece), cute::Int<8>{});
      found |= clear_nonfinite(vector);
    }
    fence_smem_writes();  // this warpgroup's P V may read V before the fence after P
    return found;
  }

  // Turns scores into probabilities, and rescales sums to the new maxima: those of all keys. Then
  // rescale_output() has to follow.
  ANYFLASH_DEVICE void softmax(Scores& scores) {
    auto matrix = as_matrix(scores);
    float largest[kThreadRows];
    ANYFLASH_UNROLL
    for (int i = 0; i < kThreadRows; ++i) {
      largest[i] = -INFINITY;
      ANYFLASH_UNROLL
      for (int x = 0; x < cute::size<1>(matrix); ++x) largest[i] = fmaxf(largest[i], matrix(i, x));
      largest[i] = quad_reduce(largest[i], [](float a, float b) { return fmaxf(a, b); });
      if (threadIdx.x % 4 == 0) smem_.of_warps[warpgroup_][row(i)] = largest[i];
    }
    sync_all();  // both warpgroups' maxima are there, and V is finite
    moves_ = false;
    ANYFLASH_UNROLL
    for (int i = 0; i < kThreadRows; ++i) {
      const float previous = maximum_[i];
      maximum_[i] = fmaxf(previous, fmaxf(largest[i], smem_.of_warps[1 - warpgroup_][row(i)]));
      // -inf means that nothing was visible yet: P must be 0, not NaN.
      const float reference = maximum_[i] == -INFINITY ? 0.0f : maximum_[i];
      const float shift = reference * scale_log2_;
      rescale_[i] = exp2f(previous * scale_log2_ - shift);
      moves_ |= previous != maximum_[i];
      sum_[i] *= rescale_[i];
      ANYFLASH_UNROLL
      for (int x = 0; x < cute::size<1>(matrix); ++x) {
        matrix(i, x) = exp2f(matrix(i, x) * scale_log2_ - shift);
        sum_[i] += matrix(i, x);
      }
    }
  }
  ANYFLASH_DEVICE void rescale_output() {
    if (!__any_sync(0xffffffffu, moves_)) return;
    auto out = as_matrix(out_);
    ANYFLASH_UNROLL
    for (int i = 0; i < kThreadRows; ++i) {
      ANYFLASH_UNROLL
      for (int x = 0; x < cute::size<1>(out); ++x) out(i, x) *= rescale_[i];
    }
  }

  // P of this warpgroup's keys, which are the columns of a tile from 16 bytes number `vector` on.
  ANYFLASH_DEVICE static void store_probabilities(Operand* tile, const Rounded& p, int vector) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int warp_row = static_cast<int>(threadIdx.x) % kWarpgroupThreads / 32 * kWarpRows;
    ANYFLASH_UNROLL
    for (int i = 0; i < Traits::kKeys / 16; ++i) {
      store_matrices(piece_of<TileP>(tile, warp_row + lane % 16, vector + 2 * i + lane / 16),
                     p.words + 4 * i);
    }
    fence_smem_writes();
  }

  // This warpgroup's columns of V, in a tile of keys; and where P is.
  ANYFLASH_DEVICE const Operand* values(const Operand* keys) const {
    return keys + warpgroup_ * Traits::kHalfPanels * Keys::kPanelElements;
  }
  ANYFLASH_DEVICE static Operand* probabilities(Operand* keys) {
    return keys + Traits::Values::kPanels * Keys::kPanelElements;
  }

  // O += P V of a tile is on its way, with P in shared memory.
  ANYFLASH_DEVICE void issue_values(Operand* keys) {
    constexpr int kPanelV = Keys::kPanelElements * static_cast<int>(sizeof(Operand));
    const OperandDescriptor p(probabilities(keys), TileP::kBytes);
    const OperandDescriptor v(values(keys), kPanelV);
    wgmma_fence();
    ANYFLASH_UNROLL
    for (int step = 0; step < Traits::kBlockN / 16; ++step) {
      Wgmma<Operand, Traits::kOutColumns>::template with_smem<Major::kK, Major::kMN>(
          out_.data(), p + step * 32, v + step * 16 * kPanelBytes, 1);
    }
    wgmma_commit();
  }

  // In the place of the tiles.
  ANYFLASH_DEVICE void stage_result() {
    const auto out = as_matrix(out_);
    ANYFLASH_UNROLL
    for (int i = 0; i < kThreadRows; ++i) {
      const float sum = quad_reduce(sum_[i], [](float a, float b) { return a + b; });
      if (threadIdx.x % 4 != 0) continue;
      smem_.of_warps[warpgroup_][row(i)] = sum;
      smem_.of_warps[2 + warpgroup_][row(i)] = 0.0f;
      if (warpgroup_ == 0) smem_.maximum[row(i)] = maximum_[i];
    }
    sync_all();  // all have done with the tiles
    ANYFLASH_UNROLL
    for (int i = 0; i < kThreadRows; ++i) {
      float* const to = &smem_.result[row(i)][warpgroup_ * Traits::kOutColumns + thread_column()];
      ANYFLASH_UNROLL
      for (int x = 0; x < cute::size<1>(out); x += 2) {
        *reinterpret_cast<float2*>(to + 4 * x) = float2{out(i, x), out(i, x + 1)};
      }
    }
    sync_all();  // every warp's part is there
  }

  // Gives what clear_values() took out of V to the rows that see it, in the staged result.
  ANYFLASH_DEVICE void restore_values(bool found) {
    if (!block_.hides(block_.keys.begin, block_.keys.end)) return;
    found = __any_sync(0xffffffffu, found);
    if (threadIdx.x % 32 == 0) smem_.found_by_warps[threadIdx.x / 32] = found;
    sync_all();  // every warp's word is there
    ANYFLASH_UNROLL
    for (const bool other : smem_.found_by_warps) found |= other;
    if (!found) return;
    const TreeMask tree(params_, block_.batch, block_.sequence);
    const auto restore = [&](int begin, int end) {
      restore_nonfinite<Traits::kConsumerThreads>(
          IndexRange{begin, end}, IndexRange{0, block_.rows}, params_.attention.head_dim_v,
          [&](int key, int x) { return cached_value<Traits>(params_, block_, key, x); },
          [&](int i, int key) {
            const SplitKeys seen = smem_.seen[i];
            const bool sees = seen.begin <= key && key < seen.end;
            const bool visible = sees && tree.keep(block_.query(i), key);
            return visible ? kLostWeight<Traits> : TermWeight::kHidden;
          },
          [&](int i, int x) -> float& { return smem_.result[i][x]; });
    };
    const SplitKeys keys = block_.keys;
    const int shown = max(keys.begin, min(block_.shown.begin, keys.end));
    restore(keys.begin, shown);
    restore(max(shown, block_.shown.end), keys.end);
    sync_all();  // every thread's columns are there
  }

  const DecodeLaunch& params_;
  const DecodeWorkTile& block_;
  Smem& smem_;
  const int warpgroup_;
  const float scale_log2_;
  float maximum_[kThreadRows];  // of scores so far
  float sum_[kThreadRows];      // of this thread's probabilities
  float rescale_[kThreadRows];  // of the output, after softmax()
  bool moves_ = false;          // some factor of these is not 1
  typename Traits::Out out_;
};

}  // namespace anyflash::sm90
