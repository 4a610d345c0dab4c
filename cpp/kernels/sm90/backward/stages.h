// What a consumer warpgroup of the main kernel does beside what all have in common: the exchange of
// dS, and dQ. mainloop.h puts these in order.
#pragma once

#include <cmath>
#include <cstdint>
#include <cute/tensor.hpp>

#include "common/finite.h"
#include "common/macros.h"
#include "sm90/accumulator.h"
#include "sm90/backward/row_stages.h"
#include "sm90/backward/traits.h"
#include "sm90/panel_tile.h"
#include "sm90/pipeline.h"
#include "sm90/tma.h"
#include "sm90/wgmma.h"

namespace anyflash::sm90 {

template <class Traits>
class BackwardStages : public RowStages<Traits> {
  using Element = typename Traits::Element;
  using TileK = typename Traits::TileK;
  using TileDS = typename Traits::TileDS;
  using AccS = typename Traits::AccS;
  using AccQ = typename Traits::AccQ;
  using Rows = RowStages<Traits>;
  using Rows::is_first_;
  using Rows::needs_mask;
  using Rows::smem_;
  using Rows::thread_;
  static constexpr int kBlockM = Traits::kBlockM;

 public:
  using typename Rows::PlainRowNumbers;
  using typename Rows::Rounded;
  using typename Rows::RowNumbers;
  // What is known of NaN and infinity in K; kReported: all warps' findings come with the last dS.
  enum class KeyState { kNotLookedAt, kLookedAt, kReported, kFinite, kCleared };

  ANYFLASH_DEVICE BackwardStages(const BackwardScratch& params,
                                 typename Traits::SharedStorage& smem, int warpgroup)
      : Rows(params, smem, warpgroup), warpgroup_(warpgroup) {}

  // Whether backward_step() may leave out what only the first tile, masks, and keys that are not
  // finite need.
  ANYFLASH_DEVICE bool is_plain() const {
    return Traits::kHasPlainSteps && !is_first_ && !needs_mask() && keys_ != KeyState::kCleared;
  }

  // P^T in place of S^T; 0 where hidden.
  template <bool kIsPlain, class Numbers>
  ANYFLASH_DEVICE void compute_p(AccS& acc_s, const Numbers& lse, Rounded& rounded) const {
    if (!kIsPlain && keys_ == KeyState::kCleared) forbid_nonfinite_keys(acc_s);
    Rows::template compute_p<!kIsPlain>(acc_s, lse, rounded);
  }

  // dQ = dS K of the tile before is on its way: this warpgroup's part of it, of all keys. In the
  // first registers of `acc`, so that these need not be kept for it: the first product reads them,
  // though it does not add to them.
  ANYFLASH_DEVICE void issue_dq(AccS& acc) {
    static_assert(size(AccQ{}) <= size(AccS{}));
    constexpr int kPanelBytesK = TileK::kPanelElements * static_cast<int>(sizeof(Element));
    const Element* ds = smem_.ds.data() + dq_place_.stage() * TileDS::kSize;
    const Element* k = smem_.k.data();
    if (Traits::kSplitsDqRows) ds += warpgroup_ * TileDS::kPanelElements;
    else k += warpgroup_ * (Traits::kDqPartColumns / kPanelColumns) * TileK::kPanelElements;
    const OperandDescriptor a(ds, kPanelBytesK);
    const OperandDescriptor b(k, kPanelBytesK);
    pin(acc);
    wgmma_fence();
    CUTE_UNROLL
    for (int step = 0; step < Traits::kBlockN / 16; ++step) {
      constexpr int kStepBytes = 16 * kPanelBytes;
      Wgmma<Element, Traits::kDqPartColumns>::template with_smem<Major::kMN, Major::kMN>(
          acc.data(), a + step * kStepBytes, b + step * kStepBytes, step > 0);
    }
    wgmma_commit();
  }

