// What every consumer warpgroup of the backward does with a tile of query rows. Scores are
// transposed: a warpgroup has 64 keys, and all rows.
#pragma once

#include <cstdint>
#include <cute/tensor.hpp>

#include "common/macros.h"
#include "sm90/accumulator.h"
#include "sm90/backward/query_tile.h"
#include "sm90/backward/variants.h"
#include "sm90/kept_elements.h"
#include "sm90/panel_tile.h"
#include "sm90/pipeline.h"
#include "sm90/products.h"
#include "sm90/tma.h"
#include "variant/backward_scratch.h"
#include "variant/dropout.h"
#include "variant/key_ranges.h"
#include "variant/mask.h"
#include "variant/work_tile.h"

namespace anyflash::sm90 {

// By all consumers.
template <class Traits>
ANYFLASH_DEVICE void find_visible_rows(const BackwardScratch& params, const BackwardWorkTile& block,
                                       typename Traits::SharedStorage& smem) {
  const Mask mask = Mask(block.sequence, params.attention.window).up_to_last_row();
  for (int i = threadIdx.x; i < Traits::kBlockN; i += Traits::kThreads) {
    const int key = block.first_key + i;
    const MRange rows = mask.m_range(key, 1, 1);
    if constexpr (!Traits::kIsWide) {
      if (i % Traits::kWarpgroupKeys == 0) smem.first_rows[i / Traits::kWarpgroupKeys] = rows.begin;
    }
    if (rows.begin >= rows.end) {  // a key that is not used has no ranges either
      smem.visible[i] = {};
    } else if constexpr (kHasRanges<typename Traits::Variant>) {
      const KeyRanges ranges(params.attention, block.sequence, block.batch, block.head_k);
      const KeyRanges::Rows seen = ranges.rows_of(key);
      const auto row_at = [&](int place) { return ranges.row_at(place, rows.begin, rows.end); };
      smem.visible[i] = {{row_at(seen.begin), row_at(seen.second_begin)},
                         {row_at(seen.end), row_at(seen.second_end)}};
    } else {
      smem.visible[i] = {{rows.begin}, {rows.end}};
    }
  }
  sync_consumers<Traits::kThreads>();
}

template <class Traits>
class RowStages {
  using Element = typename Traits::Element;
  using TileQ = typename Traits::TileQ;
  using TileK = typename Traits::TileK;
  using TileV = typename Traits::TileV;
  using TileDO = typename Traits::TileDO;
  using AccS = typename Traits::AccS;
  using Variant = typename Traits::Variant;
  static constexpr int kBlockM = Traits::kBlockM;
  static constexpr int kPairs = kBlockM / 8;  // of neighbouring rows, in a thread's accumulators
  static constexpr uint32_t kAllSeen = 0xffffffffu >> (32 - kBlockM / 4);

 public:
  using Rounded = RoundedAccumulator<Element, kBlockM>;

  // `key_warpgroup`: which 64 of the CTA's keys the warpgroup has.
  ANYFLASH_DEVICE RowStages(const BackwardScratch& params, typename Traits::SharedStorage& smem,
                            int key_warpgroup)
      : smem_(smem),
        key_warpgroup_(key_warpgroup),
        thread_(threadIdx.x),
        params_(params),
        scale_log2_(params.attention.scale_log2) {}

  // Before the first tile, where products take K or V from registers.
  ANYFLASH_DEVICE void load_keys() {
    if constexpr (Traits::kKeysInRegisters) {
      smem_.k_full.wait(0);
      k_operand_.load(smem_.k.data() + first_key(), warp_key());
    }
  }
  ANYFLASH_DEVICE void load_values() {
    if constexpr (Traits::kValuesInRegisters) {
      smem_.v_full.wait(0);
      v_operand_.load(smem_.v.data() + first_key(), warp_key());
    }
  }

  // Before the loop. Whoever looks ahead knows of the other tiles already.
  ANYFLASH_DEVICE void wait_first_rows() {
    if constexpr (Traits::kLooksAhead) flags_ = wait_flags(place_);
  }
  // The tile, with its Q; false if there is none.
  ANYFLASH_DEVICE bool wait_rows() {
    if constexpr (!Traits::kLooksAhead) flags_ = wait_flags(place_);
    return (flags_ & QueryTileInfo::kExists) != 0;
  }
  // Beside a tile's last products: the next one.
  ANYFLASH_DEVICE void look_ahead() {
    static_assert(Traits::kStages > 1, "the next tile does not wait for this one's buffer");
    if constexpr (Traits::kLooksAhead) next_flags_ = wait_flags(place_.next());
  }

