// Of the kernel that computes dQ by rows: what it is told, its types and shared memory, and what a
// consumer warpgroup does with a tile of keys. dq_by_rows.h puts these in order.
#pragma once

#include <cstdint>
#include <cute/container/array.hpp>
#include <cute/tensor.hpp>
#include <type_traits>

#include "common/finite.h"
#include "common/macros.h"
#include "cuda/tile_scheduler.h"
#include "sm90/accumulator.h"
#include "sm90/backward/config.h"
#include "sm90/backward/pair.h"
#include "sm90/backward/variants.h"
#include "sm90/kept_elements.h"
#include "sm90/panel_tile.h"
#include "sm90/pipeline.h"
#include "sm90/products.h"
#include "sm90/roles.h"
#include "sm90/seen_elements.h"
#include "sm90/visited_tiles.h"
#include "variant/backward_scratch.h"
#include "variant/dropout.h"
#include "variant/key_ranges.h"
#include "variant/mask.h"
#include "variant/sequence.h"
#include "variant/work_tile.h"

namespace anyflash::sm90 {

struct DqByRowsLaunch : BackwardScratch {
  LptTileScheduler scheduler{};  // of (batch, head) pairs; members of a group share K and V
  CUtensorMap q_map;
  CUtensorMap k_map;
  CUtensorMap v_map;
  CUtensorMap dout_map;
};

template <class Element_, int kHeadDim_, int kHeadDimV_, class Variant_>
struct DqTraits : Warpgroups<2> {
  using Element = Element_;
  using Variant = Variant_;
  static constexpr int kCtas = ctas_of_block(kHeadDim_, kHeadDimV_);
  static constexpr int kHeadDim = kHeadDim_ / kCtas;  // of a CTA, as all sizes here
  static constexpr int kHeadDimV = kHeadDimV_ / kCtas;
  static constexpr int kBlockM = 128;  // 64 of each consumer warpgroup
  static constexpr int kBlockN = kCtas > 1 ? 32 : 64;
  static constexpr int kStages = 2;  // of K
  // Of V, as many as there is room for: its next tile is wanted later than the next K.
  static constexpr int kStagesV = kBlockN == 64 && kHeadDim + kHeadDimV > 384 ? 1 : 2;
  using TileVariant = KeyTileVariant<Variant>;
  // In a pair, with tiles of half as many keys, the loader may have what it needs.
  static constexpr RegisterSplit kRegisters = kCtas > 1             ? RegisterSplit{56, 224}
                                              : kHasBlocks<Variant> ? RegisterSplit{40, 232}
                                                                    : RegisterSplit{24, 240};

  using TileQ = PanelTile<Element, 64, kHeadDim>;
  using TileDO = PanelTile<Element, 64, kHeadDimV>;
  using TileK = PanelTile<Element, kBlockN, kHeadDim>;
  using TileV = PanelTile<Element, kBlockN, kHeadDimV>;
  using AccS = Accumulator<kBlockN>;
  using AccQ = Accumulator<kHeadDim>;

  // What the other CTA of a pair sends to a warpgroup.
  struct FromPeer {
    Pieces<AccS> s;
    Pieces<AccS> dp;
    PeerBarriers s_barriers;
    PeerBarriers dp_barriers;
  };
  struct NoPeer {};

  struct SharedStorage {
    alignas(1024) cute::array<Element, kConsumers * TileQ::kSize> q;
    alignas(1024) cute::array<Element, kConsumers * TileDO::kSize> dout;
    alignas(1024) cute::array<Element, kStages * TileK::kSize> k;
    alignas(1024) cute::array<Element, kStagesV * TileV::kSize> v;
    std::conditional_t<(kCtas > 1), FromPeer, NoPeer> from_peer[kConsumers];
    Mbarrier q_full;
    Mbarrier dout_full;
    Ring<kStages> k_ring;  // K, and `tiles`
    Ring<kStagesV> v_ring;
    KeyTile tiles[kStages];                 // after the last comes one that does not exist
    int k_is_nonfinite[2][kConsumerWarps];  // of a partly hidden tile, and of the one before
    float slope_sums[kConsumerWarps];
  };
  static_assert(sizeof(SharedStorage) <= 227 * 1024, "what a CTA may have");
};

template <class Traits>
class DqStages {
  using Element = typename Traits::Element;
  using TileQ = typename Traits::TileQ;
  using TileDO = typename Traits::TileDO;
  using TileK = typename Traits::TileK;
  using TileV = typename Traits::TileV;
  using AccS = typename Traits::AccS;
  using Variant = typename Traits::Variant;