  // dS^T in shared memory, for dQ of all warpgroups.
  ANYFLASH_DEVICE void store_ds(const Rounded& ds) {
    constexpr unsigned kWarpKeys = 16;
    constexpr unsigned kVector = 8;
    const unsigned thread = thread_;
    const unsigned lane = thread % 32;
    const unsigned key = thread / 32 * kWarpKeys + lane % kWarpKeys;
    // The first vector's place in a panel. The swizzle flips bits of a vector's number; so does a
    // step by two vectors. To compute each place anew takes a hundred instructions a tile.
    const unsigned place = key * kPanelColumns + (lane / kWarpKeys ^ key % kVector) * kVector;
    const int stage = ds_place_.stage();
    smem_.ds_ring.empty[stage].wait(ds_place_.parity() ^ 1);
    Element* const tile = smem_.ds.data() + stage * TileDS::kSize;
    CUTE_UNROLL
    for (int i = 0; i < kBlockM / 16; ++i) {
      const unsigned column = 16 * i;
      Element* const panel = tile + column / kPanelColumns * TileDS::kPanelElements;
      store_matrices(panel + (place ^ column % kPanelColumns), ds.words + 4 * i);
    }
  }
  ANYFLASH_DEVICE void pass_ds() {
    fence_smem_writes();
    __syncwarp();  // all lanes' pieces are there
    release(smem_.ds_ring.full[ds_place_.stage()]);
    ds_place_.advance();
  }
  // Of the tile before.
  ANYFLASH_DEVICE void wait_ds() { smem_.ds_ring.full[dq_place_.stage()].wait(dq_place_.parity()); }

  // Adds this warp's part of dQ to the tile before in dq_accum, by way of shared memory.
  ANYFLASH_DEVICE void add_dq(const AccS& acc_dq) {
    const unsigned warp = static_cast<unsigned>(thread_) / 32;
    const unsigned lane = static_cast<unsigned>(thread_) % 32;
    float* const sums = smem_.dq[warp];
    release(smem_.ds_ring.empty[dq_place_.stage()]);
    dq_place_.advance();
    if (lane == 0) wait_stores_read();  // of the sums before
    __syncwarp();
    // Columns beyond the head dim are zeros, and stay so.
    const int elements = (warpgroup_ == 0 ? Traits::kDqPartColumns : Traits::kLastDqColumns) / 2;
    CUTE_UNROLL
    for (int i = 0; i < size(AccQ{}); i += 4) {
      if (i >= elements) break;
      reinterpret_cast<float4*>(sums + 32 * i)[lane] =
          float4{acc_dq(i), acc_dq(i + 1), acc_dq(i + 2), acc_dq(i + 3)};
    }
    fence_smem_writes();
    __syncwarp();  // all lanes' sums are there
    if (lane == 0) {
      constexpr int kBytes = 32 * static_cast<int>(sizeof(float));
      add_floats(last_dq_ + warp * Traits::kDqWarpElements, sums, elements * kBytes);
      commit_stores();
    }
  }

  // Warpgroups take turns: one issues S and dP of a tile when the other's S is there. So one's
  // products run beside the other's softmax. begin_ping_pong() gives the first warpgroup its turn,
  // and end_ping_pong() takes the turn that the last one has passed. Without kPingPong, the second
  // one only begins when the first one has its first P. Whoever is behind then stays so, as each
  // waits for the other's dS.
  ANYFLASH_DEVICE void begin_ping_pong() const {
    if (Traits::kPingPong && warpgroup_ == 0) arrive_named(ping_pong_barrier(0), Traits::kThreads);
  }
  ANYFLASH_DEVICE void wait_ping_pong() const {
    if (!Traits::kPingPong && !(is_first_ && warpgroup_ == 1)) return;
    sync_named(ping_pong_barrier(warpgroup_), Traits::kThreads);
  }
  ANYFLASH_DEVICE void pass_ping_pong() const {
    if (!Traits::kPingPong && !(is_first_ && warpgroup_ == 0)) return;
    arrive_named(ping_pong_barrier(1 - warpgroup_), Traits::kThreads);
  }
  ANYFLASH_DEVICE void end_ping_pong() const {
    if (Traits::kPingPong && warpgroup_ == 0) wait_ping_pong();
  }

  // Of the first tile: whether no row sees a key of this warpgroup, as with the second half of a
  // block under a causal mask. Later keys are seen by later rows, by position: the first one tells.
  ANYFLASH_DEVICE bool sees_nothing() const {
    if (!needs_mask()) return false;
    const int first_row = smem_.first_rows[warpgroup_];
    return uniform(first_row) >= this->tile().row + kBlockM;
  }
  // Instead of that tile's products: P and dS are zeros. The other warpgroup waits for the rest.
  template <bool kAddsToDq>
  ANYFLASH_DEVICE void pass_zeros() {
    smem_.k_full.wait(0);
    smem_.v_full.wait(0);
    this->wait_dout();
    if (kAddsToDq) wait_ping_pong();
    const bool clears_rows = this->look_at_rows();
    if (kAddsToDq) look_at_keys();
    if (kAddsToDq) pass_ping_pong();
    this->look_ahead();
    if (clears_rows) this->clear_rows();
    if (kAddsToDq) {
      Rounded zeros{};
      store_ds(zeros);
      pass_ds();
    }
    next_rows();
  }