  // S^T = K Q^T is on its way. The first tile, which kMayBeFirst says this may be, waits for K.
  template <bool kMayBeFirst = true>
  ANYFLASH_DEVICE void issue_scores(AccS& acc_s) {
    const Element* const q = smem_.q.data() + place_.stage() * TileQ::kSize;
    if constexpr (Traits::kKeysInRegisters) {
      issue_transposed<TileQ>(acc_s, k_operand_, q);
    } else {
      if (kMayBeFirst && is_first_) smem_.k_full.wait(0);
      issue_transposed<TileK, TileQ, Traits::kHeadDim>(acc_s, smem_.k.data() + first_key(), q);
    }
  }
  ANYFLASH_DEVICE void wait_dout() { smem_.dout_ring.full[place_.stage()].wait(place_.parity()); }
  // dP^T = V dO^T is on its way.
  template <bool kMayBeFirst = true>
  ANYFLASH_DEVICE void issue_dp(AccS& acc_dp) {
    const Element* const dout = smem_.dout.data() + place_.stage() * TileDO::kSize;
    if constexpr (Traits::kValuesInRegisters) {
      wait_dout();
      issue_transposed<TileDO>(acc_dp, v_operand_, dout);
    } else {
      if (kMayBeFirst && is_first_) smem_.v_full.wait(0);
      wait_dout();
      issue_transposed<TileV, TileDO, Traits::kHeadDimV>(acc_dp, smem_.v.data() + first_key(),
                                                         dout);
    }
  }
  // dV += P^T dO is on its way.
  ANYFLASH_DEVICE void issue_dv(typename Traits::AccV& acc_dv, const Rounded& p) {
    issue_accumulation<TileDO>(acc_dv, p, smem_.dout.data() + place_.stage() * TileDO::kSize);
  }
  // dK += dS^T Q is on its way.
  ANYFLASH_DEVICE void issue_dk(typename Traits::AccK& acc_dk, const Rounded& ds) {
    issue_accumulation<TileQ>(acc_dk, ds, smem_.q.data() + place_.stage() * TileQ::kSize);
  }

  // Of the tile: which elements are seen. Returns whether Q or dO may hold NaN or infinity: of a
  // row that sees keys, LSE or delta tells, or the loader's flag. All warps see the same rows.
  ANYFLASH_DEVICE bool look_at_rows() {
    hides_any_ = false;
    if (!needs_mask()) return false;
    const int row = tile().row;
    uint32_t kept = kAllSeen;
    if constexpr (kHasBlocks<Variant>) kept = smem_.kept[place_.stage()][key_warpgroup_];
    uint32_t seen_by_all = kAllSeen;
    CUTE_UNROLL
    for (int i = 0; i < kThreadRows; ++i) {
      seen_[i] = smem_.visible[thread_key(i)].bits(row) & kept;
      seen_by_all &= seen_[i];
    }
    hides_any_ = __any_sync(0xffffffffu, seen_by_all != kAllSeen);
    float zero = 0.0f;  // NaN, if anything is not finite
    CUTE_UNROLL
    for (int i = 0; i < kPairs; ++i) {
      const float2 lse = pair_of(smem_.lse, i);
      const float2 delta = pair_of(smem_.delta, i);
      zero = fmaf(lse.x, 0.0f, fmaf(lse.y, 0.0f, zero));
      zero = fmaf(delta.x, 0.0f, fmaf(delta.y, 0.0f, zero));
    }
    return __any_sync(0xffffffffu, zero != 0.0f) || (flags_ & QueryTileInfo::kMayBeNonfinite) != 0;
  }

  // Which probabilities of the tile dropout keeps, while scores are on their way.
  ANYFLASH_DEVICE void draw() {
    if constexpr (kHasDropout<Variant>) {
      const BackwardWorkTile& block = smem_.block;
      // Made anew for each tile: the rounds' keys would take the loop's registers.
      const typename Variant::Seed seed(params_.attention);
      const Dropout dropout(params_.attention, seed, block.batch, smem_.heads[place_.stage()]);
      find_kept_transposed<kBlockM / 4>(dropout, tile().row,
                                        block.first_key + thread_key(0) / 8 * 8, kept_);
    }
  }
  // What P^T is in dV's product, after dS has been made of it.
  ANYFLASH_DEVICE void round_p(AccS& acc_p, Rounded& rounded) const {
    if constexpr (kHasDropout<Variant>) drop(acc_p, kept_);
    if constexpr (!kHasSoftcap<Variant>) rounded.round(acc_p);
  }