 public:
  using Rounded = RoundedAccumulator<Element, Traits::kBlockN>;

  ANYFLASH_DEVICE DqStages(const DqByRowsLaunch& params, const ForwardWorkTile& block,
                           typename Traits::SharedStorage& smem, int warpgroup)
      : params_(params),
        block_(block),
        smem_(smem),
        warpgroup_(warpgroup),
        seed_(params.attention),
        scale_log2_(params.attention.scale_log2) {
    const Sequence& sequence = block.sequence;
    if constexpr (kHasAlibi<Variant>) {
      slope_log2_ = params.slopes_log2[block.batch * params.attention.heads + block.head];
    }
    const Mask mask(sequence, params.attention.window);
    const int64_t padded = params.first_row(sequence, block.batch, block.head) + block.first_row;
    CUTE_UNROLL
    for (int i = 0; i < kThreadRows; ++i) {
      const int row = thread_row() + 8 * i;
      const bool exists = block.first_row + row < sequence.seqlen_q;
      first_key_[i] = exists ? mask.first_key(block.first_row + row) : 0;
      end_key_[i] = exists ? mask.end_key(block.first_row + row) : 0;
      lse_[i] = exists ? params.lse_rows[padded + row] : INFINITY;
      delta_[i] = exists ? params.delta_rows[padded + row] : 0.0f;
      // dS comes without the factor on what dropout keeps.
      if constexpr (kHasDropout<Variant>) delta_[i] /= Variant::p_scale(params);
    }
  }

  // Goes on to the next tile, with its K; false if there is none.
  ANYFLASH_DEVICE bool wait_keys() {
    smem_.k_ring.full[place_.stage()].wait(place_.parity());
    needs_mask_ = uniform(tile().needs_mask);
    return uniform(tile().exists()) != 0;
  }

  ANYFLASH_DEVICE void issue_scores(AccS& acc_s) {
    smem_.q_full.wait(0);
    issue_transposed<TileQ, TileK, Traits::kHeadDim>(
        acc_s, smem_.q.data() + warpgroup_ * TileQ::kSize, keys());
  }
  ANYFLASH_DEVICE void issue_dp(AccS& acc_dp) {
    const int stage = v_place_.stage();
    smem_.dout_full.wait(0);
    smem_.v_ring.full[stage].wait(v_place_.parity());
    issue_transposed<TileDO, TileV, Traits::kHeadDimV>(
        acc_dp, smem_.dout.data() + warpgroup_ * TileDO::kSize,
        smem_.v.data() + stage * TileV::kSize);
  }
  ANYFLASH_DEVICE void issue_dq(typename Traits::AccQ& acc_dq, const Rounded& ds) {
    issue_accumulation<TileK>(acc_dq, ds, keys());
  }

  // In a pair: what the products made of this CTA's columns becomes the sum over all.
  ANYFLASH_DEVICE void complete_scores(AccS& acc_s) {
    if constexpr (Traits::kCtas > 1) {
      complete(acc_s, from_peer().s, from_peer().s_barriers);
    }
  }
  ANYFLASH_DEVICE void complete_dp(AccS& acc_dp) {
    if constexpr (Traits::kCtas > 1) {
      complete(acc_dp, from_peer().dp, from_peer().dp_barriers);
    }
  }

  // After the last tile.
  ANYFLASH_DEVICE void finish() {
    if constexpr (Traits::kCtas > 1) {
      finish_exchange(from_peer().s_barriers, place_.count());
      finish_exchange(from_peer().dp_barriers, place_.count());
    }
  }