  // Before the first dS of a partly hidden tile is passed: this warp's share of K is looked at.
  ANYFLASH_DEVICE void look_at_keys() {
    if (!needs_mask() || keys_ != KeyState::kNotLookedAt) return;
    const bool found = has_nonfinite_tile<TileK, Traits::kThreads>(smem_.k.data(), thread_);
    const bool any = __any_sync(0xffffffffu, found);
    if (thread_ % 32 == 0) smem_.k_is_nonfinite[thread_ / 32] = any;
    keys_ = KeyState::kLookedAt;
  }
  // After wait_ds() for that tile: takes NaN and infinity out of K, if the warps have found any.
  // Where a row sees such a key, its LSE is NaN, or the score is -inf: so scores of such keys are
  // -inf from now on. With a softcap the score of an infinite key is finite, and its sign is lost:
  // such scores are NaN. No product that reads K is under way.
  ANYFLASH_DEVICE void clear_keys() {
    if (keys_ != KeyState::kReported) return;
    int any = 0;
    CUTE_UNROLL
    for (int warp = 0; warp < Traits::kConsumerWarps; ++warp) any |= smem_.k_is_nonfinite[warp];
    keys_ = any == 0 ? KeyState::kFinite : KeyState::kCleared;
    if (any == 0) return;
    sync_consumers<Traits::kThreads>();
    for (int i = thread_; i < TileK::kSize / 8; i += Traits::kThreads) {
      auto vector = vector_of<TileK>(smem_.k.data(), i);
      const int key = i / (kPanelColumns / 8) % Traits::kBlockN;
      if (clear_nonfinite(vector)) atomicOr(&smem_.nonfinite_keys[key / 32], 1u << key % 32);
    }
    fence_smem_writes();
    sync_consumers<Traits::kThreads>();
  }
  ANYFLASH_DEVICE bool is_first() const { return is_first_; }

  // After the last tile: where the next one would have come, with Q for the first warpgroup, and
  // with dO for the second. All consumers have done with it, or the loader would not have told that
  // none comes.
  ANYFLASH_DEVICE Element* free_rows() const {
    const int stage = this->place_.stage();
    return warpgroup_ == 0 ? smem_.q.data() + stage * Traits::TileQ::kSize
                           : smem_.dout.data() + stage * Traits::TileDO::kSize;
  }

  // Q and dO of the tile are not needed any more: goes on to the next one.
  ANYFLASH_DEVICE void next_rows() {
    last_dq_ = this->tile().dq;
    if (keys_ == KeyState::kLookedAt) keys_ = KeyState::kReported;
    Rows::next_rows();
  }

 private:
  ANYFLASH_DEVICE static int ping_pong_barrier(int warpgroup) {
    return static_cast<int>(NamedBarrier::kPingPong) + warpgroup;
  }

  // A thread's keys have their bits in one word: what is rare gets few of the loop's registers.
  ANYFLASH_DEVICE void forbid_nonfinite_keys(AccS& acc_s) const {
    constexpr float kScore = kHasSoftcap<typename Traits::Variant> ? NAN : -INFINITY;
    const int key = this->thread_key(0);
    const uint32_t bits = smem_.nonfinite_keys[key / 32] >> key % 32;
    CUTE_UNROLL
    for (int i = 0; i < kThreadRows; ++i) {
      if ((bits >> 8 * i & 1) == 0) continue;
      CUTE_UNROLL
      for (int element = 0; element < kBlockM / 4; ++element) {
        acc_s(element / 2 * 4 + 2 * i + element % 2) = kScore;
      }
    }
  }

  int warpgroup_;
  RingPlace<Traits::kDsStages> ds_place_;  // of dS that is written
  RingPlace<Traits::kDsStages> dq_place_;  // of dS that dQ reads
  float* last_dq_ = nullptr;               // the tile before in dq_accum
  KeyState keys_ = KeyState::kNotLookedAt;
};

}  // namespace anyflash::sm90
