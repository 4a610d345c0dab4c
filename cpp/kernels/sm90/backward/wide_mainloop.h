// The consumers' loops of the kernel for wide heads: one warpgroup sums dV, and the other dK.
#pragma once

#include <cute/tensor.hpp>

#include "common/macros.h"
#include "sm90/accumulator.h"
#include "sm90/backward/pair.h"
#include "sm90/backward/row_stages.h"
#include "sm90/backward/wide_traits.h"
#include "sm90/pipeline.h"
#include "sm90/wgmma.h"

namespace anyflash::sm90 {

// P goes from each thread of the first warpgroup to the same thread of the second.
template <class Traits>
class WideStages : public RowStages<Traits> {
  using AccS = typename Traits::AccS;
  using RowStages<Traits>::smem_;

 public:
  ANYFLASH_DEVICE WideStages(const BackwardScratch& params, typename Traits::SharedStorage& smem)
      : RowStages<Traits>(params, smem, 0) {}

  // In a pair: what the product made of this CTA's columns becomes the sum over all.
  ANYFLASH_DEVICE void complete_scores(AccS& acc_s) {
    if constexpr (Traits::kCtas > 1) {
      auto& barriers = smem_.from_peer.s_barriers;
      send_to_peer<Traits>(acc_s, smem_.p, barriers, p_place_.count());
      add_from_peer(acc_s, smem_.p, barriers, p_place_.count());
    }
  }
  ANYFLASH_DEVICE void complete_dp(AccS& acc_dp) {
    if constexpr (Traits::kCtas > 1) {
      auto& barriers = smem_.from_peer.dp_barriers;
      send_to_peer<Traits>(acc_dp, smem_.from_peer.dp, barriers, p_place_.count());
      add_from_peer(acc_dp, smem_.from_peer.dp, barriers, p_place_.count());
      let_peer_send<Traits>(barriers);
    }
  }

  // After the last tile.
  ANYFLASH_DEVICE void finish_scores() {
    if constexpr (Traits::kCtas > 1) {
      finish_exchange(smem_.from_peer.s_barriers, p_place_.count());
    }
  }
  ANYFLASH_DEVICE void finish_dp() {
    if constexpr (Traits::kCtas > 1) {
      finish_exchange(smem_.from_peer.dp_barriers, p_place_.count());
    }
  }

  // In a pair, S of the tile has come to the same place. So P of the tile before was read.
  ANYFLASH_DEVICE void pass_p(const AccS& p) {
    if constexpr (Traits::kCtas == 1) smem_.p_ring.empty[0].wait(p_place_.parity() ^ 1);
    CUTE_UNROLL
    for (int i = 0; i < kPieces<AccS>; ++i) {
      smem_.p[i][thread()] = float4{p(4 * i), p(4 * i + 1), p(4 * i + 2), p(4 * i + 3)};
    }
    __syncwarp();  // all lanes' P is there
    release(smem_.p_ring.full[0]);
    p_place_.advance();
  }
  ANYFLASH_DEVICE void take_p(AccS& p) {
    smem_.p_ring.full[0].wait(p_place_.parity());
    CUTE_UNROLL
    for (int i = 0; i < kPieces<AccS>; ++i) {
      const float4 piece = smem_.p[i][thread()];
      p(4 * i) = piece.x;
      p(4 * i + 1) = piece.y;
      p(4 * i + 2) = piece.z;
      p(4 * i + 3) = piece.w;
    }
    if constexpr (Traits::kCtas > 1) {
      let_peer_send<Traits>(smem_.from_peer.s_barriers);
    } else {
      __syncwarp();  // all lanes have theirs
      release(smem_.p_ring.empty[0]);
    }
    p_place_.advance();
  }

 private:
  ANYFLASH_DEVICE static int thread() { return threadIdx.x % kWarpgroupThreads; }

  RingPlace<1> p_place_;
};

// acc_dv += P^T dO over all tiles of rows.
//
//   tensor cores, for this warpgroup   S |     | dV |
//   for the other one                      dP  |    | dK
//   registers                              P     dS
template <class Traits>
ANYFLASH_DEVICE void sum_dv(WideStages<Traits>& stages, typename Traits::AccV& acc_dv) {
  typename Traits::AccS acc_s;  // S^T, then P^T
  typename WideStages<Traits>::RowNumbers lse;
  typename WideStages<Traits>::Rounded p;
  stages.load_keys();
  stages.wait_first_rows();
  while (stages.wait_rows()) {
    stages.issue_scores(acc_s);
    const bool clears_rows = stages.look_at_rows();
    stages.load_lse(lse);
    stages.draw();
    wgmma_wait<0>();
    pin(acc_s);
    stages.complete_scores(acc_s);
    stages.wait_dout();
    if (clears_rows) stages.clear_rows();
    stages.compute_p(acc_s, lse, p);
    stages.pass_p(acc_s);
    stages.round_p(acc_s, p);
    stages.issue_dv(acc_dv, p);
    stages.look_ahead();
    wgmma_wait<0>();
    pin(acc_dv);
    stages.next_rows();
  }
  stages.finish_scores();
}

// acc_dk += dS^T Q over all tiles of rows, without the scale of dS.
template <class Traits>
ANYFLASH_DEVICE void sum_dk(WideStages<Traits>& stages, typename Traits::AccK& acc_dk) {
  typename Traits::AccS acc_p;
  typename Traits::AccS acc_dp;  // dP^T, then dS^T
  typename WideStages<Traits>::RowNumbers delta;
  typename WideStages<Traits>::Rounded ds;
  stages.load_values();
  stages.wait_first_rows();
  while (stages.wait_rows()) {
    stages.issue_dp(acc_dp);
    const bool clears_rows = stages.look_at_rows();
    stages.load_delta(delta);
    stages.draw();
    wgmma_wait<0>();
    pin(acc_dp);
    stages.complete_dp(acc_dp);
    if (clears_rows) stages.clear_rows();
    stages.take_p(acc_p);
    stages.compute_ds(acc_dp, acc_p, delta);
    ds.round(acc_dp);
    stages.issue_dk(acc_dk, ds);
    stages.look_ahead();
    wgmma_wait<0>();
    pin(acc_dk);
    stages.next_rows();
  }
  stages.finish_dp();
}

}  // namespace anyflash::sm90