  // LSE, or delta, of this thread's rows: the first pairs are loaded before they are needed.
  template <int kCount>
  struct NumbersOfPairs {
    static constexpr int kLoaded = kCount;
    float2 first[kLoaded];
  };
  using RowNumbers = NumbersOfPairs<3>;       // beside masks, registers are few
  using PlainRowNumbers = NumbersOfPairs<8>;  // of a tile without them
  template <class Numbers>
  ANYFLASH_DEVICE void load_lse(Numbers& numbers) const {
    load(numbers, smem_.lse);
  }
  template <class Numbers>
  ANYFLASH_DEVICE void load_delta(Numbers& numbers) const {
    load(numbers, smem_.delta);
  }

  // P^T in place of S^T; 0 where hidden, which kHides says may be. With a softcap P^T is rounded at
  // once, and what takes its place is its product with the softcap's slope.
  template <bool kHides = true, class Numbers>
  ANYFLASH_DEVICE void compute_p(AccS& acc_s, const Numbers& lse, Rounded& rounded) const {
    if constexpr (kHasSoftcap<Variant>) {
      compute_capped_p(acc_s, lse, rounded);
      if (hides_any_) hide(rounded, seen_);
    } else if constexpr (kHasAlibi<Variant>) {
      const float slope = smem_.slope_log2[place_.stage()];
      if (slope < 0.0f) exponentiate_with_slope<-1>(acc_s, lse, slope);
      else exponentiate_with_slope<1>(acc_s, lse, slope);
    } else {
      for_each_element(lse, smem_.lse, [&](int i, float row_lse) ANYFLASH_INLINE_LAMBDA {
        acc_s(i) = exp2f(acc_s(i) * scale_log2_ - row_lse);
      });
    }
    if (kHides && hides_any_) hide(acc_s, seen_);
  }

  // dS^T in place of dP^T; 0 where hidden.
  template <bool kHides = true, class Numbers>
  ANYFLASH_DEVICE void compute_ds(AccS& acc_dp, const AccS& p, const Numbers& delta) const {
    float share = 1.0f;  // dS comes without the factor on what dropout keeps
    if constexpr (kHasDropout<Variant>) {
      share = 1.0f / Variant::p_scale(params_);
      drop(acc_dp, kept_);
    }
    for_each_element(delta, smem_.delta, [&](int i, float row_delta) ANYFLASH_INLINE_LAMBDA {
      acc_dp(i) = p(i) * (acc_dp(i) - row_delta * share);
    });
    if (kHides && hides_any_) hide(acc_dp, seen_);
  }

  // Takes NaN and infinity out of the tile's Q and dO, when no product that reads them is under
  // way. Rare.
  ANYFLASH_DEVICE void clear_rows() {
    const int stage = place_.stage();
    sync_consumers<Traits::kThreads>();
    clear_nonfinite_tile<TileQ, Traits::kThreads>(smem_.q.data() + stage * TileQ::kSize, thread_);
    const bool found = clear_nonfinite_tile<TileDO, Traits::kThreads>(
        smem_.dout.data() + stage * TileDO::kSize, thread_);
    fence_smem_writes();
    if (__any_sync(0xffffffffu, found) && thread_ % 32 == 0) {
      smem_.dout_was_nonfinite[thread_ / 32] = 1;
    }
    sync_consumers<Traits::kThreads>();
  }

  // After the last tile: whether clear_rows() has found anything in dO.
  ANYFLASH_DEVICE bool dout_was_nonfinite() const {
    int any = 0;
    for (const int found : smem_.dout_was_nonfinite) any |= found;
    return any != 0;
  }

  // Q and dO of the tile are not needed any more: goes on to the next one.
  ANYFLASH_DEVICE void next_rows() {
    __syncwarp();  // every lane has done with `tiles`
    release(smem_.q_ring.empty[place_.stage()]);
    release(smem_.dout_ring.empty[place_.stage()]);
    is_first_ = false;
    place_.advance();
    if constexpr (Traits::kLooksAhead) flags_ = next_flags_;
  }

 protected:
  ANYFLASH_DEVICE const QueryTileInfo& tile() const { return smem_.tiles[place_.stage()]; }
  ANYFLASH_DEVICE bool needs_mask() const { return (flags_ & QueryTileInfo::kNeedsMask) != 0; }
  // The i-th of this thread's keys, in the CTA's block.
  ANYFLASH_DEVICE int thread_key(int i) const {
    constexpr int kKeyThreads = 2 * Traits::kBlockN;
    const int thread = kKeyThreads == Traits::kThreads ? thread_ : thread_ % kKeyThreads;
    return thread / 32 * 16 + thread % 32 / 4 + 8 * i;
  }