  // P in place of S; with a softcap, its product with the softcap's slope.
  ANYFLASH_DEVICE void compute_p(AccS& acc_s) const {
    [[maybe_unused]] const CappedScores capped(params_.attention);
    CUTE_UNROLL
    for (int i = 0; i < size(AccS{}); ++i) {
      const float lse = lse_[i / 2 % 2];
      if constexpr (kHasSoftcap<Variant>) {
        const float t = capped.t(acc_s(i));
        acc_s(i) = exp2f(capped.exponent(t, lse)) * capped.slope(t);
      } else if constexpr (kHasAlibi<Variant>) {
        acc_s(i) = exp2f(acc_s(i) * scale_log2_ - lse - slope_log2_ * fabsf(distance(i)));
      } else {
        acc_s(i) = exp2f(acc_s(i) * scale_log2_ - lse);
      }
    }
  }
  // Which probabilities of the tile dropout keeps, while scores are on their way.
  ANYFLASH_DEVICE void draw() {
    if constexpr (kHasDropout<Variant>) {
      const Dropout dropout(params_.attention, seed_, block_.batch, block_.head);
      const int row = block_.first_row + thread_row();
      const int rows[kThreadRows] = {row, row + 8};
      find_kept_elements<Traits::kBlockN / 4>(dropout, rows, tile().n * Traits::kBlockN, kept_);
    }
  }

  // dS in place of dP; 0 where hidden.
  ANYFLASH_DEVICE void compute_ds(AccS& acc_dp, const AccS& p) const {
    if constexpr (kHasDropout<Variant>) drop(acc_dp, kept_);
    CUTE_UNROLL
    for (int i = 0; i < size(AccS{}); ++i) acc_dp(i) = p(i) * (acc_dp(i) - delta_[i / 2 % 2]);
    if (!needs_mask_) return;
    const int first = first_key();
    uint32_t seen[kThreadRows];
    CUTE_UNROLL
    for (int i = 0; i < kThreadRows; ++i) {
      seen[i] = element_bits(first_key_[i] - first, end_key_[i] - first);
    }
    if constexpr (kSkipsTiles<Variant>) {
      if (!uniform(tile().sees_all)) {
        if constexpr (kHasRanges<Variant>) leave_ranges(first, seen);
        else leave_blocks(seen);
      }
    }
    hide(acc_dp, seen);
  }
  // For the gradient of ALiBi's slopes, from dS in float32. That of a row that does not exist may
  // be NaN.
  ANYFLASH_DEVICE void add_slope_gradient(const AccS& ds) {
    if (params_.slope_sums == nullptr) return;
    CUTE_UNROLL
    for (int i = 0; i < size(AccS{}); ++i) {
      slope_sum_ -= end_key_[i / 2 % 2] > 0 ? ds(i) * fabsf(distance(i)) : 0.0f;
    }
  }
  // Each warpgroup has as many rows as a sum is of. All consumers call it.
  ANYFLASH_DEVICE void store_slope_sum() {
    if (params_.slope_sums == nullptr) return;
    static_assert(Traits::kBlockM == Traits::kConsumers * BackwardScratch::kSlopeSumRows);
    constexpr int kWarps = kWarpgroupThreads / 32;
    float sum = slope_sum_;
    for (int lanes = 16; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, lanes);
    if (threadIdx.x % 32 == 0) smem_.slope_sums[threadIdx.x / 32] = sum;
    sync_consumers<Traits::kThreads>();
    const int64_t sums = BackwardScratch::slope_sums_of_head(params_.attention.seqlen_q);
    const int64_t place = block_.first_row / BackwardScratch::kSlopeSumRows + warpgroup_;
    if (threadIdx.x % kWarpgroupThreads != 0 || place >= sums) return;
    const float* const of_warps = smem_.slope_sums + warpgroup_ * kWarps;
    float* const target =
        params_.slope_sums + (block_.batch * params_.attention.heads + block_.head) * sums;
    target[place] = (of_warps[0] + of_warps[1]) + (of_warps[2] + of_warps[3]);
  }

