// The consumers' loop over the tiles of query rows that see a block of keys.
#pragma once

#include "common/macros.h"
#include "sm90/accumulator.h"
#include "sm90/backward/stages.h"
#include "sm90/wgmma.h"

namespace anyflash::sm90 {

// acc_dk += dS^T Q and acc_dv += P^T dO over all tiles, without the scale of dS. With kAddsToDq, dS
// K is added to dq_accum a tile later: by then the other warpgroup's dS is there. add_last_dq()
// does so for the last tile.
//
//   tensor cores   S | dP | dV         | dQ of the tile before | dK
//   registers           P  dS   to smem                          dQ to dq_accum
//
// No product is under way from one tile to the next: nvcc 13.0's ptxas would then wait for each.
template <class Traits, bool kAddsToDq>
ANYFLASH_DEVICE void backward_mainloop(BackwardStages<Traits>& stages,
                                       typename Traits::AccK& acc_dk,
                                       typename Traits::AccV& acc_dv) {
  constexpr bool kDrawsFirst = Traits::kBlockM > 64;  // the products have the registers
  if (stages.wait_rows() && stages.sees_nothing()) stages.template pass_zeros<kAddsToDq>();
  while (stages.wait_rows()) {
    // Each tile has its own, as ptxas sees it: a group's first product reads its accumulators, so
    // from before the loop these would stay alive to its end, beside what they were rounded to.
    typename Traits::AccS acc_s;   // S^T, then P^T
    typename Traits::AccS acc_dp;  // dP^T, then dS^T, then dQ
    typename BackwardStages<Traits>::RowNumbers numbers;
    typename BackwardStages<Traits>::Rounded p;
    typename BackwardStages<Traits>::Rounded ds;
    if (kAddsToDq) stages.wait_stagger();
    if (kDrawsFirst) stages.draw();
    stages.issue_scores(acc_s);
    stages.issue_dp(acc_dp);
    const bool clears_rows = stages.look_at_rows();
    if (kAddsToDq) stages.look_at_keys();
    stages.load_lse(numbers);
    if (!kDrawsFirst) stages.draw();
    wait_products<1>();
    pin(acc_s);
    stages.compute_p(acc_s, numbers, p);
    if (kAddsToDq) stages.pass_stagger();
    stages.load_delta(numbers);
    wait_products<0>();
    pin(acc_dp);
    if (clears_rows) stages.clear_rows();
    stages.compute_ds(acc_dp, acc_s, numbers);
    ds.round(acc_dp);
    stages.round_p(acc_s, p);
    if constexpr (kAddsToDq) stages.store_ds(ds);
    stages.issue_dv(acc_dv, p);
    if constexpr (kAddsToDq) stages.pass_ds();
    if (kAddsToDq && !stages.is_first()) {
      stages.wait_ds();
      stages.clear_keys();
      stages.issue_dq(acc_dp);
      stages.issue_dk(acc_dk, ds);
      wait_products<1>();
      pin(acc_dp);
      stages.add_dq(acc_dp);
    } else {
      stages.issue_dk(acc_dk, ds);
    }
    wait_products<0>();
    pin(acc_dv);
    pin(acc_dk);
    stages.release_rows();
  }
}

// What is left of dQ after the last tile.
template <class Traits>
ANYFLASH_DEVICE void add_last_dq(BackwardStages<Traits>& stages) {
  if (stages.is_first()) return;  // there was no tile
  typename Traits::AccS acc_dq;
  stages.wait_ds();
  stages.clear_keys();
  stages.issue_dq(acc_dq);
  wait_products<0>();
  pin(acc_dq);
  stages.add_dq(acc_dq);
}

}  // namespace anyflash::sm90