  typename Traits::SharedStorage& smem_;
  int key_warpgroup_;
  int thread_;
  RingPlace<Traits::kStages> place_;  // of Q and dO
  int flags_ = 0;                     // of the tile
  int next_flags_ = 0;                // of the next one, after look_ahead()
  bool is_first_ = true;

 private:
  // Waits for a tile's Q, or the word that there is no more tile. Returns its flags.
  ANYFLASH_DEVICE int wait_flags(const RingPlace<Traits::kStages>& place) const {
    smem_.q_ring.full[place.stage()].wait(place.parity());
    return uniform(smem_.tiles[place.stage()].flags);
  }

  template <class Numbers>
  ANYFLASH_DEVICE void compute_capped_p(AccS& acc_s, const Numbers& lse, Rounded& rounded) const {
    const CappedScores capped(params_.attention);
    float of_pair = 0.0f;  // P of the element before
    for_each_element(lse, smem_.lse, [&](int i, float row_lse) ANYFLASH_INLINE_LAMBDA {
      const float t = capped.t(acc_s(i));
      const float p = exp2f(capped.exponent(t, row_lse));
      acc_s(i) = p * capped.slope(t);
      if (i % 2 == 1) rounded.set(i / 2, float2{of_pair, p});
      of_pair = p;
    });
  }

  // P^T with ALiBi. The sign of a slope is known: the absolute value of a distance costs nothing.
  template <int kSign, class Numbers>
  ANYFLASH_DEVICE void exponentiate_with_slope(AccS& acc_s, const Numbers& lse, float slope) const {
    const BackwardWorkTile& block = smem_.block;
    const int row = tile().row + thread_ % 4 * 2 + block.sequence.shift - block.first_key;
    float at_first[kThreadRows];  // the slope times the distance of a key and the first row
    CUTE_UNROLL
    for (int i = 0; i < kThreadRows; ++i) {
      at_first[i] = static_cast<float>(row - thread_key(i)) * slope;
    }
    for_each_element(lse, smem_.lse, [&](int i, float row_lse) ANYFLASH_INLINE_LAMBDA {
      const int offset = i / 4 * 8 + i % 2;
      const float bias = fabsf(at_first[i / 2 % 2] + static_cast<float>(offset) * slope);
      acc_s(i) = exp2f((acc_s(i) * scale_log2_ - row_lse) - static_cast<float>(kSign) * bias);
    });
  }

  // Where this warpgroup's keys begin in a panel of K or V.
  ANYFLASH_DEVICE int first_key() const { return key_warpgroup_ * 64 * kPanelColumns; }
  // The first of this warp's keys, of its warpgroup's.
  ANYFLASH_DEVICE int warp_key() const { return thread_ % kWarpgroupThreads / 32 * kWarpRows; }

  // Numbers of the i-th pair of rows of this thread.
  template <class Numbers>
  ANYFLASH_DEVICE float2 pair_of(const Numbers& numbers, int i) const {
    return *reinterpret_cast<const float2*>(numbers[place_.stage()] + 8 * i + thread_ % 4 * 2);
  }

  template <class Loaded, class Numbers>
  ANYFLASH_DEVICE void load(Loaded& loaded, const Numbers& from) const {
    CUTE_UNROLL
    for (int i = 0; i < Loaded::kLoaded; ++i) loaded.first[i] = pair_of(from, i);
  }
  // Calls visit(element, number of its row) for all accumulators of S^T or dP^T.
  template <class Loaded, class Numbers, class Visit>
  ANYFLASH_DEVICE void for_each_element(const Loaded& loaded, const Numbers& all,
                                        const Visit& visit) const {
    CUTE_UNROLL
    for (int i = 0; i < kPairs; ++i) {
      const float2 pair = i < Loaded::kLoaded ? loaded.first[i] : pair_of(all, i);
      CUTE_UNROLL
      for (int j = 0; j < 4; ++j) visit(4 * i + j, j % 2 == 0 ? pair.x : pair.y);
    }
  }

  OperandRows<TileK, Traits::kHeadDim> k_operand_;   // load_keys()
  OperandRows<TileV, Traits::kHeadDimV> v_operand_;  // load_values()
  const BackwardScratch& params_;
  float scale_log2_;
  KeptTransposed kept_;
  uint32_t seen_[kThreadRows];  // look_at_rows(): a bit for each of a key's elements
  bool hides_any_ = false;      // of the warp's
};

}  // namespace anyflash::sm90