  // Takes NaN and infinity out of K of a partly hidden tile, after S and dP of this warpgroup: 0 *
  // NaN is NaN. Where a row sees such a key, its LSE is NaN, or the score is -inf.
  ANYFLASH_DEVICE void clear_keys() {
    if (!needs_mask_) return;
    int (&slots)[Traits::kConsumerWarps] = smem_.k_is_nonfinite[masked_tiles_++ % 2];
    const bool found = has_nonfinite_tile<TileK, Traits::kThreads>(keys(), threadIdx.x);
    const bool any = __any_sync(0xffffffffu, found);
    if (threadIdx.x % 32 == 0) slots[threadIdx.x / 32] = any;
    sync_consumers<Traits::kThreads>();  // all have reported, and have done with K
    int any_warp = 0;
    CUTE_UNROLL
    for (const int warp : slots) any_warp |= warp;
    if (any_warp == 0) return;
    clear_nonfinite_tile<TileK, Traits::kThreads>(keys(), threadIdx.x);
    fence_smem_writes();
    sync_consumers<Traits::kThreads>();
  }

  ANYFLASH_DEVICE void release_values() {
    release(smem_.v_ring.empty[v_place_.stage()]);
    v_place_.advance();
  }
  ANYFLASH_DEVICE void release_keys() {
    __syncwarp();  // every lane has done with `tiles`
    release(smem_.k_ring.empty[place_.stage()]);
    place_.advance();
  }

 private:
  ANYFLASH_DEVICE auto& from_peer() const { return smem_.from_peer[warpgroup_]; }
  ANYFLASH_DEVICE void complete(AccS& acc, Pieces<AccS>& pieces, PeerBarriers& barriers) const {
    send_to_peer<Traits>(acc, pieces, barriers, place_.count());
    add_from_peer(acc, pieces, barriers, place_.count());
    let_peer_send<Traits>(barriers);
  }

  // The first of this thread's keys in the tile.
  ANYFLASH_DEVICE int first_key() const { return tile().n * Traits::kBlockN + thread_column(); }
  // From the diagonal, of an accumulator's score.
  ANYFLASH_DEVICE float distance(int i) const {
    const int at_first = block_.first_row + thread_row() + block_.sequence.shift - first_key();
    return static_cast<float>(at_first) + static_cast<float>(i / 2 % 2 * 8 - i / 4 * 8 - i % 2);
  }
  ANYFLASH_DEVICE void leave_ranges(int first, uint32_t (&seen)[kThreadRows]) const {
    const KeyRanges ranges(params_.attention, block_.sequence, block_.batch, block_.head_k);
    const int row = block_.first_row + thread_row();
    const int places[kThreadRows] = {ranges.place_of(row), ranges.place_of(row + 8)};
    uint32_t by_ranges[kThreadRows];
    find_seen_elements<Traits::kBlockN / 4>(ranges, places, first, by_ranges);
    CUTE_UNROLL
    for (int i = 0; i < kThreadRows; ++i) seen[i] &= by_ranges[i];
  }

  ANYFLASH_DEVICE void leave_blocks(uint32_t (&seen)[kThreadRows]) const {
    const Sequence& sequence = block_.sequence;
    const int key = tile().n * Traits::kBlockN;
    const uint32_t kept = find_kept_keys(BlockMask(params_.attention, block_.batch, block_.head),
                                         min(block_.first_row + warp_row(), sequence.seqlen_q - 1),
                                         key, min(key + Traits::kBlockN, sequence.seqlen_k));
    CUTE_UNROLL
    for (uint32_t& bits : seen) bits &= kept;
  }

  ANYFLASH_DEVICE const KeyTile& tile() const { return smem_.tiles[place_.stage()]; }
  ANYFLASH_DEVICE Element* keys() const { return smem_.k.data() + place_.stage() * TileK::kSize; }

  const DqByRowsLaunch& params_;
  const ForwardWorkTile& block_;
  typename Traits::SharedStorage& smem_;
  int warpgroup_;
  typename Variant::Seed seed_;
  KeptElements kept_;
  float scale_log2_;
  float slope_log2_ = 0.0f;
  float slope_sum_ = 0.0f;
  int first_key_[kThreadRows];
  int end_key_[kThreadRows];
  float lse_[kThreadRows];
  float delta_[kThreadRows];
  RingPlace<Traits::kStages> place_;  // of K
  RingPlace<Traits::kStagesV> v_place_;
  bool needs_mask_ = false;
  uint32_t masked_tiles_ = 0;
};

}  // namespace anyflash::sm90
